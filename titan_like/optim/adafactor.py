"""Adafactor (arXiv 1804.04235) on sharded parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from titan_like.config.schema import Optimizer as OptimizerSection
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

    Its settings are those of the paper: `clip_threshold` of section 6, `decay_rate` of section 7.2, `relative_step` and
    `scale_parameter` of section 8.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], section: OptimizerSection) -> None:
        """Each of the ``groups`` has its ``weight_decay``."""
        super().__init__(groups, section.lr)
        self.section = section

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
        if self.section.beta1 is not None:
            state["exp_avg"] = torch.zeros_like(parameter)
        return state

    def traffic(self) -> list[UpdateTraffic]:
        """Two all-reduces in each mesh dimension, for the layers and for each table: before and after dividing."""
        sizes: Counter[tuple[str, int]] = Counter()  # bytes by mesh dimension and bucket
        for index, (_, name, parameter) in enumerate(self.members()):
            scalars = 1 + self.section.scale_parameter + (parameter.ndim == 2)
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
        self.optimizer, self.section = optimizer, optimizer.section
        self.parameter, self.group = parameter, group
        self.weight, factor = local(parameter), optimizer.factor
        gradient = local(parameter.grad).to(self.weight.dtype)
        self.gradient = gradient if factor is None else gradient.mul_(factor.to(self.weight.dtype))
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
        if self.section.scale_parameter:
            self.weight_squares = self.weight.square().sum()
            partials.append(self._partial(self.weight_squares))
        return partials

    def divide(self) -> Partial:
        """Update the moments and divide the gradient by their root; the sum of squares of the result."""
        share = self.number.pow(-self.section.decay_rate).to(self.weight.dtype)  # of the new squares
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
        optimizer, section, size = self.optimizer, self.section, self.parameter.numel()
        lr = self.group["lr"]
        if section.relative_step:
            rate = self.number.rsqrt().clamp(max=1e-2) * (lr / section.lr)
        else:
            rate = torch.full_like(self.number, lr)
        if section.scale_parameter:
            rate = rate * (self.weight_squares / size).sqrt().clamp(min=_EPS_SCALE)
        rate = rate.to(self.weight.dtype)
        root_mean_square = (self.update_squares / size).sqrt()
        update = self.gradient.mul_(rate / (root_mean_square / section.clip_threshold).clamp(min=1))
        if section.beta1 is not None:
            update = self._average("exp_avg", update, torch.full_like(rate, 1 - section.beta1))
        optimizer.assign(self.weight, self.weight * (1 - rate * self.group["weight_decay"]) - update)
