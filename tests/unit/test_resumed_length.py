"""The length and the schedule of a run that goes on with another batch size follow from what it has consumed."""

import json
import math
import shutil
from pathlib import Path

import pytest

from tests.distributed.mutations import runs
from tests.unit.plain_loop import run_settings
from titan_like.checkpoint.step_folders import is_resumable
from titan_like.config import ConfigError, load_config
from titan_like.config.schema import JobConfig
from titan_like.train.job import run_job
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.verify.processes import Prepare

SEQ_LEN, SAMPLES, BATCH = 8, 160, 8
SCHEDULES: dict[str, dict[str, object]] = {
    "cosine": {"lr_scheduler.warmup_steps": 4, "lr_scheduler.min_lr_ratio": 0.1},
    "wsd": {"lr_scheduler.decay": "wsd", "lr_scheduler.decay_steps": 12},
}


def config_of(dump: Path, settings: dict[str, object]) -> JobConfig:
    known = run_settings(dump.parent) | {"job.dump_folder": dump, "training.seq_len": SEQ_LEN, "optimizer.lr": 1}
    known |= {"training.micro_batch_size": 4, "training.global_batch_size": BATCH, "training.steps": "none"}
    known |= {"checkpoint.enable": "true", "checkpoint.interval": 1, "checkpoint.keep_latest": 0}
    known |= {"model.overrides.num_layers": 1, "model.overrides.hidden_size": 8, "lr_scheduler.decay": "cosine"}
    return load_config([f"--{key}={value}" for key, value in (known | settings).items()])


def train(dump: Path, settings: dict[str, object]) -> list[dict[str, float]]:
    """Train, or go on; everything that the run has logged."""
    run_job(prepare_run(resolve_settings(config_of(dump, settings))))
    return [json.loads(line) for line in (dump / "metrics.jsonl").read_text().splitlines()]


def go_back(dump: Path, step: int) -> None:
    """Leave no later checkpoint than that of a step, as a crash right after it would."""
    for path in (dump / "checkpoint").iterdir():
        if path.is_dir() and int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)


def cosine(samples: float) -> float:
    """Rate after so many samples: warm-up over 4 batches of 8, then down to a tenth at 160."""
    return samples / 32 if samples <= 32 else 0.1 + 0.9 * (1 + math.cos(math.pi * (samples - 32) / 128)) / 2


def wsd(samples: float) -> float:
    """Rate after so many samples: down to 0 over the last 12 batches of 8."""
    return min(1.0, (160 - samples) / 96)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of batches of 8 that have taken all their steps, by the shape of their schedule."""
    folder = tmp_path_factory.mktemp("begun")
    for name, settings in SCHEDULES.items():
        records = train(folder / name, settings | {"training.samples": SAMPLES})
        assert [record["consumed_samples"] for record in records] == [*range(8, 161, 8)]
    return {name: folder / name for name in SCHEDULES}


IN_SAMPLES, IN_TOKENS = {"training.samples": SAMPLES}, {"training.tokens": SAMPLES * SEQ_LEN + 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step", "batch", "steps", "length"),
    [
        ("cosine", 10, 16, 15, IN_SAMPLES), ("cosine", 10, 4, 30, IN_TOKENS), ("cosine", 2, 4, 38, IN_SAMPLES),
        ("wsd", 12, 4, 28, IN_SAMPLES), ("wsd", 12, 32, 14, IN_TOKENS),
    ],
)  # fmt: skip
def test_a_run_with_another_batch_size_ends_after_its_samples_on_the_same_schedule(
    begun: dict[str, Path], tmp_path: Path, name: str, step: int, batch: int, steps: int, length: dict[str, int]
) -> None:
    dump = tmp_path / "out"
    shutil.copytree(begun[name], dump)
    go_back(dump, step)
    settings = SCHEDULES[name] | length | {"training.global_batch_size": batch}
    assert is_resumable(config_of(dump, settings)) == (
        True,
        f"resumable: step {step} of {steps} is in {dump / 'checkpoint'}",
    )
    records = train(dump, settings)
    consumed = [*range(8, 8 * step + 1, 8), *range(8 * step + batch, 161, batch)]
    assert [record["step"] for record in records] == [*range(1, steps + 1)]
    assert [record["consumed_samples"] for record in records] == consumed
    rate = cosine if name == "cosine" else wsd
    assert [record["lr"] for record in records] == pytest.approx([rate(samples) for samples in consumed], rel=1e-12)
    finished = f"finished: a checkpoint of step {steps} of {steps} is in {dump / 'checkpoint'}"
    assert is_resumable(config_of(dump, settings)) == (False, finished)


@pytest.mark.slow
@pytest.mark.parametrize(
    "bug",
    [
        runs.length_as_if_todays_batches_had_always_held,
        runs.schedule_counts_todays_batches,
        runs.schedule_counts_steps_whatever_their_batches,
    ],
)
def test_bugs_are_found(begun: dict[str, Path], tmp_path: Path, bug: Prepare) -> None:
    test = test_a_run_with_another_batch_size_ends_after_its_samples_on_the_same_schedule
    with bug(), pytest.raises(AssertionError):
        test(begun, tmp_path, "cosine", 10, 16, 15, IN_SAMPLES)


@pytest.mark.slow
def test_the_schedule_survives_several_changes_of_the_batch_size(begun: dict[str, Path], tmp_path: Path) -> None:
    dump, settings = tmp_path / "out", SCHEDULES["cosine"] | {"training.samples": SAMPLES}
    shutil.copytree(begun["cosine"], dump)
    go_back(dump, 2)
    train(dump, settings | {"training.global_batch_size": 16})
    go_back(dump, 5)  # after 64 samples
    state = json.loads((dump / "checkpoint" / "step-5" / "run.json").read_text())
    assert state["consumed_samples"] == 64 and state["schedule_batch_size"] == 8
    records = train(dump, settings | {"training.global_batch_size": 4})
    assert [record["lr"] for record in records] == pytest.approx([cosine(r["consumed_samples"]) for r in records])
    assert records[-1]["step"] == 29 and records[-1]["consumed_samples"] == 160


def test_steps_stay_steps(begun: dict[str, Path], tmp_path: Path) -> None:
    dump = tmp_path / "out"
    shutil.copytree(begun["cosine"], dump)
    go_back(dump, 10)
    records = train(dump, SCHEDULES["cosine"] | {"training.steps": 20, "training.global_batch_size": 16})
    assert [record["lr"] for record in records] == pytest.approx([cosine(8 * r["step"]) for r in records])
    assert records[-1]["step"] == 20 and records[-1]["consumed_samples"] == 240


@pytest.mark.slow
def test_a_ramp_up_that_is_over_may_leave_the_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches of 4 up to 40 samples, then of 8: 10 + 15 steps. Without the ramp-up they would be 20."""
    dump, settings = tmp_path / "out", SCHEDULES["cosine"] | {"training.samples": SAMPLES}
    straight = train(dump, settings | {"training.batch_size_rampup": [4, 4, 40]})
    assert len(straight) == 25
    assert [record["lr"] for record in straight] == pytest.approx([cosine(r["consumed_samples"]) for r in straight])
    go_back(dump, 22)
    records = train(dump, settings)
    same = ("step", "consumed_samples", "lr", "loss")
    assert [[record[key] for key in same] for record in records] == [[r[key] for key in same] for r in straight]
    assert " step 25/25 |" in capsys.readouterr().out
    train(dump, settings)
    assert " nothing to train: the checkpoint is at step 25 of 25" in capsys.readouterr().out


def lines_of_changes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "from step" in line]


@pytest.mark.slow
def test_a_schedule_can_be_kept(begun: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = tmp_path / "out"
    shutil.copytree(begun["cosine"], dump)
    go_back(dump, 10)
    settings = {"lr_scheduler.resume": "continue", "training.steps": 22, "optimizer.lr": 9, "lr_scheduler.decay": "wsd"}
    settings |= {"lr_scheduler.decay_steps": 5000, "training.global_batch_size": 4}
    settings |= {"health.skip_nonfinite": "false", "checkpoint.interval": 2}  # the latter changes no training
    train(dump, settings)
    line, *others = lines_of_changes(capsys)
    assert others == [" from step 11 on: health.skip_nonfinite true -> false"]
    assert line.startswith(" from step 11 on: training.global_batch_size 8 -> 4, training.steps (not set) -> 22, ")
    assert 'lr_scheduler.decay "cosine" -> "wsd", ' in line and line.endswith(
        f"and lr at step 11 stays {cosine(84):.3g}"
    )
    go_back(dump, 12)
    records = train(dump, settings | {"training.steps": 34})  # past the end of the schedule, at its floor
    assert lines_of_changes(capsys) == [
        f" from step 13 on: training.steps 22 -> 34, and lr at step 13 stays {cosine(92):.3g} "
        '(lr_scheduler.resume = "continue")'
    ]
    consumed = [*range(8, 81, 8), *range(84, 177, 4)]
    assert [record["lr"] for record in records] == pytest.approx([cosine(min(160, samples)) for samples in consumed])


def test_a_kept_schedule_keeps_the_rate_of_matrices(tmp_path: Path) -> None:
    """Muon's two rates keep their ratio: the steps after the resume are those of a run that nobody touched."""
    dump, settings = tmp_path / "out", {"training.steps": 6, "optimizer.name": "muon", "optimizer.matrix_lr": 0.1}
    straight = train(dump, settings)
    go_back(dump, 3)
    changed = settings | {"optimizer.lr": 0.25, "optimizer.matrix_lr": 7, "lr_scheduler.resume": "continue"}
    assert [r["loss"] for r in train(dump, changed)] == [r["loss"] for r in straight]


@pytest.mark.parametrize("schedule", [None, {"lr": "fast"}])
def test_a_checkpoint_without_its_schedule(
    begun: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], schedule: object
) -> None:
    """One of an earlier version has none, and one that is not valid is damaged."""
    dump = tmp_path / "out"
    shutil.copytree(begun["cosine"], dump)
    path = dump / "checkpoint" / "step-20" / "run.json"
    state = json.loads(path.read_text()) | {"schedule": schedule}
    del state["crc32"], state["config"]["lr_scheduler"]["resume"]
    path.write_text(json.dumps(state))
    settings = SCHEDULES["cosine"] | {"training.samples": 176}
    step, told = (21, "") if schedule is None else (20, f" instead of {cosine(160):.3g}")
    if schedule is None:
        with pytest.raises(ConfigError, match=r'^lr_scheduler.resume = "continue": an earlier .* use "recompute"$'):
            train(dump, settings | {"lr_scheduler.resume": "continue"})
    lr = train(dump, settings)[step - 1]["lr"]
    line = f" from step {step} on: training.samples 160 -> 176, so lr at step {step} is {lr:.3g}{told}"
    assert lines_of_changes(capsys) == [line]
