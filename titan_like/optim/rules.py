"""The built-in update rules. Each is a function from parameter groups to an optimizer.

The groups have the form that torch's optimizers take, each with its ``weight_decay``. docs/optimizers.md shows how to
add a rule.
"""

from __future__ import annotations

from typing import Any

import torch

from titan_like.config.schema import Optimizer as OptimizerSection


def adamw(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) with torch's fused, foreach or for-loop implementation."""
    fused, foreach = section.implementation == "fused", section.implementation == "foreach"
    return torch.optim.AdamW(
        groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=fused or None, foreach=foreach or None
    )


def sgd(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """Plain gradient descent. It never uses torch's fused kernel, which does not take sharded parameters."""
    return torch.optim.SGD(groups, lr=section.lr, foreach=section.implementation != "for-loop")
