"""Jobs that can be looked at and disturbed while they run."""

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.e2e.scripts import PLAIN, REPO, TORCHRUN, Script


def wait_until(condition: Callable[[], object], seconds: float = 60, told: Callable[[], object] = str) -> None:
    """Wait until something is so; if it does not come about, ``told`` says more."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)


class Job:
    """Processes that write to ``log``; a context manager that leaves nothing running.

    `is_over`, `kill`, which is as when their machine is lost, `workers`, process ids by rank, and `wait`, which returns
    the exit code, are those of the kinds of jobs.
    """

    log: Path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """What it has printed."""
        return self.log.read_text(encoding="utf-8")

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 240) -> None:
        """Wait until a condition holds."""

        def has_come() -> bool:
            assert condition() or not self.is_over or condition(), f"the job ended before {what}\n{self.output}"
            return condition()

        wait_until(has_come, seconds, lambda: f"{what} does not come\n{self.output}")


class TorchrunJob(Job):
    """A job under torchrun."""

    def __init__(
        self, log: Path, script: Path, arguments: list[str], processes: int = 2, options: tuple[str, ...] = ()
    ) -> None:
        self.log = log
        log.write_text("")
        words = ["--nproc_per_node", str(processes), *options, str(script), *arguments]
        self.process = Script(TORCHRUN, words, environment=PLAIN, log=log)

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        workers = self.workers() if self.process.poll() is None else {}
        self.process.kill()
        for pid in workers.values():
            kill(pid, signal.SIGKILL)
        self.process.wait()

    def workers(self) -> dict[int, int]:
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

    def wait(self, seconds: float = 240) -> int:
        try:
            return self.process.wait(seconds).returncode
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end\n{self.output}") from None


class ForkedJob(Job):
    """The ranks of a job without torchrun, in processes forked from one that has imported what they import."""

    def __init__(
        self, log: Path, script: str, arguments: list[str], processes: int = 2,
        cwd: Path = REPO, path: Sequence[Path] = (), environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        import torch.distributed as dist

        self.log = log
        log.write_text("")
        # The store is opened here because a port that is only probed may be taken before the ranks meet at it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {**(environment or {}), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        self.ranks = []
        for rank in map(str, range(processes)):
            own = {"RANK": rank, "LOCAL_RANK": rank}
            self.ranks.append(Script(script, arguments, cwd, path, shared | own, log))

    @property
    def is_over(self) -> bool:
        return all(rank.poll() is not None for rank in self.ranks)

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()
        self.wait()

    def workers(self) -> dict[int, int]:
        return {number: rank.pid for number, rank in enumerate(self.ranks)}

    def wait(self, seconds: float = 240) -> int:
        """The exit code of the lowest rank that failed; 0 if none did."""
        try:
            codes = [rank.wait(seconds).returncode for rank in self.ranks]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end\n{self.output}") from None
        return next((code for code in codes if code), 0)


def train_on(processes: int, log: Path, arguments: list[str], **options: Any) -> str:
    """Train on that many forked ranks, which must end well, and return what they printed."""
    with ForkedJob(log, "train.py", arguments, processes, **options) as job:
        assert job.wait() == 0, job.output
    return job.output


def short(steps: int, batch: int = 8, micro_batch: int = 2, warmup: int = 2) -> list[str]:
    """Settings of a run of few tokens that does not validate."""
    return [
        "--training.seq_len=32", f"--training.micro_batch_size={micro_batch}", f"--training.global_batch_size={batch}",
        f"--training.steps={steps}", f"--lr_scheduler.warmup_steps={warmup}", "--evaluation.interval=0",
    ]  # fmt: skip


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


def processes_with(variable: str) -> list[int]:
    """Processes in whose environment this variable is, as ``NAME=value``."""
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has just ended, or is another user's
            if variable.encode() in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def steps(dump: Path) -> list[int]:
    """Steps in metrics.jsonl."""
    return [int(record["step"]) for record in records(dump)]


def records(dump: Path) -> list[dict[str, float]]:
    """Whole lines of metrics.jsonl."""
    path = dump / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
