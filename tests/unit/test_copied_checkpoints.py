"""Runs that begin with a copy of another run's checkpoint, or whose folder has moved."""

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.plain_loop import prepared, run_settings
from titan_like.train.job import run_job


def train(dump: Path, steps: int, folder: Path | None = None) -> None:
    settings = {"job.dump_folder": dump, "training.steps": steps, "checkpoint.enable": "true", "checkpoint.interval": 2}
    settings |= {"checkpoint.keep_latest": 0} | ({"checkpoint.folder": folder} if folder is not None else {})
    run_job(prepared(run_settings(dump.parent) | settings))


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def run_id(folder: Path) -> str:
    return json.loads((folder / "run.json").read_text())["run_id"]


@pytest.mark.slow
def test_a_copy_begins_another_run_and_the_first_one_loses_nothing(tmp_path: Path) -> None:
    dump, fork = tmp_path / "out", tmp_path / "out" / "fork"
    train(dump, 4)
    first = (dump / "metrics.jsonl").read_bytes()
    shutil.copytree(dump / "checkpoint" / "step-2", fork / "step-2")
    train(dump, 3, folder=fork)
    assert (dump / "metrics.1.jsonl").read_bytes() == first and steps(dump / "metrics.jsonl") == [3]
    assert run_id(fork / "step-3") != run_id(dump / "checkpoint" / "step-4")
    train(dump, 5, folder=fork)  # each goes on with its own
    assert (dump / "metrics.1.jsonl").read_bytes() == first and steps(dump / "metrics.jsonl") == [3, 4, 5]
    assert run_id(fork / "step-5") == run_id(fork / "step-3")
    train(dump, 6)
    assert steps(dump / "metrics.jsonl") == [1, 2, 3, 4, 5, 6] and steps(dump / "metrics.2.jsonl") == [3, 4, 5]


@pytest.mark.slow
def test_a_run_goes_on_where_its_folder_has_moved_or_its_output_goes_elsewhere(tmp_path: Path) -> None:
    train(tmp_path / "here", 2)
    first = run_id(tmp_path / "here" / "checkpoint" / "step-2")
    (tmp_path / "here").rename(tmp_path / "there")
    train(tmp_path / "there", 3)
    assert steps(tmp_path / "there" / "metrics.jsonl") == [1, 2, 3]
    train(tmp_path / "elsewhere", 4, folder=tmp_path / "there" / "checkpoint")
    assert steps(tmp_path / "elsewhere" / "metrics.jsonl") == [4]
    assert {run_id(tmp_path / "there" / "checkpoint" / f"step-{step}") for step in (2, 3, 4)} == {first}
