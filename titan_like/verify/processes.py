"""Process groups on this machine, for `verify` and the tests.

Processes are forked from a server that has imported everything, so a group starts in a tenth of a second. They end with
the process that started them.
"""

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
from pathlib import Path
from typing import Any
from unittest.mock import patch

DONE, FAILED, STOPPED = "done", "failed", "stopped"
WAITING, TOO_LONG, KILLED, BY_OTHERS = (
    "all processes wait for one another",
    "it was not over in time",
    "the system killed a process, perhaps for want of memory",
    "another process failed",
)
PRELOADED = ["titan_like.verify.preloaded"]  # modules that the server imports before it forks
_DAY = 86400.0  # seconds
_IDLE_SHARE = 0.05  # of one processor: a process that uses less waits for others (gloo's threads use 0.02)
_FORK_SERVER = get_context("forkserver")

Prepare = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Member:
    """One process of a group."""

    rank: int
    world_size: int
    folder: Path  # shared by the group's processes and deleted after them
    port: int  # of the group's store
    device: str


@dataclass
class Outcome:
    """How one process ended."""

    rank: int
    results: list[Any] = field(default_factory=list)  # what it yielded
    ending: str = STOPPED  # done, failed or stopped
    reason: str = BY_OTHERS  # why it was stopped, or the last line of a failed one's error
    printed: str = ""  # stdout and stderr
    exit_code: int | None = None  # None: it was stopped by this module

    @property
    def is_undecided(self) -> bool:
        """Whether the ending says nothing about what the process computed."""
        return self.ending == STOPPED and self.reason in (TOO_LONG, KILLED)


def start_fork_server(on_gpus: bool = False) -> None:
    """Start the server that processes are forked from, unless it runs. It imports in the background."""
    environment = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}  # no threads before a fork
    # Import the code next to the calling script, not another copy in the current folder.
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # compile in the process itself, not in a pool of workers
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if Path("/sys/class/net/lo").exists():  # gloo otherwise looks up the host name, which may not resolve
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    _FORK_SERVER.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, environment):
        forkserver.ensure_running()


class Group:
    """Runs the generator ``function(member, *arguments)`` on every rank of a new process group, from construction on.

    With ``on_gpus`` each process gets a GPU, else all use the CPU. ``prepare`` makes a context manager in which every
    process works.
    """

    def __init__(
        self, function: Callable[..., Iterator[Any]], world_size: int, *arguments: Any,
        on_gpus: bool = False, prepare: Prepare | None = None,
    ) -> None:  # fmt: skip
        import torch.distributed as dist

        start_fork_server(on_gpus)
        self._temporary = tempfile.TemporaryDirectory(prefix="processes-")
        folder = Path(self._temporary.name)
        # The store is opened here because a port that is only probed may be taken before the group meets at it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._running = []
        for rank in range(world_size):
            device = f"cuda:{rank}" if on_gpus else "cpu"
            member = Member(rank, world_size, folder, self._store.port, device)
            self._running.append(_Running(member, function, arguments, prepare))

    def wait(self, seconds: float, patience: float | None = None, seconds_to_follow: float = 2.0) -> list[Outcome]:
        """Wait for all processes and return how each ended, by rank. No process outlives this call.

        They are stopped after ``seconds``, or once none of them has computed for ``patience`` seconds. When one has
        failed, the others get ``seconds_to_follow`` to report failures of their own.
        """
        deadline, reason, idle_since, active_then = time.monotonic() + seconds, TOO_LONG, time.monotonic(), 0.0
        if not Path("/proc/self/stat").exists():
            patience = None
        try:
            while unfinished := [running for running in self._running if not running.is_over]:
                watched = [thing for running in unfinished for thing in (running.process.sentinel, running.pipe)]
                connection.wait(watched, timeout=max(0.0, min(deadline - time.monotonic(), 0.5)))
                for running in unfinished:
                    running.read()
                now, unfinished = time.monotonic(), [running for running in unfinished if not running.is_over]
                if reason == TOO_LONG and any(r.is_over and r.outcome.ending != DONE for r in self._running):
                    reason, deadline = BY_OTHERS, min(deadline, now + seconds_to_follow)
                if patience is not None:
                    active = active_seconds({running.process.pid for running in unfinished})
                    if abs(active - active_then) > _IDLE_SHARE * (now - idle_since) * len(unfinished) + 0.01:
                        idle_since, active_then = now, active
                    if now - idle_since > patience:
                        reason, deadline = WAITING if reason == TOO_LONG else reason, now
                if now >= deadline:
                    for running in unfinished:
                        running.outcome.reason = reason
                    break
        finally:
            self.kill()
            for running in self._running:
                running.close()
            self._temporary.cleanup()
        return [running.outcome for running in self._running]

    def kill(self) -> None:
        """Kill all processes and their children."""
        for running in self._running:
            if running.process.pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(running.process.pid, signal.SIGKILL)
            running.process.kill()


class _Running:
    """A process, and what it has reported so far."""

    def __init__(self, member: Member, function: Any, arguments: Any, prepare: Prepare | None) -> None:
        self.outcome, self.is_over = Outcome(member.rank), False
        self.log = member.folder / f"log-{member.rank}.txt"
        self.pipe, theirs = _FORK_SERVER.Pipe()
        arguments = (theirs, member, self.log, function, arguments, prepare)
        self.process = _FORK_SERVER.Process(target=_work, args=arguments, daemon=False)
        self.process.start()
        theirs.close()

    def read(self) -> None:
        """Read what is in the pipe, and record whether the process has ended."""
        outcome, exit_code = self.outcome, self.process.exitcode  # read first: all reports are in the pipe by its end
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                what, value = self.pipe.recv()
                if what == "result":
                    outcome.results.append(value)
                else:
                    outcome.ending, outcome.reason = what, value
        self.is_over, outcome.exit_code = exit_code is not None, exit_code
        if exit_code == -signal.SIGKILL and outcome.ending == STOPPED:
            outcome.reason = KILLED
        elif self.is_over and outcome.ending == STOPPED:  # it ended without a report
            lines = self._read_log().strip().splitlines()
            outcome.ending, outcome.reason = FAILED, lines[-1] if lines else f"it ended with code {exit_code}"

    def _read_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def close(self) -> None:
        """Wait for the end and keep what the process printed."""
        self.process.join()
        self.pipe.close()
        self.outcome.printed = self._read_log()


def active_seconds(groups: set[int | None]) -> float:
    """Seconds that process groups have computed, waited for a processor, or waited for a disk."""
    total = 0.0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):  # the process may have ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) in groups:
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                total += time.monotonic() if fields[0] == "D" else 0.0
                total += int((folder / "schedstat").read_text().split()[1]) * 1e-9  # not every kernel has this
    return total


def _work(
    results: connection.Connection, member: Member, log: Path, function: Any, arguments: Any, prepare: Prepare | None
) -> None:
    """The body of one process: send each result, then how it ended."""
    os.setpgid(0, 0)  # it can be killed with its children, and Ctrl-C in the terminal does not reach it
    threading.Thread(target=_end_with, args=(results,), daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        with nullcontext() if prepare is None else prepare(), _joined(member):
            for result in function(member, *arguments):
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
    """End this process when the other end of the pipe, which never sends anything, is closed."""
    with suppress(EOFError, OSError):
        pipe.recv()
    os._exit(1)


def _joined(member: Member) -> AbstractContextManager[None]:
    """The process group of all members with this port, set up as under torchrun."""
    import torch

    from titan_like.train.job import process_group

    torch.set_num_threads(1)
    rank, size = str(member.rank), str(member.world_size)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(member.port)}
    return process_group(torch.device(member.device), _DAY)  # no collective times out: `Group.wait` stops what hangs
