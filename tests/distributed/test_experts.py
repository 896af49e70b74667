"""Experts that processes share: 30 steps that equal a plain loop over transformers' models, the bytes that the formula
says, the host's waits, and checkpoints that other layouts read."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.launch import Collectives, base_config, by_name, collect, losses_of_layouts, trainer_of
from tests.distributed.layouts import pipeline, zero
from tests.unit.plain_loop import plain_losses
from titan_like.data.batch import Batch
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run

COEFFICIENT = 0.02  # of the auxiliary loss
EXPERTS, CHOSEN = 8, 2
# Layouts of 4 processes.
LAYOUTS: dict[str, dict[str, Any]] = {
    "experts 2, tensor 2": {
        "parallelism.expert_parallel_degree": 2,
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.sequence_parallel": True,
        "parallelism.zero_stage": 1,
    },
    "experts 4, ZeRO 3": {"parallelism.expert_parallel_degree": 4, "parallelism.zero_stage": 3},
}
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "max_seq_len": 64, "vocab_size": 257, "num_layers": 2}
RUN: dict[str, Any] = {
    "model.family": "moe",
    "training.micro_batch_size": 1,
    "training.global_batch_size": 4,
    "training.max_norm": 0.0,
}


def theirs(kind: str) -> tuple[Any, dict[str, Any]]:
    """A small model of transformers with random weights, and our fields of the same shape."""
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    common |= {"vocab_size": 257, "max_position_embeddings": 64, "num_experts_per_tok": CHOSEN}
    common["experts_implementation"] = "eager"  # others know no float64
    common |= {"router_aux_loss_coef": COEFFICIENT, "output_router_logits": True, "rms_norm_eps": 1e-6}
    fields = SHAPE | {"num_kv_heads": 2, "num_experts": EXPERTS, "experts_per_token": CHOSEN}
    fields |= {"expert_ffn_hidden_size": 48, "balance_coefficient": COEFFICIENT, "norm_eps": 1e-6}
    if kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(num_local_experts=EXPERTS, intermediate_size=48, **common))
        return model, fields | {"rope_theta": 1e6}
    config = Qwen3MoeConfig(
        num_experts=EXPERTS, moe_intermediate_size=48, intermediate_size=96, head_dim=32, norm_topk_prob=False, **common
    )
    return Qwen3MoeForCausalLM(config), fields | {"head_size": 32, "qk_norm": "head", "renormalize": False}


@pytest.mark.parametrize(
    ("kind", "steps", "layouts"),
    [
        ("mixtral", 8, ["experts 2, tensor 2"]),
        ("qwen3", 8, ["experts 4, ZeRO 3"]),
        *(pytest.param(kind, 30, list(LAYOUTS), marks=pytest.mark.exhaustive) for kind in ("mixtral", "qwen3")),
    ],
)
def test_steps_equal_a_plain_loop_over_transformers(tmp_path: Path, kind: str, steps: int, layouts: list[str]) -> None:
    """The auxiliary loss takes the loads of the step before, as docs/experts.md defines it."""
    model, fields = theirs(kind)
    model.save_pretrained(tmp_path / "hf")
    settings = RUN | {
        "training.steps": steps,
        "model.overrides": fields,
        "checkpoint.initial_load_path": str(tmp_path / "hf"),
    }
    found = collect(losses_of_layouts, 4, tmp_path, {name: LAYOUTS[name] for name in layouts}, settings)

    loads = [torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64)] * 2  # of each layer

    def terms_of(batch: Batch) -> list[torch.Tensor]:
        result, labels = model(input_ids=batch.tokens), batch.labels
        terms = [F.cross_entropy(result.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)]
        for number, logits in enumerate(result.router_logits):
            logits = logits.view(-1, EXPERTS)
            terms.append(COEFFICIENT * EXPERTS * (logits.softmax(1).mean(0) @ loads[number]))
            counts = torch.bincount(logits.topk(CHOSEN).indices.flatten(), minlength=EXPERTS)
            loads[number] = counts.double() / counts.sum()
        return terms

    run = prepare_run(resolve_settings(base_config(tmp_path, settings), 1))
    expected = [terms[0] for terms in plain_losses(run, model.double().train(), terms_of)]
    assert expected[-1] < expected[0] - 0.015 * steps
    for name in layouts:
        assert found[0][name] == pytest.approx(expected, rel=5e-6), name


def exchanged(rank: int, folder: Path) -> dict[str, tuple[int, int, int]]:
    """For each layout and type: bytes of a step's all-to-alls, lists that the host reads, and microbatches."""
    found = {}
    for name, layout in LAYOUTS.items():
        for dtype in ("float64", "bfloat16"):
            settings = RUN | {"model.overrides": SHAPE | {"expert_ffn_hidden_size": 48}, "training.dtype": dtype}
            settings |= {"training.global_batch_size": 8}
            trainer = trainer_of(folder, settings | layout)
            data = trainer._load_data()
            as_list = MagicMock(side_effect=torch.Tensor.tolist)
            with patch.object(torch.Tensor, "tolist", lambda tensor, read=as_list: read(tensor)), Collectives() as sent:
                trainer.train_step(data)
            data.close()
            bytes_sent = sum(taken for kind, taken, _ in sent.calls if kind == "all_to_all_single")
            found[f"{name} {dtype}"] = bytes_sent, as_list.call_count, 8 // trainer.dp_size
    return found


def test_bytes_and_waits_are_those_of_the_formula(tmp_path: Path) -> None:
    """docs/experts.md has the formula: rows go there and back, and so do their gradients; before that, int32 counts."""
    ranks = collect(exchanged, 4, tmp_path)
    for name, (_, reads, microbatches) in ranks[0].items():
        element, tensor, layers = (2 if "bfloat16" in name else 8), (2 if "tensor" in name else 1), 2
        rows = CHOSEN * 64 // tensor  # of a microbatch on a rank; it may get more than it sends, or fewer
        of_rank = microbatches * layers * (4 * rows * 64 * element + 4 * EXPERTS)
        assert sum(found[name][0] for found in ranks) == 4 * of_rank, name
        if "bfloat16" in name:  # without a loop over experts
            assert reads == microbatches * layers, name


def saved_and_resumed(rank: int, folder: Path, steps: int, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The run's tensors when it starts, after resuming if it can, and then it trains up to ``steps`` and saves."""
    settings = RUN | {"model.overrides": SHAPE | {"expert_ffn_hidden_size": 48, "balance": "bias"}}
    settings |= {"training.steps": steps, "checkpoint.enable": True, "checkpoint.interval": 100}
    trainer = trainer_of(folder, settings | {f"parallelism.{key}": value for key, value in layout.items()})
    state = trainer.optimizer.state
    named = list(trainer.model.named_parameters())
    moments = [(f"{name} moment", state[p]["exp_avg"]) for name, p in named if state.get(p)]
    buffers = [(name, value) for stage in trainer.model.stages for name, value in stage.module.named_buffers()]
    before = by_name([*named, *moments, *[(name, value) for name, value in buffers if "bias" in name]])
    trainer.train()
    after = by_name(trainer.model.named_parameters())
    return {f"before {name}": value for name, value in before.items()} | {
        f"after {name}": v for name, v in after.items()
    }


def test_checkpoints_are_read_with_other_degrees(tmp_path: Path) -> None:
    """4 processes share the experts, then 1, then 2 of tensor parallelism: each begins with what the last one ended."""
    tensor = {"tensor_parallel_degree": 2, "sequence_parallel": True, "expert_parallel_degree": 2, "zero_stage": 2}
    layouts = [(4, {"expert_parallel_degree": 4, "zero_stage": 1}), (1, {}), (4, tensor)]
    ends: dict[str, torch.Tensor] = {}
    for number, (processes, layout) in enumerate(layouts, 1):
        found = collect(saved_and_resumed, processes, tmp_path, 2 * number, layout)[0]
        begins = {name: value for name, value in found.items() if name.startswith("before ")}
        assert number == 1 or sum("moment" in name for name in begins) == len(ends)
        for name, value in ends.items():
            assert torch.equal(begins[name.replace("after", "before", 1)], value), name
        assert number == 1 or any(
            value.abs().max() > 0 for name, value in begins.items() if name.endswith("router.bias")
        )
        ends = {name: value for name, value in found.items() if name.startswith("after ")}
    assert len(ends) > 10


FIGURES: dict[str, Any] = {
    "model.family": "moe",
    "training.dtype": "float64",
    "training.steps": 3,
    "training.seq_len": 16,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 8,
    "activation_checkpoint.mode": "full",
    "activation_checkpoint.every_n_layers": 2,
    "model.overrides": {"num_layers": 3, "hidden_size": 32, "expert_ffn_hidden_size": 16, "num_dense_layers": 1},
}


def figures(rank: int, folder: Path, layouts: dict[str, dict]) -> dict[str, list[dict[str, float]]]:
    found = {}
    for name, layout in layouts.items():
        trainer = trainer_of(folder, FIGURES | layout)
        data = trainer._load_data()
        found[name] = [trainer.read_step(trainer.train_step(data)).experts for _ in range(3)]
        data.close()
    return found


@pytest.mark.exhaustive
def test_figures_are_those_of_one_process(tmp_path: Path) -> None:
    """In a pipeline of two, the first stage's only layer has no experts."""
    expected = collect(figures, 1, tmp_path, {"one": zero(0)})[0]["one"]
    assert len({step["balance_loss"] for step in expected}) == 3
    layouts = {"zero 3": zero(3), "pipeline": pipeline() | {"parallelism.pipeline_layers": [1, 2]}}
    for of_rank in collect(figures, 2, tmp_path, layouts):
        for name, steps in of_rank.items():
            assert steps == [pytest.approx(step, rel=1e-9) for step in expected], name
