"""A job that is asked to stop saves within the step and goes on from there; one that loses a rank says which."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.jobs import REPO, ForkedJob, Job, TorchrunJob, kill, records, short, steps
from tests.e2e.scripts import PLAIN, Script
from titan_like.checkpoint.step_folders import complete_steps

ENDLESS = 100_000
DISTURBED = Path(__file__).with_name("disturbed_train.py")


def settings(dump: Path, last: int = ENDLESS) -> list[str]:
    return [
        f"--job.config_file={REPO / 'train_configs/debug_gpt.toml'}", f"--job.dump_folder={dump}",
        *short(last, batch=6, micro_batch=1, warmup=0), "--lr_scheduler.decay=constant", "--checkpoint.enable=true",
        "--checkpoint.interval=100000", "--metrics.log_interval=100000",
    ]  # fmt: skip


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., TorchrunJob]:
    """Starts a job under torchrun."""

    def begin(*arguments: str, script: Path = REPO / "train.py", processes: int = 2) -> TorchrunJob:
        given = [*settings(tmp_path / "out"), *arguments]
        return TorchrunJob(tmp_path / "log.txt", script, given, processes, ("--standalone",))

    return begin


@pytest.fixture
def fork(tmp_path: Path) -> Callable[..., ForkedJob]:
    """Starts a job whose ranks are forked."""

    def begin(*arguments: str, script: Path = REPO / "train.py", processes: int = 2) -> ForkedJob:
        return ForkedJob(tmp_path / "log.txt", str(script), [*settings(tmp_path / "out"), *arguments], processes)

    return begin


def stopped_after(job: Job, name: str) -> int:
    """The step after which a job says that the signal stopped it."""
    (step,) = re.findall(rf"^ stopped by {name} after step (\d+)$", job.output, re.MULTILINE)
    return int(step)


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 1)], ids=["SIGTERM", "SIGUSR1"])
def test_a_signal_to_one_rank_saves_on_all_and_ends_well(
    fork: Callable[..., ForkedJob], tmp_path: Path, number: signal.Signals, rank: int
) -> None:
    dump = tmp_path / "out"
    with fork(f"--checkpoint.async={'true' if rank else 'false'}") as job:
        job.until(lambda: len(steps(dump)) >= 3, "the third step")
        kill(job.workers()[rank], signal.SIGUSR2)
        job.until(lambda: "not recorded, because the run uses no GPU" in job.output, "the answer to SIGUSR2")
        done = len(steps(dump))
        kill(job.workers()[rank], number)
        assert job.wait() == 0, job.output
    stopped = stopped_after(job, number.name)
    assert complete_steps(dump / "checkpoint") == [stopped]
    assert steps(dump) == list(range(1, stopped + 1))
    assert stopped <= done + 20  # a step takes some hundredths of a second, and a signal its time
    if number == signal.SIGUSR1:
        with fork(f"--training.steps={stopped + 2}") as again:
            assert again.wait() == 0, again.output
        assert f"resumed from {dump}/checkpoint/step-{stopped}" in again.output
        assert steps(dump) == list(range(1, stopped + 3))


LONG = {
    "validation": (
        ["--checkpoint.interval=3", "--parallelism.pipeline_parallel_degree=2"],
        "--evaluation.steps=1000000",
    ),
    "task": (["--parallelism.zero_stage=3", "--evaluation.steps=1"], '--evaluation.datasets=["text=FOLDER/long.txt"]'),
}


@pytest.mark.parametrize(
    ("what", "number"),
    [("validation", signal.SIGTERM), pytest.param("task", signal.SIGUSR1, marks=pytest.mark.exhaustive)],
)
def test_a_signal_during_a_long_evaluation(
    fork: Callable[..., ForkedJob], tmp_path: Path, what: str, number: signal.Signals
) -> None:
    """A checkpoint that is due is there before it begins, and another is written after the signal.

    The evaluation ends at the next batch and is made up for later.
    """
    dump, (arguments, long) = tmp_path / "out", LONG[what]
    (tmp_path / "long.txt").write_text("a line of a long text\n" * 200_000)
    arguments = ["--evaluation.interval=3", *arguments]
    with fork(*arguments, long.replace("FOLDER", str(tmp_path))) as job:
        job.until(lambda: len(steps(dump)) == 3, "the third step", 60)
        job.until(lambda: what == "task" or complete_steps(dump / "checkpoint") == [3], "the checkpoint", 60)
        time.sleep(1.0)
        kill(job.workers()[what == "validation"], number)
        asked = time.monotonic()
        assert job.wait() == 0, job.output
        assert time.monotonic() < asked + 10
    assert stopped_after(job, number.name) == 3 and "step 3 | validation" not in job.output
    assert job.output.count(" saved ") == 1 and complete_steps(dump / "checkpoint") == [3]
    assert [(line["step"], "validation_loss" in line) for line in records(dump)] == [(1, False), (2, False), (3, False)]
    arguments += ["--evaluation.steps=1", "--training.steps=4"]
    with fork(*arguments) as again:
        assert again.wait() == 0, again.output
    assert [line["step"] for line in records(dump) if "validation_loss" in line] == [3, 4]
    assert steps(dump) == [1, 2, 3, 4]
    if what == "validation":
        with fork(*arguments) as finished:
            assert finished.wait() == 0 and "validation at" not in finished.output, finished.output


def test_ending_torchrun_saves_too(start: Callable[..., TorchrunJob], tmp_path: Path) -> None:
    """By a closed terminal, here."""
    dump = tmp_path / "out"
    with start() as job:
        job.until(lambda: len(steps(dump)) >= 3, "the third step")
        kill(job.process.pid, signal.SIGHUP)
        job.wait()
    assert complete_steps(dump / "checkpoint") == [stopped_after(job, "SIGHUP")]


@pytest.mark.exhaustive
def test_ctrl_c_twice_under_torchrun_ends_at_once(start: Callable[..., TorchrunJob], tmp_path: Path) -> None:
    dump = tmp_path / "out"
    with start("--disturb=sleep", "--metrics.log_interval=1", script=DISTURBED) as job:  # step 4 does not end
        job.until(lambda: len(steps(dump)) >= 3, "the third step")
        kill(job.process.pid, signal.SIGINT)
        job.until(lambda: job.output.count("closing signal SIGINT") == 2, "the signal's way to the ranks")
        time.sleep(1.0)  # until they have taken it
        kill(job.process.pid, signal.SIGINT)
        job.wait()
    assert [line for line in job.output.splitlines() if line.startswith("ended")] == [
        "ended at once by a second signal (SIGTERM)"
    ]
    assert complete_steps(dump / "checkpoint") == []


def test_a_signal_before_the_first_step_is_one_line_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """While it tokenizes."""
    text, out = tmp_path / "text.jsonl", tmp_path / "out"
    text.write_text("".join(f'{{"text": "line {number}"}}\n' for number in range(500_000)))
    arguments = [*settings(out), "--data.dataset=text", f"--data.paths={text}"]
    with ForkedJob(tmp_path / "log.txt", "train.py", arguments, processes=1) as job:
        job.until(lambda: bool(list(out.glob("data_cache/*.unfinished"))), "the corpus", 90)
        kill(job.workers()[0], signal.SIGTERM)
        assert job.wait(90) == 128 + signal.SIGTERM, job.output
    lines = [line for line in job.output.splitlines() if not line.startswith(("tokeniz", " gpt debug: "))]
    assert lines == ["ended by SIGTERM before the first step was done"]
    done = Script("train.py", [*settings(out, last=1), "--data.dataset=text", f"--data.paths={text}"]).wait(timeout=120)
    assert done.returncode == 0, done.stderr
    assert not list(out.glob("data_cache/*.unfinished"))


def test_signals_are_handled_before_torch_is_loaded() -> None:
    code = "import sys, titan_like.commands.train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0


def test_a_signal_after_the_last_save_leaves_the_run_a_success(tmp_path: Path) -> None:
    program = (
        "import atexit, os, runpy, signal, sys\n"
        "for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):\n"
        "    atexit.register(os.kill, os.getpid(), number)\n"
        f"runpy.run_path({str(REPO / 'train.py')!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-c", program, *settings(tmp_path / "out", last=1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=REPO)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert complete_steps(tmp_path / "out/checkpoint") == [1]


def test_training_outlives_its_output(tmp_path: Path) -> None:
    dump = tmp_path / "out"
    arguments = [*settings(dump, last=12), "--checkpoint.enable=false", "--metrics.log_interval=1"]
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments, "--job.description=naïve"],
        cwd=REPO, env=PLAIN, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline().startswith(" gpt debug: ")
    process.stdout.close()
    told = [line for line in process.stderr if re.search("stdout|pipe|Traceback", line)]  # libraries say more at exit
    assert process.wait(90) == 0
    assert told == ["stdout cannot be written (Broken pipe); training continues without it\n"]
    assert steps(dump) == list(range(1, 13))


@pytest.mark.parametrize("how", ["sleeps", "dies", "fails"])
def test_the_rank_that_the_others_wait_for_is_named(
    start: Callable[..., TorchrunJob], fork: Callable[..., ForkedJob], tmp_path: Path, how: str
) -> None:
    """One of the cases is under torchrun, which ends the other rank when one dies."""
    dump, timeout = tmp_path / "out", 12.0 if how == "dies" else 8.0  # torchrun's ranks start at different times
    patience = f"--health.hang_timeout_seconds={timeout}"
    arguments = [f"--disturb={word}" for word in {"sleeps": ["sleep"], "fails": ["fail"]}.get(how, [])]
    begin, processes = (start, 2) if how == "dies" else (fork, 3)
    with begin(patience, "--metrics.log_interval=1", *arguments, script=DISTURBED, processes=processes) as job:
        job.until(lambda: len(steps(dump)) >= 3, "the third step")
        began = time.monotonic()
        if how == "dies":
            kill(job.workers()[1], signal.SIGKILL)
        job.until(lambda: "error: rank 1 " in job.output, "the name of the rank at fault", timeout + 5)
        assert time.monotonic() - began < timeout + 1
        last = steps(dump)[-1]
        assert job.wait() != 0
    (line,) = {line for line in job.output.splitlines() if line.startswith("error: rank 1")}
    assert re.search(r"after step \d+, at titan_like/\S+\.py:\d+ in \S+", line), line
    assert re.search(r"\(host \S+, process \d+\)", line), line
    if how == "sleeps":
        assert line.startswith("error: rank 1 has hung for") and line.endswith("; the other 2 wait for it")
        assert "titan_like/train/trainer.py" in line and "after step 3," in line
        assert "disturbed_train.py" in line and "in disturbed_step" in line
    elif how == "fails":
        assert line.startswith("error: rank 1 failed after step 3, at titan_like/train/trainer.py:")
        assert "in train_step (disturbed_train.py:" in line
        assert line.endswith("ZeroDivisionError: the test divides by zero")
    else:
        assert line.startswith(f"error: rank 1 died or was stopped after step {last},")


def test_other_jobs_are_kept_out_of_a_job_s_folders(fork: Callable[..., ForkedJob], tmp_path: Path) -> None:
    dump, checkpoints = tmp_path / "out", tmp_path / "checkpoints"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return Script(str(DISTURBED), [*arguments, "--disturb=impatient"]).wait(timeout=120)

    saves = [f"--checkpoint.folder={checkpoints}", "--checkpoint.interval=2"]
    with fork(*saves, "--disturb=slow", script=DISTURBED, processes=1) as first:
        first.until(lambda: len(steps(dump)) >= 3, "the third step")
        second = run(*settings(dump), "--checkpoint.enable=false")
        assert second.returncode == 2
        problem = "another job writes to this folder; stop it, or name another folder"
        assert second.stderr == f'error: job.dump_folder = "{dump}": {problem}\n'
        third = run(*settings(tmp_path / "other"), f"--checkpoint.folder={checkpoints}")
        assert third.returncode == 2
        assert third.stderr.splitlines()[-1] == f'error: checkpoint.folder = "{checkpoints}": {problem}'
        first.kill()
    seen = steps(dump)
    assert seen == list(range(1, seen[-1] + 1))
    fourth = run(*settings(dump, last=2), "--checkpoint.enable=false")  # no lock outlives its job
    assert fourth.returncode == 0 and "another job" not in fourth.stdout, fourth.stderr
    assert steps(dump) == [1, 2]
    assert [path.name for path in dump.glob("metrics.*.jsonl")] == ["metrics.1.jsonl"]
