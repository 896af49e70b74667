"""A step's timeline as a trace for ui.perfetto.dev or chrome://tracing.

Source: "Trace Event Format", the document that chrome://tracing and Perfetto refer to for JSON traces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titan_like.metrics.step_timeline import StepTimeline
from titan_like.parallel.schedules.actions import Action, inputs, outcome
from titan_like.parallel.schedules.simulate import Event

_PASSES, _WAITS, _PHASES = range(3)  # rows of a rank
_ROWS = {_PASSES: "passes", _WAITS: "waiting", _PHASES: "rest of the step"}
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
