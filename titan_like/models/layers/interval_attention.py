"""Attention over one interval of keys for each query, on CPUs, without a matrix of all pairs.

It goes through the queries in blocks: first by runs of queries whose intervals begin at the same key, such as the
queries of one document, or overlap, as sliding windows do, then by memory. The backward pass computes the probabilities
again.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from titan_like.models.layers.key_ranges import KeyRanges

BLOCK_BYTES = 8 << 20  # of attention scores at a time
_FEW_KEYS = 128  # that a block may have although no query sees half of them


class Scores(NamedTuple):
    """How scores become probabilities, as in `AttentionCore`."""

    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None  # [heads]


def interval_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: KeyRanges, scores: Scores
) -> torch.Tensor:
    """Softmax attention in which query i sees keys first[i] to end[i] - 1. It is an operator, so it can be compiled.

    q is [batch, heads, queries, head_dim], as is the result, and k and v are [batch, kv_heads, keys, head_dim].
    """
    return _attention(q, k, v, ranges.first, ranges.end, scores.sinks, scores.scale, scores.softcap)[0]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what `interval_attention` returns, the logarithm of the softmax's denominator [batch, heads, queries]).

    The latter is at least float32. A query that sees no key gets zeros, and the logarithm of 0 without a sink.
    """
    output, denominator = empty_like(q).zero_(), denominators_before(q, sinks)
    for row, queries, keys, visible in _blocks(q, first, end):
        scores = _scores(q[row, :, queries], k[row, :, keys], visible, scale, softcap)
        total = scores.logsumexp(2, keepdim=True)
        total = torch.logaddexp(total, denominator[row, :, queries].reshape(total.shape))
        mixed = _probability(scores, total) @ v[row, :, keys].to(scores.dtype)
        output[row, :, queries] = mixed.view(q.shape[1], -1, v.shape[3]).to(q.dtype)
        denominator[row, :, queries] = total.view(q.shape[1], -1)
    return output, denominator


_attention = torch.library.custom_op("titan_like::interval_attention", attend, mutates_args=())


def denominators_before(q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The logarithms of the softmax's denominators before any key: [batch, heads, queries], at least float32."""
    if sinks is None:
        return q.new_full(q.shape[:3], -math.inf, dtype=accumulator(q))
    return sinks.to(accumulator(q))[:, None].expand(q.shape[:3]).clone()


def sink_gradient(sinks: torch.Tensor, denominator: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """The gradient of sinks [heads], given what `gradients` takes: a sink draws probability from what has values."""
    probability = (sinks.to(denominator.dtype)[:, None] - denominator).exp_()
    return (probability * mean).sum((0, 2)).neg_().to(sinks.dtype)


@torch.library.custom_op("titan_like::interval_attention_backward", mutates_args=())
def _gradients(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor,
    end: torch.Tensor,
    sinks: torch.Tensor | None,
    output: torch.Tensor,
    denominator: torch.Tensor,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    mean = (gradient.to(denominator.dtype) * output).sum(3)
    scores = Scores(scale, softcap)
    of_q, of_k, of_v = gradients(gradient, (q, k, v), KeyRanges(first, end), scores, (denominator, mean))
    of_sinks = q.new_empty(0) if sinks is None else sink_gradient(sinks, denominator, mean)
    return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_sinks


def gradients(
    gradient: torch.Tensor,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ranges: KeyRanges,
    scores: Scores,
    statistics: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, at least float32, by FlashAttention's equations 1 to 4 (arXiv 2205.14135, B.2).

    ``statistics`` are the denominator that `attend` returns, and the sum of gradient · output over head_dim, both
    [batch, heads, queries]. They may come from attention to more keys than ``k`` has.
    """
    (q, k, v), (denominator, mean), (scale, softcap, _) = inputs, statistics, scores
    dtype, groups = denominator.dtype, k.shape[1]
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    for row, queries, keys, visible in _blocks(q, ranges.first, ranges.end):
        part, key = q[row, :, queries], k[row, :, keys].to(dtype)
        capped = _scores(part, key, visible, scale, softcap)
        slope = _slope(capped, softcap)
        probability = _probability(capped, denominator[row, :, queries].reshape(groups, -1, 1))
        out = gradient[row, :, queries].to(dtype).reshape(groups, -1, v.shape[3])
        of_v[row, :, keys] += probability.transpose(1, 2) @ out
        of_scores = out @ v[row, :, keys].to(dtype).transpose(1, 2)
        of_scores -= mean[row, :, queries].reshape(groups, -1, 1)
        of_scores *= probability
        of_scores *= scale if slope is None else slope.mul_(scale)
        of_q[row, :, queries] = (of_scores @ key).view(part.shape)
        of_k[row, :, keys] += of_scores.transpose(1, 2) @ part.to(dtype).reshape(groups, -1, q.shape[3])
    return of_q, of_k, of_v


def _blocks(
    q: torch.Tensor, first: torch.Tensor, end: torch.Tensor
) -> Iterator[tuple[int, slice, slice, torch.Tensor]]:
    """Yield (batch row, queries, keys that any of them sees, bool [queries, keys]) until all queries are done."""
    bytes_per_key, seq_len = q.shape[1] * accumulator(q).itemsize, q.shape[2]
    for row, (begins, ends) in enumerate(zip(first.tolist(), end.tolist(), strict=True)):
        start = 0
        while start < seq_len:
            stop, last = start, ends[start]
            while stop < seq_len:
                if begins[stop] != begins[start]:
                    most = max(2 * (ends[stop] - begins[stop]), _FEW_KEYS)
                    if not (begins[start] < begins[stop] < last and ends[stop] - begins[start] <= most):
                        break
                last = max(last, ends[stop])
                if stop > start and (stop + 1 - start) * (last - begins[start]) * bytes_per_key > BLOCK_BYTES:
                    break
                stop += 1
            last = max(ends[start:stop])
            if last > begins[start]:
                keys = torch.arange(begins[start], last, device=end.device)
                visible = (first[row, start:stop, None] <= keys) & (keys < end[row, start:stop, None])
                yield row, slice(start, stop), slice(begins[start], last), visible
            start = stop


def _scores(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    """q [heads, queries, head_dim], k [kv_heads, keys, head_dim] → [kv_heads, queries of its heads, keys]."""
    dtype, heads, queries = accumulator(q), q.shape[0], q.shape[1]
    scores = q.to(dtype).reshape(k.shape[0], -1, q.shape[2]) @ k.to(dtype).transpose(1, 2)
    scores *= scale
    if softcap:
        scores.div_(softcap).tanh_().mul_(softcap)
    scores.view(heads, queries, -1).masked_fill_(~visible, -math.inf)
    return scores


def _slope(scores: torch.Tensor, softcap: float) -> torch.Tensor | None:
    """The derivative of capped scores by those before; None: 1. Hidden ones are infinite, and get 0."""
    return (1 - (scores / softcap).square_()).clamp_(min=0) if softcap else None


def _probability(scores: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """exp(scores - denominator), in place; 0 where a query sees no key."""
    return scores.sub_(denominator.masked_fill(denominator == -math.inf, 0)).exp_()


def accumulator(x: torch.Tensor) -> torch.dtype:
    """The type of sums: at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def empty_like(q: torch.Tensor) -> torch.Tensor:
    """A tensor like q, [batch, heads, seq, head_dim], that is stored by [batch, seq, heads, head_dim]."""
    batch, heads, seq_len, head_dim = q.shape
    return q.new_empty(batch, seq_len, heads, head_dim).transpose(1, 2)


_attention.register_fake(lambda q, *_: (empty_like(q), q.new_empty(q.shape[:3], dtype=accumulator(q))))
_gradients.register_fake(
    lambda _, q, k, v, first, end, sinks, *__: (
        *map(torch.empty_like, (q, k, v)), q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    )
)  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: torch.Tensor, _denominator: None) -> tuple[torch.Tensor | None, ...]:
    *gradients, of_sinks = _gradients(gradient, *ctx.saved_tensors, ctx.scale, ctx.softcap)
    return *gradients, None, None, of_sinks if ctx.needs_input_grad[5] else None, None, None


_attention.register_autograd(_backward, setup_context=_save)
