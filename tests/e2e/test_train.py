"""The debug configuration from start to end, as a user runs it."""

import math
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.jobs import records, short, train_on
from tests.e2e.scripts import PLAIN, REPO, TORCHRUN, Script, run_here
from titan_like.metrics.run_files import read_settings
from titan_like.train.signals import STOP_SIGNALS

SHORT = [
    "--job.config_file=train_configs/debug_gpt.toml", *short(6), "--metrics.log_interval=2",
    "--metrics.log_format=megatron",
    "--metrics.tensorboard=true", "--metrics.wandb=true", "--evaluation.interval=4", "--evaluation.steps=1",
    "--checkpoint.interval=4", "--parallelism.zero_stage=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def first(home: Path) -> subprocess.CompletedProcess[str]:
    """Six steps on two ranks under torchrun."""
    settings = [*SHORT, f"--job.dump_folder={home}/out", "--training.steps=6"]
    words = ["--standalone", "--nproc_per_node=2", "train.py", *settings]
    plain = {key: value for key, value in PLAIN.items() if not key.startswith("WANDB_")}  # nobody's keys
    return Script(TORCHRUN, words, environment=plain | {"HOME": str(home)}).wait()


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Runs a script in this process: (exit code, stdout, stderr)."""

    def run(script: str, *argv: str) -> tuple[object, str, str]:
        monkeypatch.chdir(REPO)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        capfd.readouterr()
        return run_here(script, *argv), *capfd.readouterr()

    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGUSR2)}
    yield run
    for number, handler in handlers.items():  # a run that has ended ignores them until its process ends
        signal.signal(number, handler)
    if dist.is_initialized():  # a run that failed leaves its group to the end of its process
        dist.destroy_process_group()


def iterations(stdout: str) -> list[int]:
    return [int(step) for step in re.findall(r"^ (?:iteration|step) +(\d+)/", stdout, re.MULTILINE)]


def test_trains_and_prints_once_per_job(first: subprocess.CompletedProcess[str], home: Path) -> None:
    assert first.returncode == 0, first.stderr
    assert "Traceback" not in first.stderr
    assert iterations(first.stdout) == [2, 4, 6]
    validations = re.findall(r"^ step (\d) \| validation loss (\S+)$", first.stdout, re.MULTILINE)
    assert [step for step, _ in validations] == ["4", "6"]
    assert re.findall(r"^ saved (.*)$", first.stdout, re.MULTILINE) == [
        f"{home}/out/checkpoint/step-{step}" for step in (4, 6)
    ]
    line = next(line for line in first.stdout.splitlines() if line.startswith(" iteration        6/       6 | "))
    assert "| consumed samples:           48 | consumed tokens:         1536 |" in line
    assert "MFU" not in line  # nobody knows this CPU's peak


def test_metrics_are_complete_and_agree_with_the_console(first: subprocess.CompletedProcess[str], home: Path) -> None:
    lines = records(home / "out")
    assert read_settings(home / "out")["training.global_batch_size"] == lines[0]["global_batch_size"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["consumed_samples"] for line in lines] == [8, 16, 24, 32, 40, 48]
    assert all(2 < line["loss"] < 6 and line["grad_norm"] > 0 and line["tokens_per_second"] > 0 for line in lines)
    printed = [float(loss) for loss in re.findall(r"^ iteration.* lm loss: (\S+) \|", first.stdout, re.MULTILINE)]
    means = [(lines[i]["loss"] + lines[i + 1]["loss"]) / 2 for i in (0, 2, 4)]
    assert printed == pytest.approx(means, rel=1e-6)  # seven digits
    validated = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    assert list(validated) == [4, 6]
    assert f"{validated[6]:.4f}" in first.stdout


def test_tensorboard_and_wandb_are_written(first: subprocess.CompletedProcess[str], home: Path) -> None:
    events = EventAccumulator(str(home / "out" / "tensorboard")).Reload()
    losses = {event.step: event.value for event in events.Scalars("train/loss")}
    assert losses == pytest.approx({line["step"]: line["loss"] for line in records(home / "out")}, rel=2**-24)
    runs = [path for path in (home / "out" / "wandb").glob("*run-*") if not path.is_symlink()]
    assert [path.name.startswith("offline-run-") for path in runs] == [True]  # one run per job, not per rank
    assert next(runs[0].glob("*.wandb")).stat().st_size > 1000


def test_only_a_longer_run_goes_on(first: subprocess.CompletedProcess[str], home: Path, here: Any) -> None:
    before, events = records(home / "out"), sorted((home / "out" / "tensorboard").iterdir())
    code, out, err = here(
        "train.py", *SHORT, f"--job.dump_folder={home}/out", "--training.steps=6", "--metrics.wandb=false"
    )
    assert code == 0, err
    assert f"resumed from {home}/out/checkpoint/step-6" in out
    assert " nothing to train: the checkpoint is at step 6 of 6" in out
    assert iterations(out) == []
    assert records(home / "out") == before
    assert sorted((home / "out" / "tensorboard").iterdir()) == events  # a run that trains nothing writes nothing

    settings = [*SHORT, f"--job.dump_folder={home}/out", "--training.steps=9"]
    printed = train_on(2, home / "log.txt", settings, environment={"HOME": str(home)})
    assert printed.count(f"resumed from {home}/out/checkpoint/step-6") == 1
    assert iterations(printed) == [8, 9]
    lines = records(home / "out")
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert lines[:6] == before
    assert [line["consumed_samples"] for line in lines[6:]] == [56, 64, 72]
    accumulator = EventAccumulator(str(home / "out" / "tensorboard")).Reload()
    assert [event.step for event in accumulator.Scalars("train/loss")] == list(range(1, 10))
    runs = [path.name for path in (home / "out" / "wandb").glob("offline-run-*")]
    assert len(runs) == 2
    assert len({name.rpartition("-")[2] for name in runs}) == 1  # the same run goes on


def test_diverging_run_ends_with_one_sentence(tmp_path: Path, here: Any) -> None:
    (tmp_path / "text.txt").write_text("some text to learn from, " * 100)
    code, out, err = here(
        "train.py", f"--job.dump_folder={tmp_path}/out", "--data.dataset=text", f"--data.paths={tmp_path}/text.txt",
        "--model.overrides.hidden_size=32", "--training.seq_len=16", "--training.steps=20", "--training.max_norm=0",
        "--optimizer.name=sgd", "--optimizer.lr=1e6", "--health.skip_nonfinite=false", "--metrics.log_interval=1",
    )  # fmt: skip
    sentences = [line for line in err.splitlines() if not line.startswith("tokenized ")]
    assert code == 1, err
    assert len(sentences) == 1, err
    assert re.match(r"error: the loss of step (\d+) is \S+ and its gradient norm (nan|inf); ", sentences[0])
    assert len(iterations(out)) == int(re.findall(r"step (\d+)", sentences[0])[0]) - 1


DIVERGING = [
    *short(20, warmup=0), "--lr_scheduler.decay=constant", "--optimizer.name=sgd", "--training.max_norm=0",
    "--checkpoint.enable=false",
]  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [["--optimizer.lr=1e4", "--evaluation.interval=20", "--evaluation.steps=1"], ["--optimizer.lr=30"]],
    ids=["not finite", "above guessing"],
)
def test_the_last_line_of_a_run_that_has_diverged_says_so(tmp_path: Path, here: Any, settings: list[str]) -> None:
    debug = ["--job.config_file=train_configs/debug_gpt.toml", f"--job.dump_folder={tmp_path}"]
    code, out, err = here("train.py", *debug, *DIVERGING, *settings)
    assert code == 0, err
    last, lines = out.splitlines()[-1], records(tmp_path)
    since = int(re.findall(r"^ the run has diverged since step (\d+): ", last)[0])
    bad = [line["step"] for line in lines if line["loss"] is None or line["nan"] or line["loss"] > math.log(257) + 1]
    skipped = sum(line["nan"] for line in lines)  # processors differ in how many
    assert since == bad[0] <= 5 and (f"{skipped:.0f} of the last 20 updates were skipped" in last) == (skipped > 0)
    losses = [line["loss"] for line in lines if not line["nan"]]
    assert f"the last loss is {losses[-1]:.6g} " in last and f"{lines[0]['loss']:.6g} at first" in last
    assert ("the loss of the last validation is not finite" in last) == (lines[-1].get("validation_loss", 0) is None)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["--training.max_norm=-1"], r"error: training\.max_norm = -1: should be greater than or equal to 0 \(.*\)"),
        (
            ["--optimizer.lr=1e6", "--health.skip_nonfinite=false"],
            r"error: the loss of step \d+ is \S+ and its gradient norm (nan|inf); lower optimizer\.lr, or .*",
        ),
    ],
    ids=["wrong setting", "in the middle"],
)
def test_torchrun_ends_with_the_sentence(tmp_path: Path, settings: list[str], sentence: str) -> None:
    run = ["--job.config_file=train_configs/debug_gpt.toml", f"--job.dump_folder={tmp_path}", *DIVERGING, *settings]
    done = Script(TORCHRUN, ["--standalone", "--nproc_per_node=2", "train.py", *run], environment=PLAIN).wait()
    assert done.returncode == 1  # torchrun's own, whatever the ranks' is
    *_, last, border = done.stderr.splitlines()
    assert re.fullmatch(r" *traceback : (.*)", last) and set(border) == {"="}, done.stderr
    shown = last.partition(" : ")[2]
    assert re.fullmatch(sentence, shown), shown
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        shown
    ]  # once, not by each rank
