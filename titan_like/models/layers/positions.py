"""Position embeddings: rotary ones (arXiv 2104.09864) with Llama 3.1's frequency scaling, and T5's relative bias."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.config import RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> torch.Tensor:
    """Angle per position of each pair of dimensions: float32 [head_dim / 2].

    With scaling (Llama 3.1), long wavelengths are stretched by ``factor``, short ones are kept, and those in between
    are interpolated. `RopeScaling` defines long and short relative to the original context.
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # rotations over the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rope_cos_sin(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of integer positions [..., seq], each float32 [..., seq, head_dim / 2]."""
    angles = positions[..., None].float() * frequencies
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x, [batch, seq, heads, head_dim]. Dimension i pairs with i + head_dim / 2, as in Hugging Face's Llama.

    cos and sin are [seq, head_dim / 2], or [batch, seq, head_dim / 2] where positions differ between sequences.
    """
    first, second = x.chunk(2, dim=-1)
    # Broadcast over heads. Both are float32, so the products are at least float32.
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class RelativeBias(nn.Module):
    """T5's bias (arXiv 1910.10683, section 2.1): each head adds to a score a number that depends on the distance.

    Distances are in buckets that grow logarithmically. One stack of layers shares its table, [buckets, heads].
    """

    def __init__(self, num_buckets: int, max_distance: int, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.max_distance, self.is_causal = max_distance, is_causal
        self.table = nn.Embedding(num_buckets, num_heads)

    def forward(self, queries: torch.Tensor, num_keys: int) -> torch.Tensor:
        """What is added to the scores: [1, heads, queries, keys]. With causal attention, later keys get -inf.

        ``queries``, int64 [queries], are their positions among the keys.
        """
        distance = torch.arange(num_keys, device=queries.device) - queries[:, None]  # of each key from each query
        buckets = bucket_of(distance, self.table.num_embeddings, self.max_distance, self.is_causal)
        table = self.table(torch.arange(self.table.num_embeddings, device=buckets.device))
        # Looked up in float32 at least: the gradient of an entry is a sum over all pairs at its distances, which a CPU
        # would add up in a 16-bit dtype, where most of it is lost.
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
