"""Pipeline schedules × tensor and sequence parallelism × ZeRO × data parallelism × recomputation × microbatches.

Every layout is compared with one process by the gradient norms before clipping, every parameter's gradient of the first
step and every weight after the last, in float64, where summation order leaves less than 1e-10. Some are in float32.

The biases of GPT's keys are left out of the weights. Softmax does not change when all its inputs move together, so
their gradient is zero (`test_key_biases_have_no_gradient`), and what is computed is rounding, which AdamW and Adafactor
scale up to whole steps. For the same reason Adafactor neither clips GPT's updates nor scales them by the weights.

A set runs here, for two steps of AdamW, that covers every pair of choices, where schedules of one kind count as one and
each schedule occurs. ``pytest -m exhaustive`` runs a set in which all pairs of schedules with others occur, with what
`EXHAUSTIVE` adds, for ten steps, and all combinations with two data-parallel ranks for two steps of SGD (an hour on two
cores), and writes benchmarks/results/layout_matrix_cpu.json.
"""

import json
import platform
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import Case, Result, assert_same, run_cases, train_layouts, worst
from tests.distributed.layouts import (
    GLOBAL_BATCH,
    RULE_NAMES,
    SCHEDULES,
    ParallelLayout,
    covering_set,
    every_pair,
    full_product,
    pairs_of_kinds,
    pipeline,
    recompute,
    tensor,
    with_rule,
    zero,
)
from tests.float64 import bound

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "layout_matrix_cpu.json"
FLOAT64 = {"training.dtype": "float64"}
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer.name": "adamw", "optimizer.lr": 1e-3} | FLOAT64,
    # On DTensors, PyTorch's foreach SGD works out a placement for whole lists of tensors, once a layout: a quarter of
    # the time of this file.
    "sgd": {"optimizer.name": "sgd", "optimizer.lr": 0.1, "optimizer.implementation": "for-loop"} | FLOAT64,
}
FLOAT64_TOLERANCE = bound(4096 * 100)  # of 100 passes: ten steps of up to ten microbatches
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


def in_units(layers: int) -> dict[str, Any]:
    """Layers of which two share a unit of communication, or with tensor parallelism four."""
    return {"model.overrides": {"hidden_size": 64, "num_layers": layers}}


def t5(encoder: int, decoder: int, **more: Any) -> dict[str, Any]:
    """This many layers in each stack; heads of 24 dimensions, wider than the hidden states."""
    fields = {"hidden_size": 64, "num_layers": encoder + decoder, "num_decoder_layers": decoder, "head_size": 24}
    return {"model.family": "t5", "training.decoder_seq_len": 8, "model.overrides": fields | more}


def shared_heads(kv_heads: int, **more: Any) -> dict[str, Any]:
    """A decoder with few key-value heads."""
    fields = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": kv_heads}
    return {"model.family": "llama", "model.overrides": fields | more}


def micro_batch(size: int) -> dict[str, Any]:
    return {"training.micro_batch_size": size}


RELU_TIED = {"mlp": "relu", "tied_embeddings": True}
# With its usual epsilon AdamW scales the rounding of small gradients up.
FLOAT32: dict[str, Any] = {"training.dtype": "float32", "optimizer.eps": 1e-3}
COMPILED = FLOAT32 | {"compile.enable": True, "model.overrides": {"num_layers": 2}}


def by_rules(
    rules: tuple[str, ...], ranks: int, family: str, layout: dict[str, Any], layers: int = 2
) -> dict[str, tuple[int, dict[str, Any]]]:
    """The layout with each of the rules."""
    told = " ".join(f"{key.rpartition('.')[2]} {value}" for key, value in layout.items())
    names = {f"{rule} of {family} on {ranks}, {told}": rule for rule in rules}
    return {name: (ranks, with_rule(rule, family, layers) | layout) for name, rule in names.items()}


TIED_LLAMA = {"model.family": "llama", "model.overrides": {"tied_embeddings": True}}
PAIRS_AFTER = BERT_PAIRS | {"model.overrides": BERT_PAIRS["model.overrides"] | {"norm_placement": "post"}}
# Over 4 ranks, 30 rows are 8, 8, 8, 6; 5 rows are 2, 2, 1 and none; 257 and 33 rows are uneven too.
ODD = {"num_layers": 2, "hidden_size": 30, "vocab_multiple": 1}
ODD_GPT = {"model.overrides": ODD | {"num_attention_heads": 2, "ffn_hidden_size": 5, "max_seq_len": 33}}
ODD_LLAMA = {
    "model.family": "llama",
    "model.overrides": ODD | {"num_attention_heads": 3, "num_kv_heads": 1, "ffn_hidden_size": 6},
}
MORE: dict[str, tuple[int, dict[str, Any]]] = {  # what the set has not: ranks and settings
    "units of 2 and 1 layers, zero 3, recompute every 2": (2, in_units(5) | zero(3) | recompute("full", 2)),
    "gpt 1 and 3 layers": (2, pipeline() | {"parallelism.pipeline_layers": [1, 3]}),
    "llama tied, both ends on one rank, shards": (4, TIED_LLAMA | pipeline(2, "zbv_zero_bubble") | zero(3)),
    "gpt uneven vocabulary over 2, 2 stages": (
        4,
        {"model.overrides": {"vocab_multiple": 1}} | tensor(2, True) | pipeline(),
    ),
    "bert pairs, norms after, 2 stages, sequence": (4, PAIRS_AFTER | tensor(2, True) | pipeline() | recompute("full")),
    "unequal shards of gpt, zero 3 of 4": (4, ODD_GPT | zero(3)),
    "one process, recompute selective, 4 microbatches": (1, recompute("selective") | micro_batch(2)),
    "t5 the first of 2 stages ends in the decoder": (2, t5(1, 4) | pipeline(2)),
    "t5 zbv, zero 3": (4, t5(3, 3) | pipeline(2, "zbv_zero_bubble") | zero(3)),
    "4 ranks for 2 key-value heads, head norms, recompute full": (
        4,
        shared_heads(2, qk_norm="head") | tensor(4, True) | recompute("full"),
    ),
    "2 ranks for a key-value head, zero 3": (4, shared_heads(1) | tensor() | zero(3)),
    "2 ranks for a key-value head, zbv, sequence": (
        4,
        shared_heads(1, num_layers=4) | tensor(2, True) | pipeline(2, "zbv_zero_bubble"),
    ),
    **by_rules(("adafactor",), 4, "llama", zero(2, 2)),
    **by_rules(("muon",), 4, "llama", zero(3) | tensor()),
    **by_rules(("muon",), 4, "moe", tensor(2, True) | pipeline() | {"parallelism.expert_parallel_degree": 2}),
}
EXHAUSTIVE: dict[str, tuple[int, dict[str, Any]]] = {
    "units of 4 and 1 layers, tensor 2, zero 3": (4, in_units(5) | tensor() | zero(3)),
    "units of 2 and 1 layers, 2 × 2 stages, zbv, zero 3": (4, in_units(12) | pipeline(2, "zbv_zero_bubble") | zero(3)),
    "float32, zero 3, sequence": (4, FLOAT32 | zero(3) | tensor(2, True)),
    "t5 sequence of 4, relu, tied": (4, t5(2, 2, **RELU_TIED) | tensor(4, True)),
    **by_rules(("adafactor",), 4, "gpt", zero(1) | pipeline(2, "zbv_zero_bubble"), layers=4),  # both ends on one rank
    "units of 2 and 1 layers, zero 0": (2, in_units(5) | zero(0)),
    "units of 2 and 1 layers, 2 replicas of zero 3": (4, in_units(5) | zero(3, 2)),
    "bert pairs, both ends on one rank, shards": (4, BERT_PAIRS | pipeline(2, "zbv_zero_bubble") | zero(3)),
    "unequal shards of llama, zero 1 of 4": (4, ODD_LLAMA | zero(1)),
    "one process, 4 microbatches": (1, micro_batch(2)),
    "one process, recompute full every 2": (1, recompute("full", 2)),
    "one microbatch, zero 0": (2, zero(0) | micro_batch(4)),
    "float32, 2 stages": (2, FLOAT32 | pipeline()),
    "4 ranks for a key-value head": (4, shared_heads(1) | tensor(4)),
    "2 ranks for a key-value head, context": (
        4,
        shared_heads(1) | tensor(2, True) | {"parallelism.context_parallel_degree": 2},
    ),
    "t5 zero 0": (2, t5(2, 2) | zero(0)),
    "t5 a unit of an encoder's and a decoder's layer, zero 3": (2, t5(1, 2, ffn_hidden_size=96) | zero(3)),
    "t5 grouped queries, tensor 2": (2, t5(2, 2, num_kv_heads=2) | tensor(2)),
    "t5 the last of 2 stages begins in the encoder, relu, tied": (2, t5(4, 1, **RELU_TIED) | pipeline(2)),
    "t5 1 and 4 layers": (2, t5(3, 2) | pipeline(2) | {"parallelism.pipeline_layers": [1, 4]}),
    "t5 interleaved": (2, t5(3, 3) | pipeline(2, "interleaved_1f1b")),
    "t5 2 stages, sequence, recompute full": (4, t5(3, 3) | pipeline(2) | tensor(2, True) | recompute("full")),
    **by_rules(RULE_NAMES, 4, "llama", zero(3)),
    **by_rules(RULE_NAMES, 4, "llama", zero(2, 2)),
    **by_rules(RULE_NAMES, 4, "gpt", zero(1) | tensor(2, True)),
    **by_rules(RULE_NAMES, 4, "llama", zero(3) | tensor()),
    **by_rules(RULE_NAMES, 4, "gpt", tensor(2, True) | pipeline()),
    **by_rules(RULE_NAMES, 4, "moe", zero(3)),
    **by_rules(RULE_NAMES, 4, "moe", zero(1) | {"parallelism.expert_parallel_degree": 2}),
    **by_rules(RULE_NAMES, 4, "moe", zero(1) | tensor(2, True) | {"parallelism.expert_tensor_parallel_degree": 2}),
    # on more ranks than the tests take otherwise
    "gpt 4 stages of 6 layers, balanced": (4, {"model.overrides": {"num_layers": 6}} | pipeline(4)),
    "llama tied, 4 stages": (4, TIED_LLAMA | pipeline(4, "gpipe")),
    **on_eight(ParallelLayout("gpt", "interleaved_1f1b", "2 sp", 3, "2", "full", 4)),
    **on_eight(ParallelLayout("llama", "zbv_zero_bubble", "2", 2, "2 replicas", "selective", 2)),
    "t5 2 × 2 stages, sequence, zero 3, relu, tied": (
        8,
        t5(3, 3, **RELU_TIED) | pipeline(2, "interleaved_1f1b") | tensor(2, True) | zero(3),
    ),
    **by_rules(RULE_NAMES, 8, "gpt", zero(2) | tensor(2, True) | pipeline()),
    **by_rules(RULE_NAMES, 8, "gpt", zero(1) | pipeline(2, "zbv_zero_bubble"), layers=4),
}
if shutil.which("g++") or shutil.which("clang++"):  # which torch.compile needs on a CPU
    EXHAUSTIVE["compiled, sequence, recompute full"] = 2, COMPILED | tensor(2, True) | recompute("full")
    MORE["compiled whole, zero 1"] = 2, COMPILED | zero(1) | {"compile.scope": "model"}
    EXHAUSTIVE["compiled whole"] = 1, COMPILED
    EXHAUSTIVE["compiled whole, data parallel"] = 2, COMPILED | {"compile.scope": "model"}
    EXHAUSTIVE["compiled, zero 3, recompute selective"] = 2, COMPILED | zero(3) | recompute("selective")


def settings(choices: dict[str, Any], run: str, steps: int) -> dict[str, Any]:
    common = {"training.seq_len": 16, "training.global_batch_size": GLOBAL_BATCH, "training.micro_batch_size": 2}
    return common | RUNS[run] | choices | {"training.steps": steps}


def reference(choices: dict[str, Any], run: str, steps: int) -> Case:
    """The same model on one process, each global batch in one piece."""
    kept = "model.", "data.", "optimizer.", "lr_scheduler.", "training.dtype", "training.decoder"
    model = {key: value for key, value in choices.items() if key.startswith(kept)}
    label = json.dumps(model | {"run": run}, sort_keys=True)
    return Case(label, settings(model, run, steps) | {"training.micro_batch_size": GLOBAL_BATCH})


def named(layouts: list[ParallelLayout]) -> dict[str, tuple[int, dict[str, Any]]]:
    """The layouts with narrow models that have a layer for each stage."""
    layers = {layout: 2 if SCHEDULES[layout.schedule] == 1 else 4 for layout in layouts}
    overrides = {layout: {"model.overrides": {"hidden_size": 64, "num_layers": layers[layout]}} for layout in layouts}
    return {layout.name: (layout.ranks, layout.settings() | overrides[layout]) for layout in layouts}


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
        layouts, steps = NORMAL if chosen == "normal" else ALL, STEPS[chosen]
        cases = {
            name: (ranks, Case(name, settings(choices, "adamw", steps)), reference(choices, "adamw", steps))
            for name, (ranks, choices) in layouts.items()
        }
        return train_layouts(cases, tmp_path_factory.mktemp("matrix"))

    return train


@pytest.mark.parametrize(("chosen", "name"), TESTED)
def test_same_training_as_one_process(results: Callable[[str], dict[str, Result]], chosen: str, name: str) -> None:
    found, (_, choices) = results(chosen), ALL[name]
    expected, heads = (
        found[reference(choices, "adamw", 1).name],
        choices.get("model.overrides", {}).get("num_attention_heads", 4),
    )
    in_float32 = FLOAT32.items() <= choices.items()  # sums of 512 tokens
    assert_same(found[name], expected, bound(512, torch.float32) if in_float32 else FLOAT64_TOLERANCE, heads=heads)
    assert all(gradient.any() for gradient in expected.gradients.values())
    # The compiler fuses operations, which rounds differently: equal to the last bit would mean it did not run.
    compiles = "compile.enable" in choices
    assert not compiles or any(not torch.equal(g, expected.gradients[n]) for n, g in found[name].gradients.items())
    assert "optimizer.name" not in choices or expected.losses[-1] < expected.losses[0] - 0.01


def test_key_biases_have_no_gradient(results: Callable[[str], dict[str, Result]]) -> None:
    gradients = results("normal")[reference({}, "adamw", 1).name].gradients
    fused = [gradient.view(4, 3, -1) for name, gradient in gradients.items() if name.endswith("qkv.bias")]
    assert fused and all(one[:, 1].norm() < bound() * one.norm() for one in fused)


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
