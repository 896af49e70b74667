"""Fit profiles to a file of measured rows, and report how well each predicts rows left out of the fit.

    python benchmarks/fit_profiles.py --points FILE.csv [--only NAME] [--write]
    python benchmarks/fit_profiles.py --points benchmarks/results/titan_rows.json --write

It fits the profiles for which the file has rows. The second command fits this project's own; a JSON file that
`peers.py` writes does too. Rows of arXiv 2104.04473, Table 1, are refused because they are the test set.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from scipy.stats import norm, t

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the code next to this file

from benchmarks.accuracy import Prediction, judgement, predict_row
from benchmarks.measured_rows import Row, read_rows
from benchmarks.profile_recipes import RECIPES, Recipe
from benchmarks.stack_profiles import write_profile
from titan_like.planner.commands.calibrate import fit, leave_one_group_out, log_errors
from titan_like.planner.profile import Profile

USUAL_P90 = {False: 0.125, True: 0.214}  # medians of profiles without and with experts: docs/planner.md, Accuracy


def main() -> int:
    """Fit the profiles, print the errors, and write the profiles if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--points", required=True, help="CSV or JSON of measured rows")
    parser.add_argument("--only", help="one profile")
    parser.add_argument("--write", action="store_true", help="write the profiles' files")
    options = parser.parse_args()
    rows, _ = read_rows(options.points)
    if any(row.study == "ptdp_table1" for row in rows):
        print("Table 1 is the test set; remove its rows from the file", file=sys.stderr)
        return 2
    for name, recipe in RECIPES.items():
        if options.only not in (None, name):
            continue
        chosen = recipe.chosen(name, rows)
        if not chosen:
            continue
        start = recipe.begin(name)
        profile = fit(chosen, start, recipe.names)
        left_out = left_out_predictions(chosen, start, recipe)
        predictions = [prediction for group in left_out.values() for prediction in group]
        held = np.abs([prediction.error for prediction in predictions])
        inside = np.abs(np.expm1(log_errors(chosen, profile)))
        print(f"{name}: {len(chosen)} rows, {len(left_out)} groups")
        print(f"  fitted    {_spread(inside)}\n  left out  {_spread(held)}")
        for group, found in left_out.items():
            print(f"    {group:14s} n {len(found):3d}  median {100 * np.median([p.error for p in found]):+6.1f} %")
        moved = (f"{key} {getattr(start, key):.3g} → {getattr(profile, key):.3g}" for key in recipe.names)
        print(f"  {', '.join(moved)}")
        sources = Counter(row.source for row in chosen)
        profile = profile.changed(
            fitted_on=tuple(f"{source}: {count} rows" for source, count in sorted(sources.items())),
            fitted_gpus=tuple(sorted({row.adapted(start).device.name for row in chosen})),
            most_gpus=max(row.gpus for row in chosen),
            fitted_experts=any(row.work.expert > 1 for row in chosen),
            error_median=float(np.median(held)),
            error_p90=band_of(float(np.quantile(held, 0.9)), len(left_out), recipe),
        )
        if options.write:
            write_profile(profile, judgement(predictions, len(left_out)))
    return 0


def band_of(p90: float, groups: int, recipe: Recipe) -> float:
    """The error that nine in ten rows of a further group stay below, from the p90 of a few groups.

    Few groups may agree by luck, so the usual p90 counts as one more of them, and Student's t takes the place of the
    normal distribution.
    """
    pooled = np.sqrt((groups * p90**2 + USUAL_P90[bool(recipe.like)] ** 2) / (groups + 1))
    return float(pooled * t.ppf(0.95, groups + 1) / norm.ppf(0.95))


def left_out_predictions(rows: list[Row], start: Profile, recipe: Recipe) -> dict[str, list[Prediction]]:
    """For every group, predictions of its rows under the profile that all other groups give."""
    groups = leave_one_group_out(rows, start, recipe.names, recipe.group)
    found = {group: [predict_row(row, profile) for row in held] for group, (profile, held) in groups.items()}
    return {group: [one for one in predictions if one is not None] for group, predictions in found.items()}


def _spread(errors: np.ndarray) -> str:
    return (
        f"median {100 * np.median(errors):.1f} %, mean {100 * errors.mean():.1f} %, "
        f"p90 {100 * np.quantile(errors, 0.9):.1f} %, largest {100 * errors.max():.1f} %"
    )


if __name__ == "__main__":
    sys.exit(main())
