"""A run that stops and goes on is the run that never stopped."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import all_stages, base_config, by_name, collect, launch, trainer_of
from tests.distributed.layouts import pipeline, recompute, sizes, tensor, zero
from tests.e2e.jobs import records
from tests.float64 import bound
from titan_like.checkpoint.step_folders import complete_steps
from titan_like.config.errors import RunError
from titan_like.data.loading.open_source import continue_after, open_data, phases_of
from titan_like.train.job import process_group
from titan_like.train.trainer import Trainer
from titan_like.verify.dropout import recorded_draws
from titan_like.verify.watch import digest, steps_alone

TIMES = {"step_time_s", "data_time_s", "tokens_per_second", "tflops_per_device", "peak_memory_bytes"}
SETTINGS: dict[str, Any] = sizes(32, 2, 8, 6) | {
    "lr_scheduler.decay": "cosine",
    "lr_scheduler.warmup_steps": 2,
    "checkpoint.enable": True,
    "checkpoint.interval": 3,
    "metrics.log_interval": 2,
}
MODEL = {"hidden_size": 32, "dropout": 0.1}
CASES: dict[str, tuple[int, dict[str, Any]]] = {  # ranks and settings
    "zero0": (2, zero(0)),
    "zero3 recomputed": (2, zero(3) | recompute("full")),
    "2 stages of tensor 2": (4, pipeline(2, "zbv_zero_bubble") | tensor() | {"training.micro_batch_size": 4}),
}


def run_to_end(folder: Path, dump: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train (or resume) in ``dump`` and return the weights."""
    trainer = trainer_of(folder, SETTINGS | settings | {"job.dump_folder": str(dump)})
    trainer.train()
    return all_stages(trainer, by_name(trainer.model.named_parameters()))


def train_straight_and_in_two_parts(rank: int, folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    for name, settings in cases.items():
        has_stages = "parallelism.pipeline_schedule" in settings
        with_dropout = settings | {"model.overrides": MODEL | {"num_layers": 4 if has_stages else 2}}
        straight = run_to_end(folder, folder / name / "straight", with_dropout)
        if rank == 0:  # what a crash just after step 3 leaves, with a metrics line more than the checkpoint
            shutil.copytree(folder / name / "straight", folder / name / "resumed")
            shutil.rmtree(folder / name / "resumed" / "checkpoint" / "step-6")
            metrics = folder / name / "resumed" / "metrics.jsonl"
            metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:4]) + '{"step": 5, "lo')
        torch.distributed.barrier()
        resumed = run_to_end(folder, folder / name / "resumed", with_dropout)
        if rank == 0:
            torch.save({"straight": straight, "resumed": resumed}, folder / name / "weights.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the cases were trained."""
    folder = tmp_path_factory.mktemp("resume")
    base_config(folder, {})
    for ranks in (2, 4):
        here = {name: settings for name, (size, settings) in CASES.items() if size == ranks}
        launch(train_straight_and_in_two_parts, ranks, folder, here)
    return folder


def without_times(dump: Path) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key not in TIMES} for line in records(dump)]


@pytest.mark.parametrize("name", CASES)
def test_resumed_run_is_bit_identical(folder: Path, name: str) -> None:
    runs = folder / name
    straight, resumed = without_times(runs / "straight"), without_times(runs / "resumed")
    assert [record["step"] for record in resumed] == list(range(1, 7))
    assert resumed == straight
    weights = torch.load(runs / "weights.pt", weights_only=True)
    for parameter, value in weights["straight"].items():
        assert torch.equal(value, weights["resumed"][parameter]), parameter


def test_dropout_was_on(folder: Path) -> None:
    names = ("zero0", "zero3 recomputed")
    losses = [[record["loss"] for record in records(folder / name / "straight")] for name in names]
    assert losses[0] == pytest.approx(losses[1], rel=bound(dtype=torch.float32))  # recomputation draws the same dropout
    assert complete_steps(folder / "zero0" / "straight" / "checkpoint") == [3, 6]


LAYOUTS: dict[str, dict[str, Any]] = {
    "data": zero(3),
    "tensor": tensor(),
    "pipeline": pipeline(),
}


def masks_of_step_3(rank: int, folder: Path) -> dict[str, list[list[str]]]:
    """By layouts before and after: the masks outside attention and in it, drawn without a stop or after a resume."""
    found: dict[str, list[list[str]]] = {}

    def draw(name: str, trainer: Trainer) -> None:
        with recorded_draws(trainer) as draws:
            steps_alone(trainer, 1)
        for is_attention in (False, True):
            masks = [digest(draw.kept) for draw in draws if draw.is_attention == is_attention]
            found.setdefault(name, []).append(masks)

    settings = SETTINGS | {"model.overrides": MODEL | {"num_layers": 2}}
    for before, layout in LAYOUTS.items():
        settings["job.dump_folder"] = str(folder / before)
        trainer = trainer_of(folder, settings | layout)
        steps_alone(trainer, 2)
        trainer.state.save(is_last=True)
        draw(before, trainer)
        for after, other in LAYOUTS.items():
            draw(f"{before} {after}", trainer_of(folder, settings | other))
    return found


def test_another_layout_draws_the_dropout_that_it_would_have_drawn_without_a_stop(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    first, second = collect(masks_of_step_3, 2, tmp_path)
    for after in LAYOUTS:
        for before in LAYOUTS:
            assert first[f"{before} {after}"] == first[after], (before, after)
            assert second[f"{before} {after}"] == second[after], (before, after)
        (outside, attention), (others, others_attention) = first[after], second[after]
        assert set(outside) & set(others) == (set(outside) if after == "tensor" else set()), after
        assert attention and not set(attention) & set(others_attention), after


def test_a_resumed_run_goes_on_with_another_blend(tmp_path: Path) -> None:
    """It is the run whose data changes without a stop. It needs the setting once, and resumes as any other."""
    base_config(tmp_path, {})
    for number, name in enumerate("abc"):
        letters = torch.randint(97, 123, (20_000,), generator=torch.Generator().manual_seed(number)).tolist()
        (tmp_path / f"{name}.txt").write_text("".join(map(chr, letters)))
    a, b, c = (str(tmp_path / f"{name}.txt") for name in "abc")
    settings = SETTINGS | {
        "model.overrides": MODEL | {"num_layers": 1},
        "checkpoint.interval": 1,
        "lr_scheduler.decay": "constant",
    }
    settings |= {"data.paths": [0.7, a, 0.3, b], "training.steps": 3}
    changed = settings | {"data.paths": [0.5, c, 0.5, a], "training.steps": 6}
    allowed = changed | {"data.resume": "new_blend"}
    with process_group(torch.device("cpu")):
        run_to_end(tmp_path, tmp_path / "run", settings)
        with pytest.raises(
            RunError, match=r'on other data than .*, or data\.resume to "new_blend" to go on with this$'
        ):
            run_to_end(tmp_path, tmp_path / "run", changed)
        resumed = run_to_end(tmp_path, tmp_path / "run", allowed)
        shutil.copytree(tmp_path / "run", tmp_path / "again")
        shutil.rmtree(tmp_path / "again/checkpoint/step-6")
        again = run_to_end(tmp_path, tmp_path / "again", changed)  # which is its own data by now
        never = trainer_of(tmp_path, changed | {"data.paths": settings["data.paths"], "checkpoint.enable": False})
        steps_alone(never, 3)
        new = open_data(base_config(tmp_path, changed), never.run.model)["train"]
        never.run.datasets["train"] = continue_after(
            new, [*phases_of(never.run.datasets["train"]), *(p._replace(first=24) for p in phases_of(new))]
        )
        steps_alone(never, 3)
    assert without_times(tmp_path / "again") == without_times(tmp_path / "run")
    for name, value in by_name(never.model.named_parameters()).items():
        assert torch.equal(value, resumed[name]) and torch.equal(value, again[name]), name
