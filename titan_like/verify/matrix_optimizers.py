"""Adafactor and Muon in plain words, on whole tensors in one process. They share no code with the trainer's."""

from __future__ import annotations

import math
from typing import Any

import torch

from titan_like.config.schema import Optimizer as OptimizerSection


class PlainAdafactor(torch.optim.Optimizer):
    """Algorithm 4 (matrices) and 5 (vectors) of arXiv 1804.04235, or the same with a rate that is given."""

    def __init__(self, groups: list[dict[str, Any]], section: OptimizerSection) -> None:
        super().__init__(groups, {"lr": section.lr})
        self.section = section

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, self.state[weight], group)

    def _update(self, weight: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
        section, gradient = self.section, weight.grad
        assert gradient is not None
        state["step"] = state.get("step", torch.zeros(())) + 1
        t = state["step"].item()
        squares, beta2 = gradient**2 + 1e-30, 1 - t**-section.decay_rate
        if weight.ndim == 2:
            row = average(state, "exp_avg_sq_row", squares.mean(dim=1), beta2)
            column = average(state, "exp_avg_sq_col", squares.mean(dim=0), beta2)
            second = torch.outer(row / row.mean(), column)
        else:
            second = average(state, "exp_avg_sq", squares, beta2)
        update = gradient / second.sqrt()
        update = update / max(1.0, root_mean_square(update) / section.clip_threshold)
        rate = group["lr"] / section.lr * min(1e-2, 1 / math.sqrt(t)) if section.relative_step else group["lr"]
        if section.scale_parameter:
            rate *= max(1e-3, root_mean_square(weight))
        update = rate * update
        if section.beta1 is not None:
            update = average(state, "exp_avg", update, section.beta1)
        weight.sub_(rate * group["weight_decay"] * weight + update)


def average(state: dict[str, torch.Tensor], key: str, new: torch.Tensor, decay: float) -> torch.Tensor:
    """Update a running mean, which starts at 0."""
    state[key] = decay * state.get(key, torch.zeros_like(new)) + (1 - decay) * new
    return state[key]


def root_mean_square(tensor: torch.Tensor) -> float:
    """The root of the mean of all elements' squares."""
    return tensor.square().mean().sqrt().item()


class PlainMuon(torch.optim.AdamW):
    """torch's AdamW, except for matrices inside layers, which follow their orthogonalised momentum."""

    def __init__(self, groups: list[dict[str, Any]], section: OptimizerSection) -> None:
        super().__init__(groups, lr=section.lr, betas=section.betas, eps=section.eps, foreach=False)
        self.section = section

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        gradients = {}
        for group in self.param_groups:
            for name, weight in zip(group["names"], group["params"], strict=True):
                if name.startswith("layers.") and weight.ndim == 2 and weight.grad is not None:
                    gradients[weight] = weight.grad
                    self._update(weight, weight.grad, self.state[weight], group)
                    weight.grad = None  # so that AdamW leaves it out
        super().step()
        for weight, gradient in gradients.items():
            weight.grad = gradient

    def _update(
        self, weight: torch.Tensor, gradient: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
    ) -> None:
        section, (rows, columns) = self.section, weight.shape
        beta = section.momentum
        momentum = average(state, "momentum_buffer", gradient, beta)
        x = beta * momentum + (1 - beta) * gradient  # Nesterov
        x = x / max(x.norm().item(), 1e-7)
        for _ in range(section.newton_schulz_steps):
            squared = x @ x.T if rows <= columns else x.T @ x
            polynomial = -4.7750 * squared + 2.0315 * squared @ squared
            x = 3.4445 * x + (polynomial @ x if rows <= columns else x @ polynomial)
        rate = group["lr"] * (section.matrix_lr or section.lr) / section.lr
        if section.adjust_lr == "match_rms_adamw":
            factor = 0.2 * math.sqrt(max(rows, columns))
        else:
            factor = math.sqrt(max(1, rows / columns))
        weight.sub_(rate * group["weight_decay"] * weight + rate * factor * x)
