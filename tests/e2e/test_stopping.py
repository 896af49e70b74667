"""A job that is asked to stop saves within the step and goes on from there; one that loses a rank says which."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.jobs import REPO, TorchrunJob, kill, steps
from titan_like.checkpoint.folder import complete_steps

ENDLESS = 100_000
STANDALONE = ("--standalone",)
DISTURBED = Path(__file__).with_name("disturbed_train.py")


def settings(dump: Path, last: int = ENDLESS) -> list[str]:
    return [
        f"--job.config_file={REPO / 'train_configs/debug_gpt.toml'}",
        f"--job.dump_folder={dump}",
        "--training.seq_len=32",
        "--training.micro_batch_size=1",
        "--training.global_batch_size=6",
        f"--training.steps={last}",
        "--lr_scheduler.warmup_steps=0",
        "--lr_scheduler.decay=constant",
        "--checkpoint.enable=true",
        "--checkpoint.interval=100000",
        "--evaluation.interval=0",
        "--metrics.log_interval=100000",
    ]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., TorchrunJob]:
    def begin(*arguments: str, script: Path = REPO / "train.py", processes: int = 2) -> TorchrunJob:
        log = tmp_path / "log.txt"
        return TorchrunJob(log, script, [*settings(tmp_path / "out"), *arguments], processes, STANDALONE)

    return begin


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 1)], ids=["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_saves_on_all_and_ends_well(
    start: Callable[..., TorchrunJob], tmp_path: Path, number: signal.Signals, rank: int
) -> None:
    dump = tmp_path / "out"
    with start(f"--checkpoint.async={'true' if rank else 'false'}") as job:
        job.until(lambda: len(steps(dump)) >= 3, "the third step")
        done = len(steps(dump))
        kill(job.workers()[rank], number)
        assert job.wait() == 0, job.output
    (stopped,) = re.findall(rf"^ stopped by {number.name} after step (\d+)$", job.output, re.MULTILINE)
    assert complete_steps(dump / "checkpoint") == [int(stopped)]
    assert steps(dump) == list(range(1, int(stopped) + 1))
    assert int(stopped) <= done + 20  # a step takes some hundredths of a second, and a signal its time
    if number == signal.SIGUSR1:
        with start(f"--training.steps={int(stopped) + 2}") as again:
            assert again.wait() == 0, again.output
        assert f"resumed from {dump}/checkpoint/step-{stopped}" in again.output
        assert steps(dump) == list(range(1, int(stopped) + 3))


def test_ending_torchrun_saves_too(start: Callable[..., TorchrunJob], tmp_path: Path) -> None:
    dump = tmp_path / "out"
    with start() as job:
        job.until(lambda: len(steps(dump)) >= 3, "the third step")
        job.process.terminate()
        job.wait()
    (stopped,) = re.findall(r"^ stopped by SIGTERM after step (\d+)$", job.output, re.MULTILINE)
    assert complete_steps(dump / "checkpoint") == [int(stopped)]


TIMEOUT = 12.0


@pytest.mark.parametrize("how", ["sleeps", "is stopped", "dies", "fails"])
def test_the_rank_that_the_others_wait_for_is_named(
    start: Callable[..., TorchrunJob], tmp_path: Path, how: str
) -> None:
    dump, timeout = tmp_path / "out", f"--health.hang_timeout_seconds={TIMEOUT}"
    arguments = {"sleeps": ["sleep"], "fails": ["fail"]}.get(how, [])
    with start(timeout, *(f"--disturb={word}" for word in arguments), script=DISTURBED, processes=3) as job:
        job.until(lambda: len(steps(dump)) >= 3, "the third step")
        began = time.monotonic()
        if how == "is stopped":
            kill(job.workers()[1], signal.SIGSTOP)
        elif how == "dies":
            kill(job.workers()[1], signal.SIGKILL)
        job.until(lambda: "error: rank 1 " in job.output, "the name of the rank at fault", TIMEOUT + 5)
        assert time.monotonic() - began < TIMEOUT + 1
        if how != "is stopped":  # torchrun gives a stopped process half a minute to end
            assert job.wait() != 0
    (line,) = {line for line in job.output.splitlines() if line.startswith("error: rank 1")}
    assert re.search(r"after step \d+, at titan_like/\S+\.py:\d+ in \w+", line), line
    assert re.search(r"\(host \S+, process \d+\)", line), line
    if how == "sleeps":
        assert line.startswith("error: rank 1 has hung for") and line.endswith("; the other 2 wait for it")
        assert "titan_like/train/trainer.py" in line and "after step 3," in line
        assert "disturbed_train.py" in line and "in disturbed_step" in line
    elif how == "fails":
        assert line.startswith("error: rank 1 failed after step 3,")
        assert line.endswith("ZeroDivisionError: the test divides by zero")
    else:
        assert line.startswith("error: rank 1 died or was stopped after step")


def test_a_second_run_in_the_same_folder_is_kept_out(start: Callable[..., TorchrunJob], tmp_path: Path) -> None:
    dump = tmp_path / "out"
    with start("--checkpoint.interval=2", processes=1) as first:
        first.until(lambda: len(steps(dump)) >= 3, "the third step")
        arguments = [*settings(dump), "--metrics.log_interval=1"]
        with TorchrunJob(
            tmp_path / "second.txt", DISTURBED, [*arguments, "--disturb=impatient"], 1, STANDALONE
        ) as second:
            assert second.wait() != 0
        assert f"error: another run writes to {dump}/checkpoint; stop it, or set checkpoint.folder" in second.output
        kill(first.workers()[0], signal.SIGTERM)
        assert first.wait() == 0, first.output
    assert steps(dump) == list(range(1, steps(dump)[-1] + 1))
