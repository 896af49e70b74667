"""Size of an optimizer's state for a parameter, measured after an update."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from titan_like.config.schema import Optimizer as OptimizerSection
from titan_like.optim.update_work import updated

_SIDE = 32  # rows and columns of the smallest matrix that is tried


class StateValues(NamedTuple):
    """Values kept for a process's part of a matrix, [rows, columns], in units of its type."""

    element: float = 0  # for each element: 2 for AdamW
    row: float = 0
    column: float = 0
    stacked_column: float = 0  # for each column, for every further matrix of a stack


class OptimizerState(NamedTuple):
    """The values that an optimizer keeps, by kind of parameter."""

    layers: StateValues  # matrices inside layers
    tables: StateValues  # matrices outside layers
    vector: float  # for each element of a vector

    def of(self, name: str, shape: Sequence[int], matrices: int = 1) -> float:
        """Values for a process's part of a parameter: a vector, or a matrix or a stack of several."""
        rows, *columns = shape
        if not columns:
            return self.vector * rows
        values = self.layers if name.startswith("layers.") else self.tables
        by_column = values.column + (matrices - 1) * values.stacked_column
        return rows * (values.element * columns[0] + values.row) + by_column * columns[0]


ADAMW_STATE = OptimizerState(StateValues(element=2), StateValues(element=2), 2)


def optimizer_state(section: OptimizerSection) -> OptimizerState:
    """The values that the run's optimizer keeps.

    It is measured, so that it also holds for optimizers of other packages, whose state must be proportional to a
    matrix's elements, rows or columns. Scalars, such as AdamW's number of updates, are left out, and so is one for each
    matrix of a stack. AdamW's is not, because the first optimizer that torch makes imports its compiler, for 0.7 s.
    Raises a `ConfigError` as `build_optimizer`.
    """
    return ADAMW_STATE if section.name == "adamw" else _optimizer_state(section.model_dump_json())


@lru_cache(maxsize=64)
def _optimizer_state(section: str) -> OptimizerState:
    def num_values(kind: str, *shape: int, matrices: int = 1) -> float:
        optimizer, parameter, _ = updated(f"{kind}.0", shape, OptimizerSection.model_validate_json(section), matrices)
        state = (value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))
        return sum(value.nbytes for value in state if value.numel() > matrices) / parameter.element_size()

    def of_matrix(kind: str) -> StateValues:
        # With n = _SIDE, a matrix keeps e·rows·columns + r·rows + c·columns values: e·n² + (r + c)·n if it is square,
        # 2e·n² + (2r + c)·n if it is tall, and 2e·n² + (r + 2c)·n if it is wide. These three give e, r and c.
        shapes = (_SIDE, _SIDE), (2 * _SIDE, _SIDE), (_SIDE, 2 * _SIDE)
        smallest, taller, wider = (num_values(kind, *shape) for shape in shapes)
        element = _number((taller + wider - 3 * smallest) / _SIDE**2)
        row, column = ((larger - smallest) / _SIDE - element * _SIDE for larger in (taller, wider))
        stack = num_values(kind, 4 * _SIDE, _SIDE, matrices=4)
        stacked = stack / _SIDE - 4 * (element * _SIDE + row)  # for each column, of 4 matrices
        return StateValues(element, _number(row), _number(column), _number((stacked - column) / 3))

    return OptimizerState(of_matrix("layers"), of_matrix("table"), _number(num_values("layers", _SIDE) / _SIDE))


def _number(value: float) -> float:
    return int(value) if value == int(value) else value
