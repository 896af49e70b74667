"""A backward pass in two parts: gradients of activations first, of weight matrices when there is time.

Zero-bubble schedules (arXiv 2401.10241) fill idle time with the second part, which no other process waits for. Here it
is made of each linear layer's product of input and output gradient; what is small, biases and norms and lookups, stays
in the first part. Activations are recomputed once, in the first part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.models.transformer import TiedOutput, Transformer


@dataclass(frozen=True)
class Product:
    """A weight's gradient that is still to be multiplied out: its layer's input and its output's gradient."""

    weight: torch.Tensor  # the parameter
    x: torch.Tensor  # [..., input features here]
    gradient: torch.Tensor  # [..., output features here]

    @torch.no_grad()
    def add(self) -> None:
        """Add the product to the weight's gradient."""
        value = self.gradient.flatten(0, -2).t() @ self.x.flatten(0, -2)
        weight = self.weight
        summed_in = getattr(weight, "grad_dtype", None)  # from torch 2.15 on FSDP2 says so here
        value = value if summed_in is None else value.to(summed_in)
        if isinstance(weight.data, DTensor):
            placements, shape, stride = weight.data.placements, weight.shape, weight.stride()
            value = DTensor.from_local(
                value, weight.data.device_mesh, placements, run_check=False, shape=shape, stride=stride
            )
        weight.grad = value if weight.grad is None else weight.grad.add_(value)


class WeightGradients:
    """The products that backward passes have put off."""

    def __init__(self) -> None:
        self._products: list[Product] = []

    def defer(self, weight: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor) -> None:
        """Note a product for later."""
        self._products.append(Product(weight, x, gradient))

    def take(self) -> list[Product]:
        """The products noted since the last call."""
        products, self._products = self._products, []
        return products


def defer_weight_gradients(model: Transformer) -> WeightGradients:
    """From now on backward passes through the model's linear layers leave out the weights' gradients.

    Comes after tensor parallelism, whose layers ask `linear` for their products too.
    """
    deferred = WeightGradients()
    for module in model.modules():
        if isinstance(module, nn.Linear | TiedOutput):
            module.deferred = deferred  # type: ignore[assignment]
            if "forward" not in vars(module):  # tensor parallelism has one of its own
                setattr(module, "forward", partial(_forward, module))  # noqa: B010
    return deferred


def _forward(module: nn.Linear | TiedOutput, x: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
    if isinstance(module, nn.Linear):
        return linear(module, x, module.weight, module.weight, module.bias)
    assert table is not None
    return linear(module, x, table, table, None)


def linear(
    module: nn.Module, x: torch.Tensor, weight: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x · partᵀ + bias, where ``part`` is what this process holds of ``weight``, itself if that is whole."""
    deferred = getattr(module, "deferred", None)
    if deferred is None:
        return F.linear(x, part, bias)
    return _LinearWithoutWeightGradient.apply(x, bias, part.detach(), weight, deferred)


class _LinearWithoutWeightGradient(torch.autograd.Function):
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
        ctx.deferred.defer(ctx.weight, x, gradient)
        bias_gradient = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return gradient @ part, bias_gradient, None, None, None
