"""Linear layers by definition, with adapters and without."""

from collections.abc import Callable, Mapping

import torch

Weights = Mapping[str, torch.Tensor]
Linear = Callable[[str, torch.Tensor], torch.Tensor]  # the linear layer of this name, applied


def lora_linear(weights: Weights, scale: float, groups: Mapping[str, list[int]], dropped: Weights) -> Linear:
    """Linear layers with adapters: y = W x + scale · B A (x · mask), arXiv 2106.09685.

    ``groups`` has, for a fused projection, the rows in turn of its matrices (q, k, v), which have an A and a B each;
    ``dropped`` the masks, with their factor 1 / (1 - p), of the inputs that dropout changes.
    """

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        result = linear_of(weights, name, x)
        if f"{name}.lora_b" not in weights:
            return result
        down, up = weights[f"{name}.lora_a"], weights[f"{name}.lora_b"]
        rows = groups.get(name, [len(up)])
        rank, x = len(down) // len(rows), x * dropped.get(name, 1.0)
        owner = [matrix for matrix, count in enumerate(rows) for _ in range(count)]  # of each row of a group
        parts = []
        for row in range(len(up)):
            first = rank * owner[row % len(owner)]
            parts.append((x @ down[first : first + rank].t()) @ up[row])
        return result + scale * torch.stack(parts, -1)

    return linear


def linear_of(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """x · Wᵀ + b, if there is a b."""
    y = x @ weights[f"{name}.weight"].t()
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y
