"""How well a model predicts given tokens, from logits that may be split over processes by the vocabulary."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from titan_like.data.source import IGNORED_LABEL
from titan_like.parallel.collectives import Group, all_gather


def token_scores(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Score the labels: logits [batch, seq, vocab], labels [batch, seq] → two tensors [batch, seq].

    Logits may be a DTensor split over the vocabulary. One small all-gather then gives every rank the same result.

    Returns:
        The log-probability of each label in nats, at least float32, and whether the label is the most probable token
        (the lowest of equally probable ones). Without a label: 0 and False.
    """
    parts = logits.to_local() if isinstance(logits, DTensor) else logits
    group = Group.of(logits.device_mesh) if isinstance(logits, DTensor) else None
    first = 0 if group is None else group.vocabulary(logits.shape[2]).start
    # One sequence at a time, because the logits of a batch in float32 can take gigabytes.
    local = torch.stack([_parts(part, label, first) for part, label in zip(parts, labels, strict=True)], 1)
    found = local[None] if group is None else all_gather(local[None], 0, group)  # [ranks, 4, batch, seq]
    denominator, target = found[:, 0].logsumexp(0), found[:, 1].sum(0)
    best = found[:, 2].argmax(0, keepdim=True)  # rank, and below the token on it; argmax takes the first of equals
    most_probable = found[:, 3].gather(0, best)[0]
    valid = labels != IGNORED_LABEL
    return (target - denominator).masked_fill(~valid, 0), (most_probable == labels) & valid


def _parts(logits: torch.Tensor, labels: torch.Tensor, first: int) -> torch.Tensor:
    """What one rank knows: logits [seq, tokens of this rank], from token ``first`` on, labels [seq] → [4, seq].

    The rows are the logarithm of its part of the softmax's denominator, the label's logit or else 0, its largest logit,
    and the token of that, which float32 holds exactly up to 2²⁴.
    """
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    columns = labels - first
    here = (columns >= 0) & (columns < values.shape[1])
    target = values.gather(1, columns.masked_fill(~here, 0)[:, None])[:, 0].masked_fill(~here, 0)
    token = values.argmax(1)
    largest = values.gather(1, token[:, None])[:, 0]
    return torch.stack((values.logsumexp(1), target, largest, (token + first).to(values.dtype)))
