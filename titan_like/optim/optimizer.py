"""Building an optimizer and applying its updates without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from titan_like.config.entry_points import load_entry
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Optimizer as OptimizerSection
from titan_like.optim.grad_norm import Gradients
from titan_like.optim.registry import find_rule


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], section: OptimizerSection
) -> torch.optim.Optimizer:
    """Build the optimizer that `optimizer.name` chooses. Weight decay applies only to matrices and embeddings.

    Raises:
        ConfigError: there is no such optimizer, or its function does not return one.
    """
    groups: list[dict[str, Any]] = [
        {"params": [], "names": [], "weight_decay": section.weight_decay},
        {"params": [], "names": [], "weight_decay": 0.0},
    ]
    for name, parameter in named_parameters:
        group = groups[parameter.ndim < 2]
        group["params"].append(parameter)
        group["names"].append(name)
    rule = find_rule(section)
    optimizer = load_entry("optimizer.name", rule)(groups, section)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "optimizer.name", section.name, f"it returns a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    return optimizer


@torch.no_grad()
def update(
    optimizer: torch.optim.Optimizer,
    gradients: Gradients,
    lr: float,
    factor: torch.Tensor | None,
    skip: torch.Tensor,
) -> None:
    """Apply one update at learning rate ``lr``, unless ``skip``. The gradients cannot be used afterwards.

    ``skip`` is a bool scalar on the device. Fused kernels read it themselves; for other implementations the host has to
    wait for it. ``factor``, a float64 scalar, multiplies the gradients first.
    """
    if factor is not None:
        gradients.multiply(factor)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]  # as torch.amp.GradScaler sets it
        optimizer.step()
    elif not skip:
        optimizer.step()
