"""Line charts and timelines as inline SVG, for a page without scripts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from statistics import median
from typing import Any

from titan_like.metrics.step_timeline import KINDS, StepTimeline

Curve = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 230, 62, 12, 10, 26  # units of the view box
_COLUMNS = 300  # points of a drawn line; each is a median of its steps
_ROW, _MOST_PASSES = 22, 4000


def chart(curves: Mapping[str, Curve], limits: tuple[float, float] | None = None, dots: bool = False) -> str:
    """Curves over one range of steps as an SVG element; ``limits`` cut off what lies outside. Values are finite.

    A curve has the colour of its place, class ``c0`` and so on. With ``dots`` all curves but the first have points.
    """
    points = [point for curve in curves.values() for point in curve]
    low, high = limits or (min(y for _, y in points), max(y for _, y in points))
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = min(x for x, _ in points), max(x for x, _ in points)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - first) / ((last - first) or 1)
        up = (min(max(y, low), high) - low) / ((high - low) or 1)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _TOP + (1 - up) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for tick in ticks:
        y = place(first, tick)[1]
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{number(tick)}</text>')
    for x, anchor in ((first, "start"), (last, "end")):
        label = f"step {x:,.0f}" if anchor == "start" else f"{x:,.0f}"
        parts.append(f'<text x="{place(x, low)[0]:.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{label}</text>')
    for index, curve in enumerate(curves.values()):
        drawn = [place(x, y) for x, y in _thinned(curve)]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in drawn)
        parts.append(f'<path class="line c{index % 6}" d="M{line}"/>')
        if len(drawn) == 1 or (dots and index):
            parts += [f'<circle class="c{index % 6}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in drawn]
    label = escape(", ".join(curves), quote=True)
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _thinned(curve: Curve) -> Curve:
    """At most `_COLUMNS` points, each the medians of neighbours."""
    count = min(len(curve), _COLUMNS)
    edges = [len(curve) * column // count for column in range(count + 1)]
    return [(median(x for x, _ in curve[a:b]), median(y for _, y in curve[a:b])) for a, b in pairwise(edges)]


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers whose range has both in it."""
    span = (high - low) or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 4)
    return [step * count for count in range(math.floor(low / step), math.ceil(high / step) + 1)]


def number(value: float) -> str:
    """A number in at most five digits, with k, M, G for thousands."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            size = 1e3 if unit == "k" else size
            return f"{value / size:.3g}{unit}"
    return f"{value:.4g}"


def timeline(step: StepTimeline) -> str:
    """The passes of a step, a row for each rank, as an SVG element; empty for more passes than a page can hold."""
    if len(step.passes) > _MOST_PASSES:
        return ""
    scale, height = (2 * _WIDTH - 70) / step.seconds, _ROW * step.pipeline_degree
    parts = []
    for rank in range(step.pipeline_degree):
        y = _ROW * rank
        parts.append(f'<rect class="bubble" x="60" y="{y}" width="{2 * _WIDTH - 70}" height="{_ROW - 3}"/>')
        parts.append(f'<text x="54" y="{y + 14}" text-anchor="end">rank {rank}</text>')
    boxes: list[tuple[str, str, str, Any]] = []
    boxes += [("gap", gap.name, gap.name, gap) for gap in step.gaps if gap.name != "bubble"]
    for event in step.passes:
        kind, stage, microbatch = event.action
        boxes.append(("pass", kind, f"{KINDS[kind]} {microbatch} of stage {stage}", event))
    for role, key, name, (rank, *_, start, end) in boxes:
        place = f'x="{60 + scale * start:.1f}" y="{_ROW * rank}" width="{max(0.5, scale * (end - start) - 0.5):.1f}"'
        title = f"<title>{name}: {1000 * (end - start):.2f} ms</title>"
        parts.append(f'<rect class="{role} {key.split()[0]}" {place} height="{_ROW - 3}">{title}</rect>')
    return f'<svg viewBox="0 0 {2 * _WIDTH} {height}" role="img" aria-label="timeline">{"".join(parts)}</svg>'
