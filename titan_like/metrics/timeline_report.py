"""What a step's timeline says: the bubble, the slowest stage, exposed communication."""

from __future__ import annotations

from dataclasses import dataclass
from io import StringIO
from statistics import fmean

from rich import box
from rich.console import Console
from rich.table import Table

from titan_like.metrics.step_timeline import StepTimeline, as_simulated
from titan_like.parallel.schedules.actions import inputs, outcome
from titan_like.parallel.schedules.simulate import bubble_fraction, ideal_bubble

_WIDTH = 110


@dataclass(frozen=True)
class RankShares:
    """Where the time of one rank went between the step's first pass and its last, in seconds."""

    compute: float
    bubble: float  # waiting for passes of other ranks, until its first pass and from its last one included
    exposed_communication: float  # waiting for a message that was already made
    other: float  # between passes, without waiting for an input: posting messages, waiting until one has left


@dataclass(frozen=True)
class TimelineFigures:
    """The step in a few numbers."""

    bubble: float  # idle over compute time of the busiest rank (arXiv 2104.04473)
    bubble_simulated: float  # without messages and gaps, every pass taking the mean of its kind in its stage
    bubble_ideal: float  # closed form, with equal stages and backward passes twice as long as forward ones
    slowest_stage: int
    slowest_stage_excess: float  # its time per microbatch over the mean of all stages, less 1
    exposed_communication: float  # share of all ranks' time
    ranks: list[RankShares]
    stage_seconds: list[float]  # per stage, time of one microbatch's passes

    def as_metrics(self) -> dict[str, float]:
        """What metrics.jsonl and the other writers receive for the step."""
        return {
            "bubble_fraction": self.bubble,
            "bubble_fraction_simulated": self.bubble_simulated,
            "bubble_fraction_ideal": self.bubble_ideal,
            "slowest_stage": self.slowest_stage,
            "slowest_stage_excess": self.slowest_stage_excess,
            "exposed_communication": self.exposed_communication,
        }


def figures(timeline: StepTimeline) -> TimelineFigures:
    """Sum a timeline up."""
    degree, virtual = timeline.pipeline_degree, timeline.virtual_stages
    means = timeline.mean_seconds()
    stage_seconds = [
        sum(time for (_, of_stage), time in means.items() if of_stage == stage) for stage in range(len(timeline.ranks))
    ]
    slowest = max(range(len(stage_seconds)), key=lambda stage: stage_seconds[stage])
    shares = rank_shares(timeline)
    return TimelineFigures(
        bubble=bubble_fraction(timeline.passes, degree),
        bubble_simulated=bubble_fraction(as_simulated(timeline).passes, degree),
        bubble_ideal=ideal_bubble(timeline.schedule, degree, virtual, timeline.num_microbatches),
        slowest_stage=slowest,
        slowest_stage_excess=stage_seconds[slowest] / fmean(stage_seconds) - 1,
        exposed_communication=sum(share.exposed_communication for share in shares) / (degree * timeline.seconds),
        ranks=shares,
        stage_seconds=stage_seconds,
    )


def rank_shares(timeline: StepTimeline) -> list[RankShares]:
    """Split every rank's time. A wait is bubble until the pass that it waits for has ended, and exposed from there."""
    ranks, total = timeline.ranks, timeline.seconds
    made = {outcome(event.action): event.end for event in timeline.passes}
    shares = []
    for rank in range(timeline.pipeline_degree):
        passes = [event for event in timeline.passes if event.rank == rank]
        bubble = total - max(event.end for event in passes)
        exposed = 0.0
        for wait in timeline.waits:
            if wait.rank == rank:
                start = max(wait.start, 0.0)
                messages = [made[needed] for needed in inputs(wait.action, len(ranks)) if ranks[needed.stage] != rank]
                arrival = min(max([start, *messages]), wait.end)
                bubble += arrival - start
                exposed += wait.end - arrival
        compute = sum(event.end - event.start for event in passes)
        shares.append(RankShares(compute, bubble, exposed, total - compute - bubble - exposed))
    return shares


def report(timeline: StepTimeline, title: str) -> str:
    """The figures as text of fixed width."""
    summary, means = figures(timeline), timeline.mean_seconds()
    stages = _table("time of one microbatch in each stage (ms)", "stage", "rank")
    kinds = [kind for kind in "FBIW" if any(kind == of_kind for of_kind, _ in means)]
    names = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
    for name in (*(names[kind] for kind in kinds), "sum", "to the mean"):
        stages.add_column(name, justify="right")
    average = fmean(summary.stage_seconds)
    for stage, (rank, seconds) in enumerate(zip(timeline.ranks, summary.stage_seconds, strict=True)):
        times = [_ms(means[kind, stage]) if (kind, stage) in means else "" for kind in kinds]
        stages.add_row(
            str(stage), str(rank), *times, _ms(seconds), f"{round(100 * (seconds / average - 1), 1) + 0.0:+.1f}%"
        )

    ranks = _table("where each rank's time went (ms)", "rank")
    for name in ("compute", "bubble", "exposed communication", "other", "sum"):
        ranks.add_column(name, justify="right")
    for rank, share in enumerate(summary.ranks):
        parts = (share.compute, share.bubble, share.exposed_communication, share.other)
        ranks.add_row(str(rank), *map(_ms, (*parts, timeline.seconds)))

    text = StringIO()
    console = Console(file=text, width=_WIDTH, highlight=False, color_system=None)
    for part in (_headline(timeline, title), stages, ranks, *_sentences(timeline, summary)):
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="")


def _headline(timeline: StepTimeline, title: str) -> str:
    degree, microbatches = timeline.pipeline_degree, timeline.num_microbatches
    size = f"{degree} pipeline rank{'s' * (degree > 1)}, {microbatches} microbatch{'es' * (microbatches > 1)}"
    return f"{title}: {timeline.schedule}, {size}, {_ms(timeline.seconds)} ms from first to last pass"


def _sentences(timeline: StepTimeline, summary: TimelineFigures) -> list[str]:
    lines = [
        f"bubble fraction (idle / compute): {summary.bubble:.3f} measured, {summary.bubble_simulated:.3f} with these "
        f"passes alone, {summary.bubble_ideal:.3f} ideal",
        f"slowest stage: {summary.slowest_stage}, {100 * summary.slowest_stage_excess:.1f}% over the mean",
        f"exposed communication: {100 * summary.exposed_communication:.2f}% of the ranks' time",
    ]
    end: dict[str, float] = {}
    for phase in timeline.phases:
        end[phase.name] = max(end.get(phase.name, 0.0), phase.end)
    since = timeline.seconds
    parts = []
    for name, until in end.items():  # what they add to the step: the time until the last rank is done with it
        parts.append(f"{name} {_ms(max(until - since, 0.0))} ms")
        since = max(until, since)
    if parts:
        lines.append(f"after the last pass: {', '.join(parts)}")
    if timeline.pipeline_degree > 1:
        lines.append(f"times of different ranks compare within {_ms(timeline.clock_error)} ms")
    return lines


def _ms(seconds: float) -> str:
    return f"{round(1000 * seconds, 2) + 0.0:.2f}"
