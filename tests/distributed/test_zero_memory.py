"""What each ZeRO stage keeps and communicates, counted on four ranks."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.launch import Case, base_config, collect, trainer_of
from tests.distributed.memory_probe import held_bytes
from tests.unit.planner_cases import state_bytes
from titan_like.models.registry import model_config

RANKS = 4
CASES = [
    Case(f"{family} {dtype} zero{stage} x{microbatches} units of {unit_bytes}", {
        "model.family": family,
        "model.overrides": {"num_layers": 3, "hidden_size": 64, "max_seq_len": 16},
        "training.dtype": dtype,
        "parallelism.zero_stage": stage,
        "training.seq_len": 16,
        "training.micro_batch_size": 1,
        "training.global_batch_size": RANKS * microbatches,
    }, unit_bytes)
    for family, dtype, microbatches, stages in (
        ("gpt", "float32", 2, (0, 2)),
        ("llama", "float32", 3, (1, 2, 3)),
        ("llama", "bfloat16", 2, (0, 1, 2, 3)),
    )
    for stage in stages
    # A layer, which for bfloat16 test_step_plan.py has; or two in float32 and Llama, else all three.
    for unit_bytes in ((0, 700_000) if dtype == "float32" else (700_000,))
]  # fmt: skip


class CountCollectives(TorchDispatchMode):
    """Counts calls of each collective; sums of one or two numbers (loss, tokens, norm) are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not (isinstance(args[0], list) and args[0][0].numel() <= 2):
            self.counts[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def measure(rank: int, folder: Path, cases: list[Case]) -> dict[str, dict[str, Any]]:
    return {case.name: measure_case(folder, case) for case in cases}


def measure_case(folder: Path, case: Case) -> dict[str, Any]:
    with case.layer_units():
        trainer = trainer_of(folder, case.settings)
    (stage,) = trainer.model.stages
    data = trainer._load_data()
    trainer.train_step(data)  # the optimizer's state exists from here on
    between = sum(held_bytes(stage.module, trainer.optimizer).values())
    seen = [between]

    def sample(*_: Any) -> None:
        seen.append(sum(held_bytes(stage.module, trainer.optimizer).values()))

    def sample_before_reduction(_module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        # The gradient of a unit's input is complete when its weights' are, and before they are reduced.
        inputs[0].register_hook(sample)

    for layer in stage.module.layers.values():
        layer.register_forward_pre_hook(sample_before_reduction)
        layer.register_forward_hook(sample)
    for state_changer in ("before_backward", "finish"):
        original = getattr(stage.data_parallel, state_changer)
        setattr(stage.data_parallel, state_changer, lambda *a, f=original, **k: (sample(), f(*a, **k)))
    with CountCollectives() as collectives:
        trainer.train_step(data)
    data.close()
    return {"between": between, "peak": max(seen), "counts": dict(collectives.counts)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return collect(measure, RANKS, tmp_path_factory.mktemp("zero"), CASES)[-1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_state_bytes_equal_the_formula(measured: dict[str, dict[str, Any]], case: Case) -> None:
    config = base_config(Path(os.devnull), case.settings)
    compute_bytes = getattr(torch, config.training.dtype).itemsize
    with case.layer_units():
        between, peak = state_bytes(model_config(config.model), config.parallelism.zero_stage, RANKS, compute_bytes)
    assert measured[case.name]["between"] == between
    if torch.__version__ < "2.15":
        assert measured[case.name]["peak"] == peak
    else:  # there gradients in half types are converted sooner, and copies are padded
        gradients = 0 if compute_bytes == 4 else compute_bytes * model_config(config.model).num_parameters()
        assert peak - gradients <= measured[case.name]["peak"] <= 1.001 * peak


@pytest.mark.parametrize("case", [case for case in CASES if "float32" in case.name], ids=lambda case: case.name)
def test_collectives_per_step(measured: dict[str, dict[str, Any]], case: Case) -> None:
    config = base_config(Path(os.devnull), case.settings)
    model, stage = model_config(config.model), config.parallelism.zero_stage
    microbatches = config.training.global_batch_size // RANKS
    layers = {"gpt": 1, "llama": 2}[config.model.family] if case.unit_bytes else 3
    units = layers + (1 if model.tied_embeddings else 2)  # the root, and an untied embedding table
    expected = {
        0: {"allreduce_coalesced_": layers + 1},
        1: {"_allgather_base_": units, "_reduce_scatter_base_": units},
        2: {"_allgather_base_": units, "_reduce_scatter_base_": units * microbatches},
        # Forward and backward gather each unit, but the root stays gathered in between.
        3: {"_allgather_base_": (2 * units - 1) * microbatches, "_reduce_scatter_base_": units * microbatches},
    }
    assert measured[case.name]["counts"] == expected[stage]
