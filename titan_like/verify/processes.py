"""Process groups on this machine, for `verify` and the tests.

Processes are forked from a server that has imported everything, so a group starts in a tenth of a second. They end with
the process that started them.
"""

import math
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver, get_context, parent_process
from pathlib import Path
from typing import Any
from unittest.mock import patch

from titan_like.config.entry_points import is_added

DONE, FAILED, STOPPED = "done", "failed", "stopped"
WAITING, TOO_LONG, KILLED, BY_OTHERS = (
    "all processes wait for one another",
    "it was not over in time",
    "the system killed a process, perhaps for want of memory",
    "another process failed",
)
PRELOADED = ["titan_like.verify.preloaded"]  # modules that the server imports before it forks
_DAY = 86400.0  # seconds
_LONGEST_LOOK = 1.0  # seconds that may pass between two looks at processes; a pause counts as no more
_FORK_SERVER = get_context("forkserver")

_TRACEBACK = r'^Traceback \(most recent call last\):\n(  File ".*\n(?: .*\n)*)'

Prepare = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Member:
    """One process of a group."""

    rank: int
    world_size: int
    folder: Path  # shared by the group's processes and deleted after them
    port: int  # the group's store listens on it
    device: str


@dataclass(frozen=True)
class Outcome:
    """How one process ended."""

    rank: int
    ending: str  # done, failed or stopped
    reason: str  # why it was stopped, or a failed one's error
    result: Any  # what its function returned, even if the process failed afterwards
    printed: str  # stdout and stderr
    exit_code: int | None  # None: it was stopped by this module

    @property
    def is_undecided(self) -> bool:
        """Whether the ending does not show whether the process computed the right result."""
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
    folder = tempfile.gettempdir()  # the path of the server's socket in it has room for 75 bytes of its name
    folder = folder if len(os.fsencode(folder)) <= 75 else "/tmp"
    with patch.dict(os.environ, environment), patch.object(tempfile, "tempdir", folder):
        forkserver.ensure_running()


class Group:
    """Runs ``function(member, *args)`` on every rank of a new process group, from construction on.

    With ``on_gpus`` each process gets a GPU, else all use the CPU. ``prepare`` makes a context manager in which every
    process works.
    """

    def __init__(
        self, function: Callable, world_size: int, *args: Any, on_gpus: bool = False, prepare: Prepare | None = None
    ) -> None:
        import torch.distributed as dist

        start_fork_server(on_gpus)
        self._temporary = tempfile.TemporaryDirectory(prefix="processes-")
        # The store is opened here because a port that is only probed may be taken before the group meets at it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes, self._readers, self._results = [], dict[connection.Connection, int](), dict[int, Any]()
        try:
            for rank in range(world_size):
                device = f"cuda:{rank}" if on_gpus else "cpu"
                member = Member(rank, world_size, Path(self._temporary.name), self._store.port, device)
                reader, writer = _FORK_SERVER.Pipe(duplex=False)
                work = (writer, member, function, args, prepare)
                process = _FORK_SERVER.Process(target=_work, args=work, daemon=False)
                process.start()
                writer.close()
                self._processes.append(process)
                self._readers[reader] = rank
        except BaseException:  # a signal's too: Python's end would wait for processes that wait for others
            self.kill()
            raise

    def wait(self, seconds: float, patience: float = math.inf, seconds_to_follow: float = 2.0) -> list[Outcome]:
        """Wait for all processes and return how each ended, by rank. No process outlives this call.

        They are stopped after ``seconds``, or once none of them has done anything for ``patience`` seconds. When one
        has failed, the others get ``seconds_to_follow`` to report failures of their own.
        """
        with self._temporary as folder:
            try:
                reason = self._wait(seconds, patience, seconds_to_follow)
                exit_codes = [process.exitcode for process in self._processes]
                self._receive([reader for reader in self._readers if reader.poll()])
            finally:
                self.kill()
            return [self._outcome(Path(folder), rank, code, reason) for rank, code in enumerate(exit_codes)]

    def _wait(self, seconds: float, patience: float, seconds_to_follow: float) -> str:
        """Wait, and return why the processes that are left then are to be stopped."""
        patience = patience if Path("/proc/self/stat").exists() else math.inf
        now = time.monotonic()
        deadline, reason, idle, threads = now + seconds, TOO_LONG, 0.0, dict[str, tuple[str, str]]()
        while unfinished := [process for process in self._processes if process.exitcode is None]:
            # If this process itself has been paused, it does not know what the others did meanwhile.
            passed, now = min(time.monotonic() - now, _LONGEST_LOOK), time.monotonic()
            if reason == TOO_LONG and any(process.exitcode for process in self._processes):
                reason, deadline = BY_OTHERS, min(deadline, now + seconds_to_follow)
            if patience < math.inf:
                before, threads = threads, main_threads({process.pid for process in unfinished})
                is_active = threads != before or any(state in "RD" for state, _ in threads.values())
                idle = 0.0 if is_active else idle + passed
                if idle > patience:
                    return WAITING if reason == TOO_LONG else reason
            if now >= deadline:
                break
            ends = [process.sentinel for process in unfinished]
            self._receive(connection.wait([*ends, *self._readers], timeout=min(deadline - now, 0.5)))
        return reason

    def _receive(self, ready: list[Any]) -> None:
        """Take the results of processes whose pipes are ready: they have sent one, or have ended without."""
        for reader in self._readers.keys() & set(ready):
            with suppress(EOFError, OSError):
                self._results[self._readers[reader]] = reader.recv()
            del self._readers[reader]
            reader.close()

    def _outcome(self, folder: Path, rank: int, exit_code: int | None, reason: str) -> Outcome:
        """How a process ended, given the ``reason`` to stop it if it was stopped."""
        log = folder / f"log-{rank}.txt"
        printed = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        if exit_code == 0 and rank in self._results:
            ending, reason = DONE, ""
        elif exit_code in (None, -signal.SIGKILL):
            ending, reason = STOPPED, reason if exit_code is None else KILLED
        else:
            lines = printed.strip().splitlines() if exit_code else []
            message = lines[-1] if lines else f"it ended with code {exit_code}"
            ending, reason = FAILED, error_in("\n".join(lines)) or message
        return Outcome(rank, ending, reason, self._results.get(rank), printed, exit_code)

    def kill(self) -> None:
        """Kill all processes and their children."""
        for process in self._processes:
            assert process.pid is not None
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self._processes:
            process.join()


def error_in(printed: str) -> str:
    """The error of the last traceback in a program's output: its type, the first line of its message, and its place.

    The place is the innermost line of this package or of another one with entry points for it, or of any other code if
    neither has one. Without a traceback the text is empty.
    """
    parts = re.split(_TRACEBACK, printed, flags=re.MULTILINE)
    if len(parts) == 1:
        return ""
    frames, text = parts[-2:]
    message = ""
    for line in text.splitlines():
        message = f"{message} {line.strip()}".strip()
        # What a colon ends is a heading, or a type whose message begins later.
        if message and not message.endswith(":"):
            break
    places = re.findall(r'^  File "(.+)", line (\d+)', frames, flags=re.MULTILINE)
    package = Path(__file__).parents[1]
    own = [place for place in places if Path(place[0]).is_relative_to(package) or is_added(place[0])]
    file, line = (own or places)[-1]
    return f"{message} ({file.removeprefix(f'{package.parent}{os.sep}')}:{line})"


def main_threads(processes: set[int | None]) -> dict[str, tuple[str, str]]:
    """State, and lines with the numbers of context switches, of the main threads of some processes and their children.

    A thread computes or waits for a processor (R), waits for a disk (D), or sleeps; one that polls a lock sleeps nearly
    always, but its switches grow. Other threads may spin: gloo's does while a receive is due that nobody awaits.
    """
    threads = dict[str, tuple[str, str]]()
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):  # the process may have ended
            thread = folder / "task" / folder.name
            state, _, group, *_ = (thread / "stat").read_text().rpartition(")")[2].split()
            # A process is in the group of its server until it has imported its function and the main program.
            if {int(folder.name), int(group)} & processes:
                switches = (thread / "status").read_text().partition("voluntary_ctxt_switches")[2]
                threads[folder.name] = state, switches
    return threads


def _work(
    results: connection.Connection, member: Member, function: Callable, arguments: Any, prepare: Prepare | None
) -> None:
    """The body of one process. An exception ends it with a traceback."""
    if not member.folder.exists():  # the program ended meanwhile
        return
    os.setpgid(0, 0)  # it can be killed with its children, and Ctrl-C in the terminal does not reach it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = os.open(member.folder / f"log-{member.rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with nullcontext() if prepare is None else prepare(), _joined(member):
        results.send(function(member, *arguments))


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
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
