"""One training step of a pipeline on one clock: what each rank computed and waited for, and when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from titan_like.parallel.schedules.actions import Action
from titan_like.parallel.schedules.simulate import Event, simulate, step_time
from titan_like.parallel.schedules.tables import schedule_table, stage_ranks
from titan_like.parallel.timeline import Phase, RankTimes


@dataclass(frozen=True)
class StepTimeline:
    """A step, measured or simulated, in seconds from the start of its first pass.

    Times of different ranks compare within ``clock_error``.
    """

    schedule: str
    pipeline_degree: int
    virtual_stages: int
    passes: list[Event]
    waits: list[Event] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    clock_error: float = 0.0

    @property
    def ranks(self) -> list[int]:
        """Pipeline rank of each stage."""
        return stage_ranks(self.schedule, self.pipeline_degree, self.virtual_stages)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the step on this pipeline."""
        return 1 + max(event.action.microbatch for event in self.passes)

    @property
    def seconds(self) -> float:
        """From the start of the first pass of any rank to the end of the last."""
        return step_time(self.passes)

    def mean_seconds(self) -> dict[tuple[str, int], float]:
        """Mean time of the passes of each (kind, stage)."""
        times = defaultdict(list)
        for event in self.passes:
            times[event.action.kind, event.action.stage].append(event.end - event.start)
        return {key: fmean(values) for key, values in times.items()}


def measured(schedule: str, pipeline_degree: int, virtual_stages: int, ranks: Sequence[RankTimes]) -> StepTimeline:
    """Put what the ranks saw, in the order of pipeline ranks, on one clock."""
    offsets = [clock_offset(ranks[0].meetings, other.meetings) for other in ranks]
    shifts = [offset for offset, _ in offsets]
    zero = min(event.start - shift for times, shift in zip(ranks, shifts, strict=True) for event in times.passes)

    def events(lists: Sequence[list[Event]]) -> list[Event]:
        return [
            Event(rank, event.action, event.start - shift - zero, event.end - shift - zero)
            for rank, (list_, shift) in enumerate(zip(lists, shifts, strict=True))
            for event in list_
        ]

    phases = [
        Phase(rank, phase.name, phase.start - shift - zero, phase.end - shift - zero)
        for rank, (times, shift) in enumerate(zip(ranks, shifts, strict=True))
        for phase in times.phases
    ]
    error = max(error + times.error for (_, error), times in zip(offsets, ranks, strict=True))
    return StepTimeline(
        schedule,
        pipeline_degree,
        virtual_stages,
        events([times.passes for times in ranks]),
        events([times.waits for times in ranks]),
        phases,
        error,
    )


def simulated(
    schedule: str,
    pipeline_degree: int,
    virtual_stages: int,
    num_microbatches: int,
    duration: Callable[[Action], float],
    transfer: float = 0.0,
) -> StepTimeline:
    """The step as it would be with these durations of passes and this time for every message, in seconds."""
    table = schedule_table(schedule, pipeline_degree, virtual_stages, num_microbatches)
    ranks = stage_ranks(schedule, pipeline_degree, virtual_stages)
    passes = simulate(table, ranks, duration, transfer)
    waits, free = [], [0.0] * pipeline_degree
    for event in passes:
        if event.start > free[event.rank]:
            waits.append(event._replace(start=free[event.rank], end=event.start))
        free[event.rank] = event.end
    return StepTimeline(schedule, pipeline_degree, virtual_stages, passes, waits)


def as_simulated(timeline: StepTimeline) -> StepTimeline:
    """The same step without messages and gaps: every pass takes the mean time of its kind in its stage."""
    means = timeline.mean_seconds()
    return simulated(
        timeline.schedule,
        timeline.pipeline_degree,
        timeline.virtual_stages,
        timeline.num_microbatches,
        lambda action: means[action.kind, action.stage],
    )


def clock_offset(reference: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How far another clock is ahead, and how wrong this can be, from collectives that both ranks took part in.

    Nobody comes out of such a collective before all have gone in. So, the offset o being the other clock's advance,
    ``in_other - o <= out_reference`` and ``in_reference <= out_other - o``: each meeting bounds o from both sides. The
    offset is the middle of the narrowest bounds. Where they allow for none, there is none: processes on one machine
    have the same clock.

    Args:
        reference: times of going in and coming out, on the reference clock.
        other: the same for the same meetings on the other clock.

    Returns:
        The offset and the largest possible error, in the unit of the times.
    """
    lowest = max(entered - left for (_, left), (entered, _) in zip(reference, other, strict=True))
    highest = min(left - entered for (entered, _), (_, left) in zip(reference, other, strict=True))
    if lowest <= 0 <= highest:
        return 0.0, max(-lowest, highest)
    return (lowest + highest) / 2, (highest - lowest) / 2
