"""A trainer that records what goes into each step."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import torch

from titan_like.checkpoint.saver import Tensors
from titan_like.data.loader import BackgroundLoader
from titan_like.data.masks import MaskedSamples
from titan_like.metrics.record import StepRecord
from titan_like.train.issued_step import IssuedStep
from titan_like.train.setup import Run
from titan_like.train.trainer import Trainer

_COPY_SECONDS = 0.3  # that a save in the background waits before it copies


class WatchedTrainer(Trainer):
    """Keeps the samples of its latest step, and the gradients before clipping."""

    def __init__(self, run: Run, known_samples: int = 0) -> None:
        """The first ``known_samples`` of the run are recognized; every other sample has the index -1."""
        super().__init__(run)
        if run.config.checkpoint.async_:
            self._copy, self.saver._copy = self.saver._copy, self._copy_late  # type: ignore
        masked = MaskedSamples(run.datasets["train"], run.masks)
        self.known = {digest(masked[index]): index for index in range(known_samples)}
        self.drawn: list[list[int]] = []  # sample indices of each microbatch of this process
        self.gradients: list[tuple[str, torch.Tensor]] = []  # of this process, by parameter; DTensors if sharded

    def _copy_late(self, *arguments: Any) -> Tensors:
        """A small model's tensors would always be copied before their next update, whether or not that waits."""
        time.sleep(_COPY_SECONDS)
        return self._copy(*arguments)

    def _load_data(self) -> BackgroundLoader:
        return cast(BackgroundLoader, self._watched(super()._load_data()))

    def _watched(self, loader: BackgroundLoader) -> Iterator[torch.Tensor]:
        with closing(loader):
            for batch in loader:
                self.drawn.append([self.known.get(digest(sample), -1) for sample in batch])
                yield batch

    def train_step(self, data: Iterator[torch.Tensor]) -> IssuedStep:
        """Take one step and record its samples."""
        self.drawn = []
        return super().train_step(data)

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


def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's bytes: equal exactly for tensors that are equal bit for bit."""
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()
