"""Norms, among them those that multiply by 1 + weight, as Gemma's do."""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

Norm = nn.RMSNorm | nn.LayerNorm


class OffsetNorm:
    """Base of norms that multiply by 1 + weight."""

    initial_vector = 0.0  # what the weight begins as

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result have the same shape and dtype."""
        norm: Any = self
        return normalise(norm, x, norm.weight, getattr(norm, "bias", None))


class OffsetRMSNorm(OffsetNorm, nn.RMSNorm):
    """RMSNorm (arXiv 1910.07467) times 1 + weight."""


class OffsetLayerNorm(OffsetNorm, nn.LayerNorm):
    """LayerNorm (arXiv 1607.06450) times 1 + weight, plus a bias."""


class GroupRMSNorm(nn.Module):
    """RMSNorm over each group of consecutive elements, with a weight for each element."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = width // groups, eps
        self.weight = nn.Parameter(torch.ones(width))

    def weights(self) -> tuple[torch.Tensor]:
        """The weight of the groups that this process computes."""
        return (self.weight,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] → the same shape."""
        values = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, self.size))
        normed = values * (values.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (normed.flatten(-2) * self.weights()[0]).to(x.dtype)


class NormOfHeads(nn.Module):
    """RMSNorm or LayerNorm of each head, with a weight for each head and no bias: [heads · head_dim]."""

    def __init__(self, head_dim: int, is_centered: bool, width: int, eps: float) -> None:
        super().__init__()
        self.head_dim, self.is_centered, self.eps = head_dim, is_centered, eps
        self.weight = nn.Parameter(torch.empty(width))

    def weights(self) -> torch.Tensor:
        """The weight of each head, [heads, head_dim]."""
        return self.weight.view(-1, self.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result are [..., heads, head_dim]."""
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        norm: Any = F.layer_norm if self.is_centered else F.rms_norm
        return (norm(exact, (self.head_dim,), eps=self.eps) * self.weights()).to(x.dtype)


Kind = Literal["rms", "layer", "layer_no_bias", "layer_no_weight"]


def make_norm(width: int, eps: float, kind: Kind = "rms", offset: bool = False) -> Norm:
    """A norm over ``width`` elements. A LayerNorm without a weight has no bias either, and no offset."""
    if kind == "rms":
        return OffsetRMSNorm(width, eps) if offset else nn.RMSNorm(width, eps)
    if kind == "layer_no_weight":
        return nn.LayerNorm(width, eps, elementwise_affine=False)
    return (OffsetLayerNorm if offset else nn.LayerNorm)(width, eps, bias=kind == "layer")


def factor_of(norm: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """The factor of a norm, given its weight or a shard of it; with an offset at least float32."""
    is_offset = isinstance(norm, OffsetNorm)
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32)) if is_offset else weight


def normalise(
    norm: Norm, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The norm of x with another weight and bias, such as shards; with an offset in float32 at least."""
    factor, dtype = None if weight is None else factor_of(norm, weight), x.dtype
    if isinstance(norm, OffsetNorm) and factor is not None:
        x, bias = x.to(torch.promote_types(dtype, factor.dtype)), None if bias is None else bias.to(factor.dtype)
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, factor, bias, norm.eps).to(dtype)
    return F.rms_norm(x, norm.normalized_shape, factor, norm.eps).to(dtype)
