"""Split backward passes: gradients of activations come first, gradients of weight matrices later.

Zero-bubble schedules (arXiv 2401.10241) fill idle time with the second part, because no other process waits for it. The
second part consists of the products of each linear layer's input and output gradient. Small gradients (of biases, norms
and embeddings) stay in the first part. Activations are recomputed only once, in the first part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.transformer import TiedOutput, Transformer
from titan_like.parallel.extend import extend
from titan_like.parallel.gradients import split_as


@dataclass(frozen=True)
class Product:
    """A deferred weight gradient: the layer's input and the gradient of its output, yet to be multiplied."""

    weight: torch.Tensor  # the parameter
    compute: Callable[[], torch.Tensor]  # returns gradientᵀ · x, [out here, in here]

    @torch.no_grad()
    def add(self) -> None:
        """Compute the product and add it to the weight's gradient."""
        weight = self.weight
        value = split_as(self.compute(), weight)
        # From torch 2.15 on, FSDP2 has set the dtype of the sum, to which it converts gradients itself, unit by unit.
        weight.grad_dtype = None
        weight.grad = value if weight.grad is None else weight.grad.add_(value)


class WeightGradients:
    """Collects the products that backward passes have deferred."""

    def __init__(self) -> None:
        self._products: list[Product] = []

    def defer(self, weight: torch.Tensor, compute: Callable[[], torch.Tensor]) -> None:
        """Store a product for later."""
        self._products.append(Product(weight, compute))

    def take(self) -> list[Product]:
        """Return and forget the products deferred since the last call."""
        products, self._products = self._products, []
        return products


def defer_weight_gradients(model: Transformer) -> WeightGradients:
    """Make backward passes through the model's linear layers defer the weights' gradients. Changes it in place.

    Apply it after tensor parallelism.
    """
    deferred = WeightGradients()
    for module in model.modules():
        if isinstance(module, nn.Linear | TiedOutput):
            with_own_gemms(module).deferred = deferred
    return deferred


class LinearGemms(nn.Module):
    """Extends linear layers and tied outputs whose GEMMs an axis computes in its own way."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    deferred: WeightGradients | None = None
    float8: Any = None  # a `titan_like.parallel.float8.Float8Product`

    def forward(self, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        """[..., in] → [..., out]. A tied output gets its ``table``, [out, in]."""
        if table is not None:
            return self.gemm(x, table, table, None)
        return self.gemm(x, self.weight, self.weight, self.bias)

    def dropped(self, x: torch.Tensor, rate: float) -> torch.Tensor:
        """Dropout of an adapter's input [..., in here], by one mask for all that multiply the same features."""
        return F.dropout(x, rate)

    def gemm(
        self, x: torch.Tensor, weight: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x · partᵀ + bias: [..., in here] → [..., out here]. ``part`` is what this process holds of ``weight``."""
        if self.float8 is not None:
            product = self.float8.linear(x, part, weight, self.deferred)
            return product if bias is None else product + bias
        if self.deferred is None or not weight.requires_grad:
            return F.linear(x, part, bias)
        return _LinearWithoutWeightGradient.apply(x, bias, part.detach(), weight, self.deferred)


def with_own_gemms(module: nn.Module) -> LinearGemms:
    """The module, extended by `LinearGemms` unless tensor parallelism has done so."""
    if not isinstance(module, LinearGemms):
        extend(module, LinearGemms)
    return module  # type: ignore[return-value]


class _LinearWithoutWeightGradient(torch.autograd.Function):
    """A linear layer whose backward pass computes only the gradients of x and bias, and defers the weight's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        part: torch.Tensor,
        weight: torch.Tensor,
        deferred: WeightGradients,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, part)
        ctx.weight, ctx.deferred = weight, deferred
        return F.linear(x, part, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, part = ctx.saved_tensors
        x = x.detach()  # with its graph, it would keep the stage's input and the gradient of that
        ctx.deferred.defer(ctx.weight, lambda: gradient.flatten(0, -2).t() @ x.flatten(0, -2))
        bias_gradient = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return gradient @ part, bias_gradient, None, None, None
