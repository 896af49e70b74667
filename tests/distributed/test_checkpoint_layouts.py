"""A checkpoint of any layout holds the same bits when it is loaded in another; keep_latest and load_step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import crash_worker
from tests.distributed.launch import base_config, collect, launch, runs_exhaustive_tests
from titan_like.checkpoint.step_folders import complete_steps

Digests = tuple[dict[str, str], dict[Any, str]]  # by layout, and by layouts before and after
HSDP = {"parallelism.data_parallel_replicate_degree": 2}
FOUR_LAYERS = {"model.overrides": crash_worker.SETTINGS["model.overrides"] | {"num_layers": 4}}
PIPELINE = {"parallelism.pipeline_parallel_degree": 2}
INTERLEAVED = PIPELINE | {
    "parallelism.pipeline_schedule": "interleaved_1f1b",
    "parallelism.virtual_stages_per_rank": 2,
}
TENSOR = {"parallelism.tensor_parallel_degree": 2}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    4: {
        "zero3 of 4": {"parallelism.zero_stage": 3},
        "2 replicas of zero3": {"parallelism.zero_stage": 3} | HSDP,
        "2 stages of tensor 2": PIPELINE | TENSOR,
        "tensor 2 of zero1": TENSOR | {"parallelism.zero_stage": 1, "parallelism.sequence_parallel": True},
        "zero0 of 4": {"parallelism.zero_stage": 0},
        "2 stages of zero3": PIPELINE | {"parallelism.zero_stage": 3},
        "zero1 of 4": {"parallelism.zero_stage": 1},
        "bfloat16 zero0 of 4": {"parallelism.zero_stage": 0, "training.dtype": "bfloat16"},
    },
    2: {
        "zero0 of 2": {"parallelism.zero_stage": 0},
        "bfloat16 zero0 of 2": {"parallelism.zero_stage": 0, "training.dtype": "bfloat16"},
        "interleaved": INTERLEAVED,
        "zero3 of 2": {"parallelism.zero_stage": 3},
    },
    1: {"1 rank": {}, "1 rank in bfloat16": {"training.dtype": "bfloat16"}},
}
EVERY = [name for layouts in LAYOUTS.values() for name in layouts]
EXHAUSTIVE = {"zero0 of 4", "2 stages of zero3", "zero1 of 4", "bfloat16 zero0 of 4", "zero3 of 2"}
# One process reads every checkpoint. Other layouts read other parts, whose borders may not be those of what was saved.
LOADED = {
    "2 stages of tensor 2": ["zero3 of 4", "tensor 2 of zero1", "interleaved"],
    "interleaved": ["2 stages of tensor 2", "2 replicas of zero3", "1 rank"],
    "1 rank": [name for name in EVERY if name not in EXHAUSTIVE],
}


@pytest.fixture(scope="module")
def digests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """Of everything that is saved, and of what is loaded where."""
    folder, exhaustive = tmp_path_factory.mktemp("layouts"), runs_exhaustive_tests(request)
    base_config(folder, {})
    names = {layout: EVERY if exhaustive else LOADED[layout] for layout in LOADED}
    saved: dict[str, str] = {}
    loaded: dict[Any, str] = {}
    for ranks, layouts in LAYOUTS.items():
        settings = {name: FOUR_LAYERS | layouts[name] for name in layouts if exhaustive or name not in EXHAUSTIVE}
        saved |= collect(crash_worker.save_each, ranks, folder, settings)[0]
    for ranks, layouts in LAYOUTS.items():
        settings = {name: FOUR_LAYERS | layouts[name] for name in layouts if name in LOADED}
        loaded |= collect(crash_worker.load_each, ranks, folder, names, settings)[0]
    return saved, loaded


@pytest.mark.parametrize(
    ("saved", "layout"),
    [
        pytest.param(name, layout, marks=[] if name in LOADED[layout] else [pytest.mark.exhaustive])
        for layout in LOADED
        for name in EVERY
    ],
)
def test_weights_and_optimizer_state_are_bit_equal_in_every_layout(digests: Digests, saved: str, layout: str) -> None:
    assert digests[1][saved, layout] == digests[0][saved]


def test_keep_latest_keeps_exactly_that_many(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    launch(train_three_times, 1, tmp_path)


def train_three_times(rank: int, folder: Path) -> None:
    checkpoints = folder / "run" / "checkpoint"

    def train(**settings: int) -> list[int]:
        changes = {key.replace("_", ".", 1): value for key, value in settings.items()}
        crash_worker.train(rank, folder, folder / "run", changes)
        return complete_steps(checkpoints)

    assert train(training_steps=4) == [1, 2, 3, 4]
    assert train(training_steps=6, checkpoint_keep_latest=3) == [4, 5, 6]
    # Back at step 4, what is kept are the newest of the branch that the run is on.
    (checkpoints / "step-5" / "mark").touch()
    assert train(training_steps=5, checkpoint_keep_latest=2, checkpoint_load_step=4) == [4, 5]
    assert not (checkpoints / "step-5" / "mark").exists()


def test_run_saved_before_its_first_update_resumes(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    dump = tmp_path / "run"
    outcomes = launch(crash_worker.save_without_update, 2, tmp_path, dump, {"parallelism.zero_stage": 1})
    outcomes += launch(crash_worker.train, 1, tmp_path, dump, {})
    assert json.loads((dump / "resumed.jsonl").read_text())["step"] == 1
    assert all("is not used" not in outcome.printed for outcome in outcomes)
    assert complete_steps(dump / "checkpoint") == [1, 2, 3]
