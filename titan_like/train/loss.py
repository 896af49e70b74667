"""The training loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED_LABEL = -100  # positions that carry no loss


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of token losses in nats, at least float32. logits [batch, seq, vocab], labels [batch, seq].

    A sum, not a mean: the caller divides once by the number of valid tokens in the global batch, so that every
    layout and accumulation count computes the same quantity.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
