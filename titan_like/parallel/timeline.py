"""The times of one step's passes on this rank.

On a GPU they are CUDA events, recorded between kernels and read after the step, so the host never waits during it.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titan_like.parallel.schedules.simulate import Event
from titan_like.parallel.schedules.tables import Action

_UNTIMED = nullcontext()
_MEETINGS = 16  # collectives to compare the ranks' clocks with: the tightest bounds count


def stamp(device: torch.device) -> Any:
    """The current time on a CPU, in seconds. On a GPU, an event after all work that has been issued so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class Phase(NamedTuple):
    """What a rank did after its last pass. Times are in seconds."""

    rank: int
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RankTimes:
    """One rank's view of a step, in seconds on its own clock.

    A wait has the action that it delays. A meeting is the time at which this rank entered a collective of all ranks and
    the time at which it left it; they make the ranks' clocks comparable. All other times may be off by ``error`` from
    the clock of the meetings.
    """

    passes: list[Event]
    waits: list[Event]
    phases: list[Phase]
    meetings: list[tuple[float, float]]
    error: float = 0.0


class Timeline:
    """Records the start and end of every pass of one step."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        """All ranks of ``group`` create their timelines together, directly before the step."""
        self._device = device
        self._seen = RankTimes([], [], [], [self._meet(group) for _ in range(_MEETINGS)])  # its times are stamps
        self._waits_since: Any = None
        before = time.perf_counter()
        self._began = self._last = self._zero = stamp(self._device)  # the host times around it date all later events
        self._synchronize()
        self._zero_bounds = before, time.perf_counter()

    def waiting(self) -> None:
        """A pass is next, and its input may not have arrived."""
        self._waits_since = stamp(self._device)

    def start(self, step: Action) -> None:
        """A pass begins: its input has arrived."""
        self._began = stamp(self._device)
        if self._waits_since is not None:
            self._seen.waits.append(Event(0, step, self._waits_since, self._began))
            self._waits_since = None

    def stop(self, step: Action) -> None:
        """A pass has been issued."""
        self._last = stamp(self._device)
        self._seen.passes.append(Event(0, step, self._began, self._last))

    def mark(self, phase: str) -> None:
        """Attribute the time since the last pass, or the last mark, to this phase."""
        since, self._last = self._last, stamp(self._device)
        self._seen.phases.append(Phase(0, phase, since, self._last))

    def finish(self) -> RankTimes:
        """Wait for the device and read the times."""
        if self._device.type == "cpu":
            return self._seen
        self._synchronize()
        (before, after), seen = self._zero_bounds, self._seen

        def seconds(stamp: Any) -> float:  # on the host's clock
            return (before + after) / 2 + self._zero.elapsed_time(stamp) / 1000

        def read(spans: list[Any]) -> list[Any]:
            return [span._replace(start=seconds(span.start), end=seconds(span.end)) for span in spans]

        return RankTimes(read(seen.passes), read(seen.waits), read(seen.phases), seen.meetings, (after - before) / 2)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _meet(self, group: dist.ProcessGroup) -> tuple[float, float]:
        """Wait for the whole group; returns the times of entering and leaving."""
        entered = time.perf_counter()
        dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        self._synchronize()
        return entered, time.perf_counter()


class TimedPasses:
    """Base of what runs passes: it counts them, and times them if a timeline is set."""

    num_actions = 0  # which grow as long as there is progress
    timeline: Timeline | None = None

    def timed(self, step: Action) -> AbstractContextManager[None]:
        """For the time of a pass."""
        self.num_actions += 1
        return _UNTIMED if self.timeline is None else _timed_by(self.timeline, step)


@contextmanager
def _timed_by(timeline: Timeline, step: Action) -> Iterator[None]:
    timeline.start(step)
    yield
    timeline.stop(step)
