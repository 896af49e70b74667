"""A step's timeline as a trace for ui.perfetto.dev or chrome://tracing.

Source: "Trace Event Format", the document that chrome://tracing and Perfetto refer to for JSON traces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from titan_like.metrics.step_timeline import Phase, StepTimeline
from titan_like.parallel.schedules.actions import Action, inputs, outcome
from titan_like.parallel.schedules.simulate import Event
from titan_like.parallel.schedules.tables import schedule_table

_PASSES, _WAITS, _PHASES = range(3)  # rows of a rank
_ROWS = {_PASSES: "passes", _WAITS: "waiting", _PHASES: "rest of the step"}
_LATEST_START = 1e-3  # seconds
_NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


def chrome_trace(timeline: StepTimeline) -> dict[str, Any]:
    """JSON object of the trace: a process for each pipeline rank, arrows for messages between ranks. Times in µs."""
    events = [
        event
        for part in (_names(timeline), _passes(timeline), _waits(timeline), _phases(timeline), _messages(timeline))
        for event in part
    ]
    about = {
        "schedule": timeline.schedule,
        "pipeline_degree": timeline.pipeline_degree,
        "virtual_stages": timeline.virtual_stages,
        "num_microbatches": timeline.num_microbatches,
        "clock_error_us": 1e6 * timeline.clock_error,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    for rank in range(timeline.pipeline_degree):
        yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"pipeline rank {rank}"}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        for row, name in _ROWS.items():
            yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}}
            yield {"name": "thread_sort_index", "ph": "M", "pid": rank, "tid": row, "args": {"sort_index": row}}


def _slice(name: str, category: str, rank: int, row: int, start: float, end: float) -> dict[str, Any]:
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"name": name, "cat": category, "ph": "X", "pid": rank, "tid": row, **times}


def _passes(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    for event in timeline.passes:
        kind, stage, microbatch = event.action
        name = f"{kind}{microbatch} of stage {stage}"
        arguments = {"pass": _NAMES[kind], "stage": stage, "microbatch": microbatch}
        yield {**_slice(name, _NAMES[kind], event.rank, _PASSES, event.start, event.end), "args": arguments}


def _waits(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    for event in timeline.waits:
        kind, stage, microbatch = event.action
        name = f"for {kind}{microbatch} of stage {stage}"
        yield _slice(name, "waiting", event.rank, _WAITS, event.start, event.end)


def _phases(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    for phase in timeline.phases:
        yield _slice(phase.name, "phase", phase.rank, _PHASES, phase.start, phase.end)


def _messages(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    """An arrow from each pass to the one on another rank that needed its result."""
    made: dict[Action, Event] = {outcome(event.action): event for event in timeline.passes}
    ranks, number = timeline.ranks, 0
    for taker in timeline.passes:
        for needed in inputs(taker.action, len(ranks)):
            if ranks[needed.stage] == taker.rank:
                continue
            maker, number = made[needed], number + 1
            arrow = {"name": "message", "cat": "message", "id": number, "tid": _PASSES}
            # An arrow belongs to the slice around its time, and a slice's last moment is no longer in it.
            leaves = maker.start + 0.999 * (maker.end - maker.start)
            yield {**arrow, "ph": "s", "pid": maker.rank, "ts": 1e6 * leaves}
            yield {**arrow, "ph": "f", "bp": "e", "pid": taker.rank, "ts": 1e6 * taker.start}


def read_trace(path: Path) -> StepTimeline:
    """The timeline of a file that holds `chrome_trace`'s JSON.

    Raises:
        OSError: the file can not be read.
        ValueError: it holds something else.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        about = trace["otherData"]
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        timeline = StepTimeline(
            about["schedule"],
            about["pipeline_degree"],
            about["virtual_stages"],
            [_event(event) for event in slices if event["tid"] == _PASSES],
            [_event(event) for event in slices if event["tid"] == _WAITS],
            [Phase(e["pid"], str(e["name"]), *_span(e)) for e in slices if e["tid"] == _PHASES],
            about["clock_error_us"] / 1e6,
        )
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"no timeline: {error!r}") from None
    problem = _problem(timeline)
    if problem is not None:
        raise ValueError(f"no timeline: {problem}")
    return timeline


def _problem(timeline: StepTimeline) -> str | None:
    """Why this can be no step of its schedule; None if it can."""
    degree, virtual, passes = timeline.pipeline_degree, timeline.virtual_stages, timeline.passes
    if not (isinstance(degree, int) and isinstance(virtual, int) and degree >= 1 and virtual >= 1 and passes):
        return "no passes, or no whole numbers of ranks and stages"
    if degree * virtual * timeline.num_microbatches > len(passes):  # before a table is made of such numbers
        return "passes are missing"
    try:
        table = schedule_table(timeline.schedule, degree, virtual, timeline.num_microbatches)
    except ValueError as error:
        return str(error)
    planned = sorted((rank, action) for rank, actions in enumerate(table) for action in actions)
    if sorted((event.rank, event.action) for event in passes) != planned:
        return "its passes are not those of the schedule"
    spans = [(event.rank, event.start, event.end) for event in (*passes, *timeline.waits)]
    spans += [(phase.rank, phase.start, phase.end) for phase in timeline.phases]
    if not all(0 <= end - start < float("inf") for _, start, end in spans) or not timeline.clock_error >= 0:
        return "a time that is no number, or an end before its start"
    if not {rank for rank, _, _ in spans} <= set(range(degree)):
        return "a wait or a phase of a rank that there is not"
    if abs(min(event.start for event in passes)) > _LATEST_START:
        return "its first pass does not start at 0"
    for rank, actions in enumerate(table):
        begin = {event.action: event.start for event in passes if event.rank == rank}
        if any(begin[later] < begin[earlier] for earlier, later in pairwise(actions)):
            return f"the passes of rank {rank} are not in the schedule's order"
    if any(sum(event.end - event.start for event in passes if event.rank == rank) <= 0 for rank in range(degree)):
        return "a rank whose passes take no time"
    return None


def _span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6


def _event(event: dict[str, Any]) -> Event:
    kind, microbatch, stage = re.fullmatch(r"(?:for )?([FBIW])(\d+) of stage (\d+)", event["name"]).groups()  # type: ignore[union-attr]
    return Event(event["pid"], Action(kind, int(stage), int(microbatch)), *_span(event))
