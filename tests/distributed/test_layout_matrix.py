"""Pipeline schedules × tensor and sequence parallelism × ZeRO × data parallelism × recomputation × microbatches.

Every layout is held to one process by the gradient norms before clipping, every parameter's gradient of the first step
and every weight after the last, in float64, where summation order leaves less than 1e-10. (`test_parity` has float32.)

A set runs here, for two steps of AdamW, that covers every pair of choices, where schedules of one kind count as one and
each schedule occurs. ``pytest -m exhaustive`` runs a set in which all pairs of schedules with others occur, for ten
steps, and all combinations with two data-parallel ranks for two steps of SGD (an hour on two cores), and writes
benchmarks/results/layout_matrix_cpu.json.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import Case, Result, run_cases, worst
from tests.distributed.layouts import (
    GLOBAL_BATCH,
    SCHEDULES,
    ParallelLayout,
    covering_set,
    every_pair,
    full_product,
    pairs_of_kinds,
)
from tests.distributed.test_parity import without_key_biases

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "layout_matrix_cpu.json"
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer.name": "adamw", "optimizer.lr": 1e-3, "training.dtype": "float64"},
    # On DTensors, PyTorch's foreach SGD works out a placement for whole lists of tensors, once a layout: a quarter of
    # the time of this file. `test_batches_and_shards` has it.
    "sgd": {
        "optimizer.name": "sgd",
        "optimizer.lr": 0.1,
        "optimizer.implementation": "for-loop",
        "training.dtype": "float64",
    },
}
FLOAT64_TOLERANCE = 1e-10
COVERING = covering_set(full_product(), pairs_of_kinds)
COVERING_MORE = covering_set(full_product(), every_pair)

BERT_PAIRS: dict[str, Any] = {
    "model.family": "bert",
    "model.overrides": {"hidden_size": 64, "sentence_head": "pair", "vocab_size": 261},
    "data.sentence_objective": "next_sentence",
}


def on_eight(layout: ParallelLayout) -> dict[str, tuple[int, dict[str, Any]]]:
    """Three axes at once."""
    return {layout.name: (layout.ranks, layout.settings() | {"model.overrides": {"hidden_size": 64}})}


def in_units(layers: int, schedule: str = "none", **settings: Any) -> dict[str, Any]:
    """Layers of which two share a unit of communication, or with tensor parallelism four; keys of [parallelism]."""
    layout = ParallelLayout("gpt", schedule, "1", 0, "2", "none", 2)
    named = {f"parallelism.{key}": value for key, value in settings.items()}
    return layout.settings() | named | {"model.overrides": {"hidden_size": 64, "num_layers": layers}}


RECOMPUTES_EVERY_2 = {"activation_checkpoint.mode": "full", "activation_checkpoint.every_n_layers": 2}
MORE: dict[str, tuple[int, dict[str, Any]]] = {  # what the set has not: ranks and settings
    "units of 2 and 1 layers, zero 0": (2, in_units(5)),
    "units of 2 and 1 layers, zero 2": (2, in_units(5, zero_stage=2)),
    "units of 2 and 1 layers, zero 3, recompute every 2": (2, in_units(5, zero_stage=3) | RECOMPUTES_EVERY_2),
    "units of 2 and 1 layers, 2 replicas of zero 3": (4, in_units(5, zero_stage=3, data_parallel_replicate_degree=2)),
    "units of 2 and 1 layers, 2 stages, zero 3": (4, in_units(6, "1f1b", zero_stage=3)),
    "units of 2 and 1 layers, 2 × 2 stages, zbv, zero 0": (4, in_units(12, "zbv_zero_bubble")),
    "units of 2 and 1 layers, 2 × 2 stages, zbv, zero 3": (4, in_units(12, "zbv_zero_bubble", zero_stage=3)),
    "units of 2 and 1 layers, 2 × 2 stages, dualpipe, 2 replicas of zero 2": (
        4,
        in_units(12, "dualpipe_v", zero_stage=2, data_parallel_replicate_degree=2),
    ),
    "units of 4 and 1 layers, tensor 2, zero 3": (4, in_units(5, zero_stage=3, tensor_parallel_degree=2)),
    "gpt 4 stages of 6 layers, balanced": (
        4,
        {"parallelism.pipeline_parallel_degree": 4, "model.overrides": {"num_layers": 6}},
    ),
    "gpt 1 and 3 layers": (
        2,
        {"parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_layers": [1, 3]},
    ),
    "llama tied, both ends on one rank, shards": (
        4,
        {
            "model.family": "llama",
            "model.overrides": {"tied_embeddings": True},
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.pipeline_schedule": "zbv_zero_bubble",
            "parallelism.zero_stage": 3,
        },
    ),
    "gpt uneven vocabulary over 2, 2 stages": (
        4,
        {
            "model.overrides": {"vocab_multiple": 1},
            "parallelism.tensor_parallel_degree": 2,
            "parallelism.sequence_parallel": True,
            "parallelism.pipeline_parallel_degree": 2,
        },
    ),
    "bert pairs, both ends on one rank, shards": (
        4,
        BERT_PAIRS
        | {
            "parallelism.pipeline_parallel_degree": 2,
            "parallelism.pipeline_schedule": "zbv_zero_bubble",
            "parallelism.zero_stage": 3,
        },
    ),
    "bert pairs, norms after, 2 stages, sequence": (
        4,
        BERT_PAIRS
        | {
            "model.overrides": BERT_PAIRS["model.overrides"] | {"norm_placement": "post"},
            "parallelism.tensor_parallel_degree": 2,
            "parallelism.sequence_parallel": True,
            "parallelism.pipeline_parallel_degree": 2,
            "activation_checkpoint.mode": "full",
        },
    ),
    **on_eight(ParallelLayout("gpt", "interleaved_1f1b", "2 sp", 3, "2", "full", 4)),
}
EXHAUSTIVE: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt 4 stages": (4, {"parallelism.pipeline_parallel_degree": 4}),
    "llama tied, 4 stages": (
        4,
        {
            "model.family": "llama",
            "model.overrides": {"tied_embeddings": True},
            "parallelism.pipeline_parallel_degree": 4,
            "parallelism.pipeline_schedule": "gpipe",
        },
    ),
    **on_eight(ParallelLayout("llama", "zbv_zero_bubble", "2", 2, "2 replicas", "selective", 2)),
}


def settings(choices: dict[str, Any], run: str, steps: int) -> dict[str, Any]:
    common = {"training.seq_len": 16, "training.global_batch_size": GLOBAL_BATCH, "training.micro_batch_size": 2}
    return common | choices | RUNS[run] | {"training.steps": steps}


def reference(choices: dict[str, Any], run: str, steps: int) -> Case:
    """The same model on one process, each global batch in one piece."""
    model = {key: value for key, value in choices.items() if key.startswith(("model.", "data."))}
    label = json.dumps(model | {"run": run}, sort_keys=True)
    return Case(label, settings(model, run, steps) | {"training.micro_batch_size": GLOBAL_BATCH})


def small(layout: ParallelLayout) -> dict[str, Any]:
    """The layout with a narrow model that has a layer for each stage."""
    has_one_stage = SCHEDULES[layout.schedule] == 1
    return layout.settings() | {"model.overrides": {"hidden_size": 64, "num_layers": 2 if has_one_stage else 4}}


def named(layouts: list[ParallelLayout]) -> dict[str, tuple[int, dict[str, Any]]]:
    return {layout.name: (layout.ranks, small(layout)) for layout in layouts}


NORMAL = named(COVERING) | MORE
ALL = named(COVERING_MORE) | NORMAL | EXHAUSTIVE
STEPS = {"normal": 2, "exhaustive": 10}
RUN_BY_NAME = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]
TESTED = [("normal", name) for name in NORMAL]
TESTED += [pytest.param("exhaustive", name, marks=RUN_BY_NAME) for name in ALL]  # type: ignore[misc]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Result]]:
    """Those of the normal or of the exhaustive run."""

    @cache
    def train(chosen: str) -> dict[str, Result]:
        folder, steps = tmp_path_factory.mktemp("matrix"), STEPS[chosen]
        layouts = NORMAL if chosen == "normal" else ALL
        references = [reference(choices, "adamw", steps) for _, choices in layouts.values()]
        found = run_cases(list({case.name: case for case in references}.values()), 1, folder)
        for ranks in sorted({ranks for ranks, _ in layouts.values()}):
            here = {name: choices for name, (size, choices) in layouts.items() if size == ranks}
            cases = [Case(name, settings(choices, "adamw", steps)) for name, choices in here.items()]
            found |= run_cases(cases, ranks, folder)
        return found

    return train


@pytest.mark.parametrize(("chosen", "name"), TESTED)
def test_same_training_as_one_process(results: Callable[[str], dict[str, Result]], chosen: str, name: str) -> None:
    found = results(chosen)
    result, expected = found[name], found[reference(ALL[name][1], "adamw", 1).name]
    assert result.grad_norms == pytest.approx(expected.grad_norms, rel=FLOAT64_TOLERANCE)
    assert worst(result.gradients, expected.gradients) <= (FLOAT64_TOLERANCE, "")
    weights, expected_weights = without_key_biases(result.weights), without_key_biases(expected.weights)
    assert worst(weights, expected_weights) <= (FLOAT64_TOLERANCE, "")
    assert result.losses == pytest.approx(expected.losses, rel=FLOAT64_TOLERANCE)


@pytest.mark.parametrize(
    ("layouts", "parts", "most"), [(COVERING, pairs_of_kinds, 26), (COVERING_MORE, every_pair, 46)]
)
def test_covering_set_covers_and_stays_small(layouts: list[ParallelLayout], parts: Any, most: int) -> None:
    assert len(layouts) <= most
    assert set().union(*map(parts, layouts)) == set().union(*map(parts, full_product()))
    for axis in ("family", "schedule", "tensor", "zero_stage", "data", "recompute", "microbatches"):
        assert {getattr(each, axis) for each in layouts} == {getattr(each, axis) for each in full_product()}


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_every_layout(tmp_path: Path) -> None:
    """All combinations with two data-parallel ranks in float64; writes what it found."""
    layouts = [layout for layout in full_product() if layout.data == "2"]
    found = run_cases([short(layout, is_reference=True) for layout in layouts[:1] + layouts[-1:]], 1, tmp_path)
    worst_of: dict[str, float] = {}
    for ranks in (2, 4, 8):
        here = [layout for layout in layouts if layout.ranks == ranks]
        for start in range(0, len(here), 100):  # results of one launch are held in memory
            some = here[start : start + 100]
            launched = run_cases([short(layout) for layout in some], ranks, tmp_path)
            worst_of |= {layout.name: difference(layout, launched[layout.name], found) for layout in some}
            print(f"{len(worst_of)} of {len(layouts)} layouts, worst {max(worst_of.values()):.1e}", flush=True)
    result = {
        "layouts": len(worst_of),
        "worst_relative_difference": max(worst_of.values()),
        "compared": "gradient norm, every gradient of step 1, every weight after 2 SGD steps, losses; float64",
        "torch": torch.__version__,
        "machine": platform.machine(),
        "by_layout": worst_of,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    assert max(worst_of.values()) < FLOAT64_TOLERANCE


def short(layout: ParallelLayout, is_reference: bool = False) -> Case:
    """Two steps of SGD in float64."""
    choices, run = layout.settings(), "sgd"
    return reference(choices, run, 2) if is_reference else Case(layout.name, settings(choices, run, 2))


def difference(layout: ParallelLayout, result: Result, references: dict[str, Result]) -> float:
    expected = references[short(layout, is_reference=True).name]
    numbers = zip(result.grad_norms + result.losses, expected.grad_norms + expected.losses, strict=True)
    return max(
        worst(result.gradients, expected.gradients)[0],
        worst(result.weights, expected.weights)[0],
        *(abs(value / wanted - 1) for value, wanted in numbers),
    )
