"""Losses of runs as a picture, and as a few lines of text for a terminal."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from titan_like.metrics.run_files import complete_lines

_BARS = " ▁▂▃▄▅▆▇█"

Curve = list[tuple[int, float]]
"""Steps and losses."""


def read_losses(path: Path) -> dict[str, Curve]:
    """Each ``loss``, ``validation_loss`` and ``validation_loss/NAME`` in a metrics.jsonl.

    Losses that are not finite are left out, and so is a line that is being written.
    """
    curves = defaultdict[str, Curve](list)
    for step, line in complete_lines(path):
        for key, loss in json.loads(line).items():
            is_loss = key == "loss" or key.partition("/")[0] == "validation_loss"
            if is_loss and isinstance(loss, int | float) and math.isfinite(loss):
                curves[key].append((step, loss))
    return dict(curves)


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
