"""A step's passes as lines of text, one lane a rank, and where two steps differ."""

from __future__ import annotations

import math
from statistics import fmean
from typing import NamedTuple

from titan_like.metrics.step_timeline import StepTimeline
from titan_like.metrics.timeline_report import rank_shares
from titan_like.parallel.schedules.simulate import Event

LEGEND = "F forward, B backward (I its inputs, W its weights) and the microbatch; small letters: a rank's later stages"
_FILL = {"F": "-", "B": "=", "I": "=", "W": "~"}
_IDLE = "."


def lanes(step: StepTimeline, width: int, seconds: float | None = None) -> list[str]:
    """One line a rank, ``width`` columns for the time from 0 to ``seconds`` (default: the step's).

    A column shows what took most of its time: a pass, which begins with its letter and, where there is room, the
    number of its microbatch; or a dot.
    """
    scale = width / (seconds or step.seconds)
    first = {rank: stage for stage, rank in reversed(list(enumerate(step.ranks)))}
    text = []
    for rank in range(step.pipeline_degree):
        columns = _columns([event for event in step.passes if event.rank == rank], width, scale)
        line, at = "", 0
        while at < width:
            event, until = columns[at], at + 1
            while until < width and columns[until] is event:
                until += 1
            line += _box(event, until - at, first[rank])
            at = until
        text.append(line.rstrip(_IDLE) if seconds and seconds > step.seconds else line)
    return text


def _columns(events: list[Event], width: int, scale: float) -> list[Event | None]:
    """What takes most of each column's time, None for nothing."""
    longest: list[tuple[float, Event | None]] = [(0.0, None)] * width
    busy = [0.0] * width
    for event in events:
        start, end = event.start * scale, event.end * scale
        for column in range(int(start), min(math.ceil(end), width)):
            share = min(end, column + 1) - max(start, column)
            busy[column] += share
            if share > longest[column][0]:
                longest[column] = share, event
    return [event if busy[column] >= 0.5 else None for column, (_, event) in enumerate(longest)]


def _box(event: Event | None, width: int, first_stage: int) -> str:
    if event is None:
        return _IDLE * width
    letter = event.action.kind if event.action.stage == first_stage else event.action.kind.lower()
    label = f"{letter}{event.action.microbatch}"
    return (label if len(label) <= width else letter).ljust(width, _FILL[event.action.kind])


class PartOfSteps(NamedTuple):
    """A part of two steps. Seconds; of times that every rank has its own, the mean."""

    name: str
    predicted: float
    measured: float


_KINDS = {"F": "forward passes", "B": "backward passes", "I": "backward, inputs", "W": "backward, weights"}
_AFTER = {"gradient norm": "optimizer"}  # a prediction has them in one


def parts_of(step: StepTimeline) -> dict[str, float]:
    """Where the time of a step goes: to its last pass, which the first ones sum up to, and after it. Seconds."""
    shares, degree = rank_shares(step), step.pipeline_degree
    parts = {}
    for kind, name in _KINDS.items():
        times = [event.end - event.start for event in step.passes if event.action.kind == kind]
        if times:
            parts[name] = sum(times) / degree
    parts["bubble"] = fmean(share.bubble for share in shares)
    parts["exposed communication"] = fmean(share.exposed_communication for share in shares)
    parts["between passes"] = fmean(share.other for share in shares)
    parts["first to last pass"] = step.seconds
    ends: dict[str, float] = {}
    for phase in step.phases:
        name = _AFTER.get(phase.name, phase.name)
        ends[name] = max(ends.get(name, 0.0), phase.end)
    since = step.seconds
    for name, end in ends.items():  # what it adds to the step: the time until the last rank is done with it
        parts[name] = max(end - since, 0.0)
        since = max(end, since)
    parts["step"] = since
    return parts


def differences(predicted: StepTimeline, measured: StepTimeline) -> list[PartOfSteps]:
    """The parts of two steps side by side, 0 where one of them lacks a part; the whole step last."""
    ours, theirs = parts_of(predicted), parts_of(measured)
    names = [name for name in dict.fromkeys((*ours, *theirs)) if name != "step"]
    return [PartOfSteps(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in (*names, "step")]
