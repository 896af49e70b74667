"""A step's timeline as a trace for ui.perfetto.dev or chrome://tracing.

Source: "Trace Event Format", the specification of JSON traces for chrome://tracing and Perfetto.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_like.metrics.step_timeline import KINDS, Phase, StepTimeline
from titan_like.parallel.schedules.simulate import Event
from titan_like.parallel.schedules.tables import Action, schedule_table

_PASSES, _WAITS, _PHASES = range(3)  # rows of a rank
_ROWS = ("passes", "waiting", "rest of the step")
_LATEST_START = 1e-3  # seconds


def chrome_trace(timeline: StepTimeline) -> dict[str, Any]:
    """The trace as a JSON object: a process per pipeline rank, an arrow per message between ranks. Times are in µs."""
    about = {
        "schedule": timeline.schedule,
        "pipeline_degree": timeline.pipeline_degree,
        "virtual_stages": timeline.virtual_stages,
        "num_microbatches": timeline.num_microbatches,
        "clock_error_us": 1e6 * timeline.clock_error,
    }
    return {"traceEvents": list(_events(timeline)), "displayTimeUnit": "ms", "otherData": about}


def _events(timeline: StepTimeline) -> Iterator[dict[str, Any]]:
    for rank in range(timeline.pipeline_degree):
        yield from _named("process", f"pipeline rank {rank}", rank, pid=rank)
        for row, name in enumerate(_ROWS):
            yield from _named("thread", name, row, pid=rank, tid=row)
    for event in timeline.passes:
        kind, stage, microbatch = event.action
        arguments = {"pass": KINDS[kind], "stage": stage, "microbatch": microbatch}
        yield _slice(event, f"{kind}{microbatch} of stage {stage}", KINDS[kind], _PASSES) | {"args": arguments}
    for wait in timeline.waits:
        kind, stage, microbatch = wait.action
        yield _slice(wait, f"for {kind}{microbatch} of stage {stage}", "waiting", _WAITS)
    for phase in timeline.phases:
        yield _slice(phase, phase.name, "phase", _PHASES)
    messages = ((sender, taker) for taker in timeline.passes for sender in timeline.senders(taker.action))
    for number, (sender, taker) in enumerate(messages, 1):
        arrow = {"name": "message", "cat": "message", "id": number, "tid": _PASSES}
        # An arrow attaches to the slice around its time, and a slice does not include its end.
        leaves = sender.start + 0.999 * (sender.end - sender.start)
        yield {**arrow, "ph": "s", "pid": sender.rank, "ts": 1e6 * leaves}
        yield {**arrow, "ph": "f", "bp": "e", "pid": taker.rank, "ts": 1e6 * taker.start}


def _named(what: str, name: str, place: int, **where: int) -> Iterator[dict[str, Any]]:
    yield {"name": f"{what}_name", "ph": "M", **where, "args": {"name": name}}
    yield {"name": f"{what}_sort_index", "ph": "M", **where, "args": {"sort_index": place}}


def _slice(span: Event | Phase, name: str, category: str, row: int) -> dict[str, Any]:
    times = {"ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start)}
    return {"name": name, "cat": category, "ph": "X", "pid": span.rank, "tid": row, **times}


def read_trace(path: Path) -> StepTimeline:
    """Read the timeline back from a file with the JSON of `chrome_trace`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it contains something else.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        about = trace["otherData"]
        shape = about["schedule"], about["pipeline_degree"], about["virtual_stages"]
        timeline = StepTimeline(*shape, [], clock_error=about["clock_error_us"] / 1e6)
        rows = {_PASSES: timeline.passes, _WAITS: timeline.waits}
        for event in (event for event in trace["traceEvents"] if event["ph"] == "X"):
            name, times = event["name"], (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            if event["tid"] == _PHASES:
                timeline.phases.append(Phase(event["pid"], str(name), *times))
            else:
                rows[event["tid"]].append(Event(event["pid"], _action(name), *times))
        _check(timeline)
    except ValueError as error:
        raise ValueError(f"no timeline: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no timeline: {error!r}") from None
    return timeline


def _action(name: str) -> Action:
    kind, microbatch, stage = re.fullmatch(r"(?:for )?([FBIW])(\d+) of stage (\d+)", name).groups()  # type: ignore[union-attr]
    return Action(kind, int(stage), int(microbatch))


def _check(step: StepTimeline) -> None:
    """Raise a ValueError or a TypeError unless this can be a step of its schedule."""
    spans: list[Event | Phase] = [*step.passes, *step.waits, *step.phases]
    if not all(0 <= span.end - span.start < float("inf") for span in spans) or not step.clock_error >= 0:
        raise ValueError("a time is not a number, or a span has its end before its start")
    if not step.passes or abs(min(event.start for event in step.passes)) > _LATEST_START:
        raise ValueError("there are no passes, or the first one does not start at 0")
    if sum(event.end - event.start for event in step.passes) <= 0:
        raise ValueError("its passes take no time")
    if step.pipeline_degree * step.virtual_stages * step.num_microbatches > len(step.passes):
        raise ValueError("passes are missing")  # checked first, because the table of a huge step fills the memory
    order = defaultdict(list)
    for event in sorted(step.passes, key=lambda event: event.start):
        order[event.rank].append(event.action)
    table = schedule_table(step.schedule, step.pipeline_degree, step.virtual_stages, step.num_microbatches)
    if order != dict(enumerate(table)):
        raise ValueError("its passes are not those of the schedule, in its order")
    if not {span.rank for span in spans} <= order.keys():
        raise ValueError("a wait or a phase is on a rank outside the pipeline")
