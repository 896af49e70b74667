"""The load-balanced chunks of a sequence, of which each rank of a CP group holds two: pure functions."""

from __future__ import annotations

import torch


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
