"""Whether the optimizer does to the weights what its gradients, the learning rate and the weight decay ask for.

The rule is computed again in float64 from the gradients that the optimizer was given on this very process, so that
rounding in the gradients plays no part: a rate, decay or type that is wrong shows in half types as in float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from titan_like.models.layers.init import local_part
from titan_like.train.trainer import Trainer
from titan_like.verify import record
from titan_like.verify.record import Key, Measure, Seen
from titan_like.verify.reference import EPS, learning_rate

# Of the learning rate: what float32 may lose of AdamW's moments and of what their bias is divided by.
_LOST = {torch.float32: 1e-4, torch.float64: 1e-11}
_WEIGHT_ROUNDINGS = 4  # of a weight, in units of its type

Moments = tuple[torch.Tensor, torch.Tensor, int]  # first and second moment, updates so far


class UpdateWatch:
    """Hooks into a trainer's optimizer and compares every update. Its trainer is not yet trained."""

    def __init__(self, trainer: Trainer, seen: Seen) -> None:
        self.trainer, self.seen = trainer, seen
        self.updated = False  # whether the optimizer has worked since `begin`
        self.master = torch.promote_types(getattr(torch, trainer.config.training.dtype), torch.float32)
        self._unclipped: dict[int, torch.Tensor] = {}
        self._moments: dict[int, Moments] = {}
        self._expected: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}
        trainer.optimizer.register_step_pre_hook(self._before_step)
        trainer.optimizer.register_step_post_hook(self._after_step)

    def begin(self) -> None:
        """A step begins."""
        self.updated = False

    def unclipped(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Note this process's part of a gradient before clipping, without the loss scale."""
        self._unclipped[id(parameter)] = gradient

    def clipped_at(self, grad_norm: float) -> None:
        """Note the norm that gradients are clipped by, without the loss scale."""
        self.norm = grad_norm
        most = self.trainer.config.training.max_norm
        self._factor = min(1.0, most / (grad_norm + 1e-6)) if most else 1.0

    def end(self, step: int, is_good: bool, grad_norm: float) -> None:
        """A step has ended: good ones update every parameter, others none. Clipping must go by the norm reported."""
        if is_good and self.updated:
            told = f"it goes by a norm of {self.norm:.9g}, and {grad_norm:.9g} is reported"
            self.seen.wrong(Key(step, record.CLIPPED), None if self.norm == grad_norm else told)
        for name, _ in self.trainer.model.named_parameters():
            problem = None if self.updated == is_good else "it is not updated" if is_good else "it is updated"
            self.seen.wrong(Key(step, record.UPDATE if is_good else record.SKIPPED, name), problem)

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.updated = True
        config = self.trainer.config
        rate = learning_rate(config, self.trainer.step + 1, self.trainer.run.total_steps)
        for name, parameter in self.trainer.model.named_parameters():
            if parameter.grad is None:
                continue
            weight = local_part(parameter)[0].double().clone()
            gradient = local_part(parameter.grad)[0].double()
            self._compare_clipping(name, parameter, gradient)
            self._before[id(parameter)] = weight
            decay = config.optimizer.weight_decay if parameter.ndim > 1 else 0.0
            if config.optimizer.name == "sgd":
                self._expected[id(parameter)] = weight - rate * (gradient + decay * weight)
                continue
            first, second, updates = self._moments.get(id(parameter)) or known_moments(optimizer, parameter)
            beta1, beta2 = config.optimizer.betas
            first = beta1 * first + (1 - beta1) * gradient
            second = beta2 * second + (1 - beta2) * gradient**2
            updates += 1
            self._moments[id(parameter)] = first, second, updates
            size = (second / (1 - beta2**updates)).sqrt() + config.optimizer.eps
            step = first / (1 - beta1**updates) / size
            self._expected[id(parameter)] = weight * (1 - rate * decay) - rate * step

    def _compare_clipping(self, name: str, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        wanted = self._unclipped[id(parameter)].double() * self._factor
        size = wanted.norm().item()
        difference = (gradient - wanted).norm().item()
        # Elements below the smallest normal number lose digits when they are divided by a scale.
        allowed = 8 * EPS[record.SINGLE] + math.sqrt(wanted.numel()) * 1e-37 / (size or 1.0)
        key = Key(self.trainer.step + 1, record.CLIPPED, name)
        self.seen.add(key, Measure(difference / (size or 1.0), allowed))

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        rate = learning_rate(self.trainer.config, self.trainer.step + 1, self.trainer.run.total_steps)
        for name, parameter in self.trainer.model.named_parameters():
            expected = self._expected.pop(id(parameter), None)
            if expected is None:
                continue
            before = self._before.pop(id(parameter))
            rounding = _WEIGHT_ROUNDINGS * torch.finfo(self.master).eps * before.norm().item()
            lost = _LOST[self.master] * rate * math.sqrt(expected.numel())
            size = max((expected - before).norm().item(), rounding, 1e-30)
            difference = (local_part(parameter)[0].double() - expected).norm().item()
            key = Key(self.trainer.step + 1, record.UPDATE, name)
            self.seen.add(key, Measure(difference / size, (rounding + lost) / size))
            held = {value.dtype for what, value in optimizer.state[parameter].items() if what != "step"}
            types = sorted(map(str, held | {parameter.dtype}))
            problem = None if types == [str(self.master)] else f"{' and '.join(types)}, not {self.master}"
            self.seen.wrong(Key(self.trainer.step + 1, record.TYPES, name), problem)


def known_moments(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Moments:
    """AdamW's state before an update: zeros, or what a resumed run has loaded."""
    state = optimizer.state.get(parameter)
    if not state:
        nothing = torch.zeros_like(local_part(parameter)[0], dtype=torch.float64)
        return nothing, nothing.clone(), 0
    first, second = (local_part(state[name])[0].double() for name in ("exp_avg", "exp_avg_sq"))
    return first, second, int(state["step"])
