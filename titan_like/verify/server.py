"""A process that has imported everything and forks others, so that a process group starts in a tenth of a second.

Started by `titan_like.verify.processes` as ``python -P -m titan_like.verify.server DESCRIPTOR``. It takes a `Batch` at
a time from the connection, forks a process for each of its jobs, and answers with how each of them ended and what it
yielded. Results come through pipes, and no pickle is ever read from a file. Nothing is left over from one batch to the
next.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import sys
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

# What jobs would otherwise each import for themselves. torch's compiler comes with the first optimizer.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining._backward",
    "titan_like.train.trainer",
    "titan_like.verify.observe",
)
_SECONDS_TO_FOLLOW = 2.0  # that the others get, after a job failed, to fail for their own reasons
_IDLE_SHARE = 0.05  # of one processor: a process that computes less waits for others; threads of gloo take 0.02


@dataclass(frozen=True)
class Place:
    """Which process of how many a job is, and how it meets the others."""

    rank: int
    world_size: int
    folder: Path  # shared by the processes of the batch, made for it
    device: str = "cpu"  # that it computes on

    @property
    def log(self) -> Path:
        """File of what the job prints."""
        return self.folder / f"log_{self.rank}.txt"

    @property
    def failure(self) -> Path:
        """File of the traceback of a job that failed."""
        return self.folder / f"failure_{self.rank}.txt"


@dataclass(frozen=True)
class Job:
    """A generator function by name, ``module:function``, called with the place and the arguments."""

    function: str
    place: Place
    arguments: bytes  # pickled tuple
    prepare: bytes | None = None  # pickled function that makes a context manager, within which the job runs


@dataclass(frozen=True)
class Batch:
    """Jobs that run at the same time."""

    jobs: list[Job]
    timeout: float  # seconds
    patience: float  # seconds that all may wait for one another, none of them computing, before they are stopped


@dataclass(frozen=True)
class Ending:
    """How a job ended."""

    how: str  # done, failed, or stopped: killed because others failed, or waited for one another, or by the timeout
    results: bytes  # pickles of what it yielded, one after the other


@dataclass
class _Running:
    """A job's process."""

    rank: int
    pid: int
    process: int  # descriptor that becomes readable when the process ends
    pipe: int  # descriptor that its results come from
    results: bytearray = field(default_factory=bytearray)

    def read(self) -> None:
        """Take what is in the pipe."""
        with suppress(BlockingIOError):
            while piece := os.read(self.pipe, 1 << 16):
                self.results += piece

    def end(self, how: str | None = None) -> Ending:
        """Wait for the process, and take its last results."""
        _, status = os.waitpid(self.pid, 0)
        self.read()
        os.close(self.pipe)
        os.close(self.process)
        return Ending(how or ("done" if status == 0 else "failed"), bytes(self.results))

    def kill(self) -> Ending:
        """End the process with whatever it has started itself."""
        os.killpg(self.pid, signal.SIGKILL)
        return self.end("stopped")


class _Idleness:
    """Notices that processes wait for one another: for some seconds together they compute next to nothing."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._since = time.monotonic()
        self._active = 0.0  # seconds, by then

    def is_over(self, running: list[_Running]) -> bool:
        """Whether they have waited long enough to be stopped."""
        now, active = time.monotonic(), sum(active_seconds(job.pid) for job in running)
        if abs(active - self._active) > _IDLE_SHARE * (now - self._since) * len(running) + 0.01:
            self._since, self._active = now, active
        return now - self._since > self.patience


def active_seconds(pid: int) -> float:
    """Time that a process has computed, or would have if there had been a free processor; 0 once it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        computed = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
        with suppress(OSError, ValueError, IndexError):  # a kernel need not keep this
            computed += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) * 1e-9
    except OSError:
        return 0.0
    return computed


def serve(connection: Connection) -> None:
    """Run batches until the other side closes the connection."""
    for name in PRELOADED:
        importlib.import_module(name)
    connection.send("ready")
    while True:
        try:
            batch = connection.recv()
        except EOFError:
            return
        connection.send(run_batch(batch, connection))


def run_batch(batch: Batch, connection: Connection) -> dict[int, Ending]:
    """How the job of each rank ended."""
    running = [_fork(job) for job in batch.jobs]
    endings: dict[int, Ending] = {}
    deadline, idleness, has_failed = time.monotonic() + batch.timeout, _Idleness(batch.patience), False
    while running:
        wait = max(0.0, min(deadline - time.monotonic(), 0.5))
        watched = [descriptor for job in running for descriptor in (job.process, job.pipe)]
        ready, _, _ = select.select([*watched, connection.fileno()], [], [], wait)
        if connection.fileno() in ready:  # only its end can come during a batch
            for job in running:
                job.kill()
            raise SystemExit(0)
        for job in list(running):
            if job.process in ready:
                endings[job.rank] = job.end()
                running.remove(job)
            elif job.pipe in ready:
                job.read()
        if not has_failed and any(ending.how == "failed" for ending in endings.values()):
            has_failed = True
            deadline = min(deadline, time.monotonic() + _SECONDS_TO_FOLLOW)
        if time.monotonic() >= deadline or idleness.is_over(running):
            endings |= {job.rank: job.kill() for job in running}
            running.clear()
    return endings


def _fork(job: Job) -> _Running:
    sys.stdout.flush()
    sys.stderr.flush()
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        os.set_blocking(ours, False)
        # Here too, so that it is done before anyone kills the group; the child may be faster, and may have ended.
        with suppress(OSError):
            os.setpgid(pid, pid)
        return _Running(job.place.rank, pid, os.pidfd_open(pid), ours)
    code = 1
    try:
        os.close(ours)
        os.setpgid(0, 0)
        with open(theirs, "wb") as results:
            _run(job, results)
        code = 0
    finally:
        os._exit(code)


def _run(job: Job, results: BinaryIO) -> None:
    place = job.place
    descriptor = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.world_size), "LOCAL_RANK": str(place.rank)}
    try:
        module, _, function = job.function.partition(":")
        generate = getattr(importlib.import_module(module), function)
        arguments: tuple[Any, ...] = pickle.loads(job.arguments)
        prepare = nullcontext if job.prepare is None else pickle.loads(job.prepare)
        with prepare():
            for result in generate(place, *arguments):
                pickle.dump(result, results)
                results.flush()
    except BaseException:
        place.failure.write_text(traceback.format_exc(), encoding="utf-8")
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side gets it too, and closes the connection
    # Not this module's classes, which go by another name here, but those that the other side pickles.
    importlib.import_module("titan_like.verify.server").serve(Connection(int(sys.argv[1])))
