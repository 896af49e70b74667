"""Fit a profile's constants to measured rows, and report the errors on rows that were left out of the fit."""

from __future__ import annotations

import argparse
from pathlib import Path

from titan_like.config import ConfigError
from titan_like.config.options import path_option
from titan_like.planner.calibrate import calibrated, check_scipy, usable
from titan_like.planner.commands.outcome import Outcome, check_toml
from titan_like.planner.measured_rows import read_rows
from titan_like.planner.profile import load_profile, profile_to_toml

_REASONS = 5  # the most reasons shown for rows that are left out


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options. It takes no settings of a run."""
    parser.add_argument("--profile", type=path_option, help="stack profile to start from: a shipped one or a TOML file")
    parser.add_argument("--points", type=path_option, metavar="FILE.csv", help="rows measured on one stack")
    parser.add_argument("--out", type=path_option, metavar="FILE.toml", help="where to write the fitted profile")


def run(options: argparse.Namespace, settings: list[str]) -> Outcome:
    """Fit a profile and describe it.

    Raises:
        ConfigError: there are no rows to fit to, or no profile to start from.
    """
    if settings:
        raise ConfigError("command line", settings[0], "calibrate takes no settings of a run")
    if options.points is None:
        raise ConfigError("--points", None, "calibrate needs the rows")
    if options.profile is None:
        raise ConfigError("--profile", None, "say which profile to start from")
    check_toml(options.out)
    check_scipy()
    start = load_profile(options.profile)
    read, untold = read_rows(options.points)
    rows, useless = usable(read, start)
    left_out = untold + useless
    if not rows:
        reason = f"; {left_out[0]}" if left_out else ""
        raise ConfigError("--points", options.points, f"has no row to fit to{reason}")
    found = calibrated(rows, start, name=Path(options.out).stem if options.out else start.name)
    lines = [
        f"{len(rows)} rows of {options.points}; lines and columns left out: {len(left_out)}",
        *(f"  {reason}" for reason in left_out[:_REASONS]),
        *([f"  and {len(left_out) - _REASONS} more"] if len(left_out) > _REASONS else []),
        f"step time of the fitted rows: {found.inside}",
    ]
    lines += [f"  without {group:20s} {errors}" for group, errors in found.left_out.items()]
    lines += [f"  {name:22s} {before:10.4g} → {after:10.4g}" for name, (before, after) in found.constants.items()]
    files = {Path(options.out): profile_to_toml(found.profile)} if options.out else {}
    return Outcome("\n".join(lines), found.as_dict(), files=files)
