"""Every layout computes the same training as one process.

Each test compares the gradient norm before clipping, every parameter's gradient of the first step, and every weight
after 12 steps. In float32 one process is itself up to 5e-7 away from a float64 run in its gradients; AdamW divides
small gradients by their own size, so its weights after 12 steps are 2e-5 away
(`test_tolerances_are_float32_rounding` measures both). Different summation orders may differ by as much.

One thing is left out of the weights: the biases of GPT's keys. Softmax does not change when all its inputs move
together, so their gradient is zero (`test_key_biases_have_no_gradient`, in float64), and what float32 computes is
rounding, which AdamW scales up to whole steps.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed.launch import Case, Result, assert_same, run_cases, without_key_biases, worst

GRADIENT_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
FAMILIES = ("gpt", "llama")


def settings(family: str, **more: object) -> dict[str, object]:
    return {
        "model.family": family,
        "model.overrides": {"hidden_size": 64, "num_layers": 2},
        "optimizer.lr": 1e-3,
        "training.seq_len": 16,
        "training.steps": 12,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


REFERENCES = [
    Case(
        f"{family}{' float64' * double}",
        settings(family, training__micro_batch_size=16, training__dtype="float64" if double else "float32"),
    )
    for family in FAMILIES
    for double in (False, True)
]  # fmt: skip


def parallel(label: str, family: str, **more: object) -> Case:
    return Case(f"{family} | {label}", settings(family, **more))


# Every stage once, with and without accumulation. Combinations with other axes are those of `test_layout_matrix`, four
# shards and two replicas of two those of `test_optimizers`.
ON_TWO_RANKS = [
    *(
        parallel(
            f"zero {stage}, accumulation {accumulation}", family,
            parallelism__zero_stage=stage, training__micro_batch_size=8 // accumulation,
        )
        for stage, family, accumulation in ((0, "llama", 1), (1, "gpt", 4), (2, "llama", 2))
    ),
    parallel(
        "recompute full every 2, zero 3", "llama",
        parallelism__zero_stage=3, training__micro_batch_size=4,
        activation_checkpoint__mode="full", activation_checkpoint__every_n_layers=2,
    ),
]  # fmt: skip
ONE_PROCESS = [
    Case(
        f"{family} | recompute {mode} every {every}, one process, accumulation {accumulation}",
        settings(
            family, training__micro_batch_size=16 // accumulation,
            activation_checkpoint__mode=mode, activation_checkpoint__every_n_layers=every,
        ),
    )
    for family, mode, every, accumulation in (
        ("gpt", "none", 1, 4), ("gpt", "full", 1, 1), ("llama", "full", 2, 1), ("llama", "selective", 1, 4),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("parity")
    return run_cases([*REFERENCES, *ONE_PROCESS], 1, folder) | run_cases(ON_TWO_RANKS, 2, folder)


def key_biases(qkv_bias: torch.Tensor) -> torch.Tensor:
    """Of GPT's fused bias, ordered [head, (query, key, value), head_dim]; four heads in the debug model."""
    return qkv_bias.view(4, 3, -1)[:, 1]


@pytest.mark.parametrize("case", [*ONE_PROCESS, *ON_TWO_RANKS], ids=lambda case: case.name)
def test_same_training_as_one_process(results: dict[str, Result], case: Case) -> None:
    assert_same(results[case.name], results[case.name.split(" | ")[0]], GRADIENT_TOLERANCE, WEIGHT_TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_tolerances_are_float32_rounding(results: dict[str, Result], family: str) -> None:
    single, exact = results[family], results[f"{family} float64"]
    gradient_error, _ = worst(single.gradients, exact.gradients)
    weight_error, _ = worst(without_key_biases(single.weights), without_key_biases(exact.weights))
    assert 1e-8 < gradient_error < GRADIENT_TOLERANCE
    assert 1e-8 < weight_error < WEIGHT_TOLERANCE


def test_key_biases_have_no_gradient(results: dict[str, Result]) -> None:
    gradients = results["gpt float64"].gradients
    fused = {name: gradient for name, gradient in gradients.items() if name.endswith("qkv.bias")}
    assert fused
    for name, gradient in fused.items():
        assert key_biases(gradient).norm() < 1e-12 * gradient.norm(), name


def test_training_learned_something(results: dict[str, Result]) -> None:
    for case in REFERENCES:
        losses = results[case.name].losses
        assert losses[-1] < losses[0] - 0.5, case.name
