"""The update rule over a model's parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from titan_like.config.schema import Optimizer as OptimizerSection
from titan_like.optim.grad_norm import local_gradients
from titan_like.torch_private import multiply_all_


def build_optimizer(parameters: Iterable[torch.nn.Parameter], section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW or plain SGD; weight decay applies to matrices and embeddings, not to biases and norms."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    fused, foreach = section.implementation == "fused", section.implementation == "foreach"
    if section.name == "sgd":  # its fused kernel does not take sharded parameters
        return torch.optim.SGD(groups, lr=section.lr, foreach=fused or foreach)
    return torch.optim.AdamW(
        groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=fused or None, foreach=foreach or None
    )


@torch.no_grad()
def update(optimizer: torch.optim.Optimizer, lr: float, factor: torch.Tensor | None, skip: torch.Tensor) -> None:
    """One update at a learning rate, unless ``skip``, a bool scalar on the device; gradients are spent afterwards.

    Gradients are multiplied by ``factor``, a float64 scalar, first. Fused kernels look at ``skip`` themselves. Others
    cannot, and the host waits for it.
    """
    if factor is not None:
        gradients = local_gradients(p for group in optimizer.param_groups for p in group["params"])
        multiply_all_(gradients, factor.to(gradients[0].dtype))
    for group in optimizer.param_groups:
        group["lr"] = lr
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]  # as torch.amp.GradScaler sets it
        optimizer.step()
    elif not skip:
        optimizer.step()
