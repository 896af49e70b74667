"""Process groups whose processes may die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.distributed.launch import FORK_SERVER, meet_at, meeting_store, run_as_rank


class Job:
    """``function(rank, *args)`` on every rank of a fresh gloo process group; what it prints goes to ``log``."""

    def __init__(self, function: Callable[..., None], world_size: int, log: Path, *args: Any) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.log = log
        self.store = meeting_store()
        self.processes = [
            FORK_SERVER.Process(target=_worker, args=(rank, world_size, self.store.port, log, function, args))
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float = 120) -> list[int | None]:
        """Exit codes by rank; the first process that fails takes the others with it, as under torchrun."""
        deadline, running = time.monotonic() + seconds, list(self.processes)
        while running:
            ended = wait([process.sentinel for process in running], timeout=max(0.0, deadline - time.monotonic()))
            running = [process for process in running if process.sentinel not in ended]
            if not ended or any(p.exitcode for p in self.processes if p not in running):
                self.kill()
                break
        for process in self.processes:
            process.join()
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        """Kill -9 whatever still runs."""
        for process in self.processes:
            process.kill()


def run(function: Callable[..., None], world_size: int, log: Path, *args: Any) -> None:
    """Run a job that must end well."""
    codes = Job(function, world_size, log, *args).wait()
    assert codes == [0] * world_size, f"exit codes {codes}\n{log.read_text()}"


def died(codes: list[int | None]) -> bool:
    """Whether a process was killed and none failed in another way before it."""
    return any(code in (-signal.SIGKILL, -signal.SIGXFSZ) for code in codes)


def _worker(
    rank: int, world_size: int, port: int, log: Path, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    meet_at(port, rank, world_size)
    run_as_rank(rank, function, args)
