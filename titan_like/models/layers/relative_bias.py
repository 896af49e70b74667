"""T5's relative position bias (arXiv 1910.10683, section 2.1): each head adds to a score a number that depends on how
far the key is from the query, in buckets that grow logarithmically."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class RelativeBias(nn.Module):
    """The bias of one stack of layers, which share its table [buckets, heads]."""

    def __init__(self, num_buckets: int, max_distance: int, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.max_distance, self.is_causal = max_distance, is_causal
        self.table = nn.Embedding(num_buckets, num_heads)

    def forward(self, seq_len: int) -> torch.Tensor:
        """What is added to the scores: [1, heads, queries, keys]. With causal attention, later keys get -inf."""
        positions = torch.arange(seq_len, device=self.table.weight.device)
        distance = positions - positions[:, None]  # of each key from each query
        buckets = bucket_of(distance, self.table.num_embeddings, self.max_distance, self.is_causal)
        table = self.table(torch.arange(self.table.num_embeddings, device=buckets.device))
        # Looked up in float32 at least: the gradient of an entry is a sum over all pairs at its distances, which a CPU
        # would add up in a half type, where most of it is lost.
        exact = table.to(torch.promote_types(table.dtype, torch.float32))  # [buckets, heads]
        bias = F.embedding(buckets, exact).to(table.dtype).permute(2, 0, 1)[None]  # [1, heads, queries, keys]
        return bias.masked_fill(distance > 0, -math.inf) if self.is_causal else bias


def bucket_of(distance: torch.Tensor, num_buckets: int, max_distance: int, is_causal: bool) -> torch.Tensor:
    """The bucket of each distance, key minus query: int64 → int64 of the same shape, from 0 to num_buckets - 1.

    Half of the buckets are for single distances, and the others for logarithmic ranges up to ``max_distance``, beyond
    which all distances share the last. Without causal attention, one half of all buckets is for keys before the query,
    and the other for keys after it.
    """
    if is_causal:
        first, distance = torch.zeros_like(distance), (-distance).clamp(min=0)
    else:
        num_buckets //= 2
        first, distance = (distance > 0) * num_buckets, distance.abs()
    single = num_buckets // 2
    # float32, because a logarithm that is a whole number must round like those with which T5's weights were trained.
    ratio = torch.log(distance.clamp(min=1).float() / single) / math.log(max_distance / single)
    in_range = single + (ratio * (num_buckets - single)).long()
    return first + torch.where(distance < single, distance, in_range.clamp(max=num_buckets - 1))
