"""A linear layer in float8 by definition: one expert and one microbatch, quantised by themselves."""

import torch

LARGEST = 448.0  # the largest number of e4m3


def quantised(matrix: torch.Tensor, recipe: str, dim: int) -> torch.Tensor:
    """What float8 keeps of a factor of a product that sums over ``dim``."""
    if matrix.numel() == 0:
        return matrix
    amax = matrix.abs().max() if recipe == "tensorwise" else matrix.abs().amax(dim, keepdim=True)
    scale = (LARGEST / amax.double().clamp(min=1e-12)).float()
    if recipe == "rowwise":  # the power of 2 below
        scale = torch.ldexp(torch.ones_like(scale), scale.frexp().exponent - 1)
    return (matrix * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(matrix.dtype) / scale


class Float8Linear(torch.autograd.Function):
    """x · weightᵀ, [n, in] and [out, in] → [n, out], of which all three products are of float8 factors."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, recipe: str) -> torch.Tensor:
        ctx.recipe = recipe
        ctx.save_for_backward(x, weight)
        return quantised(x, recipe, 1) @ quantised(weight, recipe, 1).t()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_row, by_token = (quantised(gradient, ctx.recipe, dim) for dim in (1, 0))
        return by_row @ quantised(weight, ctx.recipe, 0), by_token.t() @ quantised(x, ctx.recipe, 0), None
