"""A run that goes on in another layout computes what it would have computed without the change."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import crash_worker
from tests.distributed.launch import base_config, collect

TP, PP = "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"
ZERO, SP, SCHEDULE = "parallelism.zero_stage", "parallelism.sequence_parallel", "parallelism.pipeline_schedule"
VIRTUAL = "parallelism.virtual_stages_per_rank"
# Ranks and settings.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "ZeRO 2 on 2": (2, {ZERO: 2}),
    "ZeRO 3 on 4": (4, {ZERO: 3}),
    "tensor 2 with SP, ZeRO 3 on 2": (4, {TP: 2, SP: True, ZERO: 3}),
    "interleaved on 2, ZeRO 1 on 2": (4, {PP: 2, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2, ZERO: 1}),
    "ZBV on 2, tensor 2": (4, {PP: 2, SCHEDULE: "zbv_zero_bubble", TP: 2}),
}
PAIRS = [  # `test_checkpoint_layouts` compares the bits of more
    ("one rank", "ZBV on 2, tensor 2"),
    ("ZeRO 3 on 4", "tensor 2 with SP, ZeRO 3 on 2"),
    ("tensor 2 with SP, ZeRO 3 on 2", "interleaved on 2, ZeRO 1 on 2"),
    ("interleaved on 2, ZeRO 1 on 2", "one rank"),
    ("ZBV on 2, tensor 2", "ZeRO 2 on 2"),
]
SAVED, STEPS = 3, 6
SETTINGS: dict[str, Any] = {
    "model.overrides": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4},
    "training.micro_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": STEPS,
    "checkpoint.interval": SAVED,
    "checkpoint.keep_latest": 0,
}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses after the saved step: of each layout's own run, and of each that goes on from another's checkpoint."""
    folder = tmp_path_factory.mktemp("reshard")
    base_config(folder, {})  # writes the text
    found: dict[str, list[float]] = {}
    for going_on in (False, True):
        for ranks in (1, 2, 4):
            if going_on:
                jobs = [(f"{a} → {b}", folder / a, LAYOUTS[b][1]) for a, b in PAIRS if LAYOUTS[b][0] == ranks]
            else:
                saved = dict.fromkeys(before for before, _ in PAIRS)
                jobs = [(name, None, LAYOUTS[name][1]) for name in saved if LAYOUTS[name][0] == ranks]
            if jobs:
                found |= collect(crash_worker.train_from, ranks, folder, jobs, SETTINGS, SAVED)[0]
    return found


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda name: name)
def test_next_losses_are_those_of_the_run_that_never_stopped(
    losses: dict[str, list[float]], before: str, after: str
) -> None:
    wanted = losses[before]
    assert len(wanted) == STEPS - SAVED and wanted[-1] < wanted[0]
    assert losses[f"{before} → {after}"] == pytest.approx(wanted, rel=1e-5)
