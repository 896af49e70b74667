"""Processes on this machine, forked from one that has imported everything: a group of them starts in a tenth of a
second. They end with the process that started them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver, get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    import torch.distributed as dist

PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "titan_like.verify.jobs"]
DONE, FAILED, STOPPED = "done", "failed", "stopped"
WAITING, TOO_LONG, KILLED, BY_OTHERS = (
    "all processes wait for one another",
    "it was not over in time",
    "the system killed a process, perhaps for want of memory",
    "another process failed",
)
_DAY = 86400.0  # seconds
_SECONDS_TO_FOLLOW = 2.0  # that the others get, after a process failed, to fail for their own reasons
_IDLE_SHARE = 0.05  # of one processor: a process that computes less waits for others; threads of gloo take 0.02

Prepare = Callable[[], AbstractContextManager[object]]
FORK_SERVER = get_context("forkserver")


@dataclass(frozen=True)
class Member:
    """Which process of how many one is."""

    rank: int
    world_size: int
    folder: Path  # shared by the processes, made for them
    port: int  # of the store that they meet at
    device: str = "cpu"  # that it computes on


@dataclass
class Outcome:
    """What became of one process."""

    rank: int
    results: list[Any] = field(default_factory=list)  # what it yielded
    ending: str = STOPPED  # done, failed or stopped
    reason: str = BY_OTHERS  # why it was stopped, or the last line of what a failed one said

    @property
    def is_undecided(self) -> bool:
        """Whether that tells nothing of what it computed."""
        return self.ending == STOPPED and self.reason in (TOO_LONG, KILLED)


class Processes:
    """Starts groups of processes. A context manager."""

    def __init__(self, timeout: float = 120.0, *, on_gpus: bool = False, prepare: Prepare | None = None) -> None:
        """A group may take ``timeout`` seconds. With ``on_gpus`` each process has a GPU, otherwise GPUs are left alone.
        ``prepare`` makes a context manager within which every process works."""
        self.timeout, self.on_gpus, self.prepare = timeout, on_gpus, prepare
        self._temporary = tempfile.TemporaryDirectory(prefix="verify-")
        self.folder = Path(self._temporary.name)
        self._groups = 0
        start_fork_server(on_gpus)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    def run(
        self, function: Callable[..., Iterator[Any]], world_size: int, *arguments: Any,
        patience: float | None = None, allowance: float = 0.0,
    ) -> list[Outcome]:  # fmt: skip
        """``function(place, *arguments)``, a generator, on every rank of a group.

        With ``patience`` they are stopped where for that many seconds none computes. ``allowance`` seconds are added to
        the timeout.
        """
        self._groups += 1
        folder = self.folder / f"group-{self._groups}"
        folder.mkdir()
        store = meeting_store()
        places = [
            Member(rank, world_size, folder, store.port, f"cuda:{rank}" if self.on_gpus else "cpu")
            for rank in range(world_size)
        ]
        group = [_Running(place, function, arguments, self.prepare) for place in places]
        try:
            _wait(group, time.monotonic() + self.timeout + allowance, _Idleness(patience))
        finally:
            for running in group:
                running.kill()
        return [running.outcome for running in group]


def start_fork_server(on_gpus: bool) -> None:
    """Start the process that the others are forked from; it imports in the background, and keeps its environment."""
    environment = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}  # no threads before a fork
    # The code beside the calling script, not another copy of it in the folder that the command is called from.
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # compilers stay in the processes that wait for them
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if Path("/sys/class/net/lo").exists():  # a machine need not know its own host name
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    FORK_SERVER.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, environment):
        forkserver.ensure_running()


class _Running:
    """A process, and what it has said so far."""

    def __init__(self, place: Member, function: Any, arguments: Any, prepare: Prepare | None) -> None:
        self.outcome = Outcome(place.rank)
        self.log = place.folder / f"log-{place.rank}.txt"
        self.pipe, theirs = FORK_SERVER.Pipe()
        arguments = (theirs, place, self.log, function, arguments, prepare)
        self.process: ForkServerProcess = FORK_SERVER.Process(target=_work, args=arguments, daemon=False)
        self.process.start()
        theirs.close()
        self.is_over = False

    def read(self) -> None:
        """Take what is in the pipe, and note the end."""
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                what, value = self.pipe.recv()
                if what == "result":
                    self.outcome.results.append(value)
                else:
                    self.outcome.ending, self.outcome.reason = what, value
        if self.process.exitcode is None or self.is_over:
            return
        self.is_over = True
        if self.outcome.ending == STOPPED:  # it has said nothing of its end
            if self.process.exitcode == -signal.SIGKILL:
                self.outcome.reason = KILLED
            else:
                words = self.log.read_text(encoding="utf-8", errors="replace").strip() if self.log.exists() else ""
                last = words.splitlines()[-1] if words else f"it ended with code {self.process.exitcode}"
                self.outcome.ending, self.outcome.reason = FAILED, last

    def kill(self) -> None:
        """End the process with whatever it has started itself."""
        if self.process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()


class _Idleness:
    """Notices that processes wait for one another: for some seconds together they compute next to nothing."""

    def __init__(self, patience: float | None) -> None:
        self.patience = patience if Path("/proc/self/stat").exists() else None
        self._since = time.monotonic()
        self._active = 0.0  # seconds, by then

    def is_over(self, group: list[_Running]) -> bool:
        """Whether they have waited long enough to be stopped."""
        if self.patience is None:
            return False
        now, active = time.monotonic(), active_seconds({running.process.pid or 0 for running in group})
        if abs(active - self._active) > _IDLE_SHARE * (now - self._since) * len(group) + 0.01:
            self._since, self._active = now, active
        return now - self._since > self.patience


def active_seconds(groups: set[int]) -> float:
    """Time that process groups have computed, would have if there had been a free processor, or wait for a disk."""
    total = 0.0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):  # it may have ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) not in groups:
                continue
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            total += time.monotonic() if fields[0] == "D" else 0.0
            total += int((folder / "schedstat").read_text().split()[1]) * 1e-9  # a kernel need not keep this
    return total


def _wait(group: list[_Running], deadline: float, idleness: _Idleness) -> None:
    """Until all are over, or there is a reason to stop them, which they are then given."""
    reason = TOO_LONG
    while unfinished := [running for running in group if not running.is_over]:
        watched = [thing for running in unfinished for thing in (running.process.sentinel, running.pipe)]
        connection.wait(watched, timeout=max(0.0, min(deadline - time.monotonic(), 0.5)))
        for running in unfinished:
            running.read()
        if reason != BY_OTHERS and any(running.is_over and running.outcome.ending != DONE for running in group):
            reason = BY_OTHERS
            deadline = min(deadline, time.monotonic() + _SECONDS_TO_FOLLOW)
        is_idle = idleness.is_over([running for running in group if not running.is_over])
        if time.monotonic() >= deadline or is_idle:
            for running in group:
                if not running.is_over:
                    running.outcome.reason = WAITING if is_idle and reason == TOO_LONG else reason
            return


def _work(
    results: connection.Connection,
    place: Member,
    log: Path,
    function: Any,
    arguments: Any,
    prepare: Prepare | None,
) -> None:
    """One process: work, and tell each result, and how it ended."""
    os.setpgid(0, 0)  # it is ended with its own children, and a key pressed in the terminal is not for it
    threading.Thread(target=_end_with, args=(results,), daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        with nullcontext() if prepare is None else prepare(), joined(place):
            for result in function(place, *arguments):
                results.send(("result", result))
        results.send((DONE, ""))
    except BaseException as error:
        traceback.print_exc()
        text = "".join(traceback.format_exception_only(error)).strip().splitlines()
        results.send((FAILED, text[-1] if text else type(error).__name__))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _end_with(pipe: connection.Connection) -> None:
    """End this process when the other end of the pipe, which says nothing, is gone."""
    with suppress(EOFError, OSError):
        pipe.recv()
    os._exit(1)


def joined(place: Member) -> AbstractContextManager[None]:
    """The process group of a place."""
    import torch

    from titan_like.train.job import process_group

    torch.set_num_threads(1)
    meet_at(place.port, place.rank, place.world_size)
    return process_group(torch.device(place.device), _DAY)  # whoever waits is stopped from outside, for a reason


def meeting_store() -> dist.TCPStore:
    """Where processes meet that are told its port by `meet_at`. A port that is only probed may be taken by then."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet_at(port: int, rank: int, world_size: int) -> None:
    """Be a rank of the processes that meet at this port, as torchrun would have it."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
