"""Runs jobs in processes of their own and returns what they yield."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from titan_like.config.errors import RunError
from titan_like.verify.server import Batch, Ending, Job, Place

Prepare = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Task:
    """A generator function by name (``module:function``), with the arguments that follow its `Place`."""

    function: str
    arguments: tuple[Any, ...]
    prepare: Prepare | None = None  # makes a context manager in the process, within which the function runs


@dataclass(frozen=True)
class Outcome:
    """What became of one process."""

    rank: int
    results: list[Any]  # what it yielded
    ending: str  # done, failed, or stopped: see `titan_like.verify.server.Ending`
    failure: str | None  # traceback of a failed one


class Processes:
    """Processes on this machine. A context manager."""

    def __init__(self, folder: Path, timeout: float = 120.0, *, on_gpus: bool = False) -> None:
        """``folder`` receives files of the batches; a batch may take ``timeout`` seconds. With ``on_gpus`` each
        process has a GPU, otherwise GPUs are left alone."""
        self.folder, self.timeout, self.on_gpus = folder, timeout, on_gpus
        self._batches = 0
        self._server = Server(child_environment() if on_gpus else cpu_environment())

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server."""
        self._server.close()

    def run(self, task: Task, world_size: int, patience: float | None = None) -> list[Outcome]:
        """Run one task on every rank of a group.

        With ``patience`` they are stopped earlier than by the timeout where for so many seconds none computes.
        """
        self._batches += 1
        folder = self.folder / f"batch-{self._batches}"
        folder.mkdir(parents=True)
        devices = [f"cuda:{rank}" if self.on_gpus else "cpu" for rank in range(world_size)]
        jobs = [make_job(task, Place(rank, world_size, folder, device)) for rank, device in enumerate(devices)]
        endings = self._server.run(Batch(jobs, self.timeout, patience or self.timeout))
        outcomes = [read_outcome(job.place, endings[job.place.rank]) for job in jobs]
        shutil.rmtree(folder, ignore_errors=True)
        return outcomes


class Server:
    """The process that forks the others."""

    def __init__(self, environment: dict[str, str]) -> None:
        ours, theirs = socket.socketpair()
        # -P: the folder that the command is called from may hold another copy of this package
        command = [sys.executable, "-P", "-m", "titan_like.verify.server", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        self._connection = Connection(ours.detach())
        self._is_ready = False

    def run(self, batch: Batch) -> dict[int, Ending]:
        """How each rank's job ended."""
        try:
            if not self._is_ready:
                self._connection.recv()
                self._is_ready = True
            self._connection.send(batch)
            return self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise RunError("the process that starts the others has died; see its message above") from None

    def close(self) -> None:
        """End it, and whatever it runs."""
        self._connection.close()
        self._process.wait()


def make_job(task: Task, place: Place) -> Job:
    """A task at its place, pickled."""
    prepare = None if task.prepare is None else pickle.dumps(task.prepare)
    return Job(task.function, place, pickle.dumps(task.arguments), prepare)


def read_outcome(place: Place, ending: Ending) -> Outcome:
    """What a job yielded, and the traceback that it left in its folder if it failed."""
    results, pickles = [], io.BytesIO(ending.results)
    while True:
        try:
            results.append(pickle.load(pickles))
        except (EOFError, pickle.UnpicklingError):  # the end, or where the process was killed
            break
    failure = None
    if ending.how == "failed":  # without a traceback a signal ended it: then its last words
        source = place.failure if place.failure.exists() else place.log
        failure = source.read_text(encoding="utf-8", errors="replace") if source.exists() else ""
    return Outcome(place.rank, results, ending.how, failure)


def cpu_environment() -> dict[str, str]:
    """Environment of processes that leave GPUs alone and compute with one thread each."""
    environment = child_environment() | {"CUDA_VISIBLE_DEVICES": ""}
    if Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a machine need not know its own host name
    return environment


def child_environment() -> dict[str, str]:
    """This process's environment, for one that imports the same code. No library may start threads before a fork."""
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
    return dict(os.environ) | threads | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
