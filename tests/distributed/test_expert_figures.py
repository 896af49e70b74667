"""The figures of experts are those of the global batch: in every layout, on all ranks, those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import collect, trainer_of
from tests.distributed.layouts import pipeline, zero

SETTINGS = {
    "model.family": "moe",
    "training.dtype": "float64",
    "training.steps": 3,
    "training.seq_len": 16,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 8,
    "checkpoint.enable": False,
    "activation_checkpoint.mode": "full",
    "activation_checkpoint.every_n_layers": 2,
    "model.overrides": {"num_layers": 3, "hidden_size": 32, "expert_ffn_hidden_size": 16, "num_dense_layers": 1},
}
# In a pipeline of two, the first stage's only layer has no experts.
LAYOUTS = {"zero 3": zero(3), "pipeline": pipeline() | {"parallelism.pipeline_layers": [1, 2]}}


def figures(rank: int, folder: Path, layouts: dict[str, dict]) -> dict[str, list[dict[str, float]]]:
    found = {}
    for name, settings in layouts.items():
        trainer = trainer_of(folder, SETTINGS | settings)
        data = trainer._load_data()
        found[name] = [trainer.read_step(trainer.train_step(data)).experts for _ in range(3)]
        data.close()
    return found


@pytest.mark.exhaustive
def test_figures_are_those_of_one_process(tmp_path: Path) -> None:
    (alone,) = collect(figures, 1, tmp_path, {"one": zero(0)})
    expected = alone["one"]
    assert len({step["balance_loss"] for step in expected}) == 3
    for of_rank in collect(figures, 2, tmp_path, LAYOUTS):
        for name, steps in of_rank.items():
            assert steps == [pytest.approx(step, rel=1e-9) for step in expected], name
