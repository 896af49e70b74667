"""The times at which each pass of a step ran on this rank.

On a GPU the host does not wait during the step: it records CUDA events between the kernels and reads them afterwards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titan_like.parallel.schedules.actions import Action
from titan_like.parallel.schedules.communication import Step
from titan_like.parallel.schedules.simulate import Event

_MEETINGS = 16  # collectives that align the ranks' clocks; the fastest one is used


class Phase(NamedTuple):
    """A part of the step after a rank's last pass, such as the optimizer. Times are in seconds."""

    rank: int
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RankTimes:
    """One rank's record of a step, in seconds of its own clock.

    ``waits`` are the times for which a pass waited for its input, each labelled with that pass. ``meetings`` are the
    times at which the rank entered and left collectives of all ranks; they align the ranks' clocks. All other times
    may be off by ``error`` on the clock of ``meetings``.
    """

    passes: list[Event]
    waits: list[Event]
    phases: list[Phase]
    meetings: list[tuple[float, float]]
    error: float = 0.0


class Timeline:
    """Records the start and the end of every pass of one step. A stamp is a time in seconds, or a CUDA event."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """Start recording. All ranks of ``group`` do this together, directly before the step."""
        self._device = device
        self._seen = RankTimes([], [], [], [self._meet(group) for _ in range(_MEETINGS)])  # with stamps, not yet times
        self._waits_since: Any = None
        before = time.perf_counter()
        # The host times around this first event are known. They place all later events on the host's clock.
        self._began = self._last = self._zero = self._stamp()
        self._synchronize()
        self._zero_bounds = before, time.perf_counter()

    def waiting(self, step: Step) -> None:
        """A pass is next, but its input may not have arrived yet."""
        self._waits_since = self._stamp()

    def start(self, step: Step) -> None:
        """A pass begins, and its input has arrived."""
        self._began = self._stamp()
        if self._waits_since is not None:
            self._seen.waits.append(Event(0, Action(*step), self._waits_since, self._began))
            self._waits_since = None

    def stop(self, step: Step) -> None:
        """All work of a pass has been issued."""
        self._last = self._stamp()
        self._seen.passes.append(Event(0, Action(*step), self._began, self._last))

    def mark(self, phase: str) -> None:
        """Label the time since the last pass or mark as this phase."""
        since, self._last = self._last, self._stamp()
        self._seen.phases.append(Phase(0, phase, since, self._last))

    def finish(self) -> RankTimes:
        """Wait for the device and return the recorded times."""
        if self._device.type == "cpu":
            return self._seen
        self._synchronize()
        (before, after), seen = self._zero_bounds, self._seen

        def seconds(stamp: Any) -> float:  # on the host's clock
            return (before + after) / 2 + self._zero.elapsed_time(stamp) / 1000

        def read(spans: list[Any]) -> list[Any]:
            return [span._replace(start=seconds(span.start), end=seconds(span.end)) for span in spans]

        return RankTimes(read(seen.passes), read(seen.waits), read(seen.phases), seen.meetings, (after - before) / 2)

    def _stamp(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _meet(self, group: dist.ProcessGroup) -> tuple[float, float]:
        """Meet the whole group in a collective; the times of entering and leaving it."""
        entered = time.perf_counter()
        dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        self._synchronize()
        return entered, time.perf_counter()
