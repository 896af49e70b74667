"""Whether the optimizer does to the weights what its gradients, the learning rate and the weight decay ask for.

The reference's optimizer repeats each update in float64 from the gradients that the trainer's was given on this very
process, so that rounding in the gradients plays no part: a wrong rate, decay or type shows in half types as in float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from titan_like.train.trainer import Trainer
from titan_like.verify.compare import SINGLE, Key, Report, Row, distance
from titan_like.verify.places import local
from titan_like.verify.reference import EPS, build_optimizer, clip_factor, learning_rate, norm, set_learning_rate

# Of the learning rate: what float32 may lose of AdamW's moments and of what their bias is divided by.
_LOST = {torch.float32: 1e-4, torch.float64: 1e-11}
_WEIGHT_ROUNDINGS = 4  # of a weight, in units of its type


class UpdateCheck:
    """Repeats a trainer's updates, from the state that its optimizer has when this is made."""

    def __init__(self, trainer: Trainer, report: Report) -> None:
        self.trainer, self.report = trainer, report
        self.master = torch.promote_types(getattr(torch, trainer.config.training.dtype), torch.float32)
        self.parameters = list(trainer.model.named_parameters())
        self.copies = [nn.Parameter(_double(parameter)) for _, parameter in self.parameters]
        self.optimizer = build_optimizer(self.copies, trainer.config)
        for (_, parameter), copy in zip(self.parameters, self.copies, strict=True):
            for what, value in trainer.optimizer.state.get(parameter, {}).items():  # of a run that is resumed
                self.optimizer.state[copy][what] = value.cpu().clone() if what == "step" else _double(value)
        trainer.optimizer.register_step_pre_hook(self._keep_gradients)

    def _keep_gradients(self, *hooked: Any) -> None:
        """The optimizer begins its work: repeat it on the gradients that it has."""
        for (_, parameter), copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = None if parameter.grad is None else _double(parameter.grad)

    def begin(self) -> None:
        """A step begins."""
        for (_, parameter), copy in zip(self.parameters, self.copies, strict=True):
            copy.data, copy.grad = _double(parameter), None

    @torch.no_grad()
    def end(self, step: int, is_good: bool, grad_norm: float, gradients: list[tuple[str, torch.Tensor]]) -> None:
        """A step has ended: good ones update every parameter, others none. Clipping must go by the norm reported."""
        config, unclipped = self.trainer.config, iter(gradients)
        before = [copy.detach().clone() for copy in self.copies]
        if is_good:
            set_learning_rate(self.optimizer, config, step)
            self.optimizer.step()
        for (name, parameter), copy, old in zip(self.parameters, self.copies, before, strict=True):
            key, new = Key(step, Row.UPDATE, name), _double(parameter)
            if not is_good:
                self.report.exact(Key(step, Row.SKIPPED, name), None if torch.equal(new, old) else "it is updated")
                continue
            self.report.exact(key, "it is not updated" if copy.grad is None else None)
            if copy.grad is None:
                continue
            gradient = _double(next(unclipped)[1]) * clip_factor(config.training.max_norm, grad_norm)
            size = norm(gradient) or 1.0
            # Elements below the smallest normal number lose digits when they are divided by a scale.
            allowed = 8 * EPS[SINGLE] + math.sqrt(gradient.numel()) * 1e-37 / size
            self.report.add(Key(step, Row.CLIPPED, name), distance(copy.grad, gradient) / size, allowed)
            rounding = _WEIGHT_ROUNDINGS * torch.finfo(self.master).eps * norm(old)
            rate = learning_rate(config, step, self.trainer.run.total_steps)
            lost = _LOST[self.master] * rate * math.sqrt(copy.numel())
            size = max(distance(copy, old), rounding, 1e-30)
            self.report.add(key, distance(new, copy) / size, (rounding + lost) / size)
            state = self.trainer.optimizer.state[parameter]
            types = sorted(
                {str(value.dtype) for what, value in state.items() if what != "step"} | {str(parameter.dtype)}
            )
            told = None if types == [str(self.master)] else f"{' and '.join(types)}, not {self.master}"
            self.report.exact(Key(step, Row.TYPES, name), told)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in float64 of this process's part."""
    return local(tensor).double()
