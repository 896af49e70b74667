"""Which layers a stage holds, and what is refused."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig, Model
from titan_like.models.registry import build_model, model_config
from titan_like.parallel.layout import resolve_layout
from titan_like.parallel.split import LAYER_UNIT_BYTES, balanced_layers, layer_costs, split_layers, units_of_layers
from titan_like.train.rules import check_rules


def slowest(counts: tuple[int, ...], last_extra: float) -> float:
    return max([*counts[:-1], counts[-1] + last_extra])


@pytest.mark.parametrize("last_extra", [0.0, 0.25, 1.0, 2.4, 7.0])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("num_layers", [4, 5, 9, 12])
def test_no_other_split_is_faster(num_layers: int, num_stages: int, last_extra: float) -> None:
    counts = balanced_layers(num_layers, num_stages, last_extra)
    assert sum(counts) == num_layers
    assert min(counts) >= 1
    cuts = (tuple(b - a for a, b in zip((0, *c), (*c, num_layers), strict=True))
            for c in combinations(range(1, num_layers), num_stages - 1))  # fmt: skip
    assert slowest(tuple(counts), last_extra) == min(slowest(other, last_extra) for other in cuts)


@pytest.mark.timeout(60)  # looking through all stages for each layer would take minutes
def test_thousands_of_stages_are_balanced() -> None:
    counts = balanced_layers(100_000, 10_000, 2.5)
    assert sum(counts) == 100_000
    assert (set(counts[:-1]), counts[-1]) == ({10, 11}, 8)
    assert counts[0] == 10  # the middle takes a layer first


def test_output_matrix_counts_as_its_products() -> None:
    # Llama 3 8B: 128,256 × 4,096 against 218 million weights and, at 8,192 tokens, 2·8192·4096 of attention.
    model = model_config(Model(family="llama", flavor="llama3.1_8b"))
    layers, output = layer_costs(model, 8192)
    assert set(layers) == {1.0}
    assert output == pytest.approx(128256 * 4096 / (218.1e6 + 2 * 8192 * 4096), rel=1e-3)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_stages_together_are_the_model(family: str) -> None:
    shape = model_config(Model(family=family))
    with torch.device("meta"):
        whole = build_model(shape, family)
        stages = [build_model(shape, family) for _ in range(3)]
    for stage, split in zip(stages, split_layers([1, 2, 1]), strict=True):
        stage.keep_stage(split.layers, split.is_first, split.is_last)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    copies = ["embedding.weight"] if shape.tied_embeddings else []
    assert sorted(names) == sorted([name for name, _ in whole.named_parameters()] + copies)
    assert [list(stage.layers) for stage in stages] == [["0"], ["1", "2"], ["3"]]


PIPELINE = {"pipeline_parallel_degree": 2}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "interleaving without stages": (
        PIPELINE | {"pipeline_schedule": "interleaved_1f1b"},
        ["pipeline_schedule", "virtual_stages_per_rank of at least 2", "use 1f1b"],
    ),
    "stages of a single-stage schedule": (
        PIPELINE | {"virtual_stages_per_rank": 2},
        ["virtual_stages_per_rank = 2", "use 1 or interleaved_1f1b"],
    ),
    "three stages in a V": (
        PIPELINE | {"pipeline_schedule": "zbv_zero_bubble", "virtual_stages_per_rank": 3},
        ["virtual_stages_per_rank = 3", "exactly 2", "use 2"],
    ),
    "more stages than layers": (
        {"pipeline_parallel_degree": 8},
        ["pipeline_parallel_degree = 8", "8 stages for 4 layers", "at most 4"],
    ),
    "layers that do not add up": (
        PIPELINE | {"pipeline_layers": [1, 2]},
        ["pipeline_layers = [1, 2]", "must be 2 numbers", "sum to the 4 layers"],
    ),
    "layers of one stage": ({"pipeline_layers": [4]}, ["pipeline_layers", "there is one stage"]),
    "sequence parallelism alone": (
        {"sequence_parallel": True},
        ["sequence_parallel", "raise parallelism.tensor_parallel_degree"],
    ),
    "microbatches that do not fill a round": (
        {"pipeline_parallel_degree": 2, "pipeline_schedule": "interleaved_1f1b", "virtual_stages_per_rank": 2},
        ["global_batch_size = 6", "multiples of pipeline_parallel_degree (2)", "use 2 or 4", "such as 1f1b"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_pipeline_cannot_do_is_said_before_it_starts(name: str) -> None:
    parallelism, words = REFUSED[name]
    batch = 6 if "round" in name else 16
    training = {"steps": 1, "seq_len": 32, "micro_batch_size": 2, "global_batch_size": batch}
    config = JobConfig.model_validate({"parallelism": parallelism, "training": training})
    layout = resolve_layout(config.parallelism, parallelism.get("pipeline_parallel_degree", 1))
    with pytest.raises(ConfigError) as refused:
        check_rules(config, model_config(config.model), layout)
    for word in words:
        assert word in str(refused.value), str(refused.value)


@pytest.mark.parametrize(
    ("percent", "lengths"),
    [([33] * 7, [3, 3, 1]), ([50] * 3, [2, 1]), ([51] * 3, [1, 1, 1]), ([10, 200, 10, 40, 60], [1, 1, 2, 1])],
)
def test_layers_share_a_unit_until_it_is_full(percent: list[int], lengths: list[int]) -> None:
    assert units_of_layers([LAYER_UNIT_BYTES * size // 100 for size in percent]) == lengths
