"""The labels of a microbatch, as those of each of a model's predictions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titan_like.models.config import NUM_OPTIONS

IGNORED_LABEL = -100  # positions that carry no loss


def labels_of_each(labels: torch.Tensor, predictions: Sequence[str]) -> list[torch.Tensor]:
    """Labels [batch, seq] → for tokens [batch, seq], for pairs [batch], for choices [questions].

    A pair's label is at the first position of its sample, and a choice's at the first position of its first option.
    """
    if "choice" in predictions:
        return [labels[::NUM_OPTIONS, 0]]
    if "pair" not in predictions:
        return [labels]
    of_tokens = labels.clone()
    of_tokens[:, 0] = IGNORED_LABEL
    return [of_tokens, labels[:, 0]]


def num_labels(labels: torch.Tensor, predictions: Sequence[str]) -> torch.Tensor:
    """How many labels of a microbatch, [batch, seq], each of the model's predictions has: int64 [predictions]."""
    return torch.stack([(own != IGNORED_LABEL).sum() for own in labels_of_each(labels, predictions)])
