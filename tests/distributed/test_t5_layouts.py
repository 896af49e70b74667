"""T5 in every kind of layout: encoder and decoder over stages that share bias tables, and both split over processes.

As in `test_layout_matrix`, each layout is held to one process in float64 by the gradient norm before clipping, every
gradient of the first step, every weight after two steps of SGD, and the losses.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.launch import Case, Result, assert_same, runs_exhaustive_tests, train_layouts
from tests.distributed.layouts import pipeline, recompute, tensor, zero

TOLERANCE = 1e-10
TWO_LAYERS = 1_400_000  # bytes of an encoder's and a decoder's, which then share a unit of communication
COMMON: dict[str, Any] = {
    "model.family": "t5",
    "training.seq_len": 16,
    "training.decoder_seq_len": 8,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 2,
    "training.dtype": "float64",
    "optimizer.name": "sgd",
    "optimizer.lr": 0.1,
    "optimizer.implementation": "for-loop",
}


def shape(encoder: int, decoder: int, **more: Any) -> dict[str, Any]:
    fields = {"hidden_size": 64, "num_layers": encoder + decoder, "num_decoder_layers": decoder, "head_size": 24}
    return {"model.overrides": fields | more}


RELU_TIED = {"mlp": "relu", "tied_embeddings": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 0": (2, shape(2, 2) | zero(0)),
    "a unit of an encoder's and a decoder's layer, zero 3": (2, shape(1, 2) | zero(3)),
    "tensor 2, sequence, recompute selective": (2, shape(2, 2) | tensor(2, True) | recompute("selective")),
    "grouped queries, tensor 2": (2, shape(2, 2, num_kv_heads=2) | tensor(2)),
    "2 stages, the first ends in the decoder": (2, shape(1, 4) | pipeline(2)),
    "2 stages, the last begins in the encoder, relu and tied": (2, shape(4, 1, **RELU_TIED) | pipeline(2)),
    "2 stages, 1 and 4 layers": (2, shape(3, 2) | pipeline(2) | {"parallelism.pipeline_layers": [1, 4]}),
    "2 × 2 stages, interleaved": (2, shape(3, 3) | pipeline(2, "interleaved_1f1b")),
    "tensor 4, sequence, relu and tied": (4, shape(2, 2, **RELU_TIED) | tensor(4, True)),
    "2 × 2 stages, zbv, zero 3": (4, shape(3, 3) | pipeline(2, "zbv_zero_bubble") | zero(3)),
    "2 stages, tensor 2, sequence, recompute full": (
        4,
        shape(3, 3) | pipeline(2) | tensor(2, True) | recompute("full"),
    ),
}  # fmt: skip
ALL_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **LAYOUTS,
    **{f"zero {stage}": (2, shape(2, 2) | zero(stage)) for stage in (1, 2, 3)},
    "tensor 2": (2, shape(2, 2) | tensor(2)),
    "4 stages": (4, shape(4, 4) | pipeline(4)),
    "2 stages, zero 2": (4, shape(2, 3) | pipeline(2) | zero(2)),
    "2 × 2 stages, tensor 2, sequence, zero 3, relu and tied": (
        8,
        shape(3, 3, **RELU_TIED) | pipeline(2, "interleaved_1f1b") | tensor(2, True) | zero(3),
    ),
}  # fmt: skip


def reference(settings: dict[str, Any]) -> Case:
    """The same model on one process, each global batch in one piece."""
    model = {"model.overrides": settings["model.overrides"]}
    return Case(json.dumps(model, sort_keys=True), COMMON | model | {"training.micro_batch_size": 8})


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    layouts = ALL_LAYOUTS if runs_exhaustive_tests(request) else LAYOUTS
    cases = {
        name: (ranks, Case(name, COMMON | settings, TWO_LAYERS), reference(settings))
        for name, (ranks, settings) in layouts.items()
    }
    return train_layouts(cases, tmp_path_factory.mktemp("t5"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in LAYOUTS)) for name in ALL_LAYOUTS]
)
def test_same_training_as_one_process(results: dict[str, Result], name: str) -> None:
    expected = results[reference(ALL_LAYOUTS[name][1]).name]
    assert_same(results[name], expected, TOLERANCE)
    assert all(gradient.any() for gradient in expected.gradients.values())
