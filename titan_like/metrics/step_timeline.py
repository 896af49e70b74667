"""The timeline of one pipeline step: each rank's passes, waits and phases on one clock.

It is stored as a trace for ui.perfetto.dev or chrome://tracing ("Trace Event Format"), together with its fields.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from titan_like.config.paths import user_file
from titan_like.parallel.schedules.simulate import Event, simulate, step_time
from titan_like.parallel.schedules.tables import Action, inputs, outcome, schedule_table, stage_ranks
from titan_like.parallel.timeline import Phase, RankTimes

KINDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
GAPS = ("bubble", "exposed communication", "between passes")  # what a rank does besides its passes: `StepTimeline.gaps`

_Span = TypeVar("_Span", Event, Phase)


@dataclass(frozen=True)
class StepTimeline:
    """A step, measured or simulated: seconds from its first pass, by clocks that agree within ``clock_error``."""

    schedule: str
    pipeline_degree: int
    virtual_stages: int
    passes: list[Event]
    waits: list[Event] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    clock_error: float = 0.0

    @cached_property
    def ranks(self) -> list[int]:
        """Pipeline rank of each stage."""
        return stage_ranks(self.schedule, self.pipeline_degree, self.virtual_stages)

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the step on this pipeline."""
        return 1 + max(event.action.microbatch for event in self.passes)

    @property
    def seconds(self) -> float:
        """Time from the start of any rank's first pass to the end of the last."""
        return step_time(self.passes)

    def mean_seconds(self) -> dict[tuple[str, int], float]:
        """Mean time of the passes of each (kind, stage)."""
        times = defaultdict(list)
        for event in self.passes:
            times[event.action.kind, event.action.stage].append(event.end - event.start)
        return {key: fmean(values) for key, values in times.items()}

    def senders(self, action: Action) -> list[Event]:
        """The passes on other ranks whose results this one needs."""
        ranks = self.ranks
        needed = inputs(action, len(ranks))
        return [self._makers[source] for source in needed if ranks[source.stage] != ranks[action.stage]]

    @cached_property
    def _makers(self) -> dict[Action, Event]:
        return {outcome(event.action): event for event in self.passes}

    @cached_property
    def gaps(self) -> list[Phase]:
        """The time of each rank outside its passes, from the first pass of any rank to the last, named as in `GAPS`.

        A wait is bubble until the pass that it waits for has ended, and exposed communication after. A rank that has
        done its last pass waits for the others. The rest, between passes, posts messages and completes sends.
        """
        spans, waits = [], {(wait.rank, wait.end): wait.start for wait in self.waits}
        for rank, passes in groupby(sorted(self.passes, key=lambda event: (event.rank, event.start)), lambda e: e.rank):
            free = 0.0
            for event in passes:
                since = max(waits.get((rank, event.start), event.start), free)
                made = max([since, *(sender.end for sender in self.senders(event.action))])
                edges = free, since, min(made, event.start), event.start
                names = "between passes", "bubble", "exposed communication"
                spans += [Phase(rank, name, *edge) for name, edge in zip(names, pairwise(edges), strict=True)]
                free = event.end
            spans.append(Phase(rank, "bubble", free, self.seconds))
        return [span for span in spans if span.end > span.start]

    def after_passes(self) -> dict[str, float]:
        """Seconds that each phase adds to the step, until the last rank has finished it."""
        reached, added = self.seconds, {}
        for name in dict.fromkeys(phase.name for phase in self.phases):
            end = max(phase.end for phase in self.phases if phase.name == name)
            added[name] = max(end - reached, 0.0)
            reached = max(end, reached)
        return added


def measured(schedule: str, pipeline_degree: int, virtual_stages: int, ranks: Sequence[RankTimes]) -> StepTimeline:
    """Combine the times of all ranks, given in the order of pipeline ranks, on the first rank's clock."""
    offsets, errors = zip(*(clock_offset(ranks[0].meetings, times.meetings) for times in ranks), strict=True)
    zero = min(event.start - offset for times, offset in zip(ranks, offsets, strict=True) for event in times.passes)

    error = max(error + times.error for error, times in zip(errors, ranks, strict=True))
    step = StepTimeline(schedule, pipeline_degree, virtual_stages, [], clock_error=error)
    for rank, (times, offset) in enumerate(zip(ranks, offsets, strict=True)):
        step.passes.extend(_moved(event, rank, offset + zero) for event in times.passes)
        step.waits.extend(_moved(event, rank, offset + zero) for event in times.waits)
        step.phases.extend(_moved(phase, rank, offset + zero) for phase in times.phases)
    return step


def _moved(span: _Span, rank: int, zero: float) -> _Span:
    return span._replace(rank=rank, start=span.start - zero, end=span.end - zero)


def simulated(
    schedule: str,
    pipeline_degree: int,
    virtual_stages: int,
    num_microbatches: int,
    duration: Callable[[Action], float],
    transfer: float = 0.0,
) -> StepTimeline:
    """Simulate a step with these durations of passes and ``transfer`` for every message, in seconds."""
    table = schedule_table(schedule, pipeline_degree, virtual_stages, num_microbatches)
    passes = simulate(table, stage_ranks(schedule, pipeline_degree, virtual_stages), duration, transfer)
    waits, free = [], [0.0] * pipeline_degree
    for event in passes:
        if event.start > free[event.rank]:
            waits.append(event._replace(start=free[event.rank], end=event.start))
        free[event.rank] = event.end
    return StepTimeline(schedule, pipeline_degree, virtual_stages, passes, waits)


def as_simulated(step: StepTimeline) -> StepTimeline:
    """The same step without messages and gaps: every pass has the mean time of its kind in its stage."""
    shape, means = (step.schedule, step.pipeline_degree, step.virtual_stages), step.mean_seconds()
    return simulated(*shape, step.num_microbatches, lambda action: means[action.kind, action.stage])


def clock_offset(reference: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(offset of another clock, error of the offset), from collectives that both ranks took part in.

    A meeting is the pair of times at which a rank enters and leaves a collective. No rank leaves before all have
    entered. If the other clock is ahead by o, then ``in_other - o <= out_reference`` and
    ``in_reference <= out_other - o``, so each meeting bounds o from both sides. The result is the middle of the
    tightest bounds, or 0 if they allow it, because processes on one machine share a clock.
    """
    lowest = max(entered - exited for (_, exited), (entered, _) in zip(reference, other, strict=True))
    highest = min(exited - entered for (entered, _), (_, exited) in zip(reference, other, strict=True))
    if lowest <= 0 <= highest:
        return 0.0, max(-lowest, highest)
    return (lowest + highest) / 2, (highest - lowest) / 2


_PASSES, _GAPS, _PHASES = range(3)  # rows of a rank
_ROWS = ("passes", "gaps", "rest of the step")


def chrome_trace(timeline: StepTimeline) -> dict[str, Any]:
    """The trace as a JSON object: a process per pipeline rank, an arrow per message between ranks. Times are in µs."""
    return {"traceEvents": list(_events(timeline)), "displayTimeUnit": "ms", "otherData": asdict(timeline)}


def _events(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    for rank in range(timeline.pipeline_degree):
        yield from _named("process", f"pipeline rank {rank}", rank, pid=rank)
        for row, name in enumerate(_ROWS):
            yield from _named("thread", name, row, pid=rank, tid=row)
    for event in timeline.passes:
        kind, stage, microbatch = event.action
        arguments = {"pass": KINDS[kind], "stage": stage, "microbatch": microbatch}
        yield _slice(event, f"{kind}{microbatch} of stage {stage}", KINDS[kind], _PASSES) | {"args": arguments}
    for gap in timeline.gaps:
        yield _slice(gap, gap.name, "gap", _GAPS)
    for phase in timeline.phases:
        yield _slice(phase, phase.name, "phase", _PHASES)
    messages = ((sender, taker) for taker in timeline.passes for sender in timeline.senders(taker.action))
    for number, (sender, taker) in enumerate(messages, 1):
        arrow = {"name": "message", "cat": "message", "id": number, "tid": _PASSES}
        # An arrow attaches to the slice around its time, and a slice does not include its end.
        leaves = sender.start + 0.999 * (sender.end - sender.start)
        yield {**arrow, "ph": "s", "pid": sender.rank, "ts": 1e6 * leaves}
        yield {**arrow, "ph": "f", "bp": "e", "pid": taker.rank, "ts": 1e6 * taker.start}


def _named(kind: str, name: str, place: int, **ids: int) -> Iterator[dict[str, Any]]:
    yield {"name": f"{kind}_name", "ph": "M", **ids, "args": {"name": name}}
    yield {"name": f"{kind}_sort_index", "ph": "M", **ids, "args": {"sort_index": place}}


def _slice(span: Event | Phase, name: str, category: str, row: int) -> dict[str, Any]:
    times = {"ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start)}
    return {"name": name, "cat": category, "ph": "X", "pid": span.rank, "tid": row, **times}


class _Trace(BaseModel):
    timeline: StepTimeline = Field(alias="otherData")


def read_trace(path: Path) -> StepTimeline:
    """Read the JSON of `chrome_trace`. Raises a `ValueError` with the predicate of a sentence for any other file."""
    with user_file(path, ValueError, "is no timeline"):
        step = _Trace.model_validate_json(path.read_bytes()).timeline
        order = defaultdict(list)
        for event in sorted(step.passes, key=lambda event: event.start):
            order[event.rank].append(event.action)
        shape = step.schedule, step.pipeline_degree, step.virtual_stages
        if order != dict(enumerate(schedule_table(*shape, step.num_microbatches))):
            raise ValueError("its passes do not follow the order of the schedule")
        return step
