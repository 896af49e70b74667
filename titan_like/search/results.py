"""What a search has found: rows, the table, the planner's judgement, and the files."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from titan_like.config.load import edit, setting
from titan_like.config.options import json_text, write_output_file
from titan_like.config.schema import JobConfig
from titan_like.metrics.timeline_plot import can_draw
from titan_like.planner.commands.search import run_as_toml
from titan_like.planner.search_space import SEARCHED
from titan_like.search.cases import GLOBAL
from titan_like.search.settings import arguments
from titan_like.search.trial import OK, measured

Row = dict[str, Any]  # one layout; the columns of results.csv

_COLUMNS = SEARCHED | {GLOBAL: "global_batch_size"}
_FIGURES = (
    "step_time_s",
    "samples_per_second",
    "tokens_per_second",
    "tflops_per_device",
    "mfu_model",
    "peak_memory_bytes",
    "predicted_step_time_s",
    "predicted_memory_bytes",
)
HEAD = (
    f"{'':>3s} {'proc.':>5s} {'tensor':>7s} {'pipeline':>9s} {'schedule':23s} {'ZeRO':>4s} {'data':>12s} {'micro':>5s} "
    f"{'batch':>6s} {'recompute':11s} {'step s':>9s} {'predicted':>9s} {'tokens/s':>10s} {'TFLOP/s':>8s} {'MFU':>6s} "
    f"{'GiB':>6s}  outcome"
)


def row_of(config: JobConfig, processes: int, found: dict[str, Any]) -> Row:
    """A layout with what was found of it; figures that are not known are None."""
    layout = {name: setting(config, key) for key, name in _COLUMNS.items()}
    known = {name: found.get(name) for name in _FIGURES}
    told = {name: found[name] for name in ("outcome", "reason")}
    return {"trial": found.get("trial", ""), "processes": processes, **layout, **known, **told}


def line(number: int | str, row: Row) -> str:
    """A row of the table."""

    def number_or_blank(name: str, width: int, form: str, scale: float = 1.0) -> str:
        return f"{'' if row[name] is None else format(row[name] * scale, form):>{width}s}"

    pipelined = row["pipeline"] > 1
    tensor = f"{row['tensor']}{' sp' if row['sequence_parallel'] else ''}"
    pipeline = f"{row['pipeline']}" + (f" × {row['virtual_stages']}" if row["virtual_stages"] > 1 else "")
    data = (f"{row['replicate']} × " if row["replicate"] > 1 else "") + (str(row["shard"]) if row["shard"] > 0 else "?")
    data += "".join(f" {short} {row[name]}" for short, name in (("cp", "context"), ("ep", "expert")) if row[name] > 1)
    recompute = row["recompute"] + (f" 1/{row['recompute_every']}" if row["recompute_every"] > 1 else "")
    reason = row["outcome"] + (f": {row['reason']}" if row["reason"] else "")
    return (
        f"{number:>3} {row['processes']:>5d} {tensor:>7s} {pipeline:>9s} {row['schedule'] if pipelined else '':23s} "
        f"{row['zero_stage']:>4d} {data:>12s} {row['micro_batch_size']:>5} {row['global_batch_size']:>6d} "
        f"{recompute:11s} {number_or_blank('step_time_s', 9, '.4f')} "
        f"{number_or_blank('predicted_step_time_s', 9, '.4f')} {number_or_blank('tokens_per_second', 10, ',.0f')} "
        f"{number_or_blank('tflops_per_device', 8, '.4g')} {number_or_blank('mfu_model', 6, '.1%')} "
        f"{number_or_blank('peak_memory_bytes', 6, '.2f', 2**-30)}  {reason}"
    )


def ranked(rows: Sequence[Row]) -> list[Row]:
    """The measured rows, those with the most tokens per second first."""
    return sorted((row for row in rows if row["outcome"] == OK), key=lambda row: -row["tokens_per_second"])


def judgement(rows: Sequence[Row]) -> dict[str, Any] | None:
    """How well predictions rank the measured layouts; None for fewer than two.

    The rank correlation is Spearman's, of seconds per sample over all layouts. A regret is how much slower the layout
    is that is predicted to be fastest than the one that is, among layouts with the same processes and batch.
    """
    known = [row for row in rows if row["outcome"] == OK and row["predicted_step_time_s"]]
    if len(known) < 2:
        return None
    predicted, seconds = (
        np.array([row[name] / row["global_batch_size"] for row in known])
        for name in ("predicted_step_time_s", "step_time_s")
    )
    regrets = {}
    for group in dict.fromkeys((row["processes"], row["global_batch_size"]) for row in known):
        here = [at for at, row in enumerate(known) if (row["processes"], row["global_batch_size"]) == group]
        chosen = here[int(np.argmin(predicted[here]))]
        regrets["{} processes, batch {}".format(*group)] = float(seconds[chosen] / seconds[here].min() - 1)
    return {
        "layouts": len(known),
        "rank_correlation": rank_correlation(predicted, seconds),
        "median_error": float(np.median(np.abs(predicted / seconds - 1))),
        "regret": max(regrets.values()),
        "regrets": regrets,
    }


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's; equal values share their mean rank. It is 1 if all values of one side are equal."""
    # Twice the mean rank of a value, but for a constant: how many are below it, and how many are not above it.
    ranks = [np.less.outer(side, side).sum(0) + np.less_equal.outer(side, side).sum(0) for side in (first, second)]
    if min(np.ptp(side) for side in ranks) == 0:
        return 1.0
    return float(np.corrcoef(*ranks)[0, 1])


def described(rows: Sequence[Row]) -> str:
    """The table at the end, with the planner's judgement."""
    lines = [HEAD, *(line(place, row) for place, row in enumerate(ranked(rows), 1))]
    lines += [line("-", row) for row in rows if row["outcome"] != OK]
    found = judgement(rows)
    if found is not None:
        worst = max(found["regrets"], key=lambda group: found["regrets"][group])
        lines.append(
            f"planner: rank correlation {found['rank_correlation']:.3f} over {found['layouts']} layouts, median error of "
            f"the step time {found['median_error']:.1%}; its choice costs at most {found['regret']:.1%} ({worst})"
        )
    return "\n".join(lines)


def calibration_rows(rows: Sequence[Row], configs: dict[str, JobConfig], steps: int, gpu: str) -> dict[str, Any]:
    """The measured layouts as ``plan.py calibrate --points`` reads them; ``gpu`` is the device's name."""
    from torch import __version__

    cases = []
    for row in rows:
        if row["outcome"] == OK:
            words = arguments(measured(configs[row["trial"]], steps, Path("outputs")))
            case = {"command": shlex.join(["train.py", *words]), "gpus": row["processes"]}
            cases.append(case | {name: row[name] for name in ("trial", "step_time_s", "peak_memory_bytes")})
    return {"gpu": gpu, "torch": __version__, "cases": cases}


def write_files(rows: Sequence[Row], configs: dict[str, JobConfig], out: Path, steps: int, gpu: str) -> None:
    """Write the tables, the best layout's TOML and the rows for calibration. Each file is replaced whole."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    files = {
        "results.csv": text.getvalue(),
        "results.json": json_text({"layouts": rows, "planner": judgement(rows)}),
        "rows.json": json_text(calibration_rows(rows, configs, steps, gpu)),
    }
    for best in ranked(rows)[:1]:
        config, path = edit(configs[best["trial"]], {"parallelism.auto": False}), out / "best.toml"
        head = [
            f"{config.job.config_file or 'A run'} in the fastest layout that scripts/search.py measured, on "
            f"{best['processes']} processes:",
            f"  {best['step_time_s']:.4g} s a step, {best['tokens_per_second']:,.0f} tokens/s ({best['trial']})",
        ]
        files["best.toml"] = run_as_toml(config, best["processes"], path, head)
    for name, content in files.items():
        write_output_file("--dump_folder", out / name, content)


def draw(rows: Sequence[Row], path: Path) -> str | None:
    """Draw tokens per second against processes: the best layout of each tensor and pipeline degree.

    Returns:
        Why there is no picture, if there is none.
    """
    if not can_draw():
        return "no picture of the throughput: it needs matplotlib (pip install 'titan_like[plot]')"
    if not ranked(rows):
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    lines: dict[tuple[int, int], dict[int, float]] = {}
    for row in reversed(ranked(rows)):  # the fastest come last and stay
        lines.setdefault((row["tensor"], row["pipeline"]), {})[row["processes"]] = row["tokens_per_second"]
    for (tensor, pipeline), points in sorted(lines.items()):
        panel.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=f"TP {tensor} × PP {pipeline}")
    counts = sorted({row["processes"] for row in ranked(rows)})
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, map(str, counts))
    panel.set(xlabel="processes", ylabel="tokens per second", ylim=(0, None))
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    return None
