"""A process that has imported everything and forks others, so that a process group starts in a tenth of a second.

Started by `titan_like.verify.processes` as ``python -m titan_like.verify.server DESCRIPTOR``. It takes a `Batch` at a
time from the connection, forks a process for each of its jobs, and answers with how each of them ended. A job writes
what it yields to a file, one pickle after the other. Nothing is left over from one batch to the next.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# What jobs would otherwise each import for themselves. torch's compiler comes with the first optimizer.
PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining._backward",
    "titan_like.train.trainer",
    "titan_like.verify.observe",
)
_SECONDS_TO_FOLLOW = 2.0  # that the others get, after a job failed, to fail for their own reasons


@dataclass(frozen=True)
class Place:
    """Which process of how many a job is, and how it meets the others."""

    rank: int
    world_size: int
    folder: Path  # shared by the processes of the batch, made for it
    device_type: str = "cpu"
    local_rank: int = 0
    store: tuple[str, int] | None = None  # address of torchrun's store; without it the first process opens one

    @property
    def result(self) -> Path:
        """File of the pickles that the job yields."""
        return self.folder / f"result_{self.rank}.pickle"

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
    cancel: Path  # once this file exists, somewhere a job of the batch has failed


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


def run_batch(batch: Batch, connection: Connection) -> dict[int, str]:
    """How the job of each rank ended: done, failed, or stopped (killed because others failed, or by the timeout)."""
    running = {os.pidfd_open(pid): (pid, rank) for pid, rank in ((_fork(job), job.place.rank) for job in batch.jobs)}
    endings: dict[int, str] = {}
    deadline, has_failed = time.monotonic() + batch.timeout, False
    while running:
        patience = max(0.0, min(deadline - time.monotonic(), 0.5))
        ready, _, _ = select.select([*running, connection.fileno()], [], [], patience)
        if connection.fileno() in ready:  # only its end can come during a batch
            endings |= _kill(running)
            raise SystemExit(0)
        for descriptor in ready:
            pid, rank = running.pop(descriptor)
            os.close(descriptor)
            _, status = os.waitpid(pid, 0)
            endings[rank] = "done" if status == 0 else "failed"
        if not has_failed and ("failed" in endings.values() or batch.cancel.exists()):
            has_failed = True
            batch.cancel.touch()
            deadline = min(deadline, time.monotonic() + _SECONDS_TO_FOLLOW)
        if time.monotonic() >= deadline:
            endings |= _kill(running)
    return endings


def _kill(running: dict[int, tuple[int, int]]) -> dict[int, str]:
    """End what still runs, with whatever it has started itself."""
    endings = {}
    for descriptor, (pid, rank) in running.items():
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)
        endings[rank] = "stopped"
    running.clear()
    return endings


def _fork(job: Job) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        # Here too, so that it is done before anyone kills the group; the child may be faster, and may have ended.
        with suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        _run(job)
        code = 0
    finally:
        os._exit(code)


def _run(job: Job) -> None:
    place = job.place
    descriptor = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.world_size), "LOCAL_RANK": str(place.local_rank)}
    try:
        module, _, function = job.function.partition(":")
        generate = getattr(importlib.import_module(module), function)
        arguments: tuple[Any, ...] = pickle.loads(job.arguments)
        prepare = nullcontext if job.prepare is None else pickle.loads(job.prepare)
        with prepare(), open(place.result, "wb") as file:
            for result in generate(place, *arguments):
                pickle.dump(result, file)
                file.flush()
    except BaseException:
        text = traceback.format_exc()
        unfinished = place.failure.with_suffix(".unfinished")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, place.failure)
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other side gets it too, and closes the connection
    # Not this module's classes, which go by another name here, but those that the other side pickles.
    importlib.import_module("titan_like.verify.server").serve(Connection(int(sys.argv[1])))
