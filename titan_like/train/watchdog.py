"""Finds the rank that the others wait for, because it hangs or has died, and ends the job."""

from __future__ import annotations

import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from titan_like.config.errors import ConfigError, RunError, first_line, record_error
from titan_like.torch_private import default_store

_PACKAGE = str(Path(__file__).resolve().parents[1])
# How the names of functions begin in which a process waits for others. A rank that is inside one of our functions that
# calls any of these, and in no other of ours, counts as waiting.
_WAITING = ("wait", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "tolist", "synchronize")
_WITH_SENTENCE = (ConfigError, RunError)
_COMMUNICATION = ("gloo", "nccl", "connection", "socket", "store", "peer")
_MOST_LOOKING = 64  # ranks that read the heartbeats of all others when a job is stuck
_HEARTBEATS_PER_SECOND = 2000  # limit for all ranks together, because a single store receives them


@dataclass(frozen=True)
class Heartbeat:
    """A rank's report on itself, sent several times a second."""

    number: int  # of heartbeats so far
    step: int  # optimizer steps done
    seconds: float  # since its last progress
    where: str  # the source line of this package that its main thread is at
    waits: bool  # whether it waits for other ranks on that line
    host: str
    pid: int
    failure: str | None = None  # the error that ended it, or "" if the rank itself prints a sentence about it

    def described(self) -> str:
        """The rank's step, source line, host and process, as a clause."""
        return f"after step {self.step}, at {self.where} (host {self.host}, process {self.pid})"


class Watchdog:
    """A thread on every rank that reports the rank's progress, and finds the rank at fault when the job is stuck.

    If a rank makes no progress for ``timeout`` seconds, because it hangs or waits for one that does, or if it loses a
    connection because another rank has died, stderr names the rank at fault and the process ends with exit code 1.
    torchrun can then restart the job. Only such ranks look at the others, and a rank that makes progress is never
    named, so a job whose steps advance is never ended. The thread survives any error except the loss of the store.

    Use it as a context manager. A timeout of 0 switches it off.
    """

    def __init__(self, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout = timeout
        fewest = self.size / _HEARTBEATS_PER_SECOND  # seconds between heartbeats that the store can receive
        self.period = min(max(2.0, fewest), timeout / 12)  # seconds
        self.seconds_between_heartbeats = min(self.period, max(0.25, fewest))
        # Returns (optimizer steps done, a number that grows with the work done). The training code replaces it.
        self.progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
        # Before the first step is done these numbers hardly change, so then any movement of the main thread counts.
        self.is_starting: Callable[[], bool] = lambda: True
        self._store = dist.PrefixStore("watchdog", default_store().clone())
        self._main = threading.main_thread().ident or 0
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._number = self._step = 0
        self._seen: object = None  # the latest progress
        self._since = self._sent_at = time.monotonic()  # when that was first seen, and the last heartbeat sent
        self._has_lost_connection = False
        # Evenly spread ranks look at the others, few enough for a single store.
        self._looks = self.rank % -(-self.size // _MOST_LOOKING) == 0
        self._first_look: dict[int, Heartbeat] | None = None
        self._next_look = self._looked_at = 0.0
        self._logged: set[str] = set()  # kinds of errors that have been printed
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._is_on = timeout > 0

    def __enter__(self) -> Watchdog:
        if self._is_on:
            self._send_heartbeat()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not self._is_on:
            return
        # An error in communication usually means that another rank has died. The thread then names that one.
        is_reported = isinstance(error, _WITH_SENTENCE)
        self._has_lost_connection = not is_reported and any(word in str(error).lower() for word in _COMMUNICATION)
        if self.size > 1 and isinstance(error, Exception) and self._has_lost_connection:
            self._thread.join(4 * self.period)
        self._ended.set()
        self._thread.join(5 * self.period)
        if isinstance(error, Exception) and not self._thread.is_alive():  # else its request hangs, as this one would
            with suppress(RuntimeError):  # the store may be gone
                self._send_heartbeat(error)

    def _watch(self) -> None:
        while not self._ended.wait(self.seconds_between_heartbeats):
            try:
                self._send_heartbeat()
                self._look_at_others()
            except dist.DistNetworkError:  # the store is gone, and with it the process that holds it
                if not self._ended.wait(self.period):
                    self._end_process("the process that hosts the job's store is gone: rank 0, or its node")
            except Exception as error:
                self._log_once(error)

    def _send_heartbeat(self, error: Exception | None = None) -> None:
        now, progress = time.monotonic(), self._current_progress()
        self._since += max(0.0, now - self._sent_at - 2 * self.period)  # while the process was suspended
        self._sent_at = now
        if progress != self._seen:
            self._seen, self._since = progress, now
        self._number += 1
        where, waits = self._current_position()
        failure = None
        if error is not None:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            where, waits = position(frame)[0], False
            failure = "" if isinstance(error, _WITH_SENTENCE) else f"{type(error).__name__}: {first_line(error)}"
        seconds = now - self._since
        heartbeat = Heartbeat(self._number, self._step, seconds, where, waits, self._host, self._pid, failure)
        self._store.set(str(self.rank), json.dumps(asdict(heartbeat)))

    def _current_progress(self) -> object:
        """A value that changes when this rank makes progress."""
        self._step, work = self.progress()
        if not self.is_starting():
            return self._step, work
        frame = sys._current_frames().get(self._main)
        return self._step, work, frame and (id(frame.f_code), frame.f_lasti)

    def _current_position(self) -> tuple[str, bool]:
        # Never keep the dictionary of frames in a variable. It contains this function's own frame, and that cycle would
        # keep the main thread's frames, with all their tensors, alive until Python's cycle collector runs.
        where, waits = position(sys._current_frames().get(self._main))
        for thread in threading.enumerate():
            if thread.name == "checkpoint":  # it may be the one that hangs
                where += f", its save at {position(sys._current_frames().get(thread.ident or 0))[0]}"
        return where, waits

    def _look_at_others(self) -> None:
        """If this rank is stuck or has lost a connection, find the rank at fault; if there is one, end the process.

        Ranks that look do so twice. The others wait for a report.
        """
        now, window, is_lost = time.monotonic(), max(8 * self.period, self.timeout / 2), self._has_lost_connection
        stuck = now - self._since
        if stuck < self.timeout - window and not is_lost:
            self._first_look = None
            return
        if now < self._next_look:
            return
        self._next_look = now + self.period / 2
        if self._store.check(["report"]):
            self._end_process("")
        if (self._looks or is_lost) and self._first_look is None:
            self._first_look, self._looked_at = self._heartbeats(), now
        elif self._first_look is not None and (
            now > self._looked_at + 2.5 * self.period if is_lost else stuck > self.timeout - 3 * self.period
        ):
            patience = math.inf if is_lost else self.timeout - 4 * self.period  # a lost rank does not merely hang
            report = find_fault(self.size, self._first_look, self._heartbeats(), patience)
            if report is not None:
                self._store.set("report", report)
                self._end_process(report if self._store.add("reporters", 1) == 1 else "")

    def _heartbeats(self) -> dict[int, Heartbeat]:
        """Read the newest heartbeat of each rank that has sent one."""
        known = self._with_heartbeat(range(self.size))
        values = self._store.multi_get([str(rank) for rank in known]) if known else []
        return {rank: Heartbeat(**json.loads(value)) for rank, value in zip(known, values, strict=True)}

    def _with_heartbeat(self, ranks: range) -> list[int]:
        """The ranks that have sent a heartbeat: one request if all have, and log n for each that has not."""
        if self._store.check([str(rank) for rank in ranks]):
            return [*ranks]
        middle = len(ranks) // 2
        return self._with_heartbeat(ranks[:middle]) + self._with_heartbeat(ranks[middle:]) if middle else []

    def _log_once(self, error: Exception) -> None:
        if (kind := type(error).__name__) not in self._logged:
            self._logged.add(kind)
            with suppress(Exception):
                print(f"the watchdog of rank {self.rank} failed ({kind}): {error}", file=sys.stderr, flush=True)

    def _end_process(self, report: str) -> None:
        if report:
            with suppress(Exception):
                print(f"error: {report}", file=sys.stderr, flush=True)
                record_error(f"error: {report}")
        os._exit(1)  # a normal exit would wait for the main thread, which may never return


def find_fault(
    size: int, before: dict[int, Heartbeat], after: dict[int, Heartbeat], patience: float = 0.0
) -> str | None:
    """Name the ranks at fault.

    ``before`` and ``after`` are two looks at all heartbeats, between which every rank should have sent a new one.

    Returns:
        A sentence, which is empty if the rank at fault has printed one, or None if a rank that the others may be
        waiting for made progress in the last ``patience`` seconds.
    """
    for rank, beat in after.items():
        if beat.failure is not None:
            return f"rank {rank} failed {beat.described()}: {beat.failure}" if beat.failure else ""
    unknown = [rank for rank in range(size) if rank not in after]
    if unknown:
        return f"{_ranks(unknown)} never sent a first heartbeat"
    silent = [rank for rank in after if rank in before and before[rank].number == after[rank].number]
    if silent:
        # A silent rank's last heartbeat may be several steps old. Its true step is the same as the others', because
        # every step needs all ranks.
        step = max(beat.step for beat in after.values())
        return f"{_ranks(silent)} died or was stopped {replace(after[silent[0]], step=step).described()}"
    # Ranks that are a step ahead wait for those behind, so only the latter can be at fault. Among these, one that waits
    # for nobody is the culprit.
    behind = min(beat.step for beat in after.values())
    candidates = {rank: beat for rank, beat in after.items() if beat.step == behind}
    if min(beat.seconds for beat in candidates.values()) < patience:
        return None
    working = {rank: beat for rank, beat in candidates.items() if not beat.waits}
    rank, beat = max((working or candidates).items(), key=lambda item: item[1].seconds)
    consequence = "" if size == 1 else f"; the other {size - 1} wait for it"
    if not working and len(candidates) > 1:
        consequence = f"; {len(candidates)} ranks wait for one another"
    return f"rank {rank} has hung for {beat.seconds:.0f} s {beat.described()}{consequence}"


def position(frame: FrameType | None) -> tuple[str, bool]:
    """Where in this package's code a thread is, as text, and whether it waits there for other processes.

    It reads no file, because that might hang on the same storage as the thread.
    """
    inner, waits = frame, False
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        is_ours = file.startswith(_PACKAGE + os.sep)
        waits = waits or "torch/distributed" in file or (is_ours and any(n.startswith(_WAITING) for n in code.co_names))
        if is_ours:
            place = f"{Path(file).relative_to(Path(_PACKAGE).parent)}:{frame.f_lineno} in {code.co_name}"
            if inner is not None and inner is not frame and "torch" not in inner.f_code.co_filename:
                called = inner.f_code
                place += f" ({Path(called.co_filename).name}:{inner.f_lineno} in {called.co_name})"
            return place, waits
        frame = frame.f_back
    return "an unknown place", waits


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
