"""Bugs in span corruption."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from tests.distributed.mutations import bug
from titan_like.data.span_corruption import SpanCorruption
from titan_like.train.trainer import Trainer


@bug(SpanCorruption, "apply")
def decoder_sees_what_it_writes(original: Any, self: SpanCorruption, *arguments: Any) -> torch.Tensor:
    """The decoder's input is not shifted, so that it holds the very token that each position has to write."""
    rows, begin = original(self, *arguments), self.encoder_len
    rows[0, begin:] = rows[0, begin:].roll(-1)
    return rows


@bug(SpanCorruption, "apply")
def padding_carries_a_loss(original: Any, self: SpanCorruption, *arguments: Any) -> torch.Tensor:
    """The decoder learns to write padding after the end."""
    rows, first = original(self, *arguments), self.encoder_len + self.num_noise + len(self.sentinel_ids) + 1
    rows[1, first:] = self.pad_id
    return rows


@bug(Trainer, "validate")
def the_same_spans_in_every_sample_of_validation(original: Any, self: Trainer) -> float:
    """Validation draws the spans of its first sample for all."""
    apply = SpanCorruption.apply
    with patch.object(SpanCorruption, "apply", lambda self, sample, seed, index: apply(self, sample, seed, 0)):
        return original(self)
