"""A trainer that records what goes into each step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from typing import cast

import torch

from titan_like.data.loader import BackgroundLoader
from titan_like.data.masks import MaskedSamples
from titan_like.metrics.record import StepRecord
from titan_like.train.issued_step import IssuedStep
from titan_like.train.setup import Run
from titan_like.train.trainer import Trainer


class WatchedTrainer(Trainer):
    """Keeps the samples of its latest step, and the gradients before clipping."""

    def __init__(self, run: Run, known_samples: int = 0) -> None:
        """The first ``known_samples`` of the run are recognized; every other sample has the index -1."""
        super().__init__(run)
        masked = MaskedSamples(run.datasets["train"], run.masks)
        self.known = {digest(masked[index]): index for index in range(known_samples)}
        self.drawn: list[list[int]] = []  # sample indices of each microbatch of this process
        self.gradients: list[tuple[str, torch.Tensor]] = []  # of this process, by parameter; DTensors if sharded

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
