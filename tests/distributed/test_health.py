"""Bad steps are left out on all ranks alike, and a run that has too many of them ends with a sentence."""

import contextlib
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed.crash_worker import build, digest
from tests.distributed.launch import base_config, collect
from tests.e2e.jobs import records
from titan_like.config.errors import RunError
from titan_like.models.transformer import Transformer
from titan_like.train.trainer import Trainer

BATCH = 4  # samples
SETTINGS: dict[str, Any] = {
    "training.steps": 14,
    "checkpoint.interval": 4,
    "health.loss_spike_factor": 8.0,
    "health.loss_spike_window": 8,
}
BAD_STEP = 10
DIGESTED = (5, 7, 9, 10, 11, 14)  # the steps at which the tests look


def train_here(
    rank: int,
    folder: Path,
    dump: Path,
    settings: dict[str, Any],
    bad: dict[int, float],
    set_back: int | None = None,
    ruined_after: int | None = None,
) -> dict[str, Any]:
    """Train where the losses of the steps that begin at some samples are multiplied, and tell what came of it.

    With ``set_back`` the data cursor is moved there first. After step ``ruined_after`` the last rank's weights are NaN.
    """
    loss = Transformer.loss
    digests: dict[int, str] = {}

    class Watched(Trainer):
        def train_step(self, data: Any) -> Any:
            issued = super().train_step(data)
            if issued.step in DIGESTED:
                digests[issued.step] = digest(self)
            if issued.step == ruined_after and rank == dist.get_world_size() - 1:
                next(self.model.parameters()).detach().fill_(math.nan)
            return issued

    outcome: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer = build(folder, dump, settings, Watched)
        if set_back is not None:
            trainer.state.consumed_samples = set_back

        def sometimes_bad(*arguments: Any) -> torch.Tensor:
            return loss(*arguments) * bad.get(trainer.state.consumed_samples, 1.0)

        with patch.object(Transformer, "loss", sometimes_bad):
            try:
                trainer.train()
            except RunError as error:
                outcome["error"] = str(error)
    return outcome | {
        "step": trainer.state.step,
        "skipped_steps": trainer.state.skipped_steps,
        "consumed_samples": trainer.state.consumed_samples,
        "digests": digests,
        "printed": printed.getvalue(),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("health")
    base_config(root, {})
    return root


def train(
    folder: Path, name: str, bad: dict[int, float], ruined_after: int | None = None, **changes: Any
) -> list[dict[str, Any]]:
    """What each of two ranks found. They agree, but for weights after one rank's were ruined."""
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    outcomes = collect(train_here, 2, folder, folder / name, settings, bad, None, ruined_after)
    for key in ("step", "skipped_steps", "consumed_samples"):
        assert outcomes[0][key] == outcomes[1][key], key
    last = math.inf if ruined_after is None else ruined_after
    first, second = ({s: d for s, d in one["digests"].items() if s <= last} for one in outcomes)
    assert first == second != {}
    return outcomes


def test_a_spike_changes_nothing_and_is_counted(folder: Path) -> None:
    outcome = train(folder, "skip", {BATCH * (BAD_STEP - 1): 5.0}, checkpoint__enable=False)[0]
    digests = outcome["digests"]
    assert digests[BAD_STEP] == digests[BAD_STEP - 1] != digests[BAD_STEP + 1]
    assert outcome["skipped_steps"] == 1 and outcome["step"] == 14
    found = records(folder / "skip")
    assert [record["step"] for record in found if record["spike"]] == [BAD_STEP]
    assert not any(record["nan"] or record["skipped"] for record in found)
    assert found[BAD_STEP - 1]["loss"] > 3 * found[BAD_STEP - 2]["loss"]
    rates = [record["lr"] for record in found]
    assert rates[BAD_STEP] == pytest.approx(rates[BAD_STEP - 1])  # the schedule does not count the step


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
def test_going_back_leaves_out_the_samples_since_the_checkpoint(folder: Path, background: bool) -> None:
    name = f"rewind {background}"
    bad_from = BATCH * (BAD_STEP - 1)
    extra: dict[str, Any] = {"health__loss_spike_action": "rewind", "checkpoint__async": background}
    if background:
        extra |= {"metrics__wandb": True, "metrics__wandb_mode": "offline"}
    outcome = train(folder, name, {bad_from: 5.0}, **extra)[0]
    assert ("the earlier figures of step 9 stay in wandb" in outcome["printed"]) == background
    assert (
        f" the loss of step {BAD_STEP} is a spike (" in outcome["printed"]
        and f"went back to step 8 and skipped samples 32 to {bad_from + BATCH - 1}" in outcome["printed"]
    )
    found = records(folder / name)
    assert [record["step"] for record in found] == list(range(1, 15)) and not any(r["spike"] for r in found)
    left_out = bad_from + BATCH - 32
    wanted = [BATCH * step + (left_out if step > 8 else 0) for step in range(1, 15)]
    assert [record["consumed_samples"] for record in found] == wanted
    # The same by hand: a run that begins at step 8 with the samples after the bad ones.
    by_hand = folder / f"by hand {background}"
    shutil.copytree(folder / name / "checkpoint", by_hand / "checkpoint")
    shutil.rmtree(by_hand / "checkpoint" / "step-12")
    shutil.rmtree(by_hand / "checkpoint" / "step-14")
    settings = SETTINGS | {"health.loss_spike_factor": 0.0}
    other = collect(train_here, 2, folder, by_hand, settings, {}, bad_from + BATCH)[0]
    assert other["digests"][14] == outcome["digests"][14]


@pytest.mark.parametrize(("bad_step", "last"), [(10, 12), (14, 12)])
def test_a_run_that_goes_back_ends_after_its_samples(folder: Path, bad_step: int, last: int) -> None:
    """Its 56 samples are 14 steps of 4. Step 10 leads back to step 8 past 40 samples; step 14 to step 12, past all."""
    name = f"samples {bad_step}"
    extra: dict[str, Any] = {"training__steps": None, "training__samples": 14 * BATCH}
    extra |= {"health__loss_spike_action": "rewind", "lr_scheduler__decay": "linear"}
    outcome = train(folder, name, {BATCH * (bad_step - 1): 5.0}, **extra)[0]
    assert outcome["step"] == last and outcome["consumed_samples"] == 14 * BATCH
    found = records(folder / name)
    assert [record["step"] for record in found] == list(range(1, last + 1))
    rates = [1e-3 * (1 - record["consumed_samples"] / 56) for record in found]
    assert [record["lr"] for record in found] == pytest.approx(rates, abs=1e-15)
    state = json.loads((folder / name / "checkpoint" / f"step-{last}" / "run.json").read_text())
    assert state["consumed_samples"] == 14 * BATCH  # so another start has nothing to train


def test_a_spike_before_the_first_checkpoint_is_only_left_out(folder: Path) -> None:
    extra: dict[str, Any] = {"health__loss_spike_action": "rewind", "checkpoint__interval": 100}
    outcome = train(folder, "no checkpoint", {BATCH * (BAD_STEP - 1): 5.0}, **extra)[0]
    assert outcome["step"] == 14 and outcome["skipped_steps"] == 1
    assert outcome["consumed_samples"] == 14 * BATCH


def test_going_back_does_not_lead_to_a_branch_that_was_left(folder: Path) -> None:
    """A run of 14 steps, gone back to step 4: its spike leads to its own step 8 and not to the other's step 14."""
    train(folder, "left", {})
    extra: dict[str, Any] = {"health__loss_spike_action": "rewind", "checkpoint__load_step": 4}
    outcome = train(folder, "left", {BATCH * (BAD_STEP - 1): 5.0}, **extra)[0]
    assert "went back to step 8 and skipped samples 32 to" in outcome["printed"]
    assert outcome["step"] == 14 and outcome["consumed_samples"] > 14 * BATCH
    assert [record["step"] for record in records(folder / "left")] == list(range(1, 15))


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
def test_weights_that_are_not_finite_are_not_saved(folder: Path, background: bool) -> None:
    name = f"ruined {background}"
    extra: dict[str, Any] = {"checkpoint__interval": 1, "checkpoint__keep_latest": 1, "checkpoint__async": background}
    outcomes = train(folder, name, {}, ruined_after=5, **extra)
    assert outcomes[0]["error"] == outcomes[1]["error"]
    assert "step-5 is not saved (weights or optimizer are not finite)" in outcomes[0]["error"]
    assert [path.name for path in (folder / name / "checkpoint").iterdir()] == ["step-4"]


def test_steps_without_an_update_make_no_checkpoint_give_way(folder: Path) -> None:
    """Weights may be ruined and finite: what was saved before the bad steps stays."""
    bad = {BATCH * step: math.nan for step in range(6, 200)}
    settings: dict[str, Any] = {"checkpoint__interval": 2, "checkpoint__keep_latest": 2}
    train(folder, "kept", bad, health__max_consecutive_skips=6, **settings)
    assert sorted(path.name for path in (folder / "kept" / "checkpoint").iterdir()) == ["step-4", "step-6"]
    train(folder, "kept", {}, **settings | {"training__steps": 7})  # the last step is saved in any case
    few_bad = {BATCH * step: math.nan for step in range(7, 9)}
    train(folder, "kept", few_bad, **settings | {"training__steps": 10})
    steps = [path.name for path in (folder / "kept" / "checkpoint").iterdir()]
    assert sorted(steps) == ["step-10", "step-7"]  # step 8 was bad, and the first good one after it is the last


def test_spikes_that_come_back_end_the_run(folder: Path) -> None:
    bad = {BATCH * step: 5.0 for step in range(BAD_STEP - 1, 200)}
    outcomes = train(folder, "again and again", bad, health__loss_spike_action="rewind")
    assert outcomes[0]["error"] == outcomes[1]["error"]
    assert outcomes[0]["error"].startswith("went back to step 8 3 times, but the loss spikes again (")
    assert outcomes[0]["error"].endswith("lower optimizer.lr")
    in_a_row: dict[str, Any] = {"checkpoint__interval": 1, "health__max_consecutive_skips": 3}
    outcomes = train(folder, "in a row", bad, health__loss_spike_action="rewind", **in_a_row)
    assert outcomes[0]["error"].startswith("3 steps in a row up to step 10 had no usable gradients")


def test_too_many_bad_steps_in_a_row_end_the_run_and_the_checkpoint_before_is_whole(folder: Path) -> None:
    bad = {BATCH * step: math.nan for step in range(5, 200)}
    outcomes = train(folder, "too many", bad, health__max_consecutive_skips=3, checkpoint__async=True)
    assert outcomes[0]["error"] == outcomes[1]["error"]
    assert outcomes[0]["error"].startswith("3 steps in a row up to step 8 had no usable gradients (last loss nan)")
    assert (folder / "too many" / "checkpoint" / "step-4" / "run.json").exists()
