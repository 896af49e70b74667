"""What an update costs: bytes that its operators read and write, and Newton-Schulz products."""

from __future__ import annotations

from typing import NamedTuple

from titan_like.config.schema import Optimizer as OptimizerSection


class UpdateWork(NamedTuple):
    """What an update does. Bytes are per element, read and written, in float32."""

    traffic: int = 28  # of every parameter: fused AdamW reads weight, gradient, moments and writes all but the gradient
    matrix_traffic: int = 0  # of matrices inside layers, in addition
    newton_schulz_steps: int = 0  # on matrices inside layers, each of them on one process
    newton_schulz_dtype: str | None = None  # None: bfloat16 on GPUs, float32 on CPUs


ADAMW_WORK = UpdateWork()


def update_work(section: OptimizerSection) -> UpdateWork:
    """What the run's optimizer does. Rules of other packages are taken to do what AdamW does.

    Bytes are those of each operator in `titan_like.optim`: 4 for every tensor of the parameter's size that it reads or
    writes.
    """
    if section.name == "muon":
        # A matrix takes 80 bytes, 52 more than under AdamW: momentum 12 and its assignment 12, direction 12, its norm
        # and division by it 12, decay 8, the update's subtraction 12, and the weight's assignment 12.
        return UpdateWork(28, 52, section.newton_schulz_steps, section.newton_schulz_dtype)
    if section.name == "adafactor":
        # Squares 8, ε₁ 8 and their three sums 12; two divisions 16; the update's squares 8 and their sum 4; rate 8,
        # decay 8, subtraction 12 and assignment 12. A first moment is read and written twice with the update: 24. The
        # weights' squares and their sum take 12.
        return UpdateWork(96 + 24 * (section.beta1 is not None) + 12 * section.scale_parameter)
    # Plain SGD adds the decay to the gradient and the gradient to the weight: 12 each.
    return UpdateWork(24) if section.name == "sgd" else ADAMW_WORK


def newton_schulz_products(rows: int, columns: int) -> list[tuple[int, int, int]]:
    """The products [m, k] · [k, n] in one step on a matrix [rows, columns]: (m, n, k) of each."""
    short, long = min(rows, columns), max(rows, columns)
    return [(short, short, long), (short, short, short), (short, long, short)]
