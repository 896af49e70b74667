"""Jobs under torchrun that can be looked at and disturbed while they run."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

REPO = Path(__file__).parents[2]


class TorchrunJob:
    """A job started in a process group of its own; a context manager that leaves nothing running."""

    def __init__(
        self, log: Path, script: Path, arguments: list[str], processes: int = 2, options: tuple[str, ...] = ()
    ) -> None:
        self.log = log
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), *options]
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPO)}
        with open(log, "w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [*command, str(script), *arguments],
                stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=REPO, start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> TorchrunJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End torchrun and its workers at once, as when their machine is lost."""
        workers = self.workers() if self.process.poll() is None else {}
        self.process.kill()
        for pid in workers.values():
            kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text(encoding="utf-8")

    def workers(self) -> dict[int, int]:
        """Process ids of the workers by rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = {}
        for pid in map(int, children):
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            except OSError:
                continue
            ranks = [variable for variable in variables if variable.startswith("RANK=")]
            if ranks:
                found[int(ranks[0].removeprefix("RANK="))] = pid
        return found

    def wait(self, seconds: float = 120) -> int:
        """torchrun's exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end\n{self.output}") from None

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 90) -> None:
        """Wait until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} does not come\n{self.output}"
            assert self.process.poll() is None or condition(), f"the job ended before {what}\n{self.output}"
            time.sleep(0.02)


def free_port() -> int:
    """A port below those that systems hand out themselves, so that it is still free when a job comes to use it."""
    while True:
        port = random.SystemRandom().randrange(15000, 30000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def kill(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def steps(dump: Path) -> list[int]:
    """Steps in metrics.jsonl."""
    return [int(record["step"]) for record in records(dump)]


def records(dump: Path) -> list[dict[str, float]]:
    """Whole lines of metrics.jsonl."""
    path = dump / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
