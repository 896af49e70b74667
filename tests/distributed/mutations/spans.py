"""Bugs in span corruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import torch

from titan_like.data.span_corruption import SpanCorruption
from titan_like.train.trainer import Trainer


def _changed(change: Callable[[SpanCorruption, torch.Tensor], torch.Tensor]) -> AbstractContextManager[object]:
    """A context in which ``change`` is applied to every sample, int64 [2, seq]."""
    original = SpanCorruption.apply

    def apply(self: SpanCorruption, sample: torch.Tensor, seed: int, index: int) -> torch.Tensor:
        return change(self, original(self, sample, seed, index))

    return patch.object(SpanCorruption, "apply", apply)


@contextmanager
def decoder_sees_what_it_writes() -> Iterator[None]:
    """The decoder's input is not shifted, so that it holds the very token that each position has to write."""

    def change(objective: SpanCorruption, rows: torch.Tensor) -> torch.Tensor:
        begin = objective.encoder_len
        rows[0, begin:] = rows[0, begin:].roll(-1)
        return rows

    with _changed(change):
        yield


@contextmanager
def padding_carries_a_loss() -> Iterator[None]:
    """The decoder learns to write padding after the end."""

    def change(objective: SpanCorruption, rows: torch.Tensor) -> torch.Tensor:
        first = objective.encoder_len + objective.num_noise + len(objective.sentinel_ids) + 1
        rows[1, first:] = objective.pad_id
        return rows

    with _changed(change):
        yield


@contextmanager
def the_same_spans_in_every_sample_of_validation() -> Iterator[None]:
    """Validation draws the spans of its first sample for all."""
    original = Trainer.validate

    def validate(self: Trainer) -> float:
        apply = SpanCorruption.apply
        with patch.object(SpanCorruption, "apply", lambda self, sample, seed, index: apply(self, sample, seed, 0)):
            return original(self)

    with patch.object(Trainer, "validate", validate):
        yield
