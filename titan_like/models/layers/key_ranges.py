"""Which keys each query of an attention sees: one interval for each query.

Intervals describe causal attention, packed documents, bidirectional prefixes and sliding windows in memory
proportional to the sequence, where a mask takes its square.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128  # queries, and keys, in a block of FlexAttention


class KeyRanges(NamedTuple):
    """Query i sees the keys from ``first[i]`` up to, but not including, ``end[i]``, and always itself."""

    first: torch.Tensor  # int64 [batch, queries]
    end: torch.Tensor  # int64 [batch, queries]
    blocks: BlockMask | None = None  # the same for FlexAttention, for all layers; only on GPUs
    window: int = 0  # most keys that a query sees, itself included, if it is the layer's own window that says so

    def mask(self) -> torch.Tensor:
        """bool [batch, 1, queries, keys]: True where a query sees a key. It takes memory for every pair."""
        keys = torch.arange(self.first.shape[1], device=self.first.device)
        return ((keys >= self.first[..., None]) & (keys < self.end[..., None]))[:, None]


def block_mask(first: torch.Tensor, end: torch.Tensor, num_keys: int) -> BlockMask:
    """FlexAttention's description of intervals [batch, queries]; it neither allocates a mask of pairs nor waits.

    A block of queries and keys is left out if no query in it sees a key in it, and computed without a mask if every
    query sees every key.
    """
    from torch.nn.attention.flex_attention import BlockMask

    seq_len = first.shape[1]
    count = -(-seq_len // _BLOCK)
    missing = count * _BLOCK - seq_len  # queries that fill the last block; they repeat the last query

    def by_block(values: torch.Tensor) -> torch.Tensor:
        return torch.cat((values, values[:, -1:].expand(-1, missing)), 1).unflatten(1, (count, _BLOCK))

    lowest, highest = by_block(first).amin(2)[..., None], by_block(first).amax(2)[..., None]  # [batch, blocks, 1]
    nearest, furthest = by_block(end).amin(2)[..., None], by_block(end).amax(2)[..., None]
    begins = torch.arange(-(-num_keys // _BLOCK), device=first.device) * _BLOCK  # of each block of keys
    seen = (begins < furthest) & (begins + _BLOCK > lowest)  # [batch, blocks of queries, blocks of keys]
    full = (begins >= highest) & (begins + _BLOCK <= nearest)

    def listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Count and numbers of the chosen blocks of keys: int32 [batch, 1, blocks] and [batch, 1, blocks, blocks]."""
        numbers = chosen.to(torch.int8).argsort(dim=2, descending=True, stable=True)
        return chosen.sum(2, dtype=torch.int32)[:, None], numbers.to(torch.int32)[:, None]

    def is_visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k >= first[b, q]) & (k < end[b, q])

    return BlockMask.from_kv_blocks(
        *listed(seen & ~full), *listed(full), BLOCK_SIZE=_BLOCK, mask_mod=is_visible, seq_lengths=(seq_len, num_keys)
    )
