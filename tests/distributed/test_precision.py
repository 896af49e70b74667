"""Training in float16 and bfloat16, and steps that overflow. Verified runs all have a step that is not finite."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import Case, collect, full, relative, train_case, trainer_of
from tests.distributed.layouts import pipeline, sizes, zero
from tests.float64 import bound
from titan_like.train.trainer import Trainer

TINY: dict[str, Any] = sizes(16, 2, 8)
TINY |= {"model.overrides": {"num_layers": 2, "hidden_size": 32, "max_seq_len": 16}}
PIPELINE = pipeline()


def half(dtype: str, stage: int) -> Case:
    return Case(f"{dtype} zero{stage}", TINY | {"training.dtype": dtype} | zero(stage))


HALF = {  # by number of ranks
    1: [half("float16", 0), half("bfloat16", 0)],
    2: [*(half("float16", stage) for stage in (0, 2)), *(half("bfloat16", stage) for stage in (1, 3))],
}
STEPS = 16
WARMUP = {"training.steps": STEPS, "lr_scheduler.warmup_steps": STEPS}
HALF_WARMUP = TINY | WARMUP | {"training.dtype": "float16"}
SCALED = {1: {"zero0": HALF_WARMUP}, 2: {"zero3": HALF_WARMUP | zero(3), "pipeline": HALF_WARMUP | PIPELINE}}
ABSURD_SCALE = 2.0**30


def of_each(cases: dict[int, Any]) -> Any:
    """Every case with its number of ranks."""
    return [
        pytest.param(case, ranks, id=f"{getattr(case, 'name', case)}-{ranks}")
        for ranks, here in cases.items()
        for case in here
    ]


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: full(parameter) for name, parameter in trainer.model.named_parameters()}


def types_of(trainer: Trainer) -> set[str]:
    """Types of master weights and optimizer state; step counters are whole numbers in float32 already."""
    state = [value for values in trainer.state.optimizer.state.values() for value in values.values()]
    return {str(tensor.dtype) for tensor in (*trainer.model.parameters(), *state)}


def train_with_absurd_scale(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    trainer = trainer_of(folder, settings)
    trainer.state.scaler.scale.fill_(ABSURD_SCALE)
    weights, records, data = [weights_of(trainer)], [], trainer.load_data()
    for _ in range(STEPS):
        records.append(trainer.read_step(trainer.train_step(data)).as_dict())
        weights.append(weights_of(trainer))
    data.close()
    return {
        "records": records,
        "weights": weights,
        "scale": trainer.state.scaler.scale.item(),
        "types": types_of(trainer),
    }


def train_everything(rank: int, folder: Path, world_size: int) -> dict[str, Any]:
    scaled = SCALED[world_size].items()
    return {
        "half": {case.name: vars(train_case(case, folder)) for case in HALF[world_size]},
        "scaled": {name: train_with_absurd_scale(folder, settings) for name, settings in scaled},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """By number of ranks; what the last rank saw."""
    folder = tmp_path_factory.mktemp("precision")
    return {size: collect(train_everything, size, folder, size)[-1] for size in (1, 2)}


def gradients_of(results: dict[int, dict[str, Any]], world_size: int, case: Case) -> dict[str, torch.Tensor]:
    return results[world_size]["half"][case.name]["gradients"]


@pytest.mark.parametrize(("case", "world_size"), of_each(HALF))
def test_sums_are_float32(results: dict[int, Any], case: Case, world_size: int) -> None:
    """Microbatches are the same in every layout, so what differs is only the order of their float32 sum."""
    alone = next(other for other in HALF[1] if other.settings["training.dtype"] == case.settings["training.dtype"])
    reference = gradients_of(results, 1, alone)
    for name, gradient in gradients_of(results, world_size, case).items():
        assert relative(gradient, reference[name]) < bound(8, torch.float32), name  # two ranks, four microbatches


@pytest.mark.parametrize(("name", "world_size"), of_each(SCALED))
def test_overflow_is_skipped_until_the_loss_scale_fits(results: dict[int, Any], world_size: int, name: str) -> None:
    run = results[world_size]["scaled"][name]
    records, weights = run["records"], run["weights"]
    skipped = [record["skipped"] for record in records]
    # Logits' gradients reach scale / 128 tokens, and float16 ends at 2^16: scales above 2^23 overflow. Other gradients
    # are sums of these; they may overflow at 2^-5 of it.
    assert 7 <= skipped.index(0) <= 12
    assert skipped.count(0) >= 2
    for number, record in enumerate(records):
        overflows = sum(skipped[:number])
        assert record["loss_scale"] == ABSURD_SCALE / 2**overflows
        assert record["nan"] == 0
        # The learning rate is a function of the step alone, whether there was an update or not.
        assert record["lr"] == pytest.approx(1e-3 * (number + 1) / STEPS)
        assert record["consumed_samples"] == 8 * (number + 1)
        assert math.isfinite(record["loss"])
        assert math.isfinite(record["grad_norm"]) != skipped[number]
        same = all(torch.equal(weights[number][key], weights[number + 1][key]) for key in weights[0])
        assert same == skipped[number]
    assert run["scale"] == ABSURD_SCALE / 2 ** sum(skipped)
    assert run["types"] == {"torch.float32"}
