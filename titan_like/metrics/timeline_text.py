"""A step as text with one lane per rank, and the differences of two steps."""

from __future__ import annotations

from itertools import groupby
from statistics import fmean
from typing import NamedTuple

import numpy as np

from titan_like.metrics.step_timeline import StepTimeline
from titan_like.metrics.timeline_report import rank_shares
from titan_like.parallel.schedules.tables import Action

LEGEND = "F forward, B backward (I its inputs, W its weights) and the microbatch; small letters: a rank's later stages"
_FILL = {"F": "-", "B": "=", "I": "=", "W": "~"}
_IDLE = "."
_PARTS = {"F": "forward passes", "B": "backward passes", "I": "backward, inputs", "W": "backward, weights"}
_AFTER = {"gradient norm": "optimizer"}  # a prediction does not separate them


def lanes(step: StepTimeline, width: int, seconds: float | None = None) -> list[str]:
    """One line per rank, with ``width`` columns for the time from 0 to ``seconds`` (default: the step's end).

    A column shows what took most of its time: a dot for idle, or a pass, which begins with its letter and, if there is
    room, the number of its microbatch.
    """
    scale, columns, text = width / (seconds or step.seconds), np.arange(width), []
    for rank in range(step.pipeline_degree):
        passes = [event for event in step.passes if event.rank == rank]
        starts, ends = (scale * np.array([times]).T for times in zip(*(event[2:] for event in passes), strict=True))
        shares = (np.minimum(ends, columns + 1) - np.maximum(starts, columns)).clip(0)  # [passes, columns]
        shown = np.where(shares.sum(0) < 0.5, -1, shares.argmax(0))
        line = ""
        for number, same in groupby(shown):
            event, length = passes[number] if number >= 0 else None, len(list(same))
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
    """Where a step's time goes, in seconds.

    The parts before "first to last pass" add up to it. The phases after the last pass follow, then the whole step.
    """
    parts: dict[str, float] = {}
    for kind, name in _PARTS.items():
        times = [event.end - event.start for event in step.passes if event.action.kind == kind]
        if times:
            parts[name] = sum(times) / step.pipeline_degree
    _, *others = map(fmean, zip(*rank_shares(step), strict=True))
    parts |= zip(("bubble", "exposed communication", "between passes"), others, strict=True)
    parts["first to last pass"] = step.seconds
    after = step.after_passes()
    for name, seconds in after.items():
        name = _AFTER.get(name, name)
        parts[name] = parts.get(name, 0.0) + seconds
    return parts | {"step": step.seconds + sum(after.values())}


def differences(predicted: StepTimeline, measured: StepTimeline) -> list[PartOfSteps]:
    """The parts of two steps side by side, with 0 for a part that one of them lacks. The whole step comes last."""
    ours, theirs = parts_of(predicted), parts_of(measured)
    names = [name for name in dict.fromkeys((*ours, *theirs)) if name != "step"]
    return [PartOfSteps(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in (*names, "step")]
