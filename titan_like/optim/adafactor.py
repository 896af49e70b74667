"""Adafactor (arXiv 1804.04235) on sharded parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from titan_like.optim.shards import (
    Partial,
    ShardedOptimizer,
    UpdateTraffic,
    is_table,
    local,
    shard_groups,
    sharded_dimensions,
    sum_partials,
    zeros_along,
)

_EPS_SQUARE = 1e-30  # added to squared gradients: ε₁ of the paper
_EPS_SCALE = 1e-3  # the least scale of a parameter: ε₂ of the paper


class Adafactor(ShardedOptimizer):
    """Divides gradients by a second moment that is kept for the rows and columns of a matrix only.

    The moment of element (i, j) is row[i] · column[j] / mean, running means of squared gradients over a row, over a
    column and over the whole matrix (section 3 of the paper). Parameters that are not matrices keep a moment per
    element. Means and norms are those of the whole parameter, whichever part of it a process holds.

    Args:
        groups: parameter groups, each with its ``weight_decay``.
        lr: the peak learning rate.
        relative_step: use min(0.01, 1/√t) at the t-th update, times the share of ``lr`` that each group's ``lr`` is
            (section 8).
        scale_parameter: multiply the rate by the root mean square of the parameter, at least 0.001 (section 8).
        clip_threshold: the largest root mean square of a parameter's update, before the rate (section 6).
        decay_rate: the moments' decay at the t-th update is 1 - t^(-decay_rate) (section 7.2).
        beta1: decay of the first moment; None keeps none.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        *,
        relative_step: bool = False,
        scale_parameter: bool = False,
        clip_threshold: float = 1.0,
        decay_rate: float = 0.8,
        beta1: float | None = None,
    ) -> None:
        super().__init__(groups, lr)
        self.peak_lr, self.relative_step, self.scale_parameter = lr, relative_step, scale_parameter
        self.clip_threshold, self.decay_rate, self.beta1 = clip_threshold, decay_rate, beta1

    def new_state(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Running means of squared gradients, the number of updates, and a first moment if there is one.

        A matrix [rows, columns] has means [rows], [columns] and a scalar. Other parameters have means of their shape.
        """
        # All parameters share the tensor that counts updates, so that it takes one kernel.
        counts = (state["step"] for state in self.state.values() if state)
        state = {"step": next(counts, torch.zeros((), dtype=torch.float32, device=parameter.device))}
        if parameter.ndim == 2:
            state["exp_avg_sq_row"] = zeros_along(parameter, 0)
            state["exp_avg_sq_col"] = zeros_along(parameter, 1)
            state["exp_avg_sq_mean"] = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        else:
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        if self.beta1 is not None:
            state["exp_avg"] = torch.zeros_like(parameter)
        return state

    def traffic(self) -> list[UpdateTraffic]:
        """Two all-reduces in each mesh dimension, for the layers and for each table: before and after dividing."""
        sizes: Counter[tuple[str, int]] = Counter()  # bytes by mesh dimension and bucket
        for index, (_, name, parameter) in enumerate(self.members()):
            scalars = 1 + self.scale_parameter + (parameter.ndim == 2)
            vectors = list(zip(local(parameter).shape, (1, 0), strict=True)) if parameter.ndim == 2 else []
            for size, dim in [*vectors, (scalars, None)]:
                for dimension in sharded_dimensions(parameter, dim):
                    sizes[dimension, _bucket(index, name, parameter)] += size * parameter.element_size()
        found: dict[str, UpdateTraffic] = {}
        for (dimension, _), size in sizes.items():
            before = found.get(dimension, UpdateTraffic((dimension,), "all_reduce", 0, 0))
            found[dimension] = before._replace(calls=before.calls + 2, bytes=before.bytes + size)
        return list(found.values())

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # there is no closure
        """Update every parameter. Gradients hold intermediate values afterwards."""
        self.begin_step()
        members = [member for member in self.members() if member[2].grad is not None]
        if not members:
            return
        counts = {id(count): count for count in (self.state[parameter]["step"] for *_, parameter in members)}
        for count in counts.values():
            self.assign(count, count + 1)
        # In float64, and at least 1, so that a skipped first step does not divide by 0.
        number = next(iter(counts.values())).double().clamp(min=1)
        # Sums over other processes separate three passes over the parameters, so each kind takes one all-reduce.
        updates = [
            _Update(self, parameter, _bucket(index, name, parameter), group, number)
            for index, (group, name, parameter) in enumerate(members)
        ]
        sum_partials(partial for update in updates for partial in update.squares())
        sum_partials(update.divide() for update in updates)
        for update in updates:
            update.apply()


def _bucket(index: int, name: str, parameter: torch.Tensor) -> int:
    """Parameters with the same bucket share an all-reduce. ``index`` is the parameter's among those of the process.

    Pipelines hold two copies of a tied table, which must stay equal. The order in which an all-reduce adds depends on a
    number's place in the buffer, so each table has its own.
    """
    return index if is_table(name, parameter) else -1


class _Update:
    """One update of one parameter, on this process's part of it."""

    def __init__(
        self,
        optimizer: Adafactor,
        parameter: torch.nn.Parameter,
        bucket: int,
        group: dict[str, Any],
        number: torch.Tensor,
    ) -> None:
        assert parameter.grad is not None
        self.optimizer, self.parameter, self.group = optimizer, parameter, group
        self.weight, self.gradient = local(parameter), local(parameter.grad)
        self.state = {key: local(value) for key, value in optimizer.state[parameter].items()}
        self.bucket = bucket
        self.number = number  # of the update, from 1: a scalar on the device

    def _partial(self, tensor: torch.Tensor, dim: int | None = None) -> Partial:
        return Partial(tensor, shard_groups(self.parameter, dim), self.bucket)

    def squares(self) -> list[Partial]:
        """Sums of squares of this process's gradients and weights."""
        squares = self.gradient.square() + _EPS_SQUARE
        partials = []
        if self.weight.ndim == 2:
            self.rows, self.columns, self.total = squares.sum(1), squares.sum(0), squares.sum()
            partials += [self._partial(self.rows, 1), self._partial(self.columns, 0), self._partial(self.total)]
        else:
            self.elements = squares
        if self.optimizer.scale_parameter:
            self.weight_squares = self.weight.square().sum()
            partials.append(self._partial(self.weight_squares))
        return partials

    def divide(self) -> Partial:
        """Update the moments and divide the gradient by their root; the sum of squares of the result."""
        share = self.number.pow(-self.optimizer.decay_rate).to(self.weight.dtype)  # of the new squares
        if self.weight.ndim == 2:
            num_rows, num_columns = self.parameter.shape
            row = self._average("exp_avg_sq_row", self.rows / num_columns, share)
            column = self._average("exp_avg_sq_col", self.columns / num_rows, share)
            mean = self._average("exp_avg_sq_mean", self.total / (num_rows * num_columns), share)
            self.gradient.mul_((row / mean).rsqrt()[:, None]).mul_(column.rsqrt())
        else:
            self.gradient.mul_(self._average("exp_avg_sq", self.elements, share).rsqrt())
        self.update_squares = self.gradient.square().sum()
        return self._partial(self.update_squares)

    def _average(self, key: str, new: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        self.optimizer.assign(self.state[key], self.state[key].lerp(new, share))
        return self.state[key]

    def apply(self) -> None:
        """Clip the update and subtract it, times the learning rate, from the weights."""
        optimizer, size = self.optimizer, self.parameter.numel()
        rate = self._rate()
        root_mean_square = (self.update_squares / size).sqrt()
        update = self.gradient.mul_(rate / (root_mean_square / optimizer.clip_threshold).clamp(min=1))
        if optimizer.beta1 is not None:
            update = self._average("exp_avg", update, torch.full_like(rate, 1 - optimizer.beta1))
        optimizer.assign(self.weight, self.weight * (1 - rate * self.group["weight_decay"]) - update)

    def _rate(self) -> torch.Tensor:
        """The learning rate of this parameter: a scalar on the device."""
        optimizer, lr = self.optimizer, self.group["lr"]
        if optimizer.relative_step:
            rate = self.number.rsqrt().clamp(max=1e-2) * (lr / optimizer.peak_lr)
        else:
            rate = torch.full_like(self.number, lr)
        if optimizer.scale_parameter:
            rate = rate * (self.weight_squares / self.parameter.numel()).sqrt().clamp(min=_EPS_SCALE)
        return rate.to(self.weight.dtype)
