"""Rotary position embeddings (arXiv 2104.09864) with Llama 3.1's frequency scaling."""

from __future__ import annotations

import math

import torch

from titan_like.models.rope_scaling import RopeScaling


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
