"""Process groups on this machine, for `verify` and the tests. Processes are forked from one that has imported
everything, so a group starts in a tenth of a second, and they end with the process that started them."""

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
_PRELOADED = ["torch._dynamo", "torch.distributed.checkpoint", "titan_like.verify.observe"]
_DAY = 86400.0  # seconds
_IDLE_SHARE = 0.05  # of one processor: a process that computes less waits for others; threads of gloo take 0.02
_FORK_SERVER = get_context("forkserver")

Prepare = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Member:
    """Which process of how many one is."""

    rank: int
    world_size: int
    folder: Path  # shared by the processes, made for them, and gone with them
    port: int  # of the store that they meet at
    device: str  # that it computes on


@dataclass
class Outcome:
    """What became of one process."""

    rank: int
    results: list[Any] = field(default_factory=list)  # what it yielded
    ending: str = STOPPED  # done, failed or stopped
    reason: str = BY_OTHERS  # why it was stopped, or the last line of what a failed one said
    printed: str = ""  # all of it, errors too
    exit_code: int | None = None  # None: it was stopped by this module

    @property
    def is_undecided(self) -> bool:
        """Whether that tells nothing of what it computed."""
        return self.ending == STOPPED and self.reason in (TOO_LONG, KILLED)


def start_fork_server(on_gpus: bool = False) -> None:
    """Start the process that the others are forked from, if it does not run; it imports in the background and keeps
    its environment."""
    environment = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}  # no threads before a fork
    # The code beside the calling script, not another copy of it in the folder that the command is called from.
    environment |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # compilers stay in the processes that wait for them
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if Path("/sys/class/net/lo").exists():  # a machine need not know its own host name
            environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    _FORK_SERVER.set_forkserver_preload(_PRELOADED)
    with patch.dict(os.environ, environment):
        forkserver.ensure_running()


class Group:
    """``function(member, *arguments)``, a generator, on every rank of a process group that begins at once.

    With ``on_gpus`` each process has a GPU, otherwise GPUs are left alone. ``prepare`` makes a context manager within
    which every process works.
    """

    def __init__(
        self, function: Callable[..., Iterator[Any]], world_size: int, *arguments: Any,
        on_gpus: bool = False, prepare: Prepare | None = None,
    ) -> None:  # fmt: skip
        import torch.distributed as dist

        start_fork_server(on_gpus)
        self._temporary = tempfile.TemporaryDirectory(prefix="processes-")
        folder = Path(self._temporary.name)
        # A port that is only probed may be taken by the time that they meet there.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._running = []
        for rank in range(world_size):
            device = f"cuda:{rank}" if on_gpus else "cpu"
            member = Member(rank, world_size, folder, self._store.port, device)
            self._running.append(_Running(member, function, arguments, prepare))

    def wait(self, seconds: float, patience: float | None = None, seconds_to_follow: float = 2.0) -> list[Outcome]:
        """What became of all processes, by rank. Whatever they have started is stopped in the end.

        They are stopped after ``seconds``, or where for ``patience`` seconds none of them computes. After one has
        failed, the others have ``seconds_to_follow`` to fail for reasons of their own.
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
        """Kill all processes with whatever they have started themselves."""
        for running in self._running:
            if running.process.pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(running.process.pid, signal.SIGKILL)
            running.process.kill()


class _Running:
    """A process, and what it has said so far."""

    def __init__(self, member: Member, function: Any, arguments: Any, prepare: Prepare | None) -> None:
        self.outcome, self.is_over = Outcome(member.rank), False
        self.log = member.folder / f"log-{member.rank}.txt"
        self.pipe, theirs = _FORK_SERVER.Pipe()
        arguments = (theirs, member, self.log, function, arguments, prepare)
        self.process = _FORK_SERVER.Process(target=_work, args=arguments, daemon=False)
        self.process.start()
        theirs.close()

    def read(self) -> None:
        """Take what is in the pipe, and note the end."""
        outcome, exit_code = self.outcome, self.process.exitcode  # what it said before its end is in the pipe by then
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
        elif self.is_over and outcome.ending == STOPPED:  # it has said nothing of its end
            lines = self._read_log().strip().splitlines()
            outcome.ending, outcome.reason = FAILED, lines[-1] if lines else f"it ended with code {exit_code}"

    def _read_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def close(self) -> None:
        """Keep what it printed; it was killed if it had not ended."""
        self.process.join()
        self.pipe.close()
        self.outcome.printed = self._read_log()


def active_seconds(groups: set[int | None]) -> float:
    """Time that process groups have computed, would have if there had been a free processor, or wait for a disk."""
    total = 0.0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with suppress(OSError, ValueError, IndexError):  # it may have ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) in groups:
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                total += time.monotonic() if fields[0] == "D" else 0.0
                total += int((folder / "schedstat").read_text().split()[1]) * 1e-9  # a kernel need not keep this
    return total


def _work(
    results: connection.Connection, member: Member, log: Path, function: Any, arguments: Any, prepare: Prepare | None
) -> None:
    """One process: work, and tell each result, and how it ended."""
    os.setpgid(0, 0)  # it is ended with its own children, and a key pressed in the terminal is not for it
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
    """End this process when the other end of the pipe, which says nothing, is gone."""
    with suppress(EOFError, OSError):
        pipe.recv()
    os._exit(1)


def _joined(member: Member) -> AbstractContextManager[None]:
    """A process group that members of one port make, as torchrun's processes do."""
    import torch

    from titan_like.train.job import process_group

    torch.set_num_threads(1)
    rank, size = str(member.rank), str(member.world_size)
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(member.port)}
    return process_group(torch.device(member.device), _DAY)  # whoever waits is stopped from outside, for a reason
