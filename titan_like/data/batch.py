"""Operations on batches: collate samples, copy to a device, count labels and tokens.

They treat all fields of `Batch` alike, and context parallelism shards every field with a dimension of positions. So a
new field is a line in `Batch`, set by a dataset or an objective, and read by a model. Another package adds a field with
a NamedTuple that has the fields of `Batch` and more.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from titan_like.config.errors import RunError
from titan_like.models.batch import Batch
from titan_like.models.layers.cross_entropy import IGNORED_LABEL

_LABELS_OF = {"tokens": "labels", "mtp": "next_labels", "pair": "sample_labels", "choice": "sample_labels"}
"""The field with the labels of each head."""
_ARRAYS = torch.Tensor, np.ndarray

B = TypeVar("B", bound=Batch)


def map_tensors(function: Callable[[Any], Any], fields: Any) -> Any:
    """Apply ``function`` to each tensor or NumPy array of a batch or a field."""
    if isinstance(fields, _ARRAYS):
        return function(fields)
    if isinstance(fields, tuple):
        kind: Any = type(fields)
        return kind(*[x if x is None else map_tensors(function, x) for x in fields])
    return fields


def collate(samples: Sequence[B]) -> B:
    """Stack samples. Raises a `RunError` if they have different fields, or values that differ and are no tensors."""

    def stack(*values: Any) -> Any:
        first = values[0]
        if len(set(map(type, values))) > 1:
            raise RunError("samples of a batch have different fields; set a field of Batch in every sample or in none")
        if isinstance(first, torch.Tensor):
            return torch.stack(values)
        if isinstance(first, tuple):
            return type(first)(*map(stack, *values))
        if len(set(map(repr, values))) > 1:
            raise RunError(f"a field of Batch differs between samples ({first!r} is not in all); make it a tensor")
        return first

    return stack(*samples)


def to_device(batch: B, device: torch.device) -> B:
    """Copy a batch to a device; asynchronously from pinned memory to a GPU."""
    return map_tensors(lambda x: x.to(device, non_blocking=True), batch)


def arrays_of(sample: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of a sample, int64 [seq] each."""
    assert sample.labels is not None
    return sample.tokens.numpy(), sample.labels.numpy()


def without_labels(sample: B) -> B:
    """The same sample without loss."""
    ignored = partial(map_tensors, lambda x: torch.full_like(x, IGNORED_LABEL))
    return sample._replace(**{name: ignored(getattr(sample, name)) for name in set(_LABELS_OF.values())})


def num_labels(batch: Batch, heads: Sequence[str]) -> torch.Tensor:
    """Number of labels in a batch for each of a model's heads: int64 [heads]."""
    labels_of_heads = [getattr(batch, _LABELS_OF[head]) for head in heads]
    return torch.stack([(labels != IGNORED_LABEL).sum() for labels in labels_of_heads if labels is not None])


def count_tokens(batch: Batch) -> torch.Tensor | int:
    """Number of tokens that are not padding: an int64 scalar on the device where padding is to be counted."""
    if batch.padding_mask is None:
        return batch.tokens.numel()
    return (~batch.padding_mask).sum()
