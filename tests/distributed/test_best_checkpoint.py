"""`checkpoint.keep_best` and `evaluation.patience`, on runs whose validation losses are given."""

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.crash_worker import Death, build, die_in, survived
from tests.distributed.launch import base_config, collect, died, start_group
from titan_like.checkpoint.best import best_of, read_validations, validation_loss
from titan_like.checkpoint.loader import CheckpointWeights, one_checkpoint
from titan_like.checkpoint.step_folders import checkpoint_path, complete_steps, is_resumable, sweep
from titan_like.config.errors import ConfigError
from titan_like.hugging_face.folder import local_folder
from titan_like.train.health import LossWatch
from titan_like.train.training_state import TrainingState
from titan_like.train.validation import Validator

LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.0, 10: 1.9}  # equal ones are no improvement
SETTINGS: dict[str, Any] = {
    "training.steps": 10,
    "checkpoint.interval": 3,
    "checkpoint.keep_latest": 1,
    "checkpoint.keep_best": True,
    "evaluation.interval": 2,
    "evaluation.patience": 2,
}


@contextlib.contextmanager
def given(losses: dict[int, float]) -> Iterator[None]:
    """Validations with these losses by step."""

    def run_all(validator: Validator) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        assert validator.observer is not None
        return {"validation": {"loss": losses[given_step[0]]}}, {}

    given_step = [0]
    is_due = Validator.is_due

    def noted(validator: Validator, step: int, total_steps: int) -> bool:
        given_step[0] = step
        return is_due(validator, step, total_steps)

    with patch.object(Validator, "run_all", run_all), patch.object(Validator, "is_due", noted):
        yield


def train(rank: int, folder: Path, dump: Path, settings: dict[str, Any], losses: dict[int, float]) -> dict[str, Any]:
    """Train or resume; what is printed and what is left."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, given(losses):
        trainer = build(folder, dump, SETTINGS | settings)
        began = trainer.state.step
        trainer.train()
    checkpoints = trainer.run.checkpoint_folder
    return {
        "began": began,
        "step": trainer.state.step,
        "validations": trainer.state.validations and list(astuple(trainer.state.validations)),
        "steps": complete_steps(checkpoints),
        "resumable": is_resumable(trainer.config),
        "printed": printed.getvalue(),
    }


def train_to_every_instant(rank: int, folder: Path, dump: Path, instants: Path) -> None:
    """Train, with a copy of the folder as it is before each of its file operations, then die."""
    add = TrainingState.add_validation

    def noted(state: TrainingState, loss: float) -> None:
        add(state, loss)
        with open(dump / "validated.jsonl", "a") as file:
            file.write(json.dumps([state.step, loss]) + "\n")

    with given(LOSSES), patch.object(TrainingState, "add_validation", noted):
        trainer = build(folder, dump, SETTINGS)
        operations = die_in(dump / "checkpoint", Death(0, instants=instants))
        trainer.train()
        survived(dump, operations)


def resume_all(rank: int, folder: Path, dumps: list[Path]) -> list[dict[str, Any]]:
    return [train(rank, folder, dump, {}, LOSSES) for dump in dumps]


@pytest.mark.parametrize(("ranks", "background"), [(1, False), (2, True)])
def test_a_run_stops_early_and_keeps_its_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, background: bool
) -> None:
    base_config(tmp_path, {})
    monkeypatch.chdir(tmp_path)  # run/best looks like a name on the hub
    dump, settings = tmp_path / "run", {"checkpoint.async": background}
    outcome = collect(train, ranks, tmp_path, dump, settings, LOSSES)[0]
    assert outcome["step"] == 8 and outcome["steps"] == [4, 8]
    assert outcome["validations"] == [8, 2.0, 4, 2.0, 2]
    assert (
        "stopped early at step 8: 2 validations without a loss below the best (2.0000, of step 4)" in outcome["printed"]
    )
    assert f"read it as --checkpoint {dump / 'checkpoint' / 'best'}" in outcome["printed"]
    assert outcome["resumable"] == (False, f"finished: stopped early at step 8, which is in {dump / 'checkpoint'}")
    for name in (dump / "best", dump / "checkpoint" / "best"):
        assert one_checkpoint(name, "--checkpoint") == checkpoint_path(dump / "checkpoint", 4)
    assert local_folder("run/best", "model.from") == Path("run/checkpoint/step-4")
    assert one_checkpoint(dump, "--checkpoint") == checkpoint_path(dump / "checkpoint", 8)
    again = collect(train, 1, tmp_path, dump, settings, LOSSES)[0]
    assert again["step"] == 8 and "nothing to train: the run stopped early at step 8" in again["printed"]
    more = collect(train, 1, tmp_path, dump, settings | {"evaluation.patience": 3}, LOSSES)[0]
    assert more["step"] == 10 and more["steps"] == [10] and more["validations"] == [10, 1.9, 10, 1.9, 0]


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    """From a step that was validated after its save, from one that never was, and from an earlier one."""
    base_config(tmp_path, {})
    for stop, load in ((6, None), (7, None), (8, 6)):
        dump = tmp_path / f"{stop} {load}"
        settings = {"evaluation.patience": 3, "checkpoint.keep_latest": 0, "checkpoint.interval": 1}
        collect(train, 1, tmp_path, dump, settings | {"training.steps": stop}, LOSSES | {7: 9.0})
        kept = settings | {"checkpoint.load_step": load, "evaluation.patience": 2}
        outcome = collect(train, 1, tmp_path, dump, kept, LOSSES)[0]
        assert outcome["began"] == (load or stop)
        assert outcome["step"] == (7 if stop == 7 else 8), "step 7 is the last of a run, and is validated"


def test_without_early_stop_or_finite_losses(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    losses = {2: float("nan"), 4: 2.0, 6: float("inf"), 8: 2.5, 10: 2.4}
    settings = {"evaluation.patience": 0, "checkpoint.interval": 5}
    outcome = collect(train, 1, tmp_path, tmp_path / "run", settings, losses)[0]
    assert outcome["step"] == 10 and outcome["steps"] == [4, 10]
    assert outcome["validations"] == [10, 2.4, 4, 2.0, 3]
    plain = {"evaluation.patience": 0, "checkpoint.keep_best": False}
    outcome = collect(train, 1, tmp_path, tmp_path / "plain", plain, losses)[0]
    assert outcome["steps"] == [10] and outcome["validations"] is None
    with pytest.raises(ConfigError, match="no checkpoint in that folder has a validation loss"):
        one_checkpoint(tmp_path / "plain" / "best", "--checkpoint")


def train_with_a_skip(rank: int, folder: Path, dump: Path) -> dict[str, Any]:
    count = LossWatch.count

    def skips(watch: LossWatch, step: int, loss: float, skipped: bool, *rest: Any) -> None:
        count(watch, step, loss, skipped or step == 4, *rest)

    with patch.object(LossWatch, "count", skips):
        return train(rank, folder, dump, {"checkpoint.interval": 10}, LOSSES)


def test_the_best_is_kept_after_a_skipped_update_and_named_only_if_it_is_there(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    outcome = collect(train_with_a_skip, 1, tmp_path, tmp_path / "run")[0]
    assert outcome["steps"] == [4, 8] and f"in {tmp_path / 'run/checkpoint/step-4'};" in outcome["printed"]
    settings = {"checkpoint.keep_best": False, "training.steps": 6}  # 4 was the best, and is not kept
    collect(train, 1, tmp_path, tmp_path / "late", settings, LOSSES)
    outcome = collect(train, 1, tmp_path, tmp_path / "late", {}, LOSSES)[0]
    assert outcome["steps"] == [8]
    best = one_checkpoint(tmp_path / "late" / "best", "--checkpoint")
    assert f"in {best};" in outcome["printed"] and best.is_dir()


def test_every_instant_of_a_run_leaves_complete_checkpoints_and_the_best(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    instants = tmp_path / "instants"
    job = start_group(train_to_every_instant, 1, tmp_path, tmp_path / "run", instants)
    outcomes = job.wait(180, seconds_to_follow=0)
    assert died(outcomes), outcomes
    dumps = sorted(instants.iterdir(), key=lambda path: int(path.name))
    assert len(dumps) > 40
    to_resume, last = [], None
    for dump in dumps:
        lines = (dump / "validated.jsonl").read_text().splitlines() if (dump / "validated.jsonl").exists() else []
        validated = dict(json.loads(line) for line in lines)
        folder = dump / "checkpoint"
        names = sorted(path.name for path in folder.iterdir())
        if names != last:
            shutil.copytree(dump, copy := dump.with_name(f"{dump.name} resumed"))
            to_resume.append(copy)
        last = names
        sweep(folder)
        for step in complete_steps(folder):
            CheckpointWeights(checkpoint_path(folder, step))
        if validated:
            best = best_of(checkpoint_path(folder, step) for step in complete_steps(folder))
            assert best is not None, dump
            known = read_validations(best)
            assert known is not None and known.loss is not None and known.loss <= min(validated.values()), dump
    assert len(to_resume) > 8
    for dump, outcome in zip(to_resume, collect(resume_all, 1, tmp_path, to_resume)[0], strict=True):
        assert outcome["step"] == 8 and {4, 8} <= {*outcome["steps"]}, (dump, outcome)  # perhaps one not yet removed
        assert outcome["validations"] == [8, 2.0, 4, 2.0, 2], dump
        lines = [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, 9))
        assert {line["step"]: line.get("validation_loss") for line in lines if line["step"] % 2 == 0} == {
            step: loss for step, loss in LOSSES.items() if step <= 8
        }


def test_which_loss_counts() -> None:
    assert validation_loss({"validation": {"loss": 2.0}, "validation/a": {"loss": 9.0}}) == 2.0
    assert validation_loss({"validation/a": {"loss": 1.0}, "validation/b": {"loss": 2.0}}) == 1.5


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"checkpoint.enable": False}, "checkpoint.keep_best"),
        ({"evaluation.interval": 0, "evaluation.patience": 0}, "checkpoint.keep_best"),
        ({"evaluation.interval": 0, "checkpoint.keep_best": False}, "evaluation.patience"),
    ],
)
def test_settings_that_need_another(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    from titan_like.train.rules import resolve_settings

    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        resolve_settings(base_config(tmp_path, SETTINGS | {"checkpoint.enable": True} | settings))
