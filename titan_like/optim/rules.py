"""The built-in update rules. Each is a function from parameter groups to an optimizer.

The groups have the form that torch's optimizers take, each with its ``weight_decay`` and the ``names`` of its
parameters. docs/optimizers.md shows how to add a rule.
"""

from __future__ import annotations

from typing import Any

import torch

from titan_like.config.schema import Optimizer as OptimizerSection
from titan_like.optim.adafactor import Adafactor
from titan_like.optim.fused_adamw import FusedAdamW
from titan_like.optim.muon import Muon
from titan_like.optim.shards import is_table


def adamw(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) with torch's fused, foreach or for-loop implementation."""
    fused, foreach = section.implementation == "fused", section.implementation == "foreach"
    kind = FusedAdamW if fused else torch.optim.AdamW
    return kind(groups, section.lr, section.betas, section.eps, fused=fused or None, foreach=foreach or None)


def sgd(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """Plain gradient descent. It never uses torch's fused kernel, which does not take sharded parameters."""
    return torch.optim.SGD(groups, lr=section.lr, foreach=section.implementation != "for-loop")


def adafactor(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """Adafactor (arXiv 1804.04235)."""
    return Adafactor(
        groups,
        section.lr,
        relative_step=section.relative_step,
        scale_parameter=section.scale_parameter,
        clip_threshold=section.clip_threshold,
        decay_rate=section.decay_rate,
        beta1=section.beta1,
    )


def muon(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """Muon for the matrices inside layers, and AdamW for vectors, embedding tables and the output matrix."""
    split = []
    for group in groups:
        for orthogonal in (True, False):
            named = zip(group["names"], group["params"], strict=True)
            members = [(name, p) for name, p in named if (p.ndim == 2 and not is_table(name, p)) == orthogonal]
            names, parameters = [name for name, _ in members], [parameter for _, parameter in members]
            split.append({**group, "params": parameters, "names": names, "orthogonal": orthogonal})
    dtype = section.newton_schulz_dtype
    return Muon(
        split,
        section.lr,
        betas=section.betas,
        eps=section.eps,
        momentum=section.momentum,
        matrix_lr_ratio=1.0 if section.matrix_lr is None else section.matrix_lr / section.lr,
        adjust_lr=section.adjust_lr,
        newton_schulz_steps=section.newton_schulz_steps,
        newton_schulz_dtype=None if dtype is None else getattr(torch, dtype),
    )
