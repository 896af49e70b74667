"""A damaged newest checkpoint is named and the one before is used; a run with none that loads does not start."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import crash_worker
from tests.distributed.launch import base_config, collect, launch
from tests.e2e.jobs import steps
from tests.e2e.scripts import Script
from tests.unit.attacks import hide_pickle, place_at

LAYOUTS: dict[int, dict[str, Any]] = {1: {}, 2: {"parallelism.zero_stage": 3}}  # by number of ranks


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "tensor file cut": lambda path: halve(path / "__0_0.distcp"),
    "tensor file deleted": lambda path: (path / "__0_0.distcp").unlink(),
    "tensor file of zeros": lambda path: (path / "__0_0.distcp").write_bytes(bytes(100_000)),
    "garbage .metadata": lambda path: (path / ".metadata").write_bytes(b"\x80\x04garbage"),
    "empty .metadata": lambda path: (path / ".metadata").write_bytes(b""),
    ".metadata cut": lambda path: halve(path / ".metadata"),
    "no .metadata": lambda path: (path / ".metadata").unlink(),
    "garbage run.json": lambda path: (path / "run.json").write_bytes(b"\xff{garbage"),
    "run.json cut": lambda path: halve(path / "run.json"),
    "run.json of something else": lambda path: (path / "run.json").write_text("[1, 2]"),
    "no run.json": lambda path: (path / "run.json").unlink(),
    "empty folder": empty,
    "pickle in a tensor file": lambda path: hide_pickle(path, path.parent / "mark"),  # it would lie beside them
    "tensor files elsewhere": lambda path: place_at(path, "../step-2/__0_0.distcp"),
}
OF_OTHER_RANKS: dict[str, Callable[[Path], object]] = {
    "tensor file of rank 1 cut": lambda path: halve(path / "__1_0.distcp"),
    "tensor file of rank 1 deleted": lambda path: (path / "__1_0.distcp").unlink(),
}


# Two ranks have to agree on what one of them finds: one damage for each file that is read, and those of the other rank.
ON_TWO_RANKS = ["tensor file cut", "garbage .metadata", "run.json cut", "pickle in a tensor file", *OF_OTHER_RANKS]


@pytest.mark.parametrize(
    ("ranks", "damaged"),
    [
        (1, list(DAMAGES)),
        (2, ON_TWO_RANKS),
        pytest.param(2, [name for name in DAMAGES if name not in ON_TWO_RANKS], marks=pytest.mark.exhaustive),
    ],
    ids=["1", "2", "2, more"],
)
def test_damaged_newest_is_named_and_the_one_before_used(tmp_path: Path, ranks: int, damaged: list[str]) -> None:
    settings = LAYOUTS[ranks]
    base_config(tmp_path, {})
    launch(crash_worker.train, ranks, tmp_path, tmp_path / "start", settings)
    digests = collect(crash_worker.reference, ranks, tmp_path, tmp_path / "straight", settings)[0]
    damages = {name: (DAMAGES | OF_OTHER_RANKS)[name] for name in damaged}
    dumps = {name: tmp_path / name for name in damages}
    for name, damage in damages.items():
        shutil.copytree(tmp_path / "start", dumps[name])
        damage(dumps[name] / "checkpoint" / "step-3")
    outcomes = collect(crash_worker.resume_each, ranks, tmp_path, list(dumps.values()), settings)[0]
    for (name, dump), outcome in zip(dumps.items(), outcomes, strict=True):
        (report,) = [line for line in outcome["printed"].splitlines() if "is not used" in line]
        assert report.startswith(f"checkpoint {dump}/checkpoint/step-3 is damaged and is not used ("), name
        assert (outcome["step"], outcome["digest"]) == (2, digests["2"]), name
        assert outcome["final"] == digests["3"], name
        assert steps(dump) == [1, 2, 3]
        assert sorted(path.name for path in (dump / "checkpoint").iterdir()) == ["step-1", "step-2", "step-3"]


def test_none_that_loads_ends_the_run_with_one_sentence_and_leaves_everything(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 500)
    arguments = ["--training.steps=2", "--training.seq_len=32", "--checkpoint.enable"]
    arguments += ["--data.dataset=text", f"--data.paths={tmp_path}/text.txt", f"--job.dump_folder={tmp_path}"]
    for step in (1, 2):
        folder = tmp_path / "checkpoint" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    result = Script("train.py", arguments).wait()
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1:] == [
        f"error: none of the checkpoints in {tmp_path}/checkpoint can be loaded; move them away to start anew"
    ]
    assert "Traceback" not in result.stderr
    assert [f"checkpoint {tmp_path}/checkpoint/step-{step} is damaged" in result.stdout for step in (1, 2)] == [
        True
    ] * 2
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-1", "step-2"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
