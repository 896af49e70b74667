"""A run's loss as a picture, and as a few lines of text for a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from titan_like.metrics.run_files import complete_lines

_BARS = " ▁▂▃▄▅▆▇█"


def read_losses(path: Path) -> list[tuple[int, float]]:
    """(step, loss) of each line of a metrics.jsonl whose loss is finite. A line that is being written is left out."""
    losses = ((step, json.loads(line).get("loss")) for step, line in complete_lines(path))
    return [(step, loss) for step, loss in losses if isinstance(loss, int | float) and math.isfinite(loss)]


def text_curve(losses: Sequence[tuple[int, float]], width: int = 72, height: int = 10) -> str:
    """The curve in block characters; a column is the median of as many steps as all others, or one more."""
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


def draw_losses(losses: Sequence[tuple[int, float]], title: str, path: Path) -> None:
    """Draw each step's loss, and the mean of the steps around it. Needs matplotlib."""
    from matplotlib.figure import Figure

    steps, values = zip(*losses, strict=True)
    half = max(1, len(values) // 100)
    means = [sum(near) / len(near) for near in (values[max(0, i - half) : i + half + 1] for i in range(len(values)))]
    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    panel.plot(steps, values, color="0.8", linewidth=0.8)
    panel.plot(steps, means, color="tab:blue", linewidth=1.6)
    panel.set(xlabel="step", ylabel="loss, nats per token", title=title)
    panel.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
