"""A trainer that records what goes into each step."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import torch

from titan_like.checkpoint.saver import Tensors
from titan_like.data.batch import Batch
from titan_like.data.loader import BackgroundLoader
from titan_like.data.masks import Masks
from titan_like.metrics.record import StepRecord
from titan_like.train.issued_step import IssuedStep
from titan_like.train.setup import Run
from titan_like.train.trainer import Trainer
from titan_like.verify.samples import part_of

_COPY_SECONDS = 0.3  # that a save in the background waits for an update that waits for it


class WatchedTrainer(Trainer):
    """Keeps the samples of its latest step, and the gradients before clipping."""

    def __init__(self, run: Run, known: Mapping[str, int] = {}) -> None:
        """``known``: indices of samples by their digests; every other sample has the index -1."""
        super().__init__(run)
        self._may_copy, self._steps_since_save = threading.Event(), 0
        if run.config.checkpoint.async_:
            self._delay_copies()
        self.known = known
        self.drawn: list[list[int]] = []  # sample indices of each microbatch of this process
        self.gradients: list[tuple[str, torch.Tensor]] = []  # of this process, by parameter; DTensors if sharded

    def _delay_copies(self) -> None:
        """Let saves in the background copy late: when the next update has waited for them for a while, or has happened.

        A small model's tensors would otherwise be copied before their next update, whether or not that waits for it.
        """
        saver, may_copy = self.saver, self._may_copy
        save, before_update, finish, copy = saver.save, saver.before_update, saver.finish, saver._copy

        def save_late(*arguments: Any) -> None:
            may_copy.clear()
            self._steps_since_save = 0
            save(*arguments)

        def wait_for_copies() -> None:
            timer = threading.Timer(_COPY_SECONDS, may_copy.set)
            timer.start()
            before_update()
            timer.cancel()

        def finish_at_once() -> Path | None:
            may_copy.set()
            return finish()

        def copy_late(*arguments: Any) -> Tensors:
            may_copy.wait()
            return copy(*arguments)

        vars(saver).update(save=save_late, before_update=wait_for_copies, finish=finish_at_once, _copy=copy_late)

    def _load_data(self) -> BackgroundLoader:
        return cast(BackgroundLoader, self._watched(super()._load_data()))

    def _watched(self, loader: BackgroundLoader) -> Iterator[Batch]:
        with closing(loader):
            for batch in loader:
                self.drawn.append([self.known.get(digest(sample), -1) for sample in samples_of(batch)])
                yield batch

    def train_step(self, data: Iterator[Batch]) -> IssuedStep:
        """Take one step and record its samples."""
        self.drawn = []
        issued = super().train_step(data)
        self._steps_since_save += 1
        if self._steps_since_save == 2:  # one of them may have been skipped
            self._may_copy.set()
        return issued

    def _complete_gradients(self) -> None:
        super()._complete_gradients()
        named = [(name, parameter.grad) for name, parameter in self.model.named_parameters()]
        self.gradients = [(name, grad.detach().clone()) for name, grad in named if grad is not None]

    def steps_alone(self, steps: int) -> list[StepRecord]:
        """Take some steps without logging, validating or saving."""
        data = self._load_data()
        records = [self.read_step(self.train_step(data)) for _ in range(steps)]
        data.close()
        return records


def first_samples(samples: Masks, count: int) -> dict[str, int]:
    """Indices of a run's first samples by their digests."""
    return {digest(samples[index]): index for index in range(count)}


def samples_of(batch: Batch) -> list[Batch]:
    """The samples that a loader has collated."""
    return [part_of(batch, number) for number in range(len(batch.tokens))]


def digest(value: Any) -> str:
    """A hash of a tensor's bytes, or of a sample's fields: equal exactly for those that are equal bit for bit."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    else:
        data = repr(tuple(map(digest, value)) if isinstance(value, tuple) else value).encode()
    return hashlib.blake2b(data, digest_size=16).hexdigest()
