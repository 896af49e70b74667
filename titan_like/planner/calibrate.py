"""Fit a profile's constants to measured rows.

The fit is least squares on the logarithms of the constants. Residuals are the logarithms of predicted over measured
step times, with Huber's loss so that single bad rows do not dominate. Each constant's prior is one more residual, so
that only clear data moves a constant away from its physical value.

Predictions simulate pipelines. The fit uses the faster closed forms, multiplied by the ratio of simulation to closed
form at its starting point, and repeats this once from where it ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from titan_like.config.errors import ConfigError
from titan_like.metrics.devices import find_device
from titan_like.planner.accuracy import Prediction, judgement, predict_row
from titan_like.planner.dtypes import BYTES
from titan_like.planner.measured_rows import STUDIES, Row, adapted, stated_dtype
from titan_like.planner.predict import of_own_trainer
from titan_like.planner.profile import FITTED, Profile, is_builtin
from titan_like.planner.simulator import simulated_step_time
from titan_like.planner.step_time import StepTime, step_time
from titan_like.planner.workload import Workload

_NOISE = 0.03  # standard deviation of the logarithm of a row's time
_HUBER = 1.5  # in units of _NOISE
_STEP = 1e-3  # of finite differences; kernels' times have steps of their own, which smaller differences would hit


def log_errors(
    rows: Sequence[Row], profile: Profile, predicted: Callable[[Workload, Profile], StepTime] = simulated_step_time
) -> np.ndarray:
    """Logarithm of predicted over measured step time for each row."""
    return np.array([np.log(predicted(row.work, adapted(profile, row)).total / row.seconds) for row in rows])


def fit(rows: Sequence[Row], start: Profile, names: Sequence[str], weights: np.ndarray | None = None) -> Profile:
    """The profile with the named constants fitted. They begin at ``start``, which is also the mean of the priors."""
    from scipy.optimize import least_squares  # an optional dependency

    low = np.log([FITTED[name].low for name in names])
    high = np.log([FITTED[name].high for name in names])
    spread = np.array([FITTED[name].spread for name in names])
    center = np.clip(np.log([getattr(start, name) for name in names]), low, high)
    weight = np.ones(len(rows)) if weights is None else np.sqrt(weights)

    def with_values(point: np.ndarray) -> Profile:
        return start.changed(**{name: float(np.exp(x)) for name, x in zip(names, point, strict=True)})

    def residuals(point: np.ndarray) -> np.ndarray:
        errors = (log_errors(rows, with_values(point), step_time) + correction) / _NOISE
        size = np.abs(errors)
        # Beyond `_HUBER` the squared residual grows linearly: its root is what least squares needs.
        tail = np.sqrt(2 * _HUBER * np.maximum(size, _HUBER) - _HUBER**2)
        robust = np.where(size > _HUBER, np.sign(errors) * tail, errors)
        return np.concatenate([robust * weight, (point - center) / spread])

    def jacobian(point: np.ndarray) -> np.ndarray:
        here = residuals(point)
        columns = []
        for i, one in enumerate(np.eye(len(point))):
            step = _STEP if point[i] + _STEP <= high[i] else -_STEP
            columns.append((residuals(point + step * one) - here) / step)
        return np.stack(columns, axis=1)

    best = center
    for _ in range(2):
        # `correction` turns closed forms into what the simulation gives, near this profile.
        profile = with_values(best)
        correction = log_errors(rows, profile) - log_errors(rows, profile, step_time)
        best = least_squares(residuals, best, jacobian, (low, high), ftol=1e-5, xtol=1e-5, max_nfev=40).x
    return with_values(best)


def check_scipy() -> None:
    """Refuse to fit without scipy.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("scipy") is None:
        raise ConfigError("command line", "calibrate", 'needs scipy; pip install "titan_like[calibrate]"')


def leave_one_group_out(
    rows: Sequence[Row], start: Profile, names: Sequence[str], group_of: Callable[[Row], str]
) -> dict[str, list[Prediction]]:
    """For every group, predictions of its rows under the profile that all other groups give."""
    predictions = {}
    for group in sorted({group_of(row) for row in rows}):
        kept = [row for row in rows if group_of(row) != group]
        profile = fit(kept, start, names) if kept else start
        found = [predict_row(row, profile) for row in rows if group_of(row) == group]
        predictions[group] = [prediction for prediction in found if prediction is not None]
    return predictions


@dataclass(frozen=True)
class Errors:
    """Relative errors of step times: the median and p90 of absolute values, and the median with its sign as bias."""

    n: int
    median: float
    p90: float
    bias: float

    def __str__(self) -> str:
        return (
            f"n {self.n}, median {100 * self.median:.1f} %, p90 {100 * self.p90:.1f} %, bias {100 * self.bias:+.1f} %"
        )


def summary(errors: Sequence[float]) -> Errors:
    """Summarize signed relative errors."""
    found = np.asarray(errors)
    return Errors(
        len(found), float(np.median(np.abs(found))), float(np.quantile(np.abs(found), 0.9)), float(np.median(found))
    )


@dataclass(frozen=True)
class Calibration:
    """A fitted profile and its errors."""

    profile: Profile
    inside: Errors
    left_out: dict[str, Errors]
    constants: dict[str, tuple[float, float]]  # before and after the fit

    def as_dict(self) -> dict[str, Any]:
        """The calibration for JSON."""
        return {
            "inside": vars(self.inside),
            "left_out": {group: vars(errors) for group, errors in self.left_out.items()},
            "constants": {name: {"before": a, "after": b} for name, (a, b) in self.constants.items()},
        }


def usable(rows: Sequence[Row], profile: Profile) -> tuple[list[Row], list[str]]:
    """Rows with a time that the profile can predict, and for each other row the reason why not.

    A user's own row has the profile's data type, unless its notes name another one.
    """
    kept, left_out = [], []
    for row in rows:
        if is_own(row) and stated_dtype(row.notes) is None and row.work.dtype == "bfloat16":
            row = replace(row, work=row.work._replace(dtype=profile.dtype))
        try:
            if is_builtin(profile.device):
                find_device(row.gpu)  # raises ConfigError
            own = adapted(profile, row)
            own.device.peak_flops(row.work.dtype)  # raises ConfigError
            if row.gpus > 1 and not own.node_bandwidth:
                raise ConfigError("gpus", row.gpus, f"{profile.name} knows nothing of links between processes")
        except ConfigError as error:
            left_out.append(f"{row.model}: {error}")
            continue
        if row.out_of_memory:
            left_out.append(f"{row.model}: ran out of memory and has no time")
        else:
            kept.append(row)
    return kept, left_out


def is_own(row: Row) -> bool:
    """Whether a row belongs to no known study, and so was measured with our own trainer."""
    return row.study not in STUDIES


def calibrated(rows: Sequence[Row], start: Profile, name: str) -> Calibration:
    """Fit the constants that `usable` rows tell anything about.

    Errors are those of groups left out in turn: model sizes, or layouts if all rows have the same model.
    """
    # The starting point: the rows' own device, and our own trainer's way of working if the rows are its.
    devices = {adapted(start, row).device for row in rows}
    if len(devices) == 1:
        start = start.changed(device=devices.pop())
    if all(is_own(row) for row in rows):  # fit under the assumptions that predictions will make
        dtype = rows[0].work.dtype
        start = of_own_trainer(start, dtype if dtype in BYTES else start.dtype)
    names = informed(rows, start)
    profile = fit(rows, start, names)
    several = len({row.model for row in rows}) > 1
    groups = leave_one_group_out(rows, start, names, lambda row: row.model if several else layout_name(row.work))
    predictions = [prediction for group in groups.values() for prediction in group]
    held = summary([prediction.error for prediction in predictions])
    sources = sorted({row.source or row.group for row in rows})
    profile = profile.changed(
        name=name,
        fitted_on=tuple(f"{source}: {sum((r.source or r.group) == source for r in rows)} rows" for source in sources),
        error_median=held.median,
        error_p90=held.p90,
        judged=judgement(predictions, len(groups)),
    )
    return Calibration(
        profile,
        summary(list(np.expm1(log_errors(rows, profile)))),
        {group: summary([prediction.error for prediction in found]) for group, found in groups.items()},
        {constant: (getattr(start, constant), getattr(profile, constant)) for constant in names},
    )


def layout_name(work: Workload) -> str:
    """A short name for what a run's speed depends on besides its model."""
    return (
        f"{work.num_gpus} GPUs, tensor {work.tensor}, pipeline {work.pipeline}, ZeRO {work.zero_stage}, "
        f"{work.microbatches} × {work.micro_batch_size}"
    )


def informed(rows: Sequence[Row], profile: Profile) -> list[str]:
    """Constants that move some row's step time by a thousandth when they change by a twentieth."""
    before = log_errors(rows, profile)
    found = []
    for name, bounds in FITTED.items():
        value = getattr(profile, name)
        changed = value * 1.05 if value * 1.05 <= bounds.high else value / 1.05
        if np.abs(log_errors(rows, profile.changed(**{name: changed})) - before).max() > 1e-3:
            found.append(name)
    return found
