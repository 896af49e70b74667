"""Attention of a slice of the queries to all keys, of which a ring of processes holds a slice each (arXiv 2310.01889).

Keys and values travel from process to process. Each attends to the block that it holds while the next one arrives, and
merges what it has by the denominators of the softmax, in float32 at least. In the backward pass the blocks travel
again, and the gradients of a block travel with it. Slices are those of `titan_like.parallel.context`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titan_like.models.layers import interval_attention
from titan_like.parallel.collectives import Group
from titan_like.parallel.pieces import places_of
from titan_like.torch_private import flash_attention, flash_attention_gradients, process_group


class Block(NamedTuple):
    """Some queries and the keys of one process that they may see."""

    queries: slice
    keys: slice
    is_causal: bool = False
    first: torch.Tensor | None = None  # int64 [batch, queries], among these keys; None: all, or those up to the query
    end: torch.Tensor | None = None


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor | None,
    end: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    group: Group,
) -> torch.Tensor:
    """q [batch, heads, queries, head_dim], k and v [batch, kv_heads, queries, head_dim] of this process → shape of q.

    ``first`` and ``end``, int64 [batch, queries], say which keys of the whole sequence each query sees. Without them
    attention ``is_causal`` or sees all keys.
    """
    if first is None and q.is_cuda and q.dtype not in (torch.bfloat16, torch.float16):  # which flash attention lacks
        length = q.shape[2] * group.size
        places = places_of(length, group.size, group.rank).to(q.device).expand(len(q), -1)
        first, end = torch.zeros_like(places), places + 1 if is_causal else torch.full_like(places, length)
    return _ring(q, k, v, first, end, is_causal, scale, group.name, group.size, group.rank)[0]


@torch.library.custom_op("titan_like::ring_attention", mutates_args=())
def _ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor | None,
    end: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    name: str,
    size: int,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = _accumulator(q)
    output = interval_attention.empty_like(q).to(dtype).zero_()
    denominator = q.new_full(q.shape[:3], -math.inf, dtype=dtype)
    for source, block in _passing(torch.stack((k, v)), name, size, rank):
        for part in _blocks(q.shape[2], first, end, is_causal, size, rank, source):
            keys, values = block[..., part.keys, :].unbind()
            found, total = _attend(q[:, :, part.queries], keys, values, part, scale)
            _merge(output[:, :, part.queries], denominator[:, :, part.queries], found, total)
    return output.to(q.dtype), denominator


@torch.library.custom_op("titan_like::ring_attention_backward", mutates_args=())
def _ring_gradients(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor | None,
    end: torch.Tensor | None,
    output: torch.Tensor,
    denominator: torch.Tensor,
    is_causal: bool,
    scale: float,
    name: str,
    size: int,
    rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    of_q = torch.zeros_like(q, dtype=denominator.dtype)
    of_block = torch.zeros(2, *k.shape, dtype=denominator.dtype, device=k.device)
    for source, block in _passing(torch.stack((k, v)), name, size, rank):
        if source != rank:
            of_block = _exchange(of_block, name, size, rank)
        for part in _blocks(q.shape[2], first, end, is_causal, size, rank, source):
            here = [x[:, :, part.queries] for x in (gradient, q, output, denominator)]
            of_queries, *of_keys = _gradients(here, block[..., part.keys, :], part, scale)
            of_q[:, :, part.queries] += of_queries
            of_block[..., part.keys, :] += torch.stack(of_keys)
    return of_q.to(q.dtype), _exchange(of_block, name, size, rank).to(k.dtype)


def _passing(block: torch.Tensor, name: str, size: int, rank: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (process, its block) for all processes, this one's first. The next block arrives meanwhile."""
    for step in range(size):
        arriving = None if step == size - 1 else _start(block, name, size, rank)
        yield (rank - step) % size, block
        if arriving is not None:
            block, works = arriving
            for work in works:
                work.wait()


def _start(block: torch.Tensor, name: str, size: int, rank: int) -> tuple[torch.Tensor, list[dist.Work]]:
    """Begin to send a tensor to the next process of the ring, and to receive that of the one before."""
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
    source: int,
) -> Iterator[Block]:
    """The pairs of queries here, of which there are ``length``, and keys of process ``source`` that may see each other.

    Both have two pieces of the sequence: number r of 2 · size, and number r from its end.
    """
    piece, halves = length // 2, (slice(0, length // 2), slice(length // 2, length))
    sources = (source, 2 * size - 1 - source)
    if first is not None and end is not None:
        for keys, number in zip(halves, sources, strict=True):
            begins, ends = ((x - number * piece).clamp(0, piece) for x in (first, end))
            yield Block(slice(0, length), keys, first=begins, end=ends)
    elif not is_causal:
        yield Block(slice(0, length), slice(0, length))
    else:
        for queries, here in zip(halves, (rank, 2 * size - 1 - rank), strict=True):
            for keys, number in zip(halves, sources, strict=True):
                if number <= here:
                    yield Block(queries, keys, is_causal=number == here)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if block.first is not None and block.end is not None:
        return interval_attention.attend(q, k, v, block.first, block.end, scale)
    return flash_attention(q, k, v, block.is_causal, scale)


def _gradients(here: list[torch.Tensor], keys: torch.Tensor, block: Block, scale: float) -> tuple[torch.Tensor, ...]:
    (gradient, q, output, denominator), (k, v) = here, keys
    if block.first is not None and block.end is not None:
        mean = (gradient.to(denominator.dtype) * output).sum(3)
        return interval_attention.gradients(gradient, q, k, v, block.first, block.end, scale, denominator, mean)
    return flash_attention_gradients(gradient, q, k, v, output, denominator, block.is_causal, scale)


def _merge(output: torch.Tensor, denominator: torch.Tensor, found: torch.Tensor, total: torch.Tensor) -> None:
    """Add attention to further keys, in place: the mean of both results, weighted by their denominators."""
    merged = torch.logaddexp(denominator, total)
    seen = merged.masked_fill(merged == -math.inf, 0)  # where nothing is seen so far, both weights are 0
    output *= (denominator - seen).exp_()[..., None]
    output += found * (total - seen).exp_()[..., None]
    denominator.copy_(merged)


def _accumulator(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


_ring.register_fake(lambda q, *_: (interval_attention.empty_like(q), q.new_empty(q.shape[:3], dtype=_accumulator(q))))
_ring_gradients.register_fake(lambda _, q, k, *__: (torch.empty_like(q), k.new_empty(2, *k.shape)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.is_causal, ctx.scale, ctx.name, ctx.size, ctx.rank = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, gradient: torch.Tensor, _denominator: None) -> tuple[torch.Tensor | None, ...]:
    settings = ctx.is_causal, ctx.scale, ctx.name, ctx.size, ctx.rank
    of_q, of_block = _ring_gradients(gradient, *ctx.saved_tensors, *settings)
    return (of_q, *of_block.unbind(), *[None] * 7)


_ring.register_autograd(_backward, setup_context=_save)
