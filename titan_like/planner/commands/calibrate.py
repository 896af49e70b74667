"""Fit a profile's constants to measured rows, and report the errors on rows that were left out of the fit.

The fit is least squares on the logarithms of the constants. Residuals are the logarithms of predicted over measured
step times, with Huber's loss so that single bad rows do not dominate. Each constant's prior is one more residual, so
that only clear data moves a constant away from its physical value.
"""

import argparse
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_like.config import ConfigError
from titan_like.config.errors import require
from titan_like.config.options import OptionParser
from titan_like.metrics.devices import find_device
from titan_like.planner.commands.outcome import Outcome, toml_option
from titan_like.planner.profile import FITTED, Profile, is_builtin, load_profile, profile_to_toml
from titan_like.planner.rows import Row, read_rows
from titan_like.planner.search_space import layout_of
from titan_like.planner.stack import of_own_trainer
from titan_like.planner.workload import Workload

_NOISE = 0.03  # standard deviation of the logarithm of a row's time
_HUBER = 1.5  # in units of _NOISE
_STEP = 1e-3  # of finite differences; kernels' times have steps of their own, which smaller differences would hit
_REASONS = 5  # the most reasons shown for rows that are left out


def add_options(parser: OptionParser) -> None:
    """Add the command's options. It takes no settings of a run."""
    start = "stack profile to start from: a shipped one or a TOML file"
    parser.add_path("--profile", start, "PROFILE", required=True)
    parser.add_path("--points", "runs of this trainer measured on one stack", "FILE.json", required=True)
    parser.add_path("--out", "where to write the fitted profile", "FILE.toml", type=toml_option)


def run(options: argparse.Namespace, settings: list[str]) -> Outcome:
    """Fit a profile and describe it."""
    require(not settings, "command line", " ".join(settings), "calibrate takes no settings of a run")
    require(find_spec("scipy"), "command line", "calibrate", 'needs scipy; pip install "titan_like[calibrate]"')
    start = load_profile(options.profile)
    read, left_out = read_rows(options.points)
    rows, useless = usable(read, start)
    left_out += useless
    require(rows, "--points", options.points, "; ".join(["has no row to fit to", *left_out[:1]]))
    dtypes = sorted({row.work.dtype for row in rows})
    reason = f"has rows in {' and '.join(dtypes)}; a profile is for one training.dtype, so give each a file of its own"
    require(len(dtypes) == 1, "--points", options.points, reason)
    fitted = calibrated(rows, start, name=Path(options.out).stem if options.out else start.name)
    lines = [
        f"{len(rows)} rows of {options.points}; left out: {len(left_out)}",
        *(f"  {reason}" for reason in left_out[:_REASONS]),
        *([f"  and {len(left_out) - _REASONS} more"] if len(left_out) > _REASONS else []),
        f"step time of the fitted rows: {fitted.inside}",
    ]
    lines += [f"  without {group:20s} {errors}" for group, errors in fitted.left_out.items()]
    lines += [f"  {name:22s} {pair['before']:10.4g} → {pair['after']:10.4g}" for name, pair in fitted.constants.items()]
    result = {
        "inside": fitted.inside._asdict(),
        "left_out": {group: errors._asdict() for group, errors in fitted.left_out.items()},
        "constants": fitted.constants,
    }
    files = {Path(options.out): profile_to_toml(fitted.profile)} if options.out else {}
    return Outcome("\n".join(lines), result, files=files)


def log_errors(rows: Sequence[Row], profile: Profile) -> np.ndarray:
    """Logarithm of predicted over measured step time for each row."""
    return np.array([np.log(row.predicted(profile) / row.seconds) for row in rows])


def fit(rows: Sequence[Row], start: Profile, names: Sequence[str]) -> Profile:
    """The profile with the named constants fitted. They begin at ``start``, which is also the mean of the priors."""
    from scipy.optimize import least_squares  # an optional dependency

    low = np.log([FITTED[name].low for name in names])
    high = np.log([FITTED[name].high for name in names])
    spread = np.array([FITTED[name].spread for name in names])
    center = np.clip(np.log([getattr(start, name) for name in names]), low, high)

    def with_values(point: np.ndarray) -> Profile:
        return start.changed(**{name: float(np.exp(x)) for name, x in zip(names, point, strict=True)})

    def residuals(point: np.ndarray) -> np.ndarray:
        errors = log_errors(rows, with_values(point)) / _NOISE
        size = np.abs(errors)
        # Beyond `_HUBER` the squared residual grows linearly: its root is what least squares needs.
        tail = np.sqrt(2 * _HUBER * np.maximum(size, _HUBER) - _HUBER**2)
        robust = np.where(size > _HUBER, np.sign(errors) * tail, errors)
        return np.concatenate([robust, (point - center) / spread])

    def jacobian(point: np.ndarray) -> np.ndarray:
        base = residuals(point)
        columns = []
        for i, direction in enumerate(np.eye(len(point))):
            step = _STEP if point[i] + _STEP <= high[i] else -_STEP
            columns.append((residuals(point + step * direction) - base) / step)
        return np.stack(columns, axis=1)

    return with_values(least_squares(residuals, center, jacobian, (low, high), ftol=1e-5, xtol=1e-5, max_nfev=40).x)


def leave_one_group_out(
    rows: Sequence[Row], start: Profile, names: Sequence[str], group_of: Callable[[Row], str]
) -> dict[str, tuple[Profile, list[Row]]]:
    """For every group, the profile that all other groups give, and its rows."""
    fits = {}
    for group in sorted({group_of(row) for row in rows}):
        remaining = [row for row in rows if group_of(row) != group]
        profile = fit(remaining, start, names) if remaining else start
        fits[group] = profile, [row for row in rows if group_of(row) == group]
    return fits


class Errors(NamedTuple):
    """Relative errors of step times: the median and p90 of absolute values, and the median with its sign as bias."""

    n: int
    median: float
    p90: float
    bias: float

    def __str__(self) -> str:
        return (
            f"n {self.n}, median {100 * self.median:.1f} %, p90 {100 * self.p90:.1f} %, bias {100 * self.bias:+.1f} %"
        )


def _summary(log_ratios: np.ndarray) -> Errors:
    """Summarize the logarithms of predicted over measured times."""
    errors = np.expm1(log_ratios)
    size = np.abs(errors)
    return Errors(len(errors), float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(errors)))


class Calibration(NamedTuple):
    """A fitted profile and its errors."""

    profile: Profile
    inside: Errors
    left_out: dict[str, Errors]
    constants: dict[str, dict[str, float]]  # "before" and "after" the fit


def usable(rows: Sequence[Row], profile: Profile) -> tuple[list[Row], list[str]]:
    """Rows that the profile can predict, and for each other row the reason why not."""
    kept, left_out = [], []
    for row in rows:
        try:
            if is_builtin(profile.device):
                find_device(row.gpu)  # raises ConfigError
            row.adapted(profile).device.peak_flops(row.work.dtype)  # raises ConfigError
            reason = f"{profile.name} knows nothing of links between processes"
            require(row.work.num_gpus == 1 or profile.node_bandwidth, "gpus", row.work.num_gpus, reason)
            kept.append(row)
        except ConfigError as error:
            left_out.append(f"{row.model}: {error}")
    return kept, left_out


def calibrated(rows: Sequence[Row], start: Profile, name: str) -> Calibration:
    """Fit the constants that `usable` rows tell anything about.

    Errors come from leaving out one group after another: model sizes, or layouts if all rows have the same model.
    """
    # The starting point: the rows' own device, and the assumptions that predictions will make.
    devices = {row.adapted(start).device for row in rows}
    if len(devices) == 1:
        start = start.changed(device=devices.pop())
    start = of_own_trainer(start, rows[0].work.dtype)
    names = informed(rows, start)
    profile = fit(rows, start, names)
    by_model = len({row.model for row in rows}) > 1
    groups = leave_one_group_out(rows, start, names, lambda row: row.model if by_model else layout_name(row.work))
    left_out = {group: log_errors(held, fitted) for group, (fitted, held) in groups.items()}
    held = _summary(np.concatenate(list(left_out.values())))
    sources = [row.source for row in rows]
    profile = profile.changed(
        name=name,
        description=f"calibrated, from {start.name}",
        fitted_on=tuple(f"{source}: {sources.count(source)} rows" for source in sorted(set(sources))),
        fitted_gpus=tuple(sorted({row.adapted(start).device.name for row in rows})),
        most_gpus=max(row.work.num_gpus for row in rows),
        fitted_experts=any(row.work.has_experts for row in rows),
        dtype=rows[0].work.dtype,
        error_median=held.median,
        error_p90=held.p90,
    )
    return Calibration(
        profile,
        _summary(log_errors(rows, profile)),
        {group: _summary(errors) for group, errors in left_out.items()},
        {constant: {"before": getattr(start, constant), "after": getattr(profile, constant)} for constant in names},
    )


def layout_name(work: Workload) -> str:
    """A short name for what a run's speed depends on besides its model."""
    microbatches = f"{work.microbatches} × {work.micro_batch_size}"
    return f"{layout_of(work).described()}, ZeRO {work.zero_stage}, {microbatches}"


def informed(rows: Sequence[Row], profile: Profile) -> list[str]:
    """Constants that move some row's step time by a thousandth when they change by a twentieth."""
    before = log_errors(rows, profile)
    names = []
    for name, bounds in FITTED.items():
        value = getattr(profile, name)
        changed = value * 1.05 if value * 1.05 <= bounds.high else value / 1.05
        if np.abs(log_errors(rows, profile.changed(**{name: changed})) - before).max() > 1e-3:
            names.append(name)
    return names
