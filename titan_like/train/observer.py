"""What may watch a trainer's steps from outside, without a subclass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from titan_like.data.batch import Batch
from titan_like.metrics.record import StepRecord
from titan_like.train.pending_step import PendingStep

if TYPE_CHECKING:
    from titan_like.train.trainer import Trainer


class Observer:
    """Hooks that every rank calls in the course of its steps. Here they do nothing; subclasses use what they need."""

    trainer: Trainer  # which this observes, from `attach` on

    def attach(self, trainer: Trainer) -> None:
        """The trainer is built, and has resumed if it does."""
        self.trainer = trainer

    def begin_step(self, step: int) -> None:
        """A training step begins."""

    def take_batch(self, batch: Batch) -> None:
        """A microbatch of training or validation has been read: on the host, with all of each sequence."""

    def complete_gradients(self) -> None:
        """The step's gradients are summed over ranks and not yet clipped. They may be changed in place."""

    def end_step(self, issued: PendingStep) -> None:
        """A step, the update included, has been issued."""

    def read_step(self, record: StepRecord) -> None:
        """The host has read a step's numbers. The loop ends after it if this sets `trainer.signals.agreed`."""

    def end_validation(self, losses: Mapping[str, float]) -> None:
        """A validation with this "loss" has ended. The loop ends after it if this sets `trainer.signals.agreed`."""
