"""Bugs in low-rank adapters."""

from typing import Any

import torch

from tests.distributed.mutations import bug
from titan_like.parallel import tensor_styles
from titan_like.parallel.lora import AdaptedLinear, Adapter
from titan_like.train import trainer


@bug(Adapter, "up")
def adapters_scaled_twice(original: Any, self: Adapter, low: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An adapter's output is multiplied by alpha / rank twice."""
    return original(self, low * self.scale, b)


@bug(trainer, "partial_parameters")
def whole_halves_not_summed(original: Any, model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The gradients of the halves of adapters that are not split stay each tensor rank's own."""
    adapters = {parameter for name, parameter in model.named_parameters() if name.endswith(("lora_a", "lora_b"))}
    return [parameter for parameter in original(model) if parameter not in adapters]


@bug(AdaptedLinear, "gemm")
def adapters_of_rows_added_by_each(original: Any, self: AdaptedLinear, x: torch.Tensor, *others: Any) -> torch.Tensor:
    """Every tensor rank adds the whole output of an adapter whose base is split by its columns."""
    result, base = original(self, x, *others), super(AdaptedLinear, self).gemm(x, *others)
    return result + (result - base) if isinstance(self, tensor_styles.RowLinear) else result
