"""Losses of runs as a picture, and as a few lines of text for a terminal."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, cycle, pairwise
from math import isnan, nan
from pathlib import Path
from statistics import median
from typing import Any

from titan_like.config.errors import shortened
from titan_like.metrics.run_files import METRICS_FILE, complete_lines, read_settings

_BARS = " ▁▂▃▄▅▆▇█"
_MARKS = "ox+*#%&=abcdefghijklmnpqrstuvwyz"  # ASCII, so that every terminal shows them
_SEVERAL = "@"
_LOSSES, _AMOUNTS = ("loss", "validation_loss"), ("consumed_tokens", "step_time_s")
_PLACES = ("job.dump_folder", "job.config_file", "job.description", "metrics.run_name")  # differ in every run

Curve = list[tuple[int, float]]
"""Steps and losses."""


def read_losses(path: Path, names: Sequence[str] = _LOSSES) -> dict[str, Curve]:
    """Each ``loss``, ``validation_loss`` and ``validation_loss/NAME`` in a metrics.jsonl, or the figures ``names``.

    Figures that are not finite, or too large for a float, are left out, and so is a line that is being written.
    """
    curves = {key: [point for point in curve if not isnan(point[1])] for key, curve in _read(path, names).items()}
    return {key: curve for key, curve in curves.items() if curve}


def _read(path: Path, names: Sequence[str]) -> dict[str, Curve]:
    """The figures ``names``, of which those that are not finite are NaN."""
    curves = defaultdict[str, Curve](list)
    for step, line in complete_lines(path):
        for key, value in json.loads(line).items():
            if key.partition("/")[0] in names and (value is None or isinstance(value, int | float)):
                curves[key].append((step, nan if value is None or not abs(value) < 1e300 else value))
    return dict(curves)


def compare_runs(folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Losses, tokens, seconds of the steps alone, and settings that differ, by row of a table and name of the run.

    A final loss is NaN if it was not finite.
    """
    rows, settings = defaultdict[str, dict[str, Any]](dict), {name: read_settings(folders[name]) for name in folders}
    figures = {name: _read(folder / METRICS_FILE, (*_LOSSES, *_AMOUNTS)) for name, folder in folders.items()}
    for name, curves in figures.items():
        for key, curve in sorted(curves.items()):
            if key not in _AMOUNTS:
                rows[f"final {key}"][name] = curve[-1][1]
                best = min(((loss, step) for step, loss in curve if not isnan(loss)), default=(None, None))
                rows[f"best {key}"][name], rows[f"step of best {key}"][name] = best
    for name, curves in figures.items():
        tokens, seconds = ([amount for _, amount in curves.get(key, []) if not isnan(amount)] for key in _AMOUNTS)
        rows["tokens"][name], rows["seconds"][name] = max(tokens, default=None), sum(seconds)
    for key in sorted({*chain(*settings.values())} - {*_PLACES}):
        values = {name: of_run.get(key) for name, of_run in settings.items() if of_run}
        if any(value != next(iter(values.values())) for value in values.values()):
            rows[key] = values
    return dict(rows)


def text_table(rows: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> str:
    """The rows of `compare_runs` with a column for each run, under its mark in `text_curves`."""
    lines = [["", *map(" ".join, zip(cycle(_MARKS), names))]]
    lines += [[row, *(_cell(values.get(name)) for name in names)] for row, values in rows.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else f"{value:,}" if type(value) is int else shortened(json.dumps(value), 40)


def text_curves(runs: Mapping[str, Curve], width: int = 72, height: int = 16, colours: bool = False) -> str:
    """The curves of runs over one another, each with a mark of its own, in ASCII; a column is the median of its steps.

    ``@`` is where several runs are. With ``colours``, marks are also coloured for a terminal.
    """
    width, steps = max(1, width), [step for curve in runs.values() for step, _ in curve]
    first, last = min(steps), max(steps)
    drawn = list[dict[int, float]]()
    for curve in runs.values():
        in_column = defaultdict[int, list[float]](list)
        for step, loss in curve:
            in_column[(step - first) * width // (last - first + 1)].append(loss)
        drawn.append({column: median(losses) for column, losses in in_column.items()})
    low, high = (extreme(chain(*(columns.values() for columns in drawn))) for extreme in (min, max))
    cells = dict[tuple[int, int], str]()
    for mark, columns, colour in zip(cycle(_MARKS), drawn, cycle(range(31, 37))):
        for column, value in columns.items():
            cell = round((value - low) / ((high - low) or 1.0) * (height - 1)), column
            text = f"\x1b[{colour}m{mark}\x1b[0m" if colours else mark
            cells[cell] = _SEVERAL if cells.get(cell, text) != text else text
    lines = []
    for row in reversed(range(height)):
        label = {height - 1: f"{high:.3f}", 0: f"{low:.3f}"}.get(row, "")
        lines.append(f"{label:>8s} |" + "".join(cells.get((row, column), " ") for column in range(width)).rstrip())
    return "\n".join([*lines, f"{'step':>8s}  {first} {last:>{max(width - len(str(first)) - 1, 1)}}"])


def text_curve(losses: Sequence[tuple[int, float]], width: int = 72, height: int = 10) -> str:
    """The curve in block characters; a column is the median of equally many steps, give or take one."""
    width = max(1, min(width, len(losses)))
    edges = [len(losses) * column // width for column in range(width + 1)]
    columns = [median(loss for _, loss in losses[a:b]) for a, b in pairwise(edges)]
    low, high = min(columns), max(columns)
    eighths = [1 + (value - low) / ((high - low) or 1.0) * (8 * height - 1) for value in columns]
    lines = []
    for row in reversed(range(height)):
        label = {height - 1: f"{high:.3f}", 0: f"{low:.3f}"}.get(row, "")
        lines.append(f"{label:>8s} ┤" + "".join(_BARS[round(min(max(e - 8 * row, 0), 8))] for e in eighths))
    first, last = (str(losses[at][0]) for at in (0, -1))
    return "\n".join([*lines, f"{'step':>8s}  {first} {last:>{max(width - len(first) - 1, 1)}s}"])


def draw_losses(runs: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Draw the losses of runs by name: each step's and the mean of the steps around it, and validations with markers.

    Needs matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    for number, (name, curves) in enumerate(runs.items()):
        color = f"C{number}"
        for key, losses in curves.items():
            steps, values = zip(*losses, strict=True)
            if key != "loss":
                marker, label = "osD^v"[list(curves).index(key) % 5], f"{name}: {key.replace('_', ' ')}"
                panel.plot(steps, values, f"{marker}--", color=color, markersize=4, linewidth=0.8, label=label)
                continue
            half = max(1, len(values) // 100)
            nearby = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
            means = [sum(window) / len(window) for window in nearby]
            panel.plot(steps, values, color=color, linewidth=0.8, alpha=0.25)
            panel.plot(steps, means, color=color, linewidth=1.6, label=name)
    panel.set(xlabel="step", ylabel="loss, nats per token")
    panel.legend()
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
