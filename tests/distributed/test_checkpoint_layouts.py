"""A checkpoint of any layout holds the same bits when it is loaded in another; keep_latest and load_step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import crash_worker
from tests.distributed.launch import launch
from titan_like.checkpoint.step_folders import complete_steps, read_run_state

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
        "zero0 of 4": {"parallelism.zero_stage": 0},
        "zero1 of 4": {"parallelism.zero_stage": 1},
        "zero3 of 4": {"parallelism.zero_stage": 3},
        "2 replicas of zero3": {"parallelism.zero_stage": 3} | HSDP,
        "bfloat16 zero0 of 4": {"parallelism.zero_stage": 0, "training.dtype": "bfloat16"},
        "2 stages of tensor 2": PIPELINE | TENSOR,
        "2 stages of zero3": PIPELINE | {"parallelism.zero_stage": 3},
        "tensor 2 of zero1": TENSOR | {"parallelism.zero_stage": 1, "parallelism.sequence_parallel": True},
    },
    2: {
        "zero0 of 2": {"parallelism.zero_stage": 0},
        "zero3 of 2": {"parallelism.zero_stage": 3},
        "interleaved": INTERLEAVED,
    },
    1: {"1 rank": {}, "1 rank in bfloat16": {"training.dtype": "bfloat16"}},
}
NAMES = [name for layouts in LAYOUTS.values() for name in layouts]
LOADED_IN = ("2 stages of tensor 2", "interleaved", "1 rank")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    crash_worker.base_config(folder, {})
    for ranks, layouts in LAYOUTS.items():
        settings = {name: FOUR_LAYERS | layout for name, layout in layouts.items()}
        launch(crash_worker.save_each, ranks, folder, NAMES, settings)
    for ranks, layouts in LAYOUTS.items():
        settings = {name: FOUR_LAYERS | layout for name, layout in layouts.items() if name in LOADED_IN}
        launch(crash_worker.load_each, ranks, folder, NAMES, settings)
    return folder


@pytest.mark.parametrize("saved", NAMES)
def test_weights_and_optimizer_state_are_bit_equal_in_every_layout(folder: Path, saved: str) -> None:
    digest = (folder / saved / "digest").read_text()
    for ranks, layouts in LAYOUTS.items():
        loaded = json.loads((folder / f"loaded at {ranks}.json").read_text())
        for layout in set(layouts) & set(LOADED_IN):
            assert loaded[f"{saved} in {layout}"] == digest, layout


def test_keep_latest_keeps_exactly_that_many(tmp_path: Path) -> None:
    crash_worker.base_config(tmp_path, {})
    checkpoints = tmp_path / "run" / "checkpoint"

    def train(**settings: int) -> list[int]:
        launch(
            crash_worker.train,
            1,
            tmp_path,
            tmp_path / "run",
            {k.replace("_", ".", 1): v for k, v in settings.items()},
        )
        return complete_steps(checkpoints)

    assert train(training_steps=4) == [1, 2, 3, 4]
    assert train(training_steps=6, checkpoint_keep_latest=3) == [4, 5, 6]
    # Back at step 4, what is kept are the newest of the branch that the run is on.
    (checkpoints / "step-5" / "mark").touch()
    assert train(training_steps=5, checkpoint_keep_latest=2, checkpoint_load_step=4) == [4, 5]
    assert not (checkpoints / "step-5" / "mark").exists()


def test_going_back_replaces_later_steps_as_they_are_reached(tmp_path: Path) -> None:
    crash_worker.base_config(tmp_path, {})
    dump = tmp_path / "run"
    launch(crash_worker.train, 1, tmp_path, dump, {"training.steps": 4})
    launch(
        crash_worker.train,
        1,
        tmp_path,
        dump,
        {"checkpoint.load_step": 1, "optimizer.lr": 5e-3, "training.steps": 3},
    )
    rates = {
        step: read_run_state(dump / "checkpoint" / f"step-{step}").config["optimizer"]["lr"]
        for step in complete_steps(dump / "checkpoint")
    }
    assert rates == {1: 1e-3, 2: 5e-3, 3: 5e-3, 4: 1e-3}
    assert [json.loads(line)["step"] for line in (dump / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_run_saved_before_its_first_update_resumes(tmp_path: Path) -> None:
    crash_worker.base_config(tmp_path, {})
    dump = tmp_path / "run"
    outcomes = launch(crash_worker.save_without_update, 2, tmp_path, dump, {"parallelism.zero_stage": 1})
    outcomes += launch(crash_worker.train, 1, tmp_path, dump, {})
    assert json.loads((dump / "resumed.jsonl").read_text())["step"] == 1
    assert all("is not used" not in outcome.printed for outcome in outcomes)
    assert complete_steps(dump / "checkpoint") == [1, 2, 3]
