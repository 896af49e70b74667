"""Check that the optimizer applies to the weights what its gradients, learning rate and weight decay ask for.

The product's optimizer on one process repeats each update in float64 from the gradients that the
trainer's received: on whole parameters, gathered from the processes that share them, if the rule may look at more
than an element. Rounding in the gradients therefore plays no part: a wrong rate, decay or type shows in half
precision as clearly as in float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.config.schema import Optimizer
from titan_like.optim.optimizer import build_optimizer
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import SINGLE, Key, Report, Row, distance
from titan_like.verify.places import local
from titan_like.verify.runs import EPS

# What float32 may lose in moments and bias corrections, as a share of the learning rate or of the update.
_LOST = {torch.float32: 1e-4, torch.float64: 1e-11}
_WEIGHT_ROUNDINGS = 4  # of a weight, in units of its type


class UpdateCheck:
    """Repeats a trainer's updates, starting from its weights and optimizer state at construction."""

    def __init__(self, trainer: Trainer, report: Report) -> None:
        self.trainer, self.report = trainer, report
        self.master = torch.promote_types(getattr(torch, trainer.config.training.dtype), torch.float32)
        self.is_gathered = not is_elementwise(trainer.config.optimizer)
        self.parameters = [(name, p, nn.Parameter(self._double(p))) for name, p in trainer.model.named_parameters()]
        self.optimizer = build_optimizer([(name, copy) for name, _, copy in self.parameters], trainer.config.optimizer)
        for _, parameter, copy in self.parameters:
            for what, value in trainer.optimizer.state.get(parameter, {}).items():  # of a resumed run
                self.optimizer.state[copy][what] = value.clone() if what == "step" else self._double(value)
        trainer.optimizer.register_step_pre_hook(self._keep_gradients)

    def _keep_gradients(self, *hooked: Any) -> None:
        for _, parameter, copy in self.parameters:
            copy.grad = None if parameter.grad is None else self._double(parameter.grad)

    @torch.no_grad()
    def check(
        self, step: int, is_good: bool, lr: float, grad_norm: float, gradients: list[tuple[str, torch.Tensor]]
    ) -> None:
        """Check the step just taken, at learning rate ``lr``: a good one updates every parameter, a bad one none.

        ``gradients`` are those before clipping. Clipping must go by ``grad_norm``, the norm that the step reports.
        """
        unclipped, before = iter(gradients), [copy.detach().clone() for _, _, copy in self.parameters]
        clipped = [None if copy.grad is None else copy.grad.clone() for _, _, copy in self.parameters]
        if is_good:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        max_norm = self.trainer.config.training.max_norm
        factor = min(1.0, max_norm / (grad_norm + 1e-6)) if max_norm else 1.0
        for (name, parameter, copy), old, received in zip(self.parameters, before, clipped, strict=True):
            new = self._double(parameter)
            if not is_good:
                self.report.exact(Key(step, Row.SKIPPED, name), None if torch.equal(new, old) else "it is updated")
            elif received is None:
                self.report.exact(Key(step, Row.UPDATE, name), "it is not updated")
            elif (held := next(unclipped, None)) is None:
                self.report.exact(Key(step, Row.MISSING, name), "it has no gradient")
            else:
                gradient = held[1]
                self._check_clipping(Key(step, Row.CLIPPED, name), received, self._double(gradient) * factor)
                self._check_update(Key(step, Row.UPDATE, name), lr, old, new, copy)
                self._check_types(Key(step, Row.TYPES, name), parameter, gradient.dtype)
            copy.copy_(new)  # the next update starts from the trainer's own weights
            copy.grad = None

    def _check_clipping(self, key: Key, found: torch.Tensor, expected: torch.Tensor) -> None:
        size = expected.norm().item() or 1.0
        # Elements below the smallest normal number lose digits when they are divided by a loss scale.
        allowed = 8 * EPS[SINGLE] + math.sqrt(expected.numel()) * 1e-37 / size
        self.report.add(key, distance(found, expected) / size, allowed)

    def _check_update(
        self, key: Key, lr: float, old: torch.Tensor, found: torch.Tensor, expected: torch.Tensor
    ) -> None:
        rounding = _WEIGHT_ROUNDINGS * torch.finfo(self.master).eps * old.norm().item()
        lost = _LOST[self.master] * max(lr * math.sqrt(old.numel()), distance(expected, old))
        size = max(distance(expected, old), rounding, 1e-30)
        self.report.add(key, distance(found, expected) / size, (rounding + lost) / size)

    def _check_types(self, key: Key, parameter: nn.Parameter, of_gradient: torch.dtype) -> None:
        state = self.trainer.optimizer.state[parameter].values()
        types = {parameter.dtype, of_gradient} | {value.dtype for value in state if value.ndim}
        types |= {value.dtype for value in state if value.dtype in (torch.bfloat16, torch.float16)}  # a count of steps
        told = f"{' and '.join(sorted(map(str, types)))}, not {self.master}"
        self.report.exact(key, None if types == {self.master} else told)

    def _double(self, tensor: torch.Tensor) -> torch.Tensor:
        """A float64 copy of the part of a tensor that this process holds, or of the whole tensor."""
        return local(tensor.full_tensor() if self.is_gathered and isinstance(tensor, DTensor) else tensor).double()


def is_elementwise(section: Optimizer) -> bool:
    """Whether a rule's update of an element depends on that element alone: it treats a matrix and its halves alike."""
    weights, gradients = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def updated(parts: int) -> torch.Tensor:
        halves = [nn.Parameter(half.clone()) for half in weights.chunk(parts)]
        for half, gradient in zip(halves, gradients.chunk(parts), strict=True):
            half.grad = gradient.clone()
        build_optimizer([(f"{number}.weight", half) for number, half in enumerate(halves)], section).step()
        return torch.cat([half.detach() for half in halves])

    return torch.allclose(updated(1), updated(2), rtol=1e-12, atol=0.0)
