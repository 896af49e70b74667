"""Compiled layers compute the same gradients as eager ones. ``pytest -m exhaustive`` adds layouts and modes."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch._dynamo

from tests.distributed.launch import Case, Result, launch, relative, run_cases, trainer_of
from tests.distributed.layouts import pipeline, recompute, tensor, zero

SMALL = {
    "model.overrides": {"num_layers": 2},
    "training.seq_len": 32,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 2,
}
EAGER = Case("eager", SMALL)


def compiled(name: str, layout: dict[str, object], mode: str) -> Case:
    return Case(f"{name}, recompute {mode}", SMALL | layout | {"compile.enable": True} | recompute(mode))


CASES = {  # by number of ranks
    1: [],
    2: [compiled("zero 3", zero(3), "selective"), compiled("sequence", tensor(2, True), "full")],
}
MORE_CASES = {
    1: [compiled("zero 0", zero(0), mode) for mode in ("none", "full", "selective")],
    2: [
        compiled("zero 3", zero(3), "none"),
        compiled("zero 3", zero(3), "full"),
        compiled("pipeline", pipeline(), "none"),
        compiled("tensor", tensor(), "none"),
        compiled("sequence", tensor(2, True), "none"),
    ],
}
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.fixture(
    scope="module", params=[CASES, pytest.param(MORE_CASES, marks=pytest.mark.exhaustive)], ids=["", "more"]
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    cases, folder = request.param, tmp_path_factory.mktemp("compile")
    return run_cases([EAGER, *cases[1]], 1, folder) | run_cases(cases[2], 2, folder)


@pytest.mark.skipif(COMPILER is None, reason="torch.compile on a CPU needs a C++ compiler")
def test_compiled_layers_have_the_same_gradients(results: dict[str, Result]) -> None:
    eager = results["eager"]
    for case, found in results.items():
        if case == "eager":
            continue
        assert found.gradients.keys() == eager.gradients.keys(), case
        for name, reference in eager.gradients.items():
            assert relative(found.gradients[name], reference) < 1e-5, (case, name)
        assert found.losses == pytest.approx(eager.losses, rel=1e-6), case
        assert found.grad_norms == pytest.approx(eager.grad_norms, rel=1e-5), case
        # The compiler fuses operations, which rounds differently: equal to the last bit would mean it did not run.
        assert any(not torch.equal(found.gradients[name], eager.gradients[name]) for name in eager.gradients), case


DOCUMENTS = {"training.dtype": "bfloat16", "data.reset_position_ids": True, "data.reset_attention_mask": True}


def train_steadily(rank, folder, family):
    settings = {"training.steps": 6, "compile.enable": True, "checkpoint.enable": False}
    trainer = trainer_of(folder, SMALL | DOCUMENTS | settings | {"model.family": family})
    data = trainer._load_data()
    for _ in range(2):
        trainer.train_step(data)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            trainer.train_step(data)
    data.close()


@pytest.mark.skipif(COMPILER is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("family", ["gpt", pytest.param("llama", marks=pytest.mark.exhaustive)])
def test_nothing_is_compiled_again_after_the_second_step(tmp_path, family):
    """From step to step documents change, and in GPT dropout's seeds."""
    launch(train_steadily, 1, tmp_path, family)
