"""What the processes of the tests of saves do while training goes on."""

from __future__ import annotations

import contextlib
import io
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.distributed.crash_worker import build, digest
from titan_like.checkpoint.saver import Saver
from titan_like.checkpoint.step_folders import RunState
from titan_like.config.errors import RunError
from titan_like.train.trainer import Trainer

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
            events.append(f"update {self.step + 1}")
            super()._update(grad_norm, lr, skip)

        def save(self, is_last: bool = False) -> None:
            super().save(is_last)
            events.append(f"save {self.step} returns")

    with slow(copy, write, events):
        trainer = build(folder, dump, settings, Noting)
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

    class Failing(Trainer):
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
        trainer = build(folder, dump, settings, Failing)
        try:
            trainer.train()
        except RunError as error:
            outcome["error"] = str(error)
    return outcome | {"step": trainer.step, "printed": printed.getvalue()}
