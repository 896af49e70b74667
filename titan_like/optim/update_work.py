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
    """What the run's optimizer does. Rules of other packages are taken to do what AdamW does."""
    if section.name == "muon":
        return UpdateWork(28, 52, section.newton_schulz_steps, section.newton_schulz_dtype)
    if section.name == "adafactor":
        return UpdateWork(96 + 24 * (section.beta1 is not None) + 12 * section.scale_parameter)
    return UpdateWork(24) if section.name == "sgd" else ADAMW_WORK


def newton_schulz_products(rows: int, columns: int) -> list[tuple[int, int, int]]:
    """The products [m, k] · [k, n] in one step on a matrix [rows, columns]: (m, n, k) of each."""
    short, long = min(rows, columns), max(rows, columns)
    return [(short, short, long), (short, short, short), (short, long, short)]
