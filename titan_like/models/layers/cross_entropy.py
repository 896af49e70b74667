"""The loss of predicted tokens, together with the output matrix, in chunks of positions.

The logits of all positions never exist at once, and a chunk's only in the type of computation. The forward pass
computes a chunk's logits, their loss and its gradient, which overwrites the logits and is multiplied at once with the
output matrix and with its input. The backward pass only scales the two results. A float32 copy of all logits and the
gradients of cross entropy would take most of the memory of a small model with a large vocabulary, and a third of its
time on a GPU.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.layers.interval_attention import accumulator

IGNORED_LABEL = -100  # positions that carry no loss

# Logits of a chunk. The gradient of the output matrix is read and written once a chunk, so GPUs, whose memory is slow
# in comparison, take few chunks.
CHUNK_LOGITS = {"cpu": 1 << 25, "cuda": 1 << 29}
PRODUCT = 1 << 25  # elements of a product in a half type that waits to be added up
BLOCK_BYTES = 4 << 20  # of logits that a CPU works on at once, about as much as a core's caches hold


class Vocabulary(NamedTuple):
    """The tokens whose logits a process computes, and what it needs of processes that have the others."""

    size: int  # tokens here; further columns of the logits are padding, which never gets probability
    whole: int  # tokens of all processes; another label makes the loss and its gradients NaN
    columns: int  # of logits, on the process that has the most
    first: int = 0  # number of the first token here
    # [2, positions] of this process → of all: log of the softmax's denominator, and the label's logit
    combine: Callable[[torch.Tensor], torch.Tensor] | None = None
    chunk: int | None = None  # logits of a chunk; None: `CHUNK_LOGITS`
    softcap: float = 0.0  # logits become softcap · tanh(logit / softcap); 0: they stay


def num_chunks(positions: int, columns: int, device: str, chunk: int | None = None) -> int:
    """In how many chunks the loss of ``positions`` with this many ``columns`` of logits is computed on a device type.

    It is the same on all processes that share the vocabulary, because ``columns`` is the largest number of any of them.
    """
    return min(positions, max(1, -(-positions * columns // (chunk or CHUNK_LOGITS[device]))))


class TokenLoss(nn.Module):
    """Cross entropy of the logits that an output matrix makes of hidden states. It has no parameters of its own."""

    chunk: int | None = None  # logits of a chunk; None: as many as suit the device

    def __init__(self, vocab_size: int, padded_vocab_size: int, softcap: float = 0.0) -> None:
        super().__init__()
        self.vocab_size, self.padded_vocab_size, self.softcap = vocab_size, padded_vocab_size, softcap

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        factor: torch.Tensor,
    ) -> torch.Tensor:
        """``factor`` times the summed loss in nats: a scalar, at least float32.

        x [batch, seq, hidden], weight [padded vocab, hidden], bias [padded vocab], labels [batch, seq], factor scalar.
        """
        sizes = self.vocab_size, self.vocab_size, self.padded_vocab_size
        vocabulary = Vocabulary(*sizes, chunk=self.chunk, softcap=self.softcap)
        return scaled_loss(x, weight, bias, labels, factor, vocabulary)


def scaled_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    factor: torch.Tensor,
    vocabulary: Vocabulary,
) -> torch.Tensor:
    """`TokenLoss` of this process's rows of the output matrix; shapes as there, with the columns of this process.

    Where several processes share the vocabulary, each gets the same loss, and gradients of x that sum to the whole.
    """
    x, labels = x.flatten(0, 1), labels.flatten()
    return _ChunkedLoss.apply(x, weight, bias, (labels, factor), vocabulary, torch.is_grad_enabled())


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,  # [positions, hidden]
        weight: torch.Tensor,  # [columns, hidden]
        bias: torch.Tensor | None,  # [columns]
        targets: tuple[torch.Tensor, torch.Tensor],  # labels [positions], and the factor of their loss
        vocabulary: Vocabulary,
        with_gradient: bool,
    ) -> torch.Tensor:
        labels, factor = targets
        count = num_chunks(len(x), vocabulary.columns, x.device.type, vocabulary.chunk)
        several, total = count > 1, torch.zeros((), dtype=accumulator(x), device=x.device)
        x_gradient = torch.empty_like(x) if with_gradient else x
        weight_gradient = bias_gradient = None
        parts, label_parts, gradients = (tensor.tensor_split(count) for tensor in (x, labels, x_gradient))
        for part, label, part_gradient in zip(parts, label_parts, gradients, strict=True):
            logits = F.linear(part, weight)
            if bias is not None:
                logits += bias
            # Not in place: compiled by torch 2.11, the sum would be an output twice, and the gradient of one be lost.
            total = total + _loss(logits, label, factor, vocabulary, with_gradient)
            if with_gradient:
                torch.mm(logits, weight, out=part_gradient)  # the logits are their own gradient now
                if ctx.needs_input_grad[1]:
                    weight_gradient = _add_product(weight_gradient, logits, part, several)
                if bias is not None:
                    summed = logits.sum(0, dtype=total.dtype)
                    bias_gradient = summed if bias_gradient is None else bias_gradient + summed
            del logits  # before the next chunk's
        ctx.save_for_backward(x_gradient, weight_gradient, bias_gradient)
        ctx.dtype = x.dtype
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = []
        for saved in ctx.saved_tensors:  # in place where possible; autograd refuses a second backward pass then
            if saved is None or saved.dtype == ctx.dtype:
                gradients.append(saved if saved is None else saved.mul_(gradient))
            else:
                gradients.append(torch.mul(saved, gradient, out=torch.empty_like(saved, dtype=ctx.dtype)))
        return *gradients, None, None, None


def _add_product(total: torch.Tensor | None, gradient: torch.Tensor, x: torch.Tensor, several: bool) -> torch.Tensor:
    """Add gradientᵀ · x, [columns, hidden], to ``total``. Products of ``several`` chunks add up in float32."""
    if total is None and (not several or x.dtype == accumulator(x)):
        return gradient.t() @ x
    if total is None:
        total = x.new_zeros(gradient.shape[1], x.shape[1], dtype=accumulator(x))
    if total.dtype == x.dtype:
        return total.addmm_(gradient.t(), x)
    # At once, so that the GEMM's result takes little memory; multiples of 128, so that GPUs have fast kernels for it.
    columns = max(128, PRODUCT // x.shape[1] // 128 * 128)
    for part, block in zip(total.split(columns), gradient.split(columns, 1), strict=True):
        part += block.t() @ x
    return total


def _loss(
    logits: torch.Tensor, labels: torch.Tensor, factor: torch.Tensor, vocabulary: Vocabulary, with_gradient: bool
) -> torch.Tensor:
    """``factor`` times the summed loss of logits [positions, columns], which become their gradient if asked for."""
    size, cap = vocabulary.size, vocabulary.softcap
    is_valid, columns = labels != IGNORED_LABEL, labels - vocabulary.first
    columns = columns.masked_fill((columns < 0) | (columns >= size), -1)  # the label's column, or -1
    sums = statistics(logits, columns, size, cap)
    denominator, target = sums if vocabulary.combine is None else vocabulary.combine(sums)
    is_wrong = is_valid & ((labels < 0) | (labels >= vocabulary.whole))
    if with_gradient:
        scale = (factor * is_valid).masked_fill(is_wrong, torch.nan)  # [positions]
        write_gradient(logits, columns, denominator, scale, size, cap)
    return (denominator - target).masked_fill(~is_valid, 0).masked_fill(is_wrong, torch.nan).sum() * factor


# Operators, because a GPU runs each as one compiled kernel, and a CPU in blocks that its caches hold. They are defined
# by schema: what `custom_op` wraps around them would cost the host as much as the operators themselves.
torch.library.define("titan_like::loss_statistics", "(Tensor logits, Tensor columns, int size, float cap) -> Tensor")
torch.library.define(
    "titan_like::loss_gradient",
    "(Tensor(a!) logits, Tensor columns, Tensor denominator, Tensor scale, int size, float cap) -> ()",
)
statistics = torch.ops.titan_like.loss_statistics.default
write_gradient = torch.ops.titan_like.loss_gradient.default


@torch.library.impl("titan_like::loss_statistics", "cpu")
def _statistics_in_blocks(logits: torch.Tensor, columns: torch.Tensor, size: int, cap: float) -> torch.Tensor:
    """Logarithm of this process's part of the softmax's denominator, and the label's logit or else 0.

    logits [positions, columns], columns [positions] → [2, positions].
    """
    return torch.cat([_statistics(block, column, size, cap) for block, column in _blocks(logits, columns)], 1)


@torch.library.impl("titan_like::loss_gradient", "cpu")
def _write_gradient_in_blocks(
    logits: torch.Tensor, columns: torch.Tensor, denominator: torch.Tensor, scale: torch.Tensor, size: int, cap: float
) -> None:
    """Overwrite logits [positions, columns] by their gradient: the probability, minus one at the label, scaled.

    columns, denominator and scale are [positions]; padding, from column ``size`` on, gets zero. The gradient is
    with respect to the logits before the soft cap.
    """
    for block, column, total, factors in _blocks(logits, columns, denominator, scale):
        _write_gradient(block, column, total, factors, size, cap)


def _blocks(logits: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Some rows at a time of all tensors [positions, …]."""
    rows = max(1, BLOCK_BYTES // (logits.shape[1] * accumulator(logits).itemsize))
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)


def _statistics(logits: torch.Tensor, columns: torch.Tensor, size: int, cap: float) -> torch.Tensor:
    values = soft_capped(logits.to(accumulator(logits)), cap)
    target = values.gather(1, columns.clamp(min=0)[:, None])[:, 0].masked_fill(columns < 0, 0)
    return torch.stack((values[:, :size].logsumexp(1), target))


def _write_gradient(
    logits: torch.Tensor, columns: torch.Tensor, denominator: torch.Tensor, scale: torch.Tensor, size: int, cap: float
) -> None:
    values = soft_capped(logits[:, :size].to(denominator.dtype), cap) if cap else logits[:, :size]
    probability = (values - denominator[:, None]).exp_()  # in the type of the denominator
    if size:
        is_local = (columns >= 0).to(scale.dtype)
        probability.scatter_add_(1, columns.clamp(min=0)[:, None], -is_local[:, None])
    if cap:
        probability *= _slope(values, cap)
    torch.mul(probability, scale[:, None], out=logits[:, :size])
    logits[:, size:] = 0


def _write_fused_gradient(
    logits: torch.Tensor, columns: torch.Tensor, denominator: torch.Tensor, scale: torch.Tensor, size: int, cap: float
) -> None:
    """`loss_gradient` in the form of which a compiler makes one kernel, without a float32 copy of the logits."""
    order = torch.arange(logits.shape[1], device=logits.device)
    values = soft_capped(logits.to(denominator.dtype), cap) if cap else logits
    probability = (values - denominator[:, None]).exp()
    gradient = torch.where(order == columns[:, None], probability - 1, probability) * scale[:, None]
    if cap:
        gradient = gradient * _slope(values, cap)
    logits.copy_(torch.where(order < size, gradient, 0))


def soft_capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """cap · tanh(logit / cap), or without a cap the logits: their shape and dtype."""
    return cap * (logits / cap).tanh() if cap else logits


def _slope(capped: torch.Tensor, cap: float) -> torch.Tensor:
    """The derivative of a soft cap, given what it made of the logits."""
    return 1 - (capped / cap).square()


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function)


def _fake_statistics(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(2, len(logits), dtype=accumulator(logits))


torch.library.impl("titan_like::loss_statistics", "cuda", lambda *inputs: _compiled(_statistics)(*inputs))
torch.library.impl("titan_like::loss_gradient", "cuda", lambda *inputs: _compiled(_write_fused_gradient)(*inputs))
torch.library.register_fake("titan_like::loss_statistics", _fake_statistics)
torch.library.register_fake("titan_like::loss_gradient", lambda *_: None)
