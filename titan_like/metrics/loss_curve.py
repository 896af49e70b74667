"""Loss curves of runs, as a picture and as text for a terminal."""

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
_SKIPS = ("skipped", "nan", "spike")
_AMOUNTS = ("consumed_tokens", "step_time_s", "tokens_per_second", "mfu_model", *_SKIPS)
_FLAT = 2.0  # losses above the usual ones are left out of a picture if they would make its range this much larger
# Keys that choose the held-out samples, or their tokens.
_HELD_OUT = ("data.", "evaluation.sets", "evaluation.steps", "training.seq_len", "training.global_batch_size")
_READING = ("data.num_workers", "data.num_readers", "data.bad_lines", "data.resume")
_PLACES = ("job.dump_folder", "job.config_file", "job.description", "metrics.run_name")  # differ in every run

Curve = list[tuple[int, float]]
"""Steps and losses."""


def read_losses(path: Path) -> dict[str, Curve]:
    """The finite values of ``loss``, ``validation_loss`` and each ``validation_loss/NAME`` in a metrics.jsonl."""
    curves = {key: [point for point in curve if not isnan(point[1])] for key, curve in _read(path).items()}
    return {key: curve for key, curve in curves.items() if curve and key not in _AMOUNTS}


def _read(path: Path) -> defaultdict[str, Curve]:
    """Losses, tokens and times; NaN where they are not finite, or too large for a float."""
    curves = defaultdict[str, Curve](list)
    for step, line in complete_lines(path):
        for key, value in json.loads(line).items():
            is_read = key.partition("/")[0] in ("loss", "validation_loss", *_AMOUNTS)
            if is_read and (value is None or isinstance(value, int | float)):
                curves[key].append((step, nan if value is None or not abs(value) < 1e300 else value))
    return curves


def compare_runs(folders: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """A table of runs, by row and name of the run: losses, tokens, rates, skipped steps, and settings that differ.

    Rates are medians of steps.
    """
    rows = defaultdict[str, dict[str, Any]](dict)
    settings = {name: read_settings(folder) for name, folder in folders.items()}
    figures = {name: _read(folder / METRICS_FILE) for name, folder in folders.items()}
    for name, curves in figures.items():
        for key in sorted({*curves} - {*_AMOUNTS}):
            rows[f"final {key}"][name] = curves[key][-1][1]
            best = min(((loss, step) for step, loss in curves[key] if not isnan(loss)), default=(None, None))
            rows[f"best {key}"][name], rows[f"step of best {key}"][name] = best
    for name, curves in figures.items():
        amounts = {key: [amount for _, amount in curves[key] if not isnan(amount)] for key in _AMOUNTS}
        rows["tokens"][name] = max(amounts["consumed_tokens"], default=None)
        rows["seconds"][name] = sum(amounts["step_time_s"])
        for row, key in (("tokens per second", "tokens_per_second"), ("MFU", "mfu_model")):
            rows[row][name] = median(amounts[key]) if amounts[key] else None
        rows["skipped steps"][name] = int(sum(sum(amounts[key]) for key in _SKIPS))
    if not any(rows["MFU"].values()):
        del rows["MFU"]
    for key in sorted({*chain(*settings.values())} - {*_PLACES}):
        values = {name: of_run.get(key) for name, of_run in settings.items() if of_run}
        if any(value != next(iter(values.values())) for value in values.values()):
            rows[key] = values
    return dict(rows)


def differing_validation(rows: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A sentence if the runs of `compare_runs` differ in what they validate on; None if at most one validates."""
    keys = [row for row in rows if row.startswith(_HELD_OUT) and row not in _READING]
    if not keys or not any(row.startswith("final validation_loss") and len(of) > 1 for row, of in rows.items()):
        return None
    return f"the validation losses are of different samples: the runs differ in {', '.join(keys)}"


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


def plotted_range(runs: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[float, float]:
    """The lowest and the highest loss of a picture of runs.

    What a run learns lies below its first loss. Losses above the highest of these, as of a run that has diverged, are
    left out if they would flatten the rest.
    """
    losses = [loss for curve in runs.values() for _, loss in curve]
    low, high, usual = min(losses), max(losses), max(curve[0][1] for curve in runs.values())
    return low, usual if low < usual and high - low > _FLAT * (usual - low) else high


def above_picture(runs: Mapping[str, Curve]) -> list[str]:
    """A sentence about each run with losses above `plotted_range`."""
    high, sentences = plotted_range(runs)[1], []
    for name, curve in runs.items():
        if above := [(loss, step) for step, loss in curve if loss > high]:
            peak, first = max(above)[0], min(step for _, step in above)
            sentences.append(f"{name} is above the picture in {len(above)} steps from {first} on, up to {peak:.4g}")
    return sentences


def text_curves(runs: Mapping[str, Curve], width: int = 72, height: int = 16, colours: bool = False) -> str:
    """The curves of runs in one ASCII plot, each with its own mark; a column is the median of its steps.

    ``@`` marks overlaps. With ``colours``, marks are also coloured for a terminal.
    """
    width = max(1, width)
    steps = [step for curve in runs.values() for step, _ in curve]
    first, last = min(steps), max(steps)
    drawn = list[dict[int, float]]()
    for curve in runs.values():
        in_column = defaultdict[int, list[float]](list)
        for step, loss in curve:
            in_column[(step - first) * width // (last - first + 1)].append(loss)
        drawn.append({column: median(losses) for column, losses in in_column.items()})
    low, high = plotted_range({name: [*columns.items()] for name, columns in zip(runs, drawn, strict=True)})
    cells = dict[tuple[int, int], str]()
    for mark, columns, colour in zip(cycle(_MARKS), drawn, cycle(range(31, 37))):
        for column, value in columns.items():
            cell = round(min(1.0, (value - low) / ((high - low) or 1.0)) * (height - 1)), column
            text = f"\x1b[{colour}m{mark}\x1b[0m" if colours else mark
            cells[cell] = _SEVERAL if cells.get(cell, text) != text else text
    rows = ["".join(cells.get((row, column), " ") for column in range(width)).rstrip() for row in range(height)]
    return _with_axes([f"|{row}" for row in rows], low, high, first, last, width)


def text_curve(losses: Sequence[tuple[int, float]], width: int = 72, height: int = 10) -> str:
    """The curve of one run in block characters; a column is the median of its steps."""
    width = max(1, min(width, len(losses)))
    edges = [len(losses) * column // width for column in range(width + 1)]
    columns = [median(loss for _, loss in losses[a:b]) for a, b in pairwise(edges)]
    low, high = plotted_range({"": [*enumerate(columns)]})
    eighths = [1 + min(1.0, (value - low) / ((high - low) or 1.0)) * (8 * height - 1) for value in columns]
    rows = ["".join(_BARS[round(min(max(e - 8 * row, 0), 8))] for e in eighths) for row in range(height)]
    return _with_axes([f"┤{row}" for row in rows], low, high, losses[0][0], losses[-1][0], width)


def _with_axes(rows: Sequence[str], low: float, high: float, first: int, last: int, width: int) -> str:
    """The rows of a plot, given from the lowest up, with the range of losses on the left and of steps below."""
    labels = {0: f"{low:.3f}", len(rows) - 1: f"{high:.3f}"}
    lines = [f"{labels.get(number, ''):>8s} {row}" for number, row in enumerate(rows)]
    return "\n".join([*reversed(lines), f"{'step':>8s}  {first} {last:>{max(width - len(str(first)) - 1, 1)}}"])


def draw_losses(runs: Mapping[str, Mapping[str, Curve]], path: Path) -> None:
    """Draw the losses of runs by name: each step's, their moving average, and validations."""
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
    low, high = plotted_range({name: curves["loss"] for name, curves in runs.items()})
    if any(loss > high for curves in runs.values() for _, loss in curves["loss"]):
        panel.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
    panel.set(xlabel="step", ylabel="loss, nats per token")
    panel.legend()
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
