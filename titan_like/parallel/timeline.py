"""When each pass of a step ran on this rank.

On a GPU nothing waits for the device during the step: CUDA events are recorded between its kernels, and read after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titan_like.parallel.schedules.actions import Action
from titan_like.parallel.schedules.communication import Step
from titan_like.parallel.schedules.simulate import Event

_MEETINGS = 16  # collectives that make clocks of ranks comparable: the quickest counts

_Span = tuple[Step, Any, Any]  # a pass, its start and its end: seconds, or CUDA events


class Phase(NamedTuple):
    """What a rank did after its last pass, with its times in seconds."""

    rank: int
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RankTimes:
    """What one rank saw of a step, in seconds of its own clock.

    ``waits`` are times in which a pass could not start, under the name of the pass. ``meetings`` are times of going
    into and coming out of collectives that all ranks took part in, which make clocks comparable. All else may be wrong
    by ``error`` on the clock of ``meetings``.
    """

    passes: list[Event]
    waits: list[Event]
    phases: list[Phase]
    meetings: list[tuple[float, float]]
    error: float = 0.0


class Timeline:
    """Receives the start and the end of every pass of one step."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """Begin. All ranks of ``group`` do this together, directly before the step."""
        self._device = device
        self._passes: list[_Span] = []
        self._waits: list[_Span] = []
        self._phases: list[tuple[str, Any, Any]] = []
        self._began: Any = None
        self._waits_since: Any = None
        self._meetings = [_meet(device, group) for _ in range(_MEETINGS)]
        self._stamp: Callable[[], Any] = time.perf_counter if device.type == "cpu" else _record_event
        before = time.perf_counter()
        self._zero: Any = self._stamp()  # the host's time at this event is known, those of others follow
        _synchronize(device)
        self._zero_bounds = before, time.perf_counter()
        self._last = self._zero

    def waiting(self, step: Step) -> None:
        """A pass is next, and its input may not be there."""
        self._waits_since = self._stamp()

    def start(self, step: Step) -> None:
        """A pass begins: its input is there."""
        self._began = self._stamp()
        if self._waits_since is not None:
            self._waits.append((step, self._waits_since, self._began))
            self._waits_since = None

    def stop(self, step: Step) -> None:
        """A pass has been issued."""
        self._last = self._stamp()
        self._passes.append((step, self._began, self._last))

    def mark(self, phase: str) -> None:
        """All since the last pass, or the last mark, was this phase."""
        since, self._last = self._last, self._stamp()
        self._phases.append((phase, since, self._last))

    def finish(self) -> RankTimes:
        """Wait for the device and read the times."""
        _synchronize(self._device)

        def events(spans: list[_Span]) -> list[Event]:
            return [Event(0, Action(*step), self._seconds(start), self._seconds(end)) for step, start, end in spans]

        return RankTimes(
            passes=events(self._passes),
            waits=events(self._waits),
            phases=[Phase(0, name, self._seconds(start), self._seconds(end)) for name, start, end in self._phases],
            meetings=self._meetings,
            error=0.0 if self._device.type == "cpu" else (self._zero_bounds[1] - self._zero_bounds[0]) / 2,
        )

    def _seconds(self, stamp: Any) -> float:
        """Time of a stamp on the host's clock."""
        if self._device.type == "cpu":
            return stamp
        return sum(self._zero_bounds) / 2 + self._zero.elapsed_time(stamp) / 1000


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _meet(device: torch.device, group: dist.ProcessGroup) -> tuple[float, float]:
    """Wait for the whole group: times of going in and of coming out."""
    entered = time.perf_counter()
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    _synchronize(device)
    return entered, time.perf_counter()
