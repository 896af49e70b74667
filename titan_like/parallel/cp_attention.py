"""Attention of a CP shard of the queries to the keys of the whole sequence.

Queries attend to one block of keys after the other, by torch's flash attention where they see all keys of a block or
all up to their own, and results are merged by the denominators of the softmax, in float32 at least. A rank has the keys
of the whole sequence, or of its CP shard. The latter travel around the ring (arXiv 2310.01889): each rank attends to
the keys that it holds while the next ones arrive. In the backward pass they travel again, and their gradients with
them. Each CP shard has two load-balanced chunks of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titan_like.models.layers import interval_attention
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.parallel.collectives import Group
from titan_like.torch_private import flash_attention, flash_attention_gradients, process_group


def shard_positions(length: int, size: int, rank: int, device: torch.device | None = None) -> torch.Tensor:
    """The positions in a rank's CP shard, in ascending order: int64 [length / size].

    They are chunk ``rank`` of 2 · size from the head and from the tail; ``length`` must be a multiple of 2 · size.
    """
    chunks = torch.arange(length, device=device).chunk(2 * size)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def unshard(shards: torch.Tensor) -> torch.Tensor:
    """Put all ranks' CP shards together: [size, …, positions of a shard, n] → [size, …, all positions in order, n]."""
    head, tail = shards.chunk(2, -2)
    return torch.cat((*head.unbind(), *tail.flip(0).unbind()), -2)


def shard(whole: torch.Tensor, size: int) -> torch.Tensor:
    """The reverse of `unshard`: […, positions, n] → [size, …, positions of a shard, n]."""
    chunks = whole.chunk(2 * size, -2)
    return torch.stack([torch.cat((chunks[rank], chunks[-1 - rank]), -2) for rank in range(size)])


class Block(NamedTuple):
    """Some queries and the keys that they may see, among the keys that a rank holds at a time."""

    queries: slice
    keys: slice
    is_causal: bool = False
    first: torch.Tensor | None = None  # int64 [batch, queries], among these keys; None: all, or those up to the query
    end: torch.Tensor | None = None


class Exchange(NamedTuple):
    """How the ranks of a CP group attend: what the operators take besides tensors."""

    is_causal: bool  # without ranges of keys: attention is causal, or sees all keys
    scale: float  # multiplies the scores
    softcap: float  # as in `AttentionCore`
    window: int  # of the ranges, as in `KeyRanges`
    name: str  # of the CP group
    size: int
    rank: int
    travels: bool  # whether keys are passed on; else each rank has the whole sequence's


class BlockSteps(NamedTuple):
    """What an operator calls for each block and message, as functions, so that whoever watches can replace them."""

    attend: Callable[..., Any]  # q, keys, block, exchange → output, denominator
    gradients: Callable[..., Any]  # (gradient, q, output, denominator), keys, block, exchange → of q, k and v
    merge: Callable[..., None]  # output, denominator, result, total; the first two in place
    exchange_gradients: Callable[..., torch.Tensor]  # gradients of keys, exchange → those from the rank before

    @classmethod
    def default(cls) -> BlockSteps:
        """The steps that training runs."""
        return cls(_attend, _gradients, _merge, _exchange)


Tensor = torch.Tensor
Ranges = tuple[Tensor | None, Tensor | None]  # first and end


def cp_attention(
    q: Tensor, keys: Tensor, ranges: KeyRanges | None, core: AttentionCore, group: Group, travels: bool
) -> Tensor:
    """q [batch, heads, queries, head_dim] → the same shape.

    ``keys`` and values are [2, batch, kv_heads, keys, head_dim], of the CP shard if they travel, else of the sequence.
    ``ranges`` say which keys of the whole sequence each query sees; without them, ``core`` has no soft cap.
    """
    has_flash = q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    if ranges is None and q.is_cuda and not has_flash:
        positions = core.query_order(q.shape[2], q.device)[0].expand(len(q), -1)
        length = q.shape[2] * group.size
        ranges = KeyRanges(
            torch.zeros_like(positions), positions + 1 if core.is_causal else torch.full_like(positions, length)
        )
    first, end, _, window = ranges or (None, None, None, 0)
    scale, softcap, sinks = core.scores_of(q)
    exchange = Exchange(core.is_causal, scale, softcap, window, group.name, group.size, group.rank, travels)
    return attention(q, keys, first, end, sinks, *exchange)[0]


def cp_attention_forward(
    q: Tensor, keys: Tensor, first: Tensor | None, end: Tensor | None, sinks: Tensor | None, *settings: Any,
    steps: BlockSteps | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`cp_attention` without gradients: its result, and the logarithm of the softmax's denominators, [..., queries].

    ``settings`` are the fields of `Exchange`.
    """
    how, dtype, steps = Exchange(*settings), interval_attention.accumulator(q), steps or BlockSteps.default()
    output = interval_attention.empty_like(q).to(dtype).zero_()
    denominator = interval_attention.denominators_before(q, sinks)
    for source, held_keys in _passing(keys, how):
        for block in _blocks(q.shape[2], (first, end), how, source):
            result, total = steps.attend(q[:, :, block.queries], held_keys[..., block.keys, :], block, how)
            steps.merge(output[:, :, block.queries], denominator[:, :, block.queries], result, total)
    return output.to(q.dtype), denominator


def cp_attention_backward(
    gradient: Tensor, q: Tensor, keys: Tensor, first: Tensor | None, end: Tensor | None, sinks: Tensor | None,
    output: Tensor, denominator: Tensor, *settings: Any, steps: BlockSteps | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, keys and values, and sinks, from the gradient of `cp_attention_forward`'s result."""
    how, steps = Exchange(*settings), steps or BlockSteps.default()
    of_q = torch.zeros_like(q, dtype=denominator.dtype)
    of_keys = torch.zeros_like(keys, dtype=denominator.dtype)
    for source, held_keys in _passing(keys, how):
        if source not in (None, how.rank):
            of_keys = steps.exchange_gradients(of_keys, how)
        for block in _blocks(q.shape[2], (first, end), how, source):
            parts = [x[:, :, block.queries] for x in (gradient, q, output, denominator)]
            of_queries, *of_both = steps.gradients(parts, held_keys[..., block.keys, :], block, how)
            of_q[:, :, block.queries] += of_queries
            for total, result in zip(of_keys[..., block.keys, :].unbind(), of_both, strict=True):
                total += result
    of_keys = steps.exchange_gradients(of_keys, how) if how.travels else of_keys
    of_sinks = q.new_empty(0)
    if sinks is not None:
        mean = (gradient.to(denominator.dtype) * output).sum(3)
        of_sinks = interval_attention.sink_gradient(sinks, denominator, mean)
    return of_q.to(q.dtype), of_keys.to(keys.dtype), of_sinks


# Operators of their own, because a compiler could not trace the messages.
_INPUTS = "Tensor q, Tensor keys, Tensor? first, Tensor? end, Tensor? sinks"
_SETTINGS = "bool c, float s, float m, int w, str g, int n, int r, bool t"
attention = torch.library.custom_op(
    "titan_like::cp_attention", cp_attention_forward, mutates_args=(),
    schema=f"({_INPUTS}, {_SETTINGS}) -> (Tensor, Tensor)",
)  # fmt: skip
attention_gradients = torch.library.custom_op(
    "titan_like::cp_attention_backward", cp_attention_backward, mutates_args=(),
    schema=f"(Tensor gradient, {_INPUTS}, Tensor output, Tensor denominator, {_SETTINGS})"
    " -> (Tensor, Tensor, Tensor)",
)  # fmt: skip

WITH_STEPS: dict[Any, Callable[..., Any]] = {
    torch.ops.titan_like.cp_attention.default: cp_attention_forward,
    torch.ops.titan_like.cp_attention_backward.default: cp_attention_backward,
}
"""The function that each operator runs, for a dispatch mode that gives it other `BlockSteps`."""


def _passing(block: Tensor, how: Exchange) -> Iterator[tuple[int | None, Tensor]]:
    """Yield (rank, its block) for all ranks of the group, this one's first. The next block arrives meanwhile.

    If keys do not travel, it is one block, of no rank.
    """
    if not how.travels:
        yield None, block
        return
    for step in range(how.size):
        arriving = None if step == how.size - 1 else _start(block, how)
        yield (how.rank - step) % how.size, block
        if arriving is not None:
            block, works = arriving
            for work in works:
                work.wait()


def _start(block: Tensor, how: Exchange) -> tuple[Tensor, list[dist.Work]]:
    """Begin to send a tensor to the next rank of the ring, and to receive one from the rank before."""
    group, block, arriving = process_group(how.name), block.contiguous(), torch.empty_like(block)
    exchange = [
        dist.P2POp(dist.isend, block, group=group, group_peer=(how.rank + 1) % how.size),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(how.rank - 1) % how.size),
    ]
    return arriving, dist.batch_isend_irecv(exchange)


def _exchange(block: Tensor, how: Exchange) -> Tensor:
    arriving, works = _start(block, how)
    for work in works:
        work.wait()
    return arriving


def _blocks(length: int, ranges: Ranges, how: Exchange, source: int | None) -> Iterator[Block]:
    """The blocks of this rank's ``length`` queries and of the keys of rank ``source`` that they may see.

    Both have two of the sequence's 2 · size chunks: number r and number r from the end. Without a ``source`` the keys
    are the whole sequence's.
    """
    (first, end), size, last = ranges, how.size, 2 * how.size - 1
    chunk, halves, everything = length // 2, (slice(0, length // 2), slice(length // 2, length)), slice(0, length)
    numbers = (how.rank, last - how.rank)
    if source is None:
        if first is not None or not how.is_causal:
            yield Block(everything, slice(0, length * size), first=first, end=end)
            return
        for queries, number in zip(halves, numbers, strict=True):
            if number:
                yield Block(queries, slice(0, number * chunk))
            yield Block(queries, slice(number * chunk, (number + 1) * chunk), is_causal=True)
        return
    sources = (source, last - source)
    if first is not None and end is not None:
        for keys, number in zip(halves, sources, strict=True):
            begins, ends = ((x - number * chunk).clamp(0, chunk) for x in (first, end))
            yield Block(everything, keys, first=begins, end=ends)
    elif not how.is_causal:
        yield Block(everything, everything)
    else:
        for queries, query_number in zip(halves, numbers, strict=True):
            for keys, number in zip(halves, sources, strict=True):
                if number <= query_number:
                    yield Block(queries, keys, is_causal=number == query_number)


def _attend(q: Tensor, keys: Tensor, block: Block, how: Exchange) -> tuple[Tensor, Tensor]:
    if block.first is not None and block.end is not None:
        k, v = keys
        return interval_attention.attend(q, k, v, block.first, block.end, None, how.scale, how.softcap)
    return flash_attention(q, keys, block.is_causal, how.scale)


def _gradients(parts: list[Tensor], keys: Tensor, block: Block, how: Exchange) -> tuple[Tensor, ...]:
    if block.first is None or block.end is None:
        return flash_attention_gradients(parts, keys, block.is_causal, how.scale)
    gradient, q, output, denominator = parts
    mean, ranges = (gradient.to(denominator.dtype) * output).sum(3), KeyRanges(block.first, block.end)
    scores = interval_attention.Scores(how.scale, how.softcap)
    return interval_attention.gradients(gradient, (q, *keys), ranges, scores, (denominator, mean))


def _merge(output: torch.Tensor, denominator: torch.Tensor, result: torch.Tensor, total: torch.Tensor) -> None:
    """Add attention to further keys, in place: the mean of both results, weighted by their denominators."""
    merged = torch.logaddexp(denominator, total)
    seen = merged.masked_fill(merged == -math.inf, 0)  # where nothing is seen so far, both weights are 0
    output *= (denominator - seen).exp_()[..., None]
    output += result * (total - seen).exp_()[..., None]
    denominator.copy_(merged)


attention.register_fake(
    lambda q, *_: (interval_attention.empty_like(q), q.new_empty(q.shape[:3], dtype=interval_attention.accumulator(q)))
)
attention_gradients.register_fake(
    lambda _, q, keys, first, end, sinks, *__: (
        *map(torch.empty_like, (q, keys)), q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    )
)  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.settings = *inputs[:5], inputs[5:]
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: torch.Tensor, _denominator: None) -> tuple[torch.Tensor | None, ...]:
    *gradients, of_sinks = attention_gradients(gradient, *ctx.saved_tensors, *ctx.settings)
    return *gradients, None, None, of_sinks if ctx.needs_input_grad[4] else None, *[None] * len(ctx.settings)


attention.register_autograd(_backward, setup_context=_save)
