"""Saves in the background hold exactly the step that they are of; a save that fails leaves everything else whole."""

import contextlib
import io
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from tests.distributed import crash_worker
from tests.distributed.crash_worker import build, digest
from tests.distributed.launch import base_config, collect
from titan_like.checkpoint.saver import Saver
from titan_like.checkpoint.step_folders import RunState, complete_steps
from titan_like.config.errors import RunError
from titan_like.config.monitoring import Checkpoint
from titan_like.train.trainer import Trainer
from titan_like.train.training_state import TrainingState

STEPS = {"training.steps": 5}
BACKGROUND = STEPS | {"checkpoint.async": True}
Tensors = dict[str, torch.Tensor]


def slow(seconds_to_copy: float, seconds_to_write: float, events: list[str]) -> contextlib.ExitStack:
    """Saves take that much longer; ``events`` notes when they have copied and written."""
    copy, write = Saver._copy, Saver._write

    def late_copy(saver: Saver, *args: Any) -> Tensors:
        time.sleep(seconds_to_copy)
        copies = copy(saver, *args)
        events.append("copied")
        return copies

    def late_write(saver: Saver, tensors: Tensors, run: RunState) -> str | None:
        time.sleep(seconds_to_write)
        problem = write(saver, tensors, run)
        events.append(f"written {run.step}")
        return problem

    stack = contextlib.ExitStack()
    stack.enter_context(patch.object(Saver, "_copy", late_copy))
    stack.enter_context(patch.object(Saver, "_write", late_write))
    return stack


def train_slowly(
    rank: int, folder: Path, dump: Path, settings: dict[str, Any], copy: float, write: float
) -> tuple[list[str], dict[str, str]]:
    """Train while saves take long: in which order things happen, and the digest of every checkpoint."""
    events: list[str] = []

    class Noting(Trainer):
        def _update(self, grad_norm: torch.Tensor, lr: float, skip: torch.Tensor) -> None:
            events.append(f"update {self.state.step + 1}")
            super()._update(grad_norm, lr, skip)

    class NotingState(TrainingState):
        def save(self, is_last: bool = False) -> None:
            super().save(is_last)
            events.append(f"save {self.step} returns")

    with slow(copy, write, events):
        trainer = build(folder, dump, settings, Noting, NotingState)
        trainer.train()
    digests = {}
    for step in range(1, settings["training.steps"] + 1):
        digests[str(step)] = digest(build(folder, dump, settings | {"checkpoint.load_step": step}))
    return events, digests


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """This process cannot write larger files."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error then, as of a full disk, and not the process's death
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def train_where_a_save_fails(
    rank: int, folder: Path, dump: Path, settings: dict[str, Any], step: int
) -> dict[str, Any]:
    """Train where the last rank cannot write its part of one step's checkpoint."""

    class Failing(TrainingState):
        def save(self, is_last: bool = False) -> None:
            fails = self.step == step and rank == dist.get_world_size() - 1
            self.finish_save()  # the one before is to be whole
            with files_of_at_most(20_000) if fails else contextlib.nullcontext():
                super().save(is_last)
                if fails and self.saver._save is not None:
                    assert self.saver._save.thread is not None
                    self.saver._save.thread.join()

    outcome: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trainer = build(folder, dump, settings, state=Failing)
        try:
            trainer.train()
        except RunError as error:
            outcome["error"] = str(error)
    return outcome | {"step": trainer.state.step, "printed": printed.getvalue()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saves")
    base_config(root, {})  # writes the text
    return root


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, str]:
    """Digest of every step of a run that saves nothing, on two ranks."""
    return collect(crash_worker.reference, 2, folder, folder / "straight", STEPS)[0]


@pytest.mark.parametrize(("copy", "write"), [(0.3, 0.0), (0.0, 0.5)], ids=["slow to copy", "slow to write"])
def test_a_checkpoint_written_in_the_background_is_that_of_its_step(
    folder: Path, wanted: dict[str, str], copy: float, write: float
) -> None:
    dump = folder / f"background {copy} {write}"
    events, digests = collect(train_slowly, 2, folder, dump, BACKGROUND, copy, write)[0]
    assert digests == wanted
    of_each = ["save {0} returns", "copied", "update {1}", "written {0}"]  # written at last, while training goes on
    if copy:
        assert [event for event in events if "written" not in event][:7] == [
            "update 1", *(event.format(step, step + 1) for step in (1, 2) for event in of_each[:3])
        ]  # fmt: skip
    else:
        before = {step: events[: events.index(f"written {step}")] for step in (1, 2, 3)}
        for step in (1, 2, 3):
            assert f"update {step + 1}" in before[step] and f"save {step + 1} returns" not in before[step]


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_save_that_fails(folder: Path, wanted: dict[str, str], background: bool, on_failure: str) -> None:
    dump = folder / f"fails {background} {on_failure}"
    settings: dict[str, Any] = STEPS | {"checkpoint.async": background, "checkpoint.on_failure": on_failure}
    outcomes = collect(train_where_a_save_fails, 2, folder, dump, settings, 3)
    problem = f"{dump}/checkpoint/step-3 is not saved (rank 1: "
    saved = complete_steps(dump / "checkpoint")
    assert not [path.name for path in (dump / "checkpoint").iterdir() if not path.name.startswith("step-")]
    assert not list((dump / "checkpoint").glob("*.unfinished"))
    if on_failure == "continue":
        assert [outcome["step"] for outcome in outcomes] == [5, 5]
        assert saved == [1, 2, 4, 5]
        (line,) = [line for line in outcomes[0]["printed"].splitlines() if "is not saved" in line]
        assert line.strip().startswith(problem) and line.endswith("earlier checkpoints are intact; training goes on")
    else:
        errors = [outcome["error"] for outcome in outcomes]
        assert errors[0] == errors[1] and errors[0].startswith(problem)
        assert errors[0].endswith("earlier checkpoints are intact") and "\n" not in errors[0]
        assert saved == [1, 2]
        assert outcomes[0]["step"] == outcomes[1]["step"] <= 4
    # What is there is whole.
    (outcome,) = collect(crash_worker.resume_each, 2, folder, [dump], STEPS)[0]
    assert outcome["step"] == saved[-1] and outcome["digest"] == wanted[str(saved[-1])]
    assert outcome["final"] == wanted["5"]


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_the_last_save_that_fails_ends_the_run_with_an_error(folder: Path, on_failure: str) -> None:
    dump = folder / f"last fails {on_failure}"
    settings: dict[str, Any] = STEPS | {"checkpoint.async": True, "checkpoint.on_failure": on_failure}
    (outcome,) = collect(train_where_a_save_fails, 1, folder, dump, settings, 5)
    assert outcome["error"].startswith(f"{dump}/checkpoint/step-5 is not saved (rank 0: ")
    assert complete_steps(dump / "checkpoint") == [1, 2, 3, 4]


def save_what_one_rank_has_more_of(rank: int, folder: Path) -> list[list[str]]:
    """Save everything, weights alone and everything, where rank 1 has weights alone; the names in each checkpoint."""
    saver = Saver(folder / "checkpoint", Checkpoint(enable=True, keep_latest=0), folder / "export", lambda *_: None)
    names = []
    for step in range(1, 4):
        tensors = {f"weight {rank}": torch.full((4,), float(step))}
        if rank == 0 and step != 2:
            tensors["moment"] = torch.full((4,), float(step))
        saver.save(tensors, RunState(step, 0, 0, 0, 1.0, 0, {}, {}))
        (saved,) = saver.finish()
        names.append(sorted(FileSystemReader(saved).read_metadata().state_dict_metadata))
    return names


def test_a_plan_is_made_again_where_only_some_ranks_tensors_change(tmp_path: Path) -> None:
    everything, weights = ["moment", "weight 0", "weight 1"], ["weight 0", "weight 1"]
    assert collect(save_what_one_rank_has_more_of, 2, tmp_path) == [[everything, weights, everything]] * 2
