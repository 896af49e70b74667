"""Pictures of steps in the manner of figures 3 and 4 of arXiv 2104.04473. Needs matplotlib, which is optional."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_like.metrics.step_timeline import StepTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Per kind of pass: the colour of a rank's first stage and that of its last; those between lie between.
_COLOURS = {
    "F": ((0.16, 0.38, 0.72), (0.68, 0.80, 0.95)),
    "B": ((0.10, 0.50, 0.30), (0.66, 0.88, 0.70)),
    "I": ((0.05, 0.50, 0.55), (0.62, 0.88, 0.90)),
    "W": ((0.80, 0.45, 0.05), (0.99, 0.83, 0.58)),
}
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_IDLE = (0.88, 0.88, 0.88)
_ROW, _GAP = 0.38, 0.75  # inches of a rank's row, and between two steps


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(steps: Sequence[tuple[str, StepTimeline]], path: Path, width: float = 12.0) -> None:
    """Draw steps, with titles, one above the other on the same time axis; ``width`` in inches.

    A row is a rank, a box a pass with the number of its microbatch, counted from 0. Stages of one rank differ in shade,
    the first being the darkest. Grey is idle.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    end = max(step.seconds for _, step in steps)
    heights = [_ROW * step.pipeline_degree + _GAP for _, step in steps]
    figure = Figure(figsize=(width, sum(heights) + 0.45), layout="constrained")
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (title, step) in zip(panels, steps, strict=True):
        _draw_step(panel, step, inches_per_second=0.9 * width / end)
        panel.set_title(title, fontsize=9, loc="left")
        panel.set_xlim(0, 1000 * end)
    panels[-1].set_xlabel("ms", fontsize=8)
    kinds = [kind for kind in _NAMES if any(event.action.kind == kind for _, step in steps for event in step.passes)]
    patches = [Patch(color=_COLOURS[kind][0], label=_NAMES[kind]) for kind in kinds]
    figure.legend(
        handles=[*patches, Patch(color=_IDLE, label="idle")],
        loc="outside lower right",
        ncols=len(kinds) + 1,
        fontsize=8,
    )
    figure.savefig(path, dpi=130)


def _draw_step(panel: Axes, step: StepTimeline, inches_per_second: float) -> None:
    from matplotlib.collections import PolyCollection

    chunks: dict[int, int] = {}  # of a stage: its place among those of its rank
    stages_of = [[stage for stage, of in enumerate(step.ranks) if of == rank] for rank in range(step.pipeline_degree)]
    for stages in stages_of:
        chunks |= {stage: place for place, stage in enumerate(stages)}
    boxes = [_box(0, 1000 * step.seconds, rank) for rank in range(step.pipeline_degree)]
    colours: list[tuple[float, ...]] = [_IDLE] * step.pipeline_degree
    edges = [0.0] * step.pipeline_degree
    for event in step.passes:
        kind, stage, microbatch = event.action
        shade = chunks[stage] / max(len(stages_of[event.rank]) - 1, 1)
        dark, light = _COLOURS[kind]
        colours.append(tuple(d + shade * (b - d) for d, b in zip(dark, light, strict=True)))
        start, length = 1000 * event.start, 1000 * (event.end - event.start)
        boxes.append(_box(start, start + length, event.rank))
        inches = inches_per_second * (event.end - event.start)
        edges.append(0.5 if inches > 0.03 else 0.0)  # of a narrow box the edges would be all
        if inches > 0.06 * len(str(microbatch)):
            size = min(8.0, 80 * inches / len(str(microbatch)))
            text_colour = "white" if shade < 0.5 else "black"
            panel.text(
                start + length / 2, event.rank, str(microbatch), color=text_colour, size=size, ha="center", va="center"
            )
    # One artist for all boxes: a large step has tens of thousands, which take minutes one by one.
    panel.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=edges), autolim=False)
    panel.set_xlim(0, 1000 * step.seconds)
    panel.set_ylim(step.pipeline_degree - 0.5, -0.5)
    panel.set_yticks(range(step.pipeline_degree), [f"rank {rank}" for rank in range(step.pipeline_degree)])
    panel.tick_params(labelsize=8)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)


def _box(start: float, end: float, rank: int) -> list[tuple[float, float]]:
    """Corners of a box in a rank's row."""
    return [(start, rank - 0.5), (end, rank - 0.5), (end, rank + 0.5), (start, rank + 0.5)]
