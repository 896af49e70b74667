"""Float8 products in plain PyTorch: each factor is rounded to float8 and back, then multiplied as usual.

It shares no code with the trainer's products or with torchao.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from titan_like.config.schema import Float8
from titan_like.models.transformer import Transformer, replace_forward

TIPPED = 2.0**-3  # half the distance of neighbouring numbers of e5m2, which gradients become, relative to the smaller
_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def take_float8(model: Transformer, section: Float8) -> None:
    """Let the linear modules that ``section`` is for compute in float8. Changes the model in place."""
    for name, module in model.named_modules() if section.enable else ():
        parts = name.split(".")
        if parts[0] != "layers" or not isinstance(module, nn.Linear) or any(n % 16 for n in module.weight.shape):
            continue
        if not any(_begins_with(parts, pattern.split(".")) for pattern in section.filter):
            replace_forward(module, partial(_forward, module, section.recipe == "rowwise"))


def _begins_with(parts: list[str], patterns: list[str]) -> bool:
    """Whether the first parts of a name match all the patterns."""
    return len(patterns) <= len(parts) and all(map(fnmatchcase, parts, patterns))


def _forward(module: nn.Linear, by_rows: bool, x: torch.Tensor) -> torch.Tensor:
    product = _Product.apply(x.flatten(0, -2), module.weight, by_rows).unflatten(0, x.shape[:-1])
    return product if module.bias is None else product + module.bias


def rounded(factor: torch.Tensor, summed: int, by_rows: bool, kind: torch.dtype = _E4M3) -> torch.Tensor:
    """What float8 keeps of a matrix: float32, or float64 if that is its type; it has the same shape.

    ``by_rows`` scales each row or column along the dimension ``summed`` by itself, by a power of 2.
    """
    factor = factor if factor.dtype == torch.float64 else factor.float()
    largest = factor.abs().amax(summed, keepdim=True) if by_rows else factor.abs().max()
    limit = torch.finfo(kind).max
    scale = (limit / largest.double().clamp(min=1e-12)).float()
    scale = scale.log2().floor().exp2() if by_rows else scale
    return (factor * scale).clamp(-limit, limit).to(kind).to(factor.dtype) / scale


class _Product(torch.autograd.Function):
    """x [tokens, in] · weightᵀ [in, out], of float8 numbers in both passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, by_rows: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_rows = by_rows
        return (rounded(x, 1, by_rows) @ rounded(weight, 1, by_rows).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (x, weight), by_rows = ctx.saved_tensors, ctx.by_rows
        kind = _E4M3 if by_rows else _E5M2
        of_x = rounded(gradient, 1, by_rows, kind) @ rounded(weight, 0, by_rows)
        of_weight = rounded(gradient, 0, by_rows, kind).t() @ rounded(x, 0, by_rows)
        return of_x.to(x.dtype), of_weight.to(x.dtype), None
