"""The training loss: cross entropy, in a form that saves memory on CPUs and one for logits split over processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from titan_like.data.source import IGNORED_LABEL
from titan_like.models.config import NUM_OPTIONS
from titan_like.parallel.collectives import Group, all_gather


def num_labels(labels: torch.Tensor, predictions: Sequence[str]) -> torch.Tensor:
    """How many labels of a microbatch, [batch, seq], each of the model's predictions has: int64 [predictions]."""
    return torch.stack([(own != IGNORED_LABEL).sum() for own in _labels_of_each(labels, predictions)])


def summed_losses(
    output: torch.Tensor | tuple[torch.Tensor, ...], labels: torch.Tensor, predictions: Sequence[str]
) -> torch.Tensor:
    """The summed loss in nats of each of the model's predictions: [predictions], at least float32.

    Sums, not means: the caller divides each once by its number of labels in the global batch, so that every layout and
    accumulation count computes the same quantity.

    Args:
        output: what the model returns, see `Bert.predict`; logits [batch, seq, vocab] in most families.
        labels: [batch, seq].
        predictions: `TransformerConfig.predictions`.
    """
    parts = (output,) if isinstance(output, torch.Tensor) else output
    losses = []
    for name, part, own in zip(predictions, parts, _labels_of_each(labels, predictions), strict=True):
        if name == "tokens":
            losses.append(summed_cross_entropy(part, own))
        else:  # [batch, classes], or [questions, options]
            scores = part[:, 0] if name == "pair" else part.reshape(-1, NUM_OPTIONS)
            scores = scores.to(_accumulator(scores))
            losses.append(F.cross_entropy(scores, own.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"))
    return torch.stack(losses)


def _labels_of_each(labels: torch.Tensor, predictions: Sequence[str]) -> list[torch.Tensor]:
    """The labels [batch, seq] as those of each prediction.

    A pair's label is at the first position of its sample, and a choice's at the first position of its first option.
    """
    if "choice" in predictions:
        return [labels[::NUM_OPTIONS, 0]]
    if "pair" not in predictions:
        return [labels]
    of_tokens = labels.clone()
    of_tokens[:, 0] = IGNORED_LABEL
    return [of_tokens, labels[:, 0]]


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of token losses in nats: logits [batch, seq, vocab], labels [batch, seq] → scalar, at least float32.

    Logits may be a DTensor split over the vocabulary. Each rank then returns the same loss as a plain tensor, and its
    backward pass gives the gradient of its own logits.
    """
    if not isinstance(logits, DTensor):
        if logits.device.type == "cpu":
            return _CrossEntropy.apply(logits.flatten(0, 1), labels.flatten())
        logits = logits.to(_accumulator(logits))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    group = Group.of(logits.device_mesh)
    first = group.vocabulary(logits.shape[2]).start
    return _SplitCrossEntropy.apply(logits.to_local().flatten(0, 1), labels.flatten(), first, group)


def _accumulator(logits: torch.Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


BLOCK_BYTES = 4 << 20  # of logits per block, about as much as a core's caches hold


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy on a CPU in blocks of rows. The gradient overwrites the logits, so no second buffer is needed.

    `F.cross_entropy` allocates four buffers as large as the logits. With a large vocabulary they are most of a step's
    memory, and the operating system maps memory of that size page by page, which takes a tenth of a small model's step.
    The backward pass destroys the logits: afterwards autograd refuses to go through anything else that needs them.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """logits [positions, vocab], labels [positions] → scalar."""
        ctx.save_for_backward(logits, labels)
        blocks = zip(logits.split(_rows(logits)), labels.split(_rows(logits)), strict=True)
        losses = [
            F.cross_entropy(block.to(_accumulator(logits)), label, ignore_index=IGNORED_LABEL, reduction="none")
            for block, label in blocks
        ]
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient of a logit, [positions, vocab]: its probability, minus one at the label."""
        logits, labels = ctx.saved_tensors
        valid = labels != IGNORED_LABEL
        columns = labels.masked_fill(~valid, 0)[:, None]
        scales = (gradient * valid)[:, None]
        for block, column, scale in zip(
            *(part.split(_rows(logits)) for part in (logits, columns, scales)), strict=True
        ):
            probability = block.softmax(1, dtype=scale.dtype)
            probability.scatter_add_(1, column, torch.full_like(scale, -1))
            torch.mul(probability, scale, out=block)
        return logits, None


def _rows(logits: torch.Tensor) -> int:
    return max(1, BLOCK_BYTES // (logits.shape[1] * _accumulator(logits).itemsize))


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits split over a group by the vocabulary, as in Megatron-LM (arXiv 1909.08053, section 3).

    The forward pass needs one small all-gather; the backward pass communicates nothing.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, group: Group) -> torch.Tensor:
        """logits [positions, tokens of this rank], from token ``first`` on; labels [positions] → scalar."""
        valid = labels != IGNORED_LABEL
        columns = labels - first
        here = (columns >= 0) & (columns < logits.shape[1])
        columns = columns.masked_fill(~here, 0)[:, None]
        values = logits.to(_accumulator(logits))
        target = values.gather(1, columns)[:, 0].masked_fill(~here, 0)
        # From every rank: the logarithm of its part of the softmax's denominator, and the label's logit or else 0.
        parts = all_gather(torch.stack((values.logsumexp(1), target))[None], 0, group)  # [ranks, 2, positions]
        denominator, target = parts[:, 0].logsumexp(0), parts[:, 1].sum(0)
        ctx.save_for_backward(logits, columns, here, valid, denominator)
        return (denominator - target).masked_fill(~valid, 0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """The gradient of this rank's logits, [positions, tokens of this rank]: probabilities, minus one at labels."""
        logits, columns, here, valid, denominator = ctx.saved_tensors
        probability = (logits.to(denominator.dtype) - denominator[:, None]).exp_()
        probability.scatter_add_(1, columns, -here.to(probability.dtype)[:, None])
        return probability.mul_((gradient * valid)[:, None]).to(logits.dtype), None, None, None
