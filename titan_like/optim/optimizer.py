"""The update rule over a model's parameters."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from titan_like.config.schema import Optimizer as OptimizerSection


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
