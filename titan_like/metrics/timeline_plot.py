"""Pictures of steps in the style of figures 3 and 4 of arXiv 2104.04473. Needs matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_like.config.errors import require
from titan_like.metrics.step_timeline import StepTimeline
from titan_like.metrics.timeline_report import legend_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# For each kind of pass, the colours of a rank's first and last stage; stages in between are interpolated.
_COLOURS = {
    "F": ((0.16, 0.38, 0.72), (0.68, 0.80, 0.95)),
    "B": ((0.10, 0.50, 0.30), (0.66, 0.88, 0.70)),
    "I": ((0.05, 0.50, 0.55), (0.62, 0.88, 0.90)),
    "W": ((0.80, 0.45, 0.05), (0.99, 0.83, 0.58)),
}
_GAPS = {"bubble": (0.88,) * 3, "exposed communication": (0.85, 0.25, 0.25), "between passes": (0.45,) * 3}
_ROW, _GAP = 0.38, 1.0  # inches of a rank's row, and between two steps


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_picture(option: str, path: str | None) -> None:
    """Refuse a file that is not .png or .svg, and any file without matplotlib."""
    require(path is None or Path(path).suffix in (".png", ".svg"), option, path, "name a .png or .svg file")
    require(path is None or can_draw(), option, path, "needs matplotlib: pip install 'titan_like[plot]'")


def draw(steps: Sequence[tuple[str, StepTimeline]], path: Path, width: float = 9.0) -> None:
    """Draw steps with their titles, one above the other, on one time axis; ``width`` is in inches.

    A row is a rank, a box a pass with the number of its microbatch, counted from 0. Shades, from dark to light, are the
    stages of a rank. Each step's legend has the milliseconds of its parts, which are means of the ranks.
    """
    from matplotlib.figure import Figure

    end = max(step.seconds for _, step in steps)
    heights = [_ROW * step.pipeline_degree + _GAP for _, step in steps]
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (title, step) in zip(panels, steps, strict=True):
        _draw_step(panel, step, inches_per_second=0.9 * width / end)
        panel.set_title(title, fontsize=9, loc="left")
    panels[-1].set(xlim=(0, 1000 * end))
    panels[-1].set_xlabel("ms", fontsize=8, loc="right")
    figure.savefig(path, dpi=130)


def _draw_step(panel: Axes, step: StepTimeline, inches_per_second: float) -> None:
    from matplotlib.patches import Patch

    parts = legend_of(step)
    colours_of = {kind: shades[0] for kind, shades in _COLOURS.items()} | _GAPS
    patches = [Patch(color=colours_of[key], label=label) for key, label in parts.items()]
    panel.legend(handles=patches, loc="upper left", bbox_to_anchor=(0, -0.1), ncols=3, fontsize=8, frameon=False)
    for rank in range(step.pipeline_degree):
        gaps = [gap for gap in step.gaps if gap.rank == rank]
        spans = [(1000 * gap.start, 1000 * (gap.end - gap.start)) for gap in gaps]
        colours: list[Any] = [_GAPS[gap.name] for gap in gaps]
        edges = [0.0] * len(gaps)
        for _, (kind, stage, microbatch), start, end in (event for event in step.passes if event.rank == rank):
            shade = step.ranks[:stage].count(rank) / max(step.ranks.count(rank) - 1, 1)
            inches, digits = inches_per_second * (end - start), len(str(microbatch))
            spans.append((1000 * start, 1000 * (end - start)))
            colours.append(tuple((1 - shade) * np.array(_COLOURS[kind][0]) + shade * np.array(_COLOURS[kind][1])))
            edges.append(0.5 if inches > 0.03 else 0.0)  # edges would cover a narrow box
            if inches > 0.06 * digits:
                middle, size = 500 * (start + end), min(8.0, 80 * inches / digits)
                colour = "white" if shade < 0.5 else "black"
                panel.text(middle, rank, str(microbatch), color=colour, size=size, ha="center", va="center")
        # One artist draws all boxes of a rank: one artist a box would need minutes for a large step.
        panel.broken_barh(spans, (rank - 0.5, 1), facecolors=colours, edgecolors="white", linewidths=edges)
    panel.set(xlim=(0, 1000 * step.seconds), ylim=(step.pipeline_degree - 0.5, -0.5))
    panel.set_yticks(range(step.pipeline_degree), [f"rank {rank}" for rank in range(step.pipeline_degree)])
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right", "left"]].set_visible(False)
