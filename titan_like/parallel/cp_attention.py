"""Attention of a CP shard of the queries to the keys of the whole sequence.

Queries attend to one block of keys after the other, by torch's flash attention where they see all keys of a block or
all up to their own, and results are merged by the denominators of the softmax, in float32 at least. A rank has the keys
of the whole sequence, or of its CP shard. The latter travel around the ring (arXiv 2310.01889): each rank attends to
the keys that it holds while the next ones arrive. In the backward pass they travel again, and their gradients with
them. Each CP shard has two load-balanced chunks of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titan_like.models.layers import interval_attention
from titan_like.parallel.collectives import Group
from titan_like.torch_private import flash_attention, flash_attention_gradients, process_group


def shard_positions(length: int, size: int, rank: int) -> torch.Tensor:
    """The positions in a rank's CP shard, in ascending order: int64 [length / size].

    They are chunk ``rank`` of 2 · size from the head and from the tail; ``length`` must be a multiple of 2 · size.
    """
    chunks = torch.arange(length).chunk(2 * size)
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


def cp_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor | None,
    end: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    group: Group,
    travels: bool,
) -> torch.Tensor:
    """q [batch, heads, queries, head_dim] → the same shape.

    Args:
        q: of this rank's CP shard.
        keys: and values, [2, batch, kv_heads, keys, head_dim], of the CP shard if they travel, else of the sequence.
        first: with ``end``, int64 [batch, queries], which keys of the whole sequence each query sees. None: attention
            ``is_causal`` or sees all keys.
        end: see ``first``.
        is_causal: see ``first``.
        scale: multiplies the scores.
        group: the CP group.
        travels: whether keys are passed on.
    """
    has_flash = q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    if first is None and q.is_cuda and not has_flash:
        length = q.shape[2] * group.size
        positions = shard_positions(length, group.size, group.rank).to(q.device).expand(len(q), -1)
        first, end = torch.zeros_like(positions), positions + 1 if is_causal else torch.full_like(positions, length)
    return _attention(q, keys, first, end, is_causal, scale, group.name, group.size, group.rank, travels)[0]


def cp_attention_forward(
    q: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor | None,
    end: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    name: str,
    size: int,
    rank: int,
    travels: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cp_attention` without gradients: its result, and the logarithm of the softmax's denominators, [..., queries].

    ``name``, ``size`` and ``rank`` are those of the group.
    """
    dtype = _accumulator(q)
    output = interval_attention.empty_like(q).to(dtype).zero_()
    denominator = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
    for source, held_keys in _passing(keys, name, size, rank) if travels else [(None, keys)]:
        for block in _blocks(q.shape[2], first, end, is_causal, size, rank, source):
            result, total = _attend(q[:, :, block.queries], held_keys[..., block.keys, :], block, scale)
            _merge(output[:, :, block.queries], denominator[:, :, block.queries], result, total)
    return output.to(q.dtype), denominator


def cp_attention_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    first: torch.Tensor | None,
    end: torch.Tensor | None,
    output: torch.Tensor,
    denominator: torch.Tensor,
    is_causal: bool,
    scale: float,
    name: str,
    size: int,
    rank: int,
    travels: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of q and of the keys and values, from that of the result of `cp_attention_forward`."""
    of_q = torch.zeros_like(q, dtype=denominator.dtype)
    of_keys = torch.zeros_like(keys, dtype=denominator.dtype)
    for source, held_keys in _passing(keys, name, size, rank) if travels else [(None, keys)]:
        if source not in (None, rank):
            of_keys = _exchange(of_keys, name, size, rank)
        for block in _blocks(q.shape[2], first, end, is_causal, size, rank, source):
            parts = [x[:, :, block.queries] for x in (gradient, q, output, denominator)]
            of_queries, *of_both = _gradients(parts, held_keys[..., block.keys, :], block, scale)
            of_q[:, :, block.queries] += of_queries
            for total, result in zip(of_keys[..., block.keys, :].unbind(), of_both, strict=True):
                total += result
    of_keys = _exchange(of_keys, name, size, rank) if travels else of_keys
    return of_q.to(q.dtype), of_keys.to(keys.dtype)


# Operators of their own, because a compiler could not trace the messages. The planner runs the functions themselves.
_attention = torch.library.custom_op("titan_like::cp_attention", cp_attention_forward, mutates_args=())
_attention_gradients = torch.library.custom_op(
    "titan_like::cp_attention_backward", cp_attention_backward, mutates_args=()
)


def _passing(block: torch.Tensor, name: str, size: int, rank: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (rank, its block) for all ranks of the group, this one's first. The next block arrives meanwhile."""
    for step in range(size):
        arriving = None if step == size - 1 else _start(block, name, size, rank)
        yield (rank - step) % size, block
        if arriving is not None:
            block, works = arriving
            for work in works:
                work.wait()


def _start(block: torch.Tensor, name: str, size: int, rank: int) -> tuple[torch.Tensor, list[dist.Work]]:
    """Begin to send a tensor to the next rank of the ring, and to receive one from the rank before."""
    group, block, arriving = process_group(name), block.contiguous(), torch.empty_like(block)
    exchange = [
        dist.P2POp(dist.isend, block, group=group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - 1) % size),
    ]
    return arriving, dist.batch_isend_irecv(exchange)


def _exchange(block: torch.Tensor, name: str, size: int, rank: int) -> torch.Tensor:
    arriving, works = _start(block, name, size, rank)
    for work in works:
        work.wait()
    return arriving


def _blocks(
    length: int,
    first: torch.Tensor | None,
    end: torch.Tensor | None,
    is_causal: bool,
    size: int,
    rank: int,
    source: int | None,
) -> Iterator[Block]:
    """The blocks of this rank's ``length`` queries and of the keys of rank ``source`` that they may see.

    Both have two of the sequence's 2 · size chunks: number r and number r from the end. Without a ``source`` the keys
    are the whole sequence's.
    """
    chunk, halves = length // 2, (slice(0, length // 2), slice(length // 2, length))
    numbers = (rank, 2 * size - 1 - rank)
    if source is None:
        everything = slice(0, length * size)
        if first is not None or not is_causal:
            yield Block(slice(0, length), everything, first=first, end=end)
            return
        for queries, number in zip(halves, numbers, strict=True):
            if number:
                yield Block(queries, slice(0, number * chunk))
            yield Block(queries, slice(number * chunk, (number + 1) * chunk), is_causal=True)
        return
    sources = (source, 2 * size - 1 - source)
    if first is not None and end is not None:
        for keys, number in zip(halves, sources, strict=True):
            begins, ends = ((x - number * chunk).clamp(0, chunk) for x in (first, end))
            yield Block(slice(0, length), keys, first=begins, end=ends)
    elif not is_causal:
        yield Block(slice(0, length), slice(0, length))
    else:
        for queries, query_number in zip(halves, numbers, strict=True):
            for keys, number in zip(halves, sources, strict=True):
                if number <= query_number:
                    yield Block(queries, keys, is_causal=number == query_number)


def _attend(q: torch.Tensor, keys: torch.Tensor, block: Block, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = keys
    if block.first is not None and block.end is not None:
        return interval_attention.attend(q, k, v, block.first, block.end, scale)
    return flash_attention(q, k, v, block.is_causal, scale)


def _gradients(parts: list[torch.Tensor], keys: torch.Tensor, block: Block, scale: float) -> tuple[torch.Tensor, ...]:
    (gradient, q, output, denominator), (k, v) = parts, keys
    if block.first is not None and block.end is not None:
        mean = (gradient.to(denominator.dtype) * output).sum(3)
        return interval_attention.gradients(gradient, q, k, v, block.first, block.end, scale, denominator, mean)
    return flash_attention_gradients(gradient, q, k, v, output, denominator, block.is_causal, scale)


def _merge(output: torch.Tensor, denominator: torch.Tensor, result: torch.Tensor, total: torch.Tensor) -> None:
    """Add attention to further keys, in place: the mean of both results, weighted by their denominators."""
    merged = torch.logaddexp(denominator, total)
    seen = merged.masked_fill(merged == -math.inf, 0)  # where nothing is seen so far, both weights are 0
    output *= (denominator - seen).exp_()[..., None]
    output += result * (total - seen).exp_()[..., None]
    denominator.copy_(merged)


def _accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


_attention.register_fake(
    lambda q, *_: (interval_attention.empty_like(q), q.new_empty(q.shape[:3], dtype=_accumulator(q)))
)
_attention_gradients.register_fake(lambda _, q, keys, *__: (torch.empty_like(q), torch.empty_like(keys)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, keys, first, end, *ctx.settings = inputs
    ctx.save_for_backward(q, keys, first, end, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: torch.Tensor, _denominator: None) -> tuple[torch.Tensor | None, ...]:
    return *_attention_gradients(gradient, *ctx.saved_tensors, *ctx.settings), *[None] * 8


_attention.register_autograd(_backward, setup_context=_save)
