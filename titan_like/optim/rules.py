"""The update rules of this package: each is a function from parameter groups to an optimizer.

Groups are as torch's optimizers take them, each with its ``weight_decay``. docs/optimizers.md shows how to add a rule.
"""

from __future__ import annotations

from typing import Any

import torch

from titan_like.config.schema import Optimizer as OptimizerSection


def adamw(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101)."""
    fused, foreach = section.implementation == "fused", section.implementation == "foreach"
    return torch.optim.AdamW(
        groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=fused or None, foreach=foreach or None
    )


def sgd(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """Plain gradient descent. Its fused kernel does not take sharded parameters."""
    return torch.optim.SGD(groups, lr=section.lr, foreach=section.implementation != "for-loop")
