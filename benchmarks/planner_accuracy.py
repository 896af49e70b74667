"""Errors of the planner against measured training steps.

    python benchmarks/planner_accuracy.py [--points FILE.csv] [--rows] [--json PATH]

Judges the rows of a file (columns: `measured_rows.py`), or those of published_rows.toml, which include
the ten of arXiv 2104.04473, Table 1, and this trainer's of titan_rows.json. Each row is predicted with the profile
for its GPU and the first word of its notes. For each such group it prints n; the median, mean and p90 of the absolute
error of the step time; the bias (signed median); the worst regret of choosing the layout that is predicted fastest, and
the number of sweeps in which it is at most 2 %; the rank correlation over layouts; the errors of memory, if it was
measured; and rows that ran out of memory. Without --points it also prints the errors on rows left out of each profile's
fit, as recorded when it was fitted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the code next to this file

from benchmarks.accuracy import SMALL_REGRET, GroupAccuracy, Prediction, Sweep, accuracy, predict_row
from benchmarks.measured_rows import Row, read_rows
from benchmarks.published_rows import published_rows
from benchmarks.stack_profiles import left_out_figures, profiles
from titan_like.config.errors import ConfigError

OWN_ROWS = Path(__file__).resolve().parent / "results" / "titan_rows.json"


def main(argv: list[str]) -> int:
    """Predict every row and print the groups."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--points", metavar="FILE.csv", help="measured rows (default: those cited by the package)")
    parser.add_argument("--rows", action="store_true", help="print every row too")
    parser.add_argument("--json", metavar="PATH", help="also write all of it to this file")
    options = parser.parse_args(argv)
    try:
        rows, left_out = read_rows(options.points or OWN_ROWS)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    rows += [] if options.points else published_rows()
    predictions, uncovered = predict_all(rows)
    groups = accuracy(predictions)
    if options.rows:
        print_rows(predictions)
    print_groups(groups)
    print_sweeps([sweep for group in groups for sweep in group.sweeps])
    print_memory(groups)
    reasons = Counter(f"not predicted, {line.split(': ', 1)[1]}" for line in left_out)
    for reason, count in [*((f"no profile covers {name}", n) for name, n in uncovered.items()), *reasons.items()]:
        print(f"{reason}: {count} rows")
    left_out_of_fits = {} if options.points else {"left_out": print_left_out()}
    if options.json:
        result = left_out_of_fits | {
            "groups": [group.as_dict() for group in groups],
            "rows": [row_as_dict(prediction) for prediction in predictions],
            "not_predicted": left_out,
            "without_profile": uncovered,
        }
        Path(options.json).write_text(json.dumps(result, indent=2), encoding="utf-8")
    return 0


def predict_all(rows: list[Row]) -> tuple[list[Prediction], dict[str, int]]:
    """Predictions, and the number of rows in each group that no profile covers."""
    found = [(row, predict_row(row)) for row in rows]
    uncovered = Counter(row.group for row, prediction in found if prediction is None)
    return [prediction for _, prediction in found if prediction is not None], dict(uncovered)


def print_rows(predictions: list[Prediction]) -> None:
    """Print one line per row."""
    for prediction in predictions:
        row, work = prediction.row, prediction.row.work
        measured = "out of memory" if row.out_of_memory else f"{row.seconds:9.3f} s"
        error = "" if row.out_of_memory else f"{100 * prediction.error:+6.1f} %"
        layout = f"tp{work.tensor} pp{work.pipeline} v{work.virtual_stages} dp{work.data_parallel} z{work.zero_stage}"
        used = f"  {prediction.memory_gib:6.1f} GiB"
        used += f" of {row.memory_gib:6.1f} measured" if row.memory_gib else ""
        print(
            f"{row.study:14s} {row.model:14s} {row.gpus:5d} GPUs  {layout:24s} b{work.micro_batch_size:<3d} "
            f"{measured}  predicted {prediction.seconds:9.3f} s  {error}{used}"
        )
    print()


def print_groups(groups: list[GroupAccuracy]) -> None:
    """Print one line per group."""
    print(
        f"{'GPU and study':36s} {'n':>4s} {'median':>7s} {'mean':>7s} {'p90':>7s} {'worst':>7s} {'bias':>7s} "
        f"{'sweeps':>6s} {'≤ 2 %':>6s} {'regret':>7s} {'ranks':>6s}   {'memory: n':>9s} {'median':>7s} {'p90':>7s}  "
        "profile"
    )
    for group in groups:
        if not group.n:  # only rows that ran out of memory
            continue
        choice = group.choice
        print(
            f"{group.name:36s} {group.n:4d} {_percent(group.median)} {_percent(group.mean)} {_percent(group.p90)} "
            f"{_percent(group.largest)} {_percent(group.bias, sign=True)} {len(group.sweeps):6d} "
            f"{choice.get('small_regrets', 0):6d} {_percent(choice.get('worst_regret'))} "
            f"{_number(choice.get('rank_correlation'))}   "
            f"{group.memory_n:9d} {_percent(group.memory_median)} {_percent(group.memory_p90)}  "
            f"{', '.join(group.profiles)}"
        )


def print_sweeps(sweeps: list[Sweep]) -> None:
    """Print the sweeps in which a slower layout is chosen, with the spread of repeated measurements of one layout."""
    if not sweeps:
        return
    small = sum(sweep.regret <= SMALL_REGRET for sweep in sweeps)
    print(f"\nchoice: within {100 * SMALL_REGRET:.0f} % of the fastest in {small} of {len(sweeps)} sweeps; the others:")
    for sweep in sorted(sweeps, key=lambda sweep: -sweep.regret):
        if sweep.regret > SMALL_REGRET:
            noise = "" if sweep.noise is None else f", one layout measured up to {_percent(sweep.noise).strip()} apart"
            ranks = f"{sweep.layouts} layouts, ranks {sweep.rank_correlation:.2f}"
            print(f"  {_percent(sweep.regret)}  {sweep.name} ({ranks}{noise})")


def print_memory(groups: list[GroupAccuracy]) -> None:
    """Print whether runs that fitted into memory are predicted to fit, and those that did not are not."""
    ran, too_large = sum(group.memory_n for group in groups), sum(group.wrongly_too_large for group in groups)
    failed, fits = sum(group.out_of_memory for group in groups), sum(group.wrongly_fits for group in groups)
    print(f"\nmemory: of {failed} runs that did not fit {fits} predicted to fit; ", end="")
    print(f"of {ran} that ran, with measured memory, {too_large} predicted not to fit")


def print_left_out() -> dict[str, dict[str, Any]]:
    """Print the errors on rows left out of each profile's fit, from the record of the fit."""
    print("\nrows left out of the fit")
    found = {}
    more = left_out_figures()
    for profile in profiles().values():
        figures = {"median": profile.error_median, "band": profile.error_p90, **more[profile.name]}
        print(f"{profile.name:34s} {', '.join(f'{name} {value:.3g}' for name, value in figures.items())}")
        found[profile.name] = {"fitted_on": profile.fitted_on, **figures}
    return found


def _percent(value: float | None, sign: bool = False) -> str:
    if value is None:
        return f"{'-':>7s}"
    return f"{100 * value:+5.1f} %" if sign else f"{100 * value:5.1f} %"


def _number(value: float | None) -> str:
    return f"{'-':>6s}" if value is None else f"{value:6.2f}"


def row_as_dict(prediction: Prediction) -> dict[str, object]:
    """A row as JSON."""
    row, layout = prediction.row, ("tensor", "pipeline", "virtual_stages", "data_parallel", "zero_stage")
    stated = {name: getattr(row, name) for name in ("group", "source", "model", "gpus", "out_of_memory")}
    stated |= {name: getattr(row.work, name) for name in (*layout, "micro_batch_size", "global_batch_size")}
    return stated | {
        "measured_seconds": None if row.out_of_memory else row.seconds,
        "predicted_seconds": prediction.seconds,
        "error": None if row.out_of_memory else prediction.error,
        "fits": prediction.fits,
        "measured_memory_gib": row.memory_gib,
        "predicted_memory_gib": prediction.memory_gib,
        "profile": prediction.profile,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
