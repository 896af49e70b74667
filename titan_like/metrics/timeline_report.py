"""A step's timeline in figures and text: bubble, slowest stage, a lane per rank, and the differences of two steps."""

from collections.abc import Iterable
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.table import Column, Table

from titan_like.metrics.step_timeline import GAPS, KINDS, StepTimeline, as_simulated
from titan_like.parallel.schedules.simulate import bubble_fraction, ideal_bubble
from titan_like.parallel.schedules.tables import Action

_WIDTH = 110
LEGEND = "F forward, B backward (I its inputs, W its weights) and the microbatch; small letters: a rank's later stages"
_FILL = {"F": "-", "B": "=", "I": "=", "W": "~"}
_IDLE = "."
_PARTS = {"F": "forward passes", "B": "backward passes", "I": "backward, inputs", "W": "backward, weights"}
_AFTER = {"gradient norm": "optimizer"}  # a prediction does not separate them


class RankShares(NamedTuple):
    """The parts of one rank's time between the step's first and last pass, in seconds: see `StepTimeline.gaps`."""

    compute: float
    bubble: float
    exposed_communication: float
    other: float


@dataclass(frozen=True)
class TimelineFigures:
    """The main figures of a step."""

    bubble_fraction: float  # t_pb / t_id of arXiv 2104.04473: see `bubble_of`
    bubble_fraction_simulated: float  # the same without messages and gaps; see `as_simulated`
    bubble_fraction_ideal: float  # with equal stages and backward passes twice as long as forward passes
    slowest_stage: int
    slowest_stage_excess: float  # its time per microbatch over the mean of all stages, minus 1
    exposed_communication: float  # share of all ranks' time
    ranks: list[RankShares]
    stage_seconds: list[float]  # time of one microbatch's passes in each stage

    def as_metrics(self) -> dict[str, float]:
        """The figures for metrics.jsonl and trackers, by key."""
        return {name: value for name, value in vars(self).items() if not isinstance(value, list)}


def figures(timeline: StepTimeline) -> TimelineFigures:
    """Compute the figures of a timeline."""
    degree, stages = timeline.pipeline_degree, range(len(timeline.ranks))
    means, shares = timeline.mean_seconds(), rank_shares(timeline)
    stage_seconds = [sum(time for (_, owner), time in means.items() if owner == stage) for stage in stages]
    slowest = max(stages, key=stage_seconds.__getitem__)
    ideal = ideal_bubble(timeline.schedule, degree, timeline.virtual_stages, timeline.num_microbatches)
    return TimelineFigures(
        bubble_fraction=bubble_of(timeline),
        bubble_fraction_simulated=bubble_fraction(as_simulated(timeline).passes, degree),
        bubble_fraction_ideal=ideal,
        slowest_stage=slowest,
        slowest_stage_excess=stage_seconds[slowest] / fmean(stage_seconds) - 1,
        exposed_communication=sum(share.exposed_communication for share in shares) / (degree * timeline.seconds),
        ranks=shares,
        stage_seconds=stage_seconds,
    )


def rank_shares(timeline: StepTimeline) -> list[RankShares]:
    """Split each rank's time."""
    seconds = [dict.fromkeys(GAPS, 0.0) for _ in range(timeline.pipeline_degree)]
    for gap in timeline.gaps:
        seconds[gap.rank][gap.name] += gap.end - gap.start
    return [RankShares(timeline.seconds - sum(parts.values()), *parts.values()) for parts in seconds]


def bubble_of(timeline: StepTimeline) -> float:
    """The busiest rank's wait for passes of others over its compute time, t_pb / t_id of arXiv 2104.04473, section 2.2.

    Messages and what else lies between passes do not count.
    """
    busiest = max(rank_shares(timeline), key=lambda share: round(share.compute, 9))  # the first of equal ranks
    return busiest.bubble / busiest.compute


def headline(step: StepTimeline) -> str:
    """A line with the pipeline and the time of a step."""
    stages, bubble = len(step.ranks) // step.pipeline_degree, bubble_of(step)
    of_each = f" of {stages} stages each" if stages > 1 else ""
    ranks = "1 rank" if step.pipeline_degree == 1 else f"{step.pipeline_degree} ranks"
    microbatches = "1 microbatch" if step.num_microbatches == 1 else f"{step.num_microbatches} microbatches"
    return f"{step.schedule}, {ranks}{of_each}, {microbatches}; {milliseconds(step.seconds)} ms, bubble {bubble:.3f}"


def sentences(summary: TimelineFigures, parts: dict[str, float]) -> list[str]:
    """Lines about the bubble, and about the phases after the last pass."""
    names = list(parts)[list(parts).index("first to last pass") + 1 : -1]
    after = "".join(f"{name} {milliseconds(parts[name])} ms, " for name in names)
    return [
        f"bubble fraction (waiting for other ranks / compute): {summary.bubble_fraction:.3f}, "
        f"{summary.bubble_fraction_simulated:.3f} without messages, "
        f"{summary.bubble_fraction_ideal:.3f} for equal stages",
        f"after the last pass: {after}step {milliseconds(parts['step'])} ms",
    ]


def report(timeline: StepTimeline, title: str) -> str:
    """The figures as text for a terminal."""
    summary = figures(timeline)
    means = timeline.mean_seconds()
    kinds = [kind for kind in KINDS if any(kind == other for other, _ in means)]
    columns = (*(KINDS[kind] for kind in kinds), "sum", "to the mean")
    stages = _table("time of one microbatch in each stage (ms)", ("stage", "rank"), columns)
    columns = ("compute", "bubble", "exposed communication", "other", "sum")
    ranks = _table("where each rank's time went (ms)", ("rank",), columns)
    for stage, (rank, seconds) in enumerate(zip(timeline.ranks, summary.stage_seconds, strict=True)):
        times = [milliseconds(means[kind, stage]) if (kind, stage) in means else "" for kind in kinds]
        off = round(100 * (seconds / fmean(summary.stage_seconds) - 1), 1) + 0.0  # no minus zero
        stages.add_row(str(stage), str(rank), *times, milliseconds(seconds), f"{off:+.1f}%")
    for rank, share in enumerate(summary.ranks):
        ranks.add_row(str(rank), *map(milliseconds, (*share, timeline.seconds)))
    parts: list[str | Table] = [
        f"{title}: {headline(timeline)}",
        stages,
        ranks,
        f"slowest stage: {summary.slowest_stage}, {100 * summary.slowest_stage_excess:.1f}% over the mean",
        f"exposed communication: {100 * summary.exposed_communication:.2f}% of the ranks' time",
        *sentences(summary, parts_of(timeline)),
    ]
    if timeline.pipeline_degree > 1:
        parts.append(f"clocks of different ranks agree within {milliseconds(timeline.clock_error)} ms")
    text = StringIO()  # not the terminal, whose encoding would change the tables' lines
    Console(file=text, width=_WIDTH, highlight=False, color_system=None).print(Group(*parts))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _table(title: str, names: Iterable[str], numbers: Iterable[str]) -> Table:
    """A table without rows: left-aligned columns of names, then right-aligned columns of numbers."""
    columns = [*map(Column, names), *(Column(name, justify="right") for name in numbers)]
    return Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="")


def milliseconds(seconds: float) -> str:
    """Milliseconds with two decimals, never minus zero."""
    return f"{round(1000 * seconds, 2) + 0.0:,.2f}"


def lanes(step: StepTimeline, width: int, seconds: float | None = None) -> list[str]:
    """One line per rank, with ``width`` columns for the time from 0 to ``seconds`` (default: the step's end).

    A column shows the longest part of its time: a dot for idle, or a pass, which begins with its letter and, if there
    is room, the number of its microbatch.
    """
    scale = width / (seconds or step.seconds)
    columns = np.arange(width)
    text = []
    for rank in range(step.pipeline_degree):
        passes = [event for event in step.passes if event.rank == rank]
        starts, ends = (scale * np.array([times]).T for times in zip(*(event[2:] for event in passes), strict=True))
        shares = (np.minimum(ends, columns + 1) - np.maximum(starts, columns)).clip(0)  # [passes, columns]
        shown = np.where(shares.sum(0) < 0.5, -1, shares.argmax(0))
        line = ""
        for number, run in groupby(shown):
            event, length = passes[number] if number >= 0 else None, len(list(run))
            line += _box(event.action, length, step.ranks.index(rank)) if event else _IDLE * length
        text.append(line.rstrip(_IDLE) if seconds and seconds > step.seconds else line)
    return text


def _box(action: Action, width: int, first_stage: int) -> str:
    letter = action.kind if action.stage == first_stage else action.kind.lower()
    label = f"{letter}{action.microbatch}"
    return (label if len(label) <= width else letter).ljust(width, _FILL[action.kind])


class PartOfSteps(NamedTuple):
    """One part of two steps, in seconds; the mean over the ranks if each has its own time."""

    name: str
    predicted: float
    measured: float


def parts_of(step: StepTimeline) -> dict[str, float]:
    """The parts of a step's time, in seconds, by name.

    The parts before "first to last pass" sum up to it. The phases after the last pass follow, then the whole step.
    """
    parts: dict[str, float] = {}
    for kind, name in _PARTS.items():
        times = [event.end - event.start for event in step.passes if event.action.kind == kind]
        if times:
            parts[name] = sum(times) / step.pipeline_degree
    _, *idle = map(fmean, zip(*rank_shares(step), strict=True))
    parts |= zip(GAPS, idle, strict=True)
    parts["first to last pass"] = step.seconds
    after = step.after_passes()
    for name, seconds in after.items():
        name = _AFTER.get(name, name)
        parts[name] = parts.get(name, 0.0) + seconds
    return parts | {"step": step.seconds + sum(after.values())}


def legend_of(step: StepTimeline) -> dict[str, str]:
    """Kinds of passes and names of gaps → their names and times in ms, of the parts from first to last pass."""
    parts = parts_of(step)
    names = _PARTS | {gap: gap for gap in GAPS}
    return {key: f"{name} {milliseconds(parts[name])} ms" for key, name in names.items() if parts.get(name)}


def differences(predicted: StepTimeline, measured: StepTimeline) -> list[PartOfSteps]:
    """The parts of two steps, with 0 for a part that one of them lacks. The whole step comes last."""
    expected, actual = parts_of(predicted), parts_of(measured)
    names = [name for name in dict.fromkeys((*expected, *actual)) if name != "step"]
    return [PartOfSteps(name, expected.get(name, 0.0), actual.get(name, 0.0)) for name in (*names, "step")]
