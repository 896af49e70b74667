"""What a search has found: the table, the files, the picture, and how well the planner ranks the layouts."""

import csv
import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titan_like.config.load import setting
from titan_like.config.schema import JobConfig
from titan_like.metrics.timeline_plot import can_draw
from titan_like.search.cases import KEYS, layout_name
from titan_like.search.trial import OK, measured

Row = dict[str, Any]  # one layout; the columns of results.csv

# Columns of the table, each with its heading, width, format and factor.
_FIGURES = {
    "step_time_s": ("step s", 9, ".4f", 1.0),
    "predicted_step_time_s": ("predicted", 9, ".4f", 1.0),
    "samples_per_second": ("samples/s", 10, ",.2f", 1.0),
    "tokens_per_second": ("tokens/s", 11, ",.0f", 1.0),
    "tflops_per_device": ("TFLOP/s", 8, ".4g", 1.0),
    "mfu_model": ("MFU", 6, ".1%", 1.0),
    "peak_memory_bytes": ("GiB", 7, ".3f", 2**-30),
    "predicted_memory_bytes": ("predicted", 9, ".3f", 2**-30),
}
HEAD = f"{'layout':50s} " + " ".join(f"{title:>{width}s}" for title, width, _, _ in _FIGURES.values()) + "  outcome"


def row_of(config: JobConfig, processes: int, result: dict[str, Any]) -> Row:
    """A layout with its ``result``; figures that are not known are None."""
    layout = {name: setting(config, key) for key, name in KEYS.items()}
    figures = {name: result.get(name) for name in (*_FIGURES, "outcome", "reason")}
    return {"layout": layout_name(config, processes), "processes": processes, **layout, **figures}


def line(row: Row) -> str:
    """A row of the table."""
    cells = [
        f"{'' if row[name] is None else format(row[name] * factor, form):>{width}s}"
        for name, (_, width, form, factor) in _FIGURES.items()
    ]
    reason = f": {row['reason']}" if row["reason"] else ""
    return f"{row['layout']:50s} {' '.join(cells)}  {row['outcome']}{reason}"


def ranked(rows: Sequence[Row]) -> list[Row]:
    """The measured layouts, the most tokens per second first."""
    return sorted((row for row in rows if row["outcome"] == OK), key=lambda row: -row["tokens_per_second"])


def judgement(rows: Sequence[Row]) -> dict[str, Any] | None:
    """How well predictions rank the measured layouts; None for fewer than two.

    The rank correlation is Spearman's, of seconds per sample over all layouts. A regret is how much longer the layout
    that is predicted to be fastest takes than the fastest, among layouts with the same processes and batch.
    """
    judged = [row for row in rows if row["outcome"] == OK and row["predicted_step_time_s"]]
    if len(judged) < 2:
        return None
    batch = np.array([row["global_batch_size"] for row in judged])
    predicted = np.array([row["predicted_step_time_s"] for row in judged]) / batch
    seconds = np.array([row["step_time_s"] for row in judged]) / batch
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(judged):
        groups.setdefault(f"{row['processes']} processes, batch {row['global_batch_size']}", []).append(index)
    regrets = {
        name: float(seconds[indices[int(np.argmin(predicted[indices]))]] / seconds[indices].min() - 1)
        for name, indices in groups.items()
        if len(indices) > 1
    }
    return {
        "layouts": len(judged),
        "rank_correlation": rank_correlation(predicted, seconds),
        "median_error": float(np.median(np.abs(predicted / seconds - 1))),
        "worst_regret": max(regrets.values(), default=0.0),
        "regrets": regrets,
    }


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's; equal values share their mean rank. It is 1 if all values of one side are equal."""
    # How many values are below a value, and how many are not above it: together twice its mean rank, plus a constant.
    ranks = [np.less.outer(side, side).sum(0) + np.less_equal.outer(side, side).sum(0) for side in (first, second)]
    return 1.0 if min(map(np.ptp, ranks)) == 0 else float(np.corrcoef(*ranks)[0, 1])


def described(rows: Sequence[Row]) -> str:
    """The table at the end, the fastest layout first, with the planner's judgement."""
    lines = [HEAD, *map(line, ranked(rows)), *(line(row) for row in rows if row["outcome"] != OK)]
    score = judgement(rows)
    if score is not None:
        worst = max(score["regrets"], key=lambda group: score["regrets"][group])
        lines.append(
            f"planner: rank correlation {score['rank_correlation']:.3f} over {score['layouts']} layouts, median error "
            f"of the step time {score['median_error']:.1%}, regret at most {score['worst_regret']:.1%} ({worst})"
        )
    return "\n".join(lines)


def as_csv(rows: Sequence[Row]) -> str:
    """All columns of all rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def calibration_rows(runs: Sequence[tuple[JobConfig, Row]], steps: int, gpu: str) -> dict[str, Any]:
    """The measured layouts as ``plan.py calibrate --points`` reads them; ``gpu`` is the device's name."""
    from torch import __version__

    columns = ("layout", "step_time_s", "peak_memory_bytes")
    cases = [
        {"command": shlex.join(["train.py", *measured(config, steps, "outputs")]), "gpus": row["processes"]}
        | {name: row[name] for name in columns}
        for config, row in runs
        if row["outcome"] == OK
    ]
    return {"gpu": gpu, "torch": __version__, "cases": cases}


def draw(rows: Sequence[Row], path: Path) -> str | None:
    """Draw tokens per second against processes, a line for each tensor × pipeline degree with its best layouts.

    Returns why there is no picture, if there is none.
    """
    if not can_draw():
        return "no picture of the throughput: it needs matplotlib (pip install 'titan_like[plot]')"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    lines: dict[tuple[int, int], dict[int, float]] = {}
    for row in reversed(ranked(rows)):  # the fastest come last, and stay
        lines.setdefault((row["tensor"], row["pipeline"]), {})[row["processes"]] = row["tokens_per_second"]
    for (tensor, pipeline), points in sorted(lines.items()):
        panel.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=f"TP {tensor} × PP {pipeline}")
    counts = sorted({row["processes"] for row in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, map(str, counts))
    panel.set(xlabel="processes", ylabel="tokens per second", ylim=(0, None))
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    return None
