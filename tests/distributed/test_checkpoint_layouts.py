"""A checkpoint of any layout holds the same bits when it is loaded in another; keep_latest and load_step."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import crash_worker
from tests.distributed.launch import base_config, collect, launch
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
        "zero3 of 4": {"parallelism.zero_stage": 3},
        "2 replicas of zero3": {"parallelism.zero_stage": 3} | HSDP,
        "2 stages of tensor 2": PIPELINE | TENSOR,
        "tensor 2 of zero1": TENSOR | {"parallelism.zero_stage": 1, "parallelism.sequence_parallel": True},
    },
    2: {
        "zero0 of 2": {"parallelism.zero_stage": 0},
        "bfloat16 zero0 of 2": {"parallelism.zero_stage": 0, "training.dtype": "bfloat16"},
        "interleaved": INTERLEAVED,
    },
    1: {"1 rank": {}, "1 rank in bfloat16": {"training.dtype": "bfloat16"}},
}
MORE_LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    4: LAYOUTS[4]
    | {
        "zero0 of 4": {"parallelism.zero_stage": 0},
        "2 stages of zero3": PIPELINE | {"parallelism.zero_stage": 3},
        "zero1 of 4": {"parallelism.zero_stage": 1},
        "bfloat16 zero0 of 4": {"parallelism.zero_stage": 0, "training.dtype": "bfloat16"},
    },
    2: LAYOUTS[2] | {"zero3 of 2": {"parallelism.zero_stage": 3}},
    1: LAYOUTS[1],
}
# One process reads every checkpoint. Other layouts read other parts, whose borders may not be those of what was saved.
LOADED = {
    "2 stages of tensor 2": ["zero3 of 4", "tensor 2 of zero1", "interleaved"],
    "interleaved": ["2 stages of tensor 2", "2 replicas of zero3", "1 rank"],
    "1 rank": [name for layouts in LAYOUTS.values() for name in layouts],
}
LOADED_MORE = {layout: [name for layouts in MORE_LAYOUTS.values() for name in layouts] for layout in LOADED}
SETS = {"normal": (LAYOUTS, LOADED), "exhaustive": (MORE_LAYOUTS, LOADED_MORE)}


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, str], dict[Any, str]]]:
    """Of everything that is saved, and of what is loaded where, in the normal or in the exhaustive run."""

    @cache
    def save_and_load(chosen: str) -> tuple[dict[str, str], dict[Any, str]]:
        folder, (saved, loaded) = tmp_path_factory.mktemp("layouts"), SETS[chosen]
        base_config(folder, {})
        before: dict[str, str] = {}
        after: dict[Any, str] = {}
        for ranks, layouts in saved.items():
            settings = {name: FOUR_LAYERS | layout for name, layout in layouts.items()}
            before |= collect(crash_worker.save_each, ranks, folder, settings)[0]
        for ranks, layouts in saved.items():
            settings = {name: FOUR_LAYERS | layout for name, layout in layouts.items() if name in loaded}
            after |= collect(crash_worker.load_each, ranks, folder, loaded, settings)[0]
        return before, after

    return save_and_load


@pytest.mark.parametrize(
    ("chosen", "saved", "layout"),
    [
        pytest.param(chosen, name, layout, marks=[pytest.mark.exhaustive] * (chosen == "exhaustive"))
        for chosen, (_, loaded) in SETS.items()
        for layout, names in loaded.items()
        for name in names
    ],
)
def test_weights_and_optimizer_state_are_bit_equal_in_every_layout(
    digests: Callable[[str], tuple[dict[str, str], dict[Any, str]]], chosen: str, saved: str, layout: str
) -> None:
    before, after = digests(chosen)
    assert after[saved, layout] == before[saved]


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


def test_going_back_replaces_later_steps_as_they_are_reached(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    dump = tmp_path / "run"
    runs = [{"training.steps": 4}, {"checkpoint.load_step": 1, "optimizer.lr": 5e-3, "training.steps": 3}]
    launch(train_each, 1, tmp_path, dump, runs)
    rates = {
        step: read_run_state(dump / "checkpoint" / f"step-{step}").config["optimizer"]["lr"]
        for step in complete_steps(dump / "checkpoint")
    }
    assert rates == {1: 1e-3, 2: 5e-3, 3: 5e-3, 4: 1e-3}
    assert [json.loads(line)["step"] for line in (dump / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def train_each(rank: int, folder: Path, dump: Path, runs: list[dict[str, Any]]) -> None:
    for settings in runs:
        crash_worker.train(rank, folder, dump, settings)


def test_run_saved_before_its_first_update_resumes(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    dump = tmp_path / "run"
    outcomes = launch(crash_worker.save_without_update, 2, tmp_path, dump, {"parallelism.zero_stage": 1})
    outcomes += launch(crash_worker.train, 1, tmp_path, dump, {})
    assert json.loads((dump / "resumed.jsonl").read_text())["step"] == 1
    assert all("is not used" not in outcome.printed for outcome in outcomes)
    assert complete_steps(dump / "checkpoint") == [1, 2, 3]
