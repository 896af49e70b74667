"""Position embeddings: rotary ones (arXiv 2104.09864) with Llama 3.1's frequency scaling, and T5's relative bias."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.rope_scaling import RopeScaling


def rope_frequencies(
    size: int, theta: float, scaling: RopeScaling | None, device: torch.device, seq_len: int | torch.Tensor = 0
) -> torch.Tensor:
    """Angle per position of each pair of ``size`` rotated dimensions: float32 [size / 2].

    llama3 stretches long wavelengths by ``factor``, keeps short ones and interpolates those in between; `RopeScaling`
    defines long and short relative to the original context. yarn (arXiv 2309.00071) does the same along the dimensions,
    and linear scaling (arXiv 2306.15595) stretches all. dynamic scaling grows ``theta`` with sequences of ``seq_len``
    tokens beyond the original context, so that the longest wave keeps pace (NTK-aware). longrope (arXiv 2402.13753)
    divides by ``short_factors``, or by ``long_factors`` if the sequences are longer than that. A ``seq_len`` of shape
    [batch, 1, 1] gives each sequence its own, [batch, 1, size / 2].
    """
    if scaling is not None and scaling.type == "dynamic":
        longer = (seq_len > scaling.original_max_seq_len) * (seq_len - scaling.original_max_seq_len)
        grown: Any = 1 + scaling.factor / scaling.original_max_seq_len * longer
        theta, scaling = theta * grown ** (size / (size - 2)), None
    # In float64 before it is rounded, as cos and sin are, so that every compiler and device rounds to the same table.
    frequencies = (theta ** -(torch.arange(0, size, 2, device=device, dtype=torch.float64) / size)).float()
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type == "longrope":
        short, long = map(frequencies.new_tensor, (scaling.short_factors, scaling.long_factors))
        original = scaling.original_max_seq_len
        return frequencies / (short * (seq_len <= original) + long * (seq_len > original))
    if scaling.type == "yarn":

        def pair(turns: float) -> float:  # whose frequency makes so many turns over the original context
            context = scaling.original_max_seq_len
            return size * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

        low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        order = torch.arange(size // 2, device=device, dtype=torch.float32)
        width = (high - low) or 0.001
        keep = 1 - ((order - low) / width).clamp(0, 1)
    else:
        turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)  # rotations over the original context
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        keep = keep.clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)


def rope_magnitude(scaling: RopeScaling | None, seq_len: int | torch.Tensor = 0) -> float | torch.Tensor:
    """The factor on cos and sin, 1 except with yarn and longrope; ``seq_len`` as in `rope_frequencies`."""
    if scaling is None or scaling.type not in ("yarn", "longrope"):
        return 1.0
    if scaling.short_magnitude:
        is_short, is_long = seq_len <= scaling.original_max_seq_len, seq_len > scaling.original_max_seq_len
        return scaling.short_magnitude * is_short + scaling.long_magnitude * is_long
    if scaling.attention_factor:
        return scaling.attention_factor
    logarithm = math.log(max(scaling.factor, 1.0))
    if scaling.type == "longrope":
        return math.sqrt(1 + logarithm / math.log(scaling.original_max_seq_len))
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * logarithm + 1) / (0.1 * scaling.mscale_all_dim * logarithm + 1)
    return 0.1 * logarithm + 1


def rope_cos_sin(
    positions: torch.Tensor, frequencies: torch.Tensor, magnitude: float | torch.Tensor = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of integer positions [..., seq], each float32 [..., seq, rotated / 2], times ``magnitude``."""
    angles = (positions[..., None].float() * frequencies).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    return (cos, sin) if isinstance(magnitude, float) and magnitude == 1 else (cos * magnitude, sin * magnitude)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x, [batch, seq, heads, head_dim]. Dimension i pairs with i + rotated / 2, as in Hugging Face's Llama.

    cos and sin are [seq, rotated / 2], or [batch, seq, rotated / 2] where positions differ between sequences. Of heads
    that are wider than that, the first dimensions are rotated.
    """
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        turned, rest = x.split([width, x.shape[-1] - width], -1)
        return torch.cat((apply_rope(turned, cos, sin), rest), -1)
    first, second = x.chunk(2, dim=-1)
    # Broadcast over heads. Both are float32, so the products are at least float32.
    cos, sin = cos[..., None, :], sin[..., None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def query_temperature(positions: torch.Tensor, factor: float, period: int, offset: int = 0) -> torch.Tensor:
    """What multiplies queries, so that attention to many keys stays sharp (arXiv 2501.19399): float32 [..., seq].

    It grows with the logarithm of the integer positions [..., seq] plus ``offset``, and is 1 up to ``period``.
    """
    return 1 + factor * torch.log(1 + ((positions + offset) // period).float())


class RelativeBias(nn.Module):
    """T5's bias (arXiv 1910.10683, section 2.1): each head adds to a score a number that depends on the distance.

    Distances are in buckets that grow logarithmically. One stack of layers shares its table, [buckets, heads].
    """

    def __init__(self, num_buckets: int, max_distance: int, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.max_distance, self.is_causal = max_distance, is_causal
        self.table = nn.Embedding(num_buckets, num_heads)

    def forward(self, queries: torch.Tensor, num_keys: int) -> torch.Tensor:
        """The bias of the scores: [1, heads, queries, keys]. With causal attention, later keys get -inf.

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
