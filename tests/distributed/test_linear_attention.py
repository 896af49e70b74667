"""Layers with a gated delta net, Kimi's or Mamba-2 in parallel layouts, on packed documents."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import base_config
from tests.distributed.layouts import pipeline, tensor, zero
from titan_like.config.errors import ConfigError
from titan_like.verify.compare import EXACT
from titan_like.verify.shrink import Options, resolve, shrink
from titan_like.verify.verify import Verifier

PACKED = {"data.reset_attention_mask": True, "data.reset_position_ids": True}
HYBRID = {"model.family": "decoder", "model.flavor": "debug_linear"} | PACKED
SHARDS = {"parallelism.data_parallel_shard_degree": 2}
NEXT, GRANITE = {"model.flavor": "qwen3_next_80b_a3b"}, {"model.flavor": "granite4_h_small"}
KIMI = {"model.flavor": "kimi_linear_48b_a3b"}
MAMBA = {"model.flavor": "debug_mamba"}
EXPERTS = {"parallelism.expert_parallel_degree": 2} | SHARDS
CONTEXT = {"parallelism.context_parallel_degree": 2}


def verify(folder: Path, settings: dict[str, Any]) -> str:
    config = base_config(folder, HYBRID | settings)
    verdict = Verifier(shrink(config, resolve(config, None), Options(steps=2)), 240, kinds=[EXACT]).verify()
    assert verdict.outcome == "same", (verdict.first_difference, verdict.blame, verdict.place, verdict.reason)
    return verdict.outcome


MORE = {
    "tensor, pipeline, zero 3": tensor(2) | pipeline(2) | SHARDS | zero(3),
    "sequence, zero 1": tensor(2, sequence_parallel=True) | SHARDS | zero(1),
    "Kimi Linear, sequence, experts": KIMI | tensor(2, sequence_parallel=True) | EXPERTS,
    "Mamba-2, tensor, pipeline, zero 3": MAMBA | tensor(2) | pipeline(2) | SHARDS | zero(3),
    "Granite 4, tensor, experts": GRANITE | tensor(2, sequence_parallel=True) | EXPERTS,
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(NEXT | tensor(2, sequence_parallel=True) | EXPERTS, id="Qwen3-Next, tensor, experts"),
        pytest.param(KIMI | tensor(2, True) | pipeline(2) | SHARDS | zero(3), id="Kimi Linear, pipeline, zero 3"),
        pytest.param(MAMBA | tensor(2, sequence_parallel=True) | SHARDS | zero(3), id="Mamba-2, sequence, zero 3"),
        *(pytest.param(layout, id=name, marks=pytest.mark.exhaustive) for name, layout in MORE.items()),
    ],
)
@pytest.mark.slow
def test_a_layout_computes_the_training_of_one_process(tmp_path: Path, layout: dict[str, Any]) -> None:
    verify(tmp_path, layout)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (CONTEXT, r"layers\.0\.attention.* needs whole sequences, but a rank has only its CP shard of each"),
        (tensor(8), r"does not divide the model's num_attention_heads|kinds\.linear\.options\.key_heads \(4\)"),
        ({"data.prefix_lm": True}, "has layers with a recurrence, which is causal; leave it out"),
        (MAMBA | CONTEXT, r"layers\.0\.attention.* needs whole sequences, but a rank has only its CP shard of each"),
        (MAMBA | tensor(8), r"does not divide the model's num_attention_heads|kinds\.mamba\.options\.groups \(4\)"),
        (MAMBA | {"data.prefix_lm": True}, "has layers with a recurrence, which is causal; leave it out"),
    ],
    ids=["context", "heads", "prefix", "Mamba-2, context", "Mamba-2, groups", "Mamba-2, prefix"],
)
def test_what_a_recurrence_cannot_do_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    config = base_config(tmp_path, HYBRID | settings)
    with pytest.raises(ConfigError, match=message):
        shrink(config, resolve(config, None), Options(steps=2))
