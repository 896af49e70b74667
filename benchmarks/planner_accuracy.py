"""How far the planner is from measured training steps.

    python benchmarks/planner_accuracy.py [--points FILE.csv] [--rows] [--json PATH]

Judges the rows of a CSV (columns: `titan_like.planner.measured`), or those that the package cites itself, the ten of
arXiv 2104.04473, Table 1, among them. Each row is predicted with the profile of its GPU and of the first word of its
notes. Per such group: n, median, mean and p90 of the absolute error of the step time, its bias (median with sign), the
worst regret of choosing the layout predicted fastest, and the rank correlation over layouts; then of memory, where it
was measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the code beside this file

from titan_like.config.errors import ConfigError
from titan_like.planner.accuracy import GroupAccuracy, Prediction, accuracy, predict_row
from titan_like.planner.measured import Row, published_rows, read_rows


def main(argv: list[str]) -> int:
    """Predict every row, and print the groups."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--points", metavar="FILE.csv", help="measured rows (default: those cited by the package)")
    parser.add_argument("--rows", action="store_true", help="print every row too")
    parser.add_argument("--json", metavar="PATH", help="also write all of it to this file")
    options = parser.parse_args(argv)
    try:
        rows, left_out = read_rows(options.points) if options.points else (published_rows(), [])
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    predictions, uncovered = predict_all(rows)
    groups = accuracy(predictions)
    if options.rows:
        print_rows(predictions)
    print_groups(groups)
    for group, count in uncovered.items():
        print(f"no profile covers {group}: {count} rows")
    for reason, count in Counter(line.split(": ", 1)[1] for line in left_out).items():
        print(f"not predicted, {reason}: {count} rows")
    if options.json:
        result = {
            "groups": [group.as_dict() for group in groups],
            "rows": [row_as_dict(prediction) for prediction in predictions],
            "not_predicted": left_out,
            "without_profile": uncovered,
        }
        Path(options.json).write_text(json.dumps(result, indent=2), encoding="utf-8")
    return 0


def predict_all(rows: list[Row]) -> tuple[list[Prediction], dict[str, int]]:
    """Predictions, and how many rows of which groups no profile covers."""
    predictions, uncovered = [], Counter[str]()
    for row in rows:
        prediction = predict_row(row)
        if prediction is None:
            uncovered[row.group] += 1
        else:
            predictions.append(prediction)
    return predictions, dict(uncovered)


def print_rows(predictions: list[Prediction]) -> None:
    """One line a row."""
    for prediction in predictions:
        row, work = prediction.row, prediction.row.work
        layout = f"tp{work.tensor} pp{work.pipeline} v{work.virtual_stages} dp{work.data_parallel} z{work.zero_stage}"
        memory = f"  {prediction.memory_gib:6.1f} GiB"
        memory += f" of {row.memory_gib:6.1f} measured" if row.memory_gib else ""
        print(
            f"{row.study:14s} {row.model:14s} {row.gpus:5d} GPUs  {layout:24s} b{work.micro_batch_size:<3d} "
            f"{row.seconds:9.3f} s  predicted {prediction.seconds:9.3f} s  {100 * prediction.error:+6.1f} %{memory}"
        )
    print()


def print_groups(groups: list[GroupAccuracy]) -> None:
    """One line a group."""
    print(
        f"{'GPU and study':36s} {'n':>4s} {'median':>7s} {'mean':>7s} {'p90':>7s} {'worst':>7s} {'bias':>7s} "
        f"{'sweeps':>6s} {'regret':>7s} {'ranks':>6s}   {'memory: n':>9s} {'median':>7s} {'p90':>7s}  profile"
    )
    for group in groups:
        print(
            f"{group.name:36s} {group.n:4d} {_percent(group.median)} {_percent(group.mean)} {_percent(group.p90)} "
            f"{_percent(group.largest)} {_percent(group.bias, sign=True)} {len(group.sweeps):6d} "
            f"{_percent(group.worst_regret)} {_number(group.rank_correlation)}   {group.memory_n:9d} "
            f"{_percent(group.memory_median)} {_percent(group.memory_p90)}  {', '.join(group.profiles)}"
        )


def _percent(value: float | None, sign: bool = False) -> str:
    if value is None:
        return f"{'-':>7s}"
    return f"{100 * value:+5.1f} %" if sign else f"{100 * value:5.1f} %"


def _number(value: float | None) -> str:
    return f"{'-':>6s}" if value is None else f"{value:6.2f}"


def row_as_dict(prediction: Prediction) -> dict[str, object]:
    """For JSON."""
    row, work = prediction.row, prediction.row.work
    return {
        "group": row.group,
        "source": row.source,
        "model": row.model,
        "gpus": row.gpus,
        "tensor": work.tensor,
        "pipeline": work.pipeline,
        "virtual_stages": work.virtual_stages,
        "data_parallel": work.data_parallel,
        "zero_stage": work.zero_stage,
        "micro_batch_size": work.micro_batch_size,
        "global_batch_size": work.global_batch_size,
        "measured_seconds": row.seconds,
        "predicted_seconds": prediction.seconds,
        "error": prediction.error,
        "measured_memory_gib": row.memory_gib,
        "predicted_memory_gib": prediction.memory_gib,
        "profile": prediction.profile,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
