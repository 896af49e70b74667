"""Traces of one microbatch, and what is composed from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trace_memory import settings_of
from tests.traces import microbatch_flops, microbatch_tokens
from tests.whole_step import whole_step
from titan_like.config.load import edit, load_config
from titan_like.config.schema import JobConfig
from titan_like.metrics.flops import hardware_flops_per_token, model_flops_per_token, recomputed_layers
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import model_config
from titan_like.parallel.layout import Layout, resolve_layout
from titan_like.parallel.schedules.simulate import max_in_flight
from titan_like.parallel.schedules.tables import SCHEDULES, schedule_table, stages_per_rank
from titan_like.planner import trace as traces
from titan_like.planner.memory import candidates, rank_memory, rank_moments
from titan_like.planner.trace import run, trace
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.trace.program import Moment, Program, fullest
from titan_like.planner.traffic import step_traffic
from titan_like.planner.walk import occupancy
from titan_like.planner.workload import PipelineSchedule, Workload, workload_of

Run = tuple[JobConfig, TransformerConfig, Layout]
# Kinds of layers that take turns, of equal parameters and different cost.
KINDS = {"layer_pattern": '["near","near","full"]', "kinds": "{near={window=24}}", "attention_sinks": "true"}


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Traces of these tests alone."""
    with pytest.MonkeyPatch.context() as patch:
        where = tmp_path_factory.mktemp("traces")
        patch.setattr(traces, "default_folder", lambda: where)
        yield where


def a_run(layout: str, dtype: str = "bfloat16", **overrides: Any) -> Run:
    """A run in the words of benchmarks/trace_memory.py, with one to three layers a stage."""
    family, flavor, seq_len, micro, microbatches, processes, *words = layout.split()
    settings = {"training.dtype": dtype, "model.family": family, "model.flavor": flavor, "training.steps": 1}
    every_second = "full2" in words
    words = ["full" if word == "full2" else word for word in words]
    settings |= {"training.seq_len": seq_len, "training.micro_batch_size": micro} | settings_of(words)
    settings |= {"activation_checkpoint.every_n_layers": 2} if every_second else {}
    settings |= {f"model.overrides.{name}": value for name, value in overrides.items()}
    degrees = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree")
    data_parallel = int(processes)
    for degree in degrees:
        data_parallel //= settings.get(f"parallelism.{degree}", 1)
    settings["training.global_batch_size"] = int(micro) * int(microbatches) * data_parallel
    config = load_config([f"--{key}={value}" for key, value in settings.items()])
    return config, model_config(config.model), resolve_layout(config.parallelism, int(processes))


def work_of(run: Run) -> Workload:
    return workload_of(*run)


# --- Keys and files ---------------------------------------------------------------------------------------------------


def test_what_a_trace_does_not_depend_on_shares_one() -> None:
    same = [
        "llama debug 64 2 4 8 z3",
        "llama debug 64 2 8 16 z1 hsdp2",
        "llama debug 64 2 1 4 z0",
    ]
    assert len({TraceKey.of(work_of(a_run(layout))) for layout in same}) == 1
    assert len({TraceKey.of(work_of(a_run(same[0], num_layers=layers))) for layers in (4, 8)}) == 1
    others = ["llama debug 64 2 4 8 z3 pp2", "llama debug 64 2 4 8 tp2 sp", "llama debug 64 2 4 8 full"]
    others += ["llama debug 128 2 4 8", "llama debug 64 1 4 8", "llama debug 64 2 4 8 pp2 zbv_zero_bubble"]
    assert len({TraceKey.of(work_of(a_run(layout))) for layout in [*same, *others]}) == 7


def test_a_trace_is_kept_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = TraceKey.of(work_of(a_run("moe debug 64 2 2 4 z2 ep2 tp2 sp full")))
    program = trace(key, tmp_path)
    (file,) = tmp_path.iterdir()
    assert Program.from_json(json.loads(file.read_text())).tree == program.tree
    traces.trace.cache_clear()
    monkeypatch.setattr(run, "run_trace", None)
    assert trace(key, tmp_path).tree == program.tree


@pytest.mark.parametrize("text", ["", "{", "[]", '{"groups": {}}'])
def test_a_damaged_file_is_traced_again(text: str, tmp_path: Path) -> None:
    key = TraceKey.of(work_of(a_run("gpt debug 32 1 1 1")))
    (tmp_path / key.file_name).write_text(text)
    traces.trace.cache_clear()
    program = trace(key, tmp_path)
    assert json.loads((tmp_path / key.file_name).read_text()) == json.loads(json.dumps(program.tree))


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    traces.trace.cache_clear()
    assert trace(TraceKey.of(work_of(a_run("gpt debug 32 1 1 1"))), tmp_path / "file" / "folder").layers


def test_a_moment_is_left_out_only_where_another_one_is_always_fuller() -> None:
    moments = [Moment(10, 0), Moment(9, 2), Moment(5, 3), Moment(4, 6), Moment(3, 6), Moment(1, 7)]
    kept = fullest(moments)
    for bytes_of_element, most in product((0, 0.5, 1, 2, 4, 100), (1, 2, 3, 9)):  # of gradients, at once

        def size(moment: Moment, each: float = bytes_of_element, limit: int = most) -> float:
            return moment.activations + each * min(moment.gradients, limit)

        assert max(map(size, kept)) == max(map(size, moments))
    assert kept == [Moment(10, 0), Moment(9, 2), Moment(5, 3), Moment(4, 6), Moment(1, 7)]


# --- What a step sends and computes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        "llama debug 64 2 2 4 z3 full",
        "gpt debug 64 2 2 4 tp2 sp selective",
        "moe debug 64 2 2 4 ep4 experts",
        "bert debug 64 2 2 4 tp2 sp",
        "t5 debug 64 2 2 4 pp2",
        "llama debug 64 2 2 4 cp2 all_gather",
        "llama debug 64 2 2 4 cp2 ring full",
        "gpt debug 64 2 2 4 pp2 v2 interleaved_zero_bubble",
    ],
)
def test_flops_are_those_of_the_formula(layout: str) -> None:
    """Slices of a causal sequence skip what the mask hides, so their FLOPs are those with half the matrix."""
    work = work_of(a_run(layout))
    causal = work.context > 1
    per_token = model_flops_per_token(work.model, work.seq_len, causal, work.decoder_seq_len)
    found = sum(microbatch_flops(work, rank, causal=causal) for rank in range(work.pipeline))
    assert found == per_token * microbatch_tokens(work) / work.tensor


@pytest.mark.parametrize("layout", [
    "llama debug 64 2 2 4 full2", "llama debug 64 2 2 4 cp2 all_gather", "llama debug 64 2 2 4 cp2 ulysses",
    "llama debug 64 2 2 4 cp2 ring", "llama debug 64 2 2 4 tp2 sp pp2 v2 interleaved_1f1b", "moe debug 64 2 2 4 ep2",
])  # fmt: skip
@pytest.mark.parametrize("cap", [0, 2])
def test_flops_of_kinds_that_take_turns(layout: str, cap: float) -> None:
    """Layers with a window have those of its keys, on whichever stage they are."""
    dense = {"num_dense_layers": 1} if layout.startswith("moe") else {}
    work = work_of(a_run(layout, num_layers=5, attention_softcap=cap, **KINDS, **dense))
    assert work.model.layer_kinds == ((0, 1, 2, 1, 1) if dense else (0, 0, 1, 0, 0))
    causal = work.context > 1 and not cap
    per_token = model_flops_per_token(work.model, work.seq_len, causal)
    found = sum(microbatch_flops(work, rank, causal=causal) for rank in range(work.pipeline))
    assert found == pytest.approx(
        per_token * microbatch_tokens(work) / work.tensor, rel=1e-4 if work.context > 1 else 0
    )
    parts, (full, near) = work.model.parts, (64 * 64, 64 * 24)
    scores = full + 4 * near
    products = sum(parts.kinds[kind].matrices[0] for kind in work.model.layer_kinds) + parts.head_matrices
    assert model_flops_per_token(work.model, 64) == 6 * (products + 2 * work.model.attention_size * scores / 64)
    hidden = full - 64 * 64 // 2 + 4 * (24 * 24 // 2)  # from the first 24 queries a window hides what the mask does
    per_token = 12 * work.model.attention_size / 64
    causal_flops = model_flops_per_token(work.model, 64, causal=True)
    assert model_flops_per_token(work.model, 64) - causal_flops == pytest.approx(per_token * hidden)
    if "full2" in layout:  # layers 0, 2 and 4
        recompute = work.activation_checkpoint
        more = hardware_flops_per_token(work.model, 64, recompute) - model_flops_per_token(work.model, 64)
        assert recomputed_layers(work.model, recompute) == (2, 1)
        skipped = (
            3 * 2 * 128 * 384 * microbatch_tokens(work)
        )  # nothing needs the result of a recomputed layer's last product
        again = microbatch_flops(work, 0, recomputed=True) - microbatch_flops(work, 0)
        assert more * microbatch_tokens(work) - skipped == again


# --- Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "layers", "within"),
    [
        ("llama llama3.2_1b 1024 1 1 1", 4, 0.002),
        pytest.param("gpt gpt2_1558m 1024 2 1 1", 12, 0.005, marks=pytest.mark.exhaustive),
        ("gpt debug 256 2 3 4 z0", 4, 0.002),
        ("gpt gpt2_124m 512 1 2 2 pp2 float32", 4, 0.001),  # both ends hold the table
        ("llama llama3.2_1b 1024 1 1 1 adafactor", 4, 0.001),  # fullest in the update
        ("llama llama3.2_1b 1024 1 3 4 z3 offload", 4, 0.001),
        pytest.param(
            "llama llama3.2_1b 1024 1 4 4 z2 pp2 gpipe offload", 4, 0.005, marks=pytest.mark.exhaustive
        ),  # a layer leaves during other passes
        ("llama llama3.2_1b 1024 1 4 4 z3 pp2 v2 dualpipe_v", 8, 0.005),  # weights gathered early in second parts
        ("llama llama3.2_1b 512 1 2 2 z0 pp2 dualpipe_v", 4, 0.002),  # a table's gradients in 16 bits, then sums
        ("moe debug 256 2 3 4 z1 float32", 4, 0.005),  # gradients are added in place
        ("decoder qwen3_8b 512 1 2 4 z2 pp2 hsdp2", 4, 0.001),  # a single shard
        ("llama llama3.2_1b 1024 1 3 4 z2 tp2 sp selective", 4, 0.005),
        pytest.param("llama llama3.2_1b 1024 1 4 4 z3 pp2", 4, 0.01, marks=pytest.mark.exhaustive),
        pytest.param(
            "llama llama3.2_1b 1024 1 4 4 z2 pp2 v2 interleaved_zero_bubble", 4, 0.02, marks=pytest.mark.exhaustive
        ),
        pytest.param("moe debug 256 2 2 4 z3 ep2", 4, 0.03, marks=pytest.mark.exhaustive),
        ("t5 debug 256 2 2 4 z2 pp2", 4, 0.02),
        pytest.param("t5 60m 512 1 1 1", 6, 0.012, marks=pytest.mark.exhaustive),
        ("moe debug 256 2 2 4 z3 ep2 experts", 4, 0.02),
        pytest.param("llama llama3.2_1b 1024 1 3 1 kinds", 5, 0.004, marks=pytest.mark.exhaustive),
        pytest.param(
            "llama llama3.2_1b 1024 1 4 4 z3 pp2 v2 interleaved_1f1b kinds", 5, 0.02, marks=pytest.mark.exhaustive
        ),
        ("llama llama3.2_1b 1024 1 2 4 z1 cp2 ring full2 kinds", 5, 0.02),
    ],
)
def test_the_peak_is_that_of_the_whole_step(layout: str, layers: int, within: float) -> None:
    config, model, where = a_run(
        layout.removesuffix(" kinds"), num_layers=layers, **(KINDS if layout.endswith(" kinds") else {})
    )
    work = workload_of(config, model, where)
    for rank in range(work.pipeline):
        whole = whole_step(config, model, where, rank * (where.num_processes // where.pipeline))
        composed = rank_memory(work, rank)
        assert composed.total == pytest.approx(whole.peak, rel=within)
        assert (composed.parameters, composed.optimizer) == (whole.weights, whole.optimizer)


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        ("llama llama3.2_1b 512 1 1 1 sgd", 4),
        pytest.param("llama llama3.2_1b 512 1 2 4 z2 adafactor", 4, marks=pytest.mark.exhaustive),
        ("gpt gpt2_355m 512 1 2 6 z3 muon", 3),  # rows are uneven
        ("moe olmoe_1b_7b 512 1 1 8 z1 tp2 sp ep4 muon", 2),
        pytest.param(
            "moe olmoe_1b_7b 512 1 1 2 z0 ep2 muon", 2, marks=pytest.mark.exhaustive
        ),  # each process has whole matrices
    ],
)
def test_the_fullest_moment_of_the_update_is_that_of_the_whole_step(layout: str, layers: int) -> None:
    config, model, where = a_run(layout, num_layers=layers)
    _, update = rank_moments(workload_of(config, model, where), 0)
    assert update.total == pytest.approx(whole_step(config, model, where, 0).update, rel=0.0025)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("llama llama3.2_1b 1024 1 3 1 selective", marks=pytest.mark.exhaustive),
        "llama llama3.2_1b 1024 1 4 4 z3 pp2",
        pytest.param("llama llama3.2_1b 1024 1 3 4 z2 tp2 sp", marks=pytest.mark.exhaustive),
        "moe debug 256 2 2 4 z3 ep2",
    ],
)
def test_the_peak_with_adapters_is_that_of_the_whole_step(layout: str) -> None:
    config, model, where = a_run(layout, num_layers=4)
    config = edit(config, {"lora.rank": 16})
    for rank in range(where.pipeline):
        whole = whole_step(config, model, where, rank * (where.num_processes // where.pipeline))
        composed = rank_memory(workload_of(config, model, where), rank)
        assert composed.total == pytest.approx(whole.peak, rel=0.008)
        assert (composed.parameters, composed.optimizer) == (whole.weights, whole.optimizer)


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("moe debug 64 2 2 8 z3 ep2 tp2 sp hsdp2 full", 0),
        pytest.param("llama llama3.2_1b 1024 1 4 8 z3 hsdp2", 16, marks=pytest.mark.exhaustive),
        ("llama llama3.2_1b 1024 1 2 8 z1 hsdp2", 16),
        pytest.param("gpt debug 64 1 4 16 z1 hsdp2 pp2 tp2 sp", 0, marks=pytest.mark.exhaustive),
    ],
)
def test_what_a_whole_step_sends_is_what_is_composed(layout: str, rank: int) -> None:
    config, model, where = a_run(layout, **({"num_layers": 4} if rank else {}))
    config = edit(config, {"lora.rank": rank})
    whole = whole_step(config, model, where, 0)
    sent: dict[tuple[str, str], tuple[int, int]] = {}
    for (kind, group, _), (calls, size) in [*whole.collectives.items(), *whole.sums.items()]:
        before = sent.get((group, kind), (0, 0))
        sent[group, kind] = before[0] + calls, before[1] + size
    composed: dict[tuple[str, str], tuple[int, int]] = {}
    for (group, kind, _), amount in step_traffic(work_of((config, model, where)), 0).items():
        before = composed.get((group, kind), (0, 0))
        composed[group, kind] = before[0] + amount.calls, before[1] + amount.bytes
    assert sent == composed


def fullest_of(work: Workload, ranks: Iterable[int] | None = None) -> int:
    return max(rank_memory(work, rank).total for rank in ranks or candidates(work))


@pytest.mark.parametrize(("schedule", "pipeline", "rounds"), [*product(SCHEDULES, (2, 4), (1, 2, 4))])
def test_a_rank_holds_as_many_microbatches_as_its_table_says(schedule: str, pipeline: int, rounds: int) -> None:
    virtual = stages_per_rank(schedule, 3)
    microbatches = rounds * pipeline
    expected = max_in_flight(schedule_table(schedule, pipeline, virtual, microbatches))
    for rank in range(pipeline):
        found = occupancy(PipelineSchedule(schedule, pipeline, virtual, microbatches), rank, splits_backward=True)
        held = (found.held + found.deferred).sum(1)
        running = [one.kind for kinds in found.passes for one in kinds]
        during = [running[number] == "F" for number in found.running]
        assert max(held + during) == expected[rank]


def test_memory_does_not_depend_on_how_many_rounds_a_schedule_has() -> None:
    few, many = (work_of(a_run(f"llama debug 64 2 {m} 4 pp4")) for m in (12, 64))
    assert fullest_of(few) == fullest_of(many)
