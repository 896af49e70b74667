"""Names the rank for which the others wait: one that hangs, or has died."""

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from titan_like.config.errors import RunError, first_line

_PACKAGE = str(Path(__file__).resolve().parents[1])
# What a source line or file has where a process waits for others.
_WAITING = (".wait()", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "tolist(", "synchronize(")
_COMMUNICATION = ("gloo", "nccl", "connection", "socket", "store", "peer")


@dataclass(frozen=True)
class Sign:
    """A rank's sign of life."""

    number: int  # of signs so far
    step: int  # optimizer steps done
    seconds: float  # since it last got on
    where: str  # the product's source line that its main thread is at
    waits: bool  # whether that is one where it waits for others
    host: str
    pid: int
    failure: str | None = None  # why it has ended

    def described(self) -> str:
        """What is known of the rank, as a clause."""
        return f"after step {self.step}, at {self.where} (host {self.host}, process {self.pid})"


class Watchdog:
    """A thread of every rank that says at which step it is and where, and looks after the others.

    Where a rank has not got on for ``timeout`` seconds, be it that it hangs or that it waits for one that does, the
    rank at fault is named on stderr and the process ends with exit code 1, so that torchrun can start the job again.
    A context manager; 0 seconds watch nothing.
    """

    def __init__(self, timeout: float) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.period = min(2.0, timeout / 12)  # seconds between signs
        self.patience = timeout - 4 * self.period  # what is left is for finding out who it is
        # (optimizer steps done, a number that grows as work gets done); set by whoever works
        self.progress: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._store = dist.PrefixStore("watchdog", dist.distributed_c10d._get_default_store().clone())  # type: ignore[attr-defined]
        self._main = threading.main_thread().ident
        self._number = 0
        self._seen, self._since = (-1, 0), time.monotonic()
        self._next_sign, self._next_since = -1, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._is_on = timeout > 0

    def __enter__(self) -> Watchdog:
        if self._is_on:
            self._give_sign()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not self._is_on:
            return
        self._ended.set()
        self._thread.join()
        if error is None or not isinstance(error, Exception):
            return
        by_others = not isinstance(error, RunError) and any(word in str(error).lower() for word in _COMMUNICATION)
        if self.size > 1 and by_others and (lost := self._who_is_lost()):
            with suppress(RuntimeError):
                lost = lost if self._store.add("reporters", 1) == 1 else ""
            self._end_process(lost)
        with suppress(RuntimeError):  # the store may be gone
            self._give_sign(f"{type(error).__name__}: {first_line(error)}")

    def _watch(self) -> None:
        while not self._ended.wait(self.period):
            try:
                self._give_sign()
                if self._is_stuck() or self._is_next_silent():
                    self._end_process(self._report())
            except RuntimeError:  # the store is gone, and with it the process that holds it
                if not self._ended.wait(self.period):
                    self._end_process("the process that the others meet at is gone: that of rank 0, or its node")

    def _give_sign(self, failure: str | None = None) -> None:
        progress = self.progress()
        if progress != self._seen:
            self._seen, self._since = progress, time.monotonic()
        self._number += 1
        # All threads' frames are never kept in a variable: this function's own is one of them, and a frame that holds
        # itself keeps those of the main thread, with all their tensors, until Python next looks for cycles.
        where, waits = position(sys._current_frames().get(self._main or 0))
        for thread in threading.enumerate():
            if thread.name == "checkpoint":  # it may be the one that hangs
                where += f", its save at {position(sys._current_frames().get(thread.ident or 0))[0]}"
        seconds = time.monotonic() - self._since
        sign = Sign(self._number, progress[0], seconds, where, waits, socket.gethostname(), os.getpid(), failure)
        self._store.set(str(self.rank), json.dumps(asdict(sign)))

    def _is_stuck(self) -> bool:
        return time.monotonic() - self._since > self.patience

    def _is_next_silent(self) -> bool:
        """Whether the next rank has given no sign for too long. Each is looked after by one other."""
        if self.size == 1:
            return False
        sign = self._signs([(self.rank + 1) % self.size])
        number = max((sign.number for sign in sign.values()), default=0)
        if number != self._next_sign:
            self._next_sign, self._next_since = number, time.monotonic()
        return time.monotonic() - self._next_since > self.patience

    def _signs(self, ranks: list[int]) -> dict[int, Sign]:
        """The newest sign of each of some ranks that has given one."""
        known = [rank for rank in ranks if self._store.check([str(rank)])]
        values = self._store.multi_get([str(rank) for rank in known]) if known else []
        return {rank: Sign(**json.loads(value)) for rank, value in zip(known, values, strict=True)}

    def _report(self) -> str:
        """Who is at fault. One rank finds out; the others take its word."""
        if self._store.add("reporters", 1) > 1:
            deadline = time.monotonic() + 4 * self.period
            while not self._store.check(["report"]) and time.monotonic() < deadline:
                self._give_sign()
                time.sleep(self.period / 4)
            return ""
        ranks = list(range(self.size))
        before = self._signs(ranks)
        deadline = time.monotonic() + 2.5 * self.period
        while time.monotonic() < deadline:
            time.sleep(self.period / 2)
            self._give_sign()
        report = find_fault(self.size, before, self._signs(ranks))
        self._store.set("report", report)
        return report

    def _who_is_lost(self) -> str | None:
        """Which rank ended the connections of this one: it has failed, or gives no sign any more."""
        with suppress(RuntimeError):
            before = self._signs(list(range(self.size)))
            deadline = time.monotonic() + 2.5 * self.period
            while time.monotonic() < deadline:
                self._give_sign()
                after = self._signs(list(range(self.size)))
                failed = {rank: sign for rank, sign in after.items() if sign.failure is not None}
                if failed:
                    rank, sign = next(iter(failed.items()))
                    return f"rank {rank} failed {sign.described()}: {sign.failure}"
                time.sleep(self.period / 4)
            silent = [rank for rank in before if after[rank].number == before[rank].number]
            if silent:
                return find_fault(self.size, before, after)
        return None

    def _end_process(self, report: str) -> None:
        if report:
            print(f"error: {report}", file=sys.stderr, flush=True)
        os._exit(1)  # the main thread may never come back


def find_fault(size: int, before: dict[int, Sign], after: dict[int, Sign]) -> str:
    """Names the ranks at fault, from two looks at all ranks' signs between which each should have given one."""
    unknown = [rank for rank in range(size) if rank not in after]
    if unknown:
        return f"{_ranks(unknown)} never came as far as the first sign of life"
    silent = [rank for rank in after if rank in before and before[rank].number == after[rank].number]
    if silent:
        return f"{_ranks(silent)} died or was stopped {after[silent[0]].described()}"
    behind = min(sign.step for sign in after.values())
    candidates = {rank: sign for rank, sign in after.items() if sign.step == behind}
    working = {rank: sign for rank, sign in candidates.items() if not sign.waits}
    rank, sign = max((working or candidates).items(), key=lambda item: item[1].seconds)
    others = "" if size == 1 else f"; the other {size - 1} wait for it"
    if not working and len(candidates) > 1:
        others = f"; {len(candidates)} ranks wait for one another"
    return f"rank {rank} has hung for {sign.seconds:.0f} s {sign.described()}{others}"


def position(frame: FrameType | None) -> tuple[str, bool]:
    """Where in the product's code a thread is, as text, and whether it waits there for other processes."""
    stack = []  # innermost first, without the frames: what they hold must not outlive them while lines are read
    while frame is not None:
        stack.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    waits = False
    for code, number in stack:
        file = code.co_filename
        line = linecache.getline(file, number).strip()
        is_ours = file.startswith(_PACKAGE)
        waits = waits or "torch/distributed" in file or (is_ours and any(word in line for word in _WAITING))
        if is_ours:
            place = f"{Path(file).relative_to(Path(_PACKAGE).parent)}:{number} in {code.co_name}"
            inner, inner_number = stack[0]
            if inner is not code and "torch" not in inner.co_filename:
                place += f" ({Path(inner.co_filename).name}:{inner_number} in {inner.co_name})"
            return place, waits
    return "an unknown place", waits


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
