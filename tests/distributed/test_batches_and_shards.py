"""Growing batches, and validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.launch import base_config, by_name, collect, full, relative, trainer_of
from titan_like.config.schema import JobConfig
from titan_like.models.registry import build_model, model_config
from titan_like.models.transformer import Transformer
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer
from titan_like.verify.watch import WatchedTrainer

TINY = {
    "model.overrides": {"num_layers": 2, "hidden_size": 32, "max_seq_len": 32},
    "training.seq_len": 32,
    "training.micro_batch_size": 2,
    "data.split": "9,1,0",
}
TEXT_LENGTH, FIRST_FOR_VALIDATION = 60_001, 54_001  # tokens of the text, end of document included

RAMP = TINY | {"training.micro_batch_size": 1, "training.batch_size_rampup": [4, 4, 24], "training.steps": 6}
# The batch grows by 4 after each third of 24 samples.
RAMP_SIZES, RAMP_CONSUMED = [4, 4, 8, 12, 16, 16], [4, 8, 16, 28, 44, 60]
RAMP_STAGES = (0, 3)

VALIDATED = {
    f"zero{stage}, {steps} batches": TINY | {"parallelism.zero_stage": stage, "evaluation.steps": steps}
    for stage, steps in ((0, 100), (3, 2))
}


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: full(parameter) for name, parameter in trainer.model.named_parameters()}


def train(folder: Path, settings: dict[str, Any], validates: bool = False) -> dict[str, Any]:
    """Records, gradients and weights (before the first, after each) of every step."""
    trainer = trainer_of(folder, settings, WatchedTrainer)
    weights, gradients, records, validation = [weights_of(trainer)], [], [], []
    data = trainer._load_data()
    for _ in range(trainer.run.total_steps):
        if validates:
            validation.append(trainer.validate())
        records.append(trainer.read_step(trainer.train_step(data)).as_dict())
        gradients.append(by_name(trainer.gradients))
        weights.append(weights_of(trainer))
    data.close()
    return {"records": records, "gradients": gradients, "weights": weights, "validation": validation}


def train_everything(rank: int, folder: Path, world_size: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    if world_size == 2:
        for stage in RAMP_STAGES:
            results[f"ramp zero{stage}"] = train(folder, RAMP | {"parallelism.zero_stage": stage})
    else:
        for name, settings in VALIDATED.items():
            micro_batch = {"training.steps": 2, "training.micro_batch_size": 16 if world_size == 1 else 2}
            for validates in (False, True):
                results[name, validates] = train(folder, settings | micro_batch, validates)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, dict[Any, Any]]:
    """By number of ranks."""
    return {size: collect(train_everything, size, folder, size)[-1] for size in (1, 2, 4)}


def plain_model(config: JobConfig) -> Transformer:
    model = build_model(model_config(config.model), config.model.family)
    model.init_weights(config.job.seed)
    return model


def mean_loss(model: Transformer, samples: torch.Tensor) -> torch.Tensor:
    """samples [n, 2, seq]: inputs and labels."""
    return F.cross_entropy(model(samples[:, 0]).flatten(0, 1), samples[:, 1].flatten())


@pytest.mark.parametrize("stage", RAMP_STAGES)
def test_ramp_up_trains_on_the_right_batches(folder: Path, results: dict[int, Any], stage: int) -> None:
    run = results[2][f"ramp zero{stage}"]
    assert [record["global_batch_size"] for record in run["records"]] == RAMP_SIZES
    assert [record["consumed_samples"] for record in run["records"]] == RAMP_CONSUMED
    assert [record["consumed_tokens"] for record in run["records"]] == [32 * n for n in RAMP_CONSUMED]
    prepared = prepare_run(resolve_settings(base_config(folder, RAMP)))
    model = plain_model(prepared.config)
    first = 0
    for step, size in enumerate(RAMP_SIZES):
        model.load_state_dict(run["weights"][step])
        model.zero_grad()
        samples = torch.stack([prepared.datasets["train"][i] for i in range(first, first + size)])
        loss = mean_loss(model, samples)
        loss.backward()
        assert run["records"][step]["loss"] == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in model.named_parameters():
            assert relative(run["gradients"][step][name], parameter.grad) < 1e-5, (step, name)
        first += size


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("name", VALIDATED)
def test_validation_loss_is_the_mean_over_its_samples(
    folder: Path, results: dict[int, Any], world_size: int, name: str
) -> None:
    config = base_config(folder, VALIDATED[name])
    text = torch.tensor([*(folder / "text.txt").read_bytes(), 256])
    assert len(text) == TEXT_LENGTH
    held_out = text[FIRST_FOR_VALIDATION:]
    samples = torch.stack([torch.stack((w[:-1], w[1:])) for w in held_out.unfold(0, 33, 32)])
    assert len(samples) == 187  # not divisible by 4 ranks, nor by their microbatches
    samples = samples[: 16 * config.evaluation.steps]
    run = results[world_size][name, True]
    model = plain_model(config)
    for step, value in enumerate(run["validation"]):
        model.load_state_dict(run["weights"][step])
        with torch.no_grad():
            assert value == pytest.approx(mean_loss(model, samples).item(), rel=1e-6)
    assert len(run["validation"]) == 2


@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("name", VALIDATED)
def test_validation_leaves_training_as_it_was(results: dict[int, Any], world_size: int, name: str) -> None:
    without, validated = (results[world_size][name, validates]["weights"] for validates in (False, True))
    for before, after in zip(without, validated, strict=True):
        for key, value in before.items():
            assert torch.equal(value, after[key]), key
