"""Bugs in span corruption."""

from typing import Any
from unittest.mock import patch

from tests.distributed.mutations import bug
from titan_like.data.batch import Batch
from titan_like.data.objectives.span_corruption import SpanCorruption
from titan_like.train.validation import Validator


@bug(SpanCorruption, "apply")
def decoder_sees_what_it_writes(original: Any, self: SpanCorruption, *arguments: Any) -> Batch:
    """The decoder's input is not shifted, so that it holds the very token that each position has to write."""
    made, begin = original(self, *arguments), self.length.encoder
    made.tokens[begin:] = made.tokens[begin:].roll(-1)
    return made


@bug(SpanCorruption, "apply")
def padding_carries_a_loss(original: Any, self: SpanCorruption, *arguments: Any) -> Batch:
    """The decoder learns to write padding after the end."""
    made, first = original(self, *arguments), self.length.encoder + self.num_noise + len(self.sentinel_ids) + 1
    made.labels[first:] = self.pad_id
    return made


@bug(Validator, "validate")
def the_same_spans_in_every_sample_of_validation(original: Any, self: Validator, *split: str) -> float:
    """Validation draws the spans of its first sample for all."""
    apply = SpanCorruption.apply
    with patch.object(SpanCorruption, "apply", lambda self, sample, seed, index: apply(self, sample, seed, 0)):
        return original(self, *split)
