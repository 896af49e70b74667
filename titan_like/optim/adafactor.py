"""Adafactor (arXiv 1804.04235) on sharded parameters."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from titan_like.config.schema import Optimizer as OptimizerSection
from titan_like.optim import shards

_Member = tuple[dict[str, Any], str, torch.nn.Parameter]  # as `ShardedOptimizer.members`
_EPS_SQUARE = 1e-30  # added to squared gradients: ε₁ of the paper
_EPS_SCALE = 1e-3  # the least scale of a parameter: ε₂ of the paper


class Adafactor(shards.ShardedOptimizer):
    """Divides gradients by a second moment that is kept for the rows and columns of a matrix only.

    The moment of element (i, j) is row[i] · column[j] / mean, running means of squared gradients over a row, over a
    column and over the whole matrix (section 3 of the paper). Parameters that are not matrices keep a moment per
    element. Means and norms are taken over the whole parameter, whichever part of it a process holds, and in a stack
    over each matrix.

    The paper describes `clip_threshold` in section 6, `decay_rate` in section 7.2, and `relative_step` and
    `scale_parameter` in section 8.
    """

    takes_factor = True

    def __init__(self, groups: Iterable[dict[str, Any]], section: OptimizerSection) -> None:
        """Each of the ``groups`` has its ``weight_decay``."""
        super().__init__(groups, section.lr)
        self.section = section
        self.blocks: dict[torch.nn.Parameter, list[shards.Block]] = {}

    def new_state(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Running means of squared gradients, the number of updates, and a first moment if there is one.

        A matrix [rows, columns] has means [rows], [columns] and a scalar; a stack [matrices · rows, columns] has them
        for each matrix, as [matrices · rows], [matrices, columns] and [matrices]. Others have means of their shape.
        """
        # All parameters share the tensor that counts updates, so that one kernel increments it.
        counts = (state["step"] for state in self.state.values() if state)
        state = {"step": next(counts, torch.zeros((), dtype=torch.float32, device=parameter.device))}
        if parameter.ndim == 2:
            state["exp_avg_sq_row"] = shards.zeros_along(parameter, 0)
            state["exp_avg_sq_col"] = shards.zeros_along(parameter, 1)
            state["exp_avg_sq_mean"] = shards.zeros_along(parameter, None)
        else:
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        if self.section.beta1 is not None:
            state["exp_avg"] = torch.zeros_like(parameter)
        return state

    def traffic(self) -> list[shards.UpdateTraffic]:
        """Two all-reduces in each mesh dimension, for the layers and for each table: before and after dividing."""
        sizes: Counter[tuple[str, int]] = Counter()  # bytes by mesh dimension and bucket
        for index, (_, name, parameter) in enumerate(self.members()):
            scalars = 2 if self.section.scale_parameter else 1  # for each matrix
            sizes_sent: list[tuple[int, int | None]] = []  # with the dimension that shards sum over
            if parameter.ndim == 2:
                scalars += 1
                sizes_sent += [(shards.local(shards.zeros_along(parameter, dim)).numel(), 1 - dim) for dim in (0, 1)]
            for size, dim in [*sizes_sent, (shards.matrices_here(parameter) * scalars, None)]:
                for dimension in shards.sharded_dimensions(parameter, dim, in_matrix=True):
                    sizes[dimension, _bucket(index, name, parameter)] += size * parameter.element_size()
        totals: dict[str, shards.UpdateTraffic] = {}
        for (dimension, _), size in sizes.items():
            before = totals.get(dimension, shards.UpdateTraffic((dimension,), "all_reduce", 0, 0))
            totals[dimension] = before._replace(calls=before.calls + 2, bytes=before.bytes + size)
        return list(totals.values())

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # there is no closure
        """Update every parameter."""
        self.begin_step()
        members = [member for member in self.members() if member[2].grad is not None]
        if not members:
            return
        counts = {id(count): count for count in (self.state[parameter]["step"] for *_, parameter in members)}
        for count in counts.values():
            self.assign(count, count + 1)
        # In float64, and at least 1, so that a skipped first step does not divide by 0.
        number = next(iter(counts.values())).double().clamp(min=1)
        # Three passes over the parameters, so that each of the two sums over processes is one all-reduce.
        updates = [_Update(self, index, member, number) for index, member in enumerate(members)]
        shards.sum_partials(partial for update in updates for partial in update.squares())
        shards.sum_partials(update.divide() for update in updates)
        for update in updates:
            update.apply()


def _bucket(index: int, name: str, parameter: torch.Tensor) -> int:
    """Parameters with the same bucket share an all-reduce. ``index`` counts the process's parameters.

    Pipelines have two copies of a tied table, which must stay equal. The order in which an all-reduce adds depends on a
    number's place in the buffer, so each table has its own.
    """
    return index if shards.is_table(name, parameter) else -1


class _Update:
    """One update of one parameter, on this process's part of it.

    Sums, means and rates are vectors: one for each matrix of a stack. Other parameters are stacks of one.
    """

    def __init__(self, optimizer: Adafactor, index: int, member: _Member, number: torch.Tensor) -> None:
        """``index`` counts the process's parameters, and ``number`` the updates, from 1: a scalar on the device."""
        self.optimizer, self.section, self.number = optimizer, optimizer.section, number
        self.group, name, parameter = member
        self.parameter, self.bucket = parameter, _bucket(index, name, parameter)
        assert parameter.grad is not None
        self.weight, self.gradient = (torch.atleast_1d(shards.local(tensor)) for tensor in (parameter, parameter.grad))
        self.state = {key: torch.atleast_1d(shards.local(value)) for key, value in optimizer.state[parameter].items()}
        if parameter not in optimizer.blocks:
            optimizer.blocks[parameter] = shards.blocks_of(parameter)
        self.blocks = optimizer.blocks[parameter]
        self.factor = 1.0 if optimizer.factor is None else optimizer.factor
        self.matrices, self.size = shards.matrices_here(parameter), parameter.numel() // shards.num_matrices(parameter)

    def _partial(self, tensor: torch.Tensor, dim: int | None = None) -> shards.Partial:
        return shards.Partial(tensor, shards.shard_groups(self.parameter, dim, in_matrix=True), self.bucket)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return self.weight.new_zeros(self.matrices, *shape)

    def squares(self) -> list[shards.Partial]:
        """Sums of squares of this process's gradients, before they are multiplied by the factor, and of its weights."""
        partials = []
        if self.weight.ndim == 2:
            length, width = self.weight.shape
            self.rows = self.weight.new_zeros(length)
            self.columns = self._zeros(width)
            self.total = self._zeros()
            for block in self.blocks:
                squares = block.of(self.gradient).to(self.weight.dtype).square()
                rows = squares.sum(2)
                self.rows[block.rows] = rows.flatten()
                self.columns[block.matrices], self.total[block.matrices] = squares.sum(1), rows.sum(1)
            partials += [self._partial(self.rows, 1), self._partial(self.columns, 0), self._partial(self.total)]
        if self.section.scale_parameter:
            self.weight_squares = self._zeros()
            for block in self.blocks:
                norms = torch.linalg.vector_norm(block.of(self.weight).flatten(1), dim=1)
                self.weight_squares[block.matrices] = norms.square()
            partials.append(self._partial(self.weight_squares))
        return partials

    def divide(self) -> shards.Partial:
        """Update the moments; the sum of squares of the gradient divided by their root."""
        dtype, share = self.weight.dtype, self.number.pow(-self.section.decay_rate).to(self.weight.dtype)

        def average(key: str, squares: torch.Tensor) -> torch.Tensor:
            new = squares * (self.factor * self.factor) + _EPS_SQUARE
            return self._average(self.state[key].view_as(new), new, share)  # share: of the new squares

        self.update_squares = self._zeros()
        if self.weight.ndim != 2:
            gradient = self.gradient.to(dtype)
            self.quotient = gradient * (average("exp_avg_sq", gradient.square()).rsqrt() * self.factor)
            self.update_squares += self.quotient.square().sum()
            return self._partial(self.update_squares)
        num_columns = self.parameter.shape[1]
        row = average("exp_avg_sq_row", self.rows / num_columns)
        column = average("exp_avg_sq_col", self.columns / (self.size // num_columns))
        mean = average("exp_avg_sq_mean", self.total / self.size)
        # The product of these two is the factor over the root, for each element [matrix, row, column].
        self.by_row = [(block.of(row) / mean[block.matrices, None]).rsqrt()[..., None] for block in self.blocks]
        self.by_column = (column.rsqrt() * self.factor)[:, None]
        for block, by_row in zip(self.blocks, self.by_row, strict=True):
            norms = torch.linalg.vector_norm(block.of(self.gradient) * self.by_column[block.matrices], dim=2)
            self.update_squares[block.matrices] = (norms * by_row[..., 0]).square().sum(1)
        return self._partial(self.update_squares)

    def _average(self, old: torch.Tensor, new: torch.Tensor, share: torch.Tensor | float) -> torch.Tensor:
        self.optimizer.assign(old, old.lerp(new, share))
        return old

    def apply(self) -> None:
        """Clip the update and subtract it, times the learning rate, from the weights."""
        section, lr = self.section, self.group["lr"]
        if section.relative_step:
            rate = self.number.rsqrt().clamp(max=1e-2) * (lr / section.lr)
        else:
            rate = torch.full_like(self.number, lr)
        if section.scale_parameter:
            rate = rate * (self.weight_squares / self.size).sqrt().clamp(min=_EPS_SCALE)
        rate = rate.to(self.weight.dtype).expand(self.matrices)
        root_mean_square = (self.update_squares / self.size).sqrt()
        clipped = rate / (root_mean_square / section.clip_threshold).clamp(min=1)
        for number, block in enumerate(self.blocks):
            weight = block.of(self.weight)
            shape = (-1, *[1] * (weight.ndim - 1))
            decay = (1 - rate * self.group["weight_decay"])[block.matrices].view(shape)
            left = clipped[block.matrices].view(shape)
            if self.weight.ndim == 2:
                left, right = block.of(self.gradient) * (self.by_row[number] * left), self.by_column[block.matrices]
            else:
                right = self.quotient
            if section.beta1 is None:
                new = torch.addcmul(weight * decay, left, right, value=-1)
            else:
                new = weight * decay - self._average(block.of(self.state["exp_avg"]), left * right, 1 - section.beta1)
            self.optimizer.assign(weight, new)
