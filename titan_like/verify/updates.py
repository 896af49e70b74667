"""Check that the optimizer applies to the weights what its gradients, learning rate and weight decay ask for.

The product's optimizer on one process repeats each update in float64 from the whole gradients that the trainer's
received. Rounding in the gradients therefore plays no part: a wrong rate, decay or type shows in half precision as
clearly as in float64, where weights are compared instead.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.optim.optimizer import build_optimizer
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import SINGLE, Key, Report, Row, distance
from titan_like.verify.places import local
from titan_like.verify.runs import EPS

_LOST = 1e-4  # by float32 in moments and bias corrections, as a share of the learning rate or of the update
_WEIGHT_ROUNDINGS = 4  # of a weight, in units of its type


class UpdateCheck:
    """Repeats the updates of a trainer of a new run."""

    def __init__(self, trainer: Trainer, report: Report) -> None:
        self.trainer, self.report = trainer, report
        self.clipped: dict[str, torch.Tensor] = {}  # parts of the gradients that the optimizer received
        self.parameters = [(name, p, nn.Parameter(_whole(p))) for name, p in trainer.model.named_parameters()]
        self.optimizer = build_optimizer([(name, copy) for name, _, copy in self.parameters], trainer.config.optimizer)
        trainer.optimizer.register_step_pre_hook(self._keep_gradients)

    def _keep_gradients(self, *hooked: Any) -> None:
        for name, parameter, copy in self.parameters:
            if parameter.grad is not None:
                copy.grad, self.clipped[name] = _whole(parameter.grad), local(parameter.grad).double()

    @torch.no_grad()
    def check(
        self, step: int, is_good: bool, lr: float, grad_norm: float, gradients: list[tuple[str, torch.Tensor]]
    ) -> None:
        """Check the step just taken, at learning rate ``lr``: a good one updates every parameter, a bad one none.

        ``gradients`` are those before clipping. Clipping must go by ``grad_norm``, the norm that the step reports.
        """
        unclipped, before = dict(gradients), [copy.detach().clone() for _, _, copy in self.parameters]
        if is_good:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        max_norm = self.trainer.config.training.max_norm
        factor = min(1.0, max_norm / (grad_norm + 1e-6)) if max_norm else 1.0
        for (name, parameter, copy), old in zip(self.parameters, before, strict=True):
            new = _whole(parameter)
            if not is_good:
                self.report.exact(Key(step, Row.SKIPPED, name), None if torch.equal(new, old) else "it is updated")
            elif name not in self.clipped:
                self.report.exact(Key(step, Row.UPDATE, name), "it is not updated")
            elif name in unclipped:  # else it is reported as missing
                wanted = local(unclipped[name]).double() * factor
                self._check_clipping(Key(step, Row.CLIPPED, name), self.clipped[name], wanted)
                self._check_update(Key(step, Row.UPDATE, name), lr, old, new, copy)
                self._check_types(Key(step, Row.TYPES, name), parameter, unclipped[name].dtype)
            copy.copy_(new)  # the next update starts from the trainer's own weights
            copy.grad = None
        self.clipped = {}

    def _check_clipping(self, key: Key, found: torch.Tensor, expected: torch.Tensor) -> None:
        size = expected.norm().item() or 1.0
        # Elements below the smallest normal number lose digits when they are divided by a loss scale.
        allowed = 8 * EPS[SINGLE] + math.sqrt(expected.numel()) * 1e-37 / size
        self.report.add(key, distance(found, expected) / size, allowed)

    def _check_update(
        self, key: Key, lr: float, old: torch.Tensor, found: torch.Tensor, expected: torch.Tensor
    ) -> None:
        rounding = _WEIGHT_ROUNDINGS * EPS[SINGLE] * old.norm().item()
        lost = _LOST * max(lr * math.sqrt(old.numel()), distance(expected, old))
        size = max(distance(expected, old), rounding, 1e-30)
        self.report.add(key, distance(found, expected) / size, (rounding + lost) / size)

    def _check_types(self, key: Key, parameter: nn.Parameter, of_gradient: torch.dtype) -> None:
        state = self.trainer.optimizer.state[parameter].values()
        types = {parameter.dtype, of_gradient} | {value.dtype for value in state if value.ndim}
        types |= {value.dtype for value in state if value.dtype in (torch.bfloat16, torch.float16)}  # a count of steps
        message = f"{' and '.join(sorted(map(str, types)))}, not torch.float32"
        self.report.exact(key, None if types == {torch.float32} else message)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A float64 copy of a whole tensor. All ranks that share it call this together."""
    return local(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).double()
