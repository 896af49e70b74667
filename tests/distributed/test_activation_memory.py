"""What our trainer really holds, by torch's memory tracker, beside the planner's formulas."""

from __future__ import annotations

from operator import mul
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor

from tests.distributed.launch import Case, base_config, collect, runs_exhaustive_tests
from tests.losses import summed_loss
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch, model_fields
from titan_like.data.lengths import sample_length
from titan_like.metrics.devices import Device, find_device
from titan_like.models.registry import model_config
from titan_like.parallel import experts
from titan_like.parallel.apply import build_pipeline
from titan_like.parallel.collectives import Group
from titan_like.parallel.context import cp_shard_of
from titan_like.parallel.layout import resolve_layout
from titan_like.parallel.mesh import build_mesh
from titan_like.planner.activations import full_moments, kept_of
from titan_like.planner.dry_run import fake_process_group
from titan_like.planner.memory import memory
from titan_like.planner.predict import workload_of
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.workload import Workload
from titan_like.train.job import process_group
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer

RANKS = 2
CPU = Device("CPU", 2**40, 1e10, 1e10, 1, 1, {"float32": 1e11, "bfloat16": 1e10}, is_cpu=True)
SHAPE = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 160, "vocab_size": 257}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 96}
SHARED = {"num_shared_experts": 2, "num_dense_layers": 1, "ffn_hidden_size": 160}
LARGER = {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 320}


def case(name: str, mode: str = "none", dtype: str = "float32", shape: dict | None = None, **changes: Any) -> Case:
    family = name.split()[0].strip(",")
    own = {"num_kv_heads": 4} if family != "llama" else {"num_kv_heads": 2}
    if family == "moe":
        own = {"num_kv_heads": 2, "ffn_hidden_size": 0} | EXPERTS
    settings = {
        "model.family": family,
        "model.overrides": SHAPE | own | (shape or {}),
        "training.dtype": dtype,
        "training.seq_len": 128,
        "training.micro_batch_size": (size := changes.pop("micro_batch_size", 16)),
        "training.global_batch_size": size * changes.pop("microbatches", 2),
        "activation_checkpoint.mode": mode,
    }
    if family == "t5":
        settings["training.decoder_seq_len"] = 48
    return Case(name, settings | {f"parallelism.{key}": value for key, value in changes.items()})


def sliced(name: str, method: str, mode: str = "none", dtype: str = "float32") -> Case:
    return case(name, mode, dtype, context_parallel_degree=2, context_parallel_method=method)


def split(name: str, mode: str = "none", dtype: str = "float32", sequence_parallel: bool = True) -> Case:
    return case(name, mode, dtype, tensor_parallel_degree=2, sequence_parallel=sequence_parallel)


def with_experts(name: str, mode: str = "none", dtype: str = "float32", ep: int = 2, tp: int = 1, **shape: Any) -> Case:
    """Of 4,096 tokens, next to which the gradients of the experts' weights are small."""
    degrees = {"expert_parallel_degree": ep, "tensor_parallel_degree": tp, "sequence_parallel": tp > 1}
    return case(f"moe {name}", mode, dtype, shape, micro_batch_size=32, **degrees)


EVERY_OTHER = case("llama full, every other layer", "full")
EVERY_OTHER.settings["activation_checkpoint.every_n_layers"] = 2
PASSES = [
    case("gpt bfloat16", dtype="bfloat16"),
    case("gpt dropout", shape={"dropout": 0.1}),
    case("gpt selective", "selective"),
    case("gpt full", "full", "bfloat16"),
    case("llama selective", "selective", "bfloat16"),
    EVERY_OTHER,
    split("gpt tensor parallel", sequence_parallel=False),
    split("gpt sequence parallel, selective", "selective", "bfloat16"),
    split("llama sequence parallel, full", "full"),
    case("bert norms after, bfloat16", dtype="bfloat16", shape={"norm_placement": "post"}),
    case("t5 full, relu", "full", shape={"mlp": "relu"}),
    case("t5 selective bfloat16", "selective", "bfloat16"),
    split("t5 sequence parallel"),
    sliced("llama all-gather", "all_gather"),
    sliced("llama ulysses", "ulysses"),
    sliced("llama ring", "ring"),
    sliced("t5 all-gather", "all_gather"),
    case("moe", shape=SHARED),
    case("moe bfloat16", dtype="bfloat16", shape={"qk_norm": "head"}),
    with_experts("ep, full", "full"),
    with_experts("ep", dtype="bfloat16"),
    with_experts("ep and tp", tp=2, **SHARED),
    with_experts("ep, experts", "experts"),
]
MORE_PASSES = [
    case("llama"),
    case("t5"),
    case("moe selective", "selective", shape=SHARED),
    sliced("gpt all-gather, full", "all_gather", "full", "bfloat16"),
    case("moe full", "full"),
    with_experts("of many, full, bfloat16", "full", "bfloat16", 1, num_experts=64, experts_per_token=8, num_layers=1),
    with_experts("selective, bfloat16", "selective", "bfloat16", ep=1),
    with_experts("ep, selective", "selective"),
    with_experts("tp, selective", "selective", ep=1, tp=2, num_shared_experts=2),
    with_experts("ep and tp, full", "full", tp=2),
    with_experts("tp, experts", "experts", ep=1, tp=2, **SHARED),
    with_experts("experts, bfloat16", "experts", "bfloat16", ep=1, num_layers=1),
    case("moe sigmoid", dtype="bfloat16", shape={"qk_norm": "all", "router_score": "sigmoid", "balance": "bias"}),
    case("moe wide", shape={"expert_ffn_hidden_size": 512}),
    case("gpt grouped queries", shape={"num_kv_heads": 2}),
    split("gpt sequence parallel"),
    split("llama sequence parallel", dtype="bfloat16"),
    split("llama tensor parallel, selective", "selective", sequence_parallel=False),
    split("bert sequence parallel"),
    case("t5 full", "full"),
    case("t5 selective, relu", "selective", shape={"mlp": "relu"}),
    case("t5 dropout", shape={"dropout": 0.1}),
    split("t5 tensor parallel", sequence_parallel=False),
    split("t5 sequence parallel, selective", "selective"),
]
STEPS = [
    case("gpt full, 1 microbatch", "full", shape=LARGER, micro_batch_size=2, microbatches=2),
    case("gpt bfloat16", dtype="bfloat16", micro_batch_size=2, microbatches=4),
    case("gpt zero 3", shape=LARGER, micro_batch_size=2, microbatches=4, zero_stage=3),
    case("gpt pipeline", shape=LARGER, micro_batch_size=2, microbatches=4, pipeline_parallel_degree=2),
]
MORE_STEPS = [
    case("gpt, 2 microbatches", shape=LARGER, micro_batch_size=2, microbatches=4),
    case("gpt, 1 microbatch", shape=LARGER, micro_batch_size=2, microbatches=2),
    case("llama zero 3 bfloat16", dtype="bfloat16", micro_batch_size=2, microbatches=4, zero_stage=3),
    case(
        "llama gpipe",
        shape=LARGER,
        micro_batch_size=2,
        microbatches=4,
        pipeline_parallel_degree=2,
        pipeline_schedule="gpipe",
    ),
]


def marked(cases: list[Case], more: list[Case]) -> list[Any]:
    return [pytest.param(case, marks=[pytest.mark.exhaustive] * (case in more), id=case.name) for case in cases + more]


def measure(rank: int, folder: Path, cases: list[Case]) -> dict[str, int]:
    return {case.name: measure_step(base_config(folder, case.settings)) for case in cases}


class Tracker(MemTracker):
    """Total bytes on the CPU."""

    def knows(self, tensors: Any) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self.track_external(tensor.to_local() if isinstance(tensor, DTensor) else tensor)

    def total(self, moment: str) -> int:
        return self.get_tracker_snapshot(moment)[torch.device("cpu")]["Total"]


def measure_passes(config: JobConfig) -> dict[str, int]:
    """Bytes kept between the forward and the backward pass of one microbatch, and most of both passes."""
    layout, device = resolve_layout(config.parallelism, RANKS), torch.device("cpu")
    mesh = build_mesh(layout, device.type)
    pipeline = build_pipeline(config, model_config(config.model), mesh, device)
    (stage,) = pipeline.model.stages
    stage.data_parallel.before_backward(is_last=False)
    length = sample_length(config, stage.module.config)
    tokens = torch.randint(97, 123, (config.training.micro_batch_size, length.positions))
    whole = Batch(tokens, tokens, encoder_len=length.encoder if length.decoder else None)
    batch = cp_shard_of(config, stage.module.config, mesh).shard(whole)

    def loss() -> torch.Tensor:
        return summed_loss(stage.module, batch.tokens, **model_fields(batch))

    tracker = Tracker()
    tracker.knows(stage.module.parameters())
    with tracker:
        loss().backward()  # weights are gathered and gradients exist from here on
        before = tracker.total("current")
        tracker.reset_mod_stats()  # it wants to be told of modules that are called again
        value = loss()
        held = tracker.total("current") - before
        value.backward()
    return {"kept": held, "peak": tracker.total("peak") - before}


def measure_step(config: JobConfig) -> int:
    """Most bytes of a whole step."""
    trainer = Trainer(prepare_run(resolve_settings(config)))
    data = trainer._load_data()
    trainer.train_step(data)  # the optimizer's state exists from here on
    tracker = Tracker()
    tracker.knows(trainer.model.parameters())
    tracker.knows(value for state in trainer.optimizer.state.values() for value in state.values())
    # Told at the start of every pass; the tracker wants to be told of modules that are called again.
    trainer.pipeline.timeline = Mock(start=lambda step: step.kind == "F" and tracker.reset_mod_stats())
    with tracker:
        trainer.train_step(data)
    data.close()
    return tracker.total("peak")


def equal_exchange(ends: torch.Tensor, group: Group, ends_on_host: bool) -> experts.Exchange:
    """The exchange at equal loads, which a fake group cannot tell."""
    rows, here = int(ends[-1]), len(ends) // group.size
    sizes = [rows // group.size] * group.size
    order = torch.arange(rows).view(group.size, here, -1).transpose(0, 1).flatten()
    return experts.Exchange(sizes, sizes, order, torch.arange(1, here + 1, dtype=torch.int32) * (rows // here))


@pytest.fixture(scope="module")
def passes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """By case. In a fake process group: gloo's threads let go of a collective's buffers some time after it is done."""
    folder = tmp_path_factory.mktemp("passes")
    cases = PASSES + (MORE_PASSES if runs_exhaustive_tests(request) else [])
    with fake_process_group(0, RANKS), pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "exchange_of", equal_exchange)
        return {case.name: measure_passes(base_config(folder, case.settings)) for case in cases}


@pytest.fixture(scope="module")
def steps(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, int]]:
    """By rank and case."""
    cases = STEPS + (MORE_STEPS if runs_exhaustive_tests(request) else [])
    return collect(measure, RANKS, tmp_path_factory.mktemp("activations"), cases)


def workload(config: JobConfig, world_size: int) -> Workload:
    return workload_of(config, model_config(config.model), resolve_layout(config.parallelism, world_size))


@pytest.mark.parametrize("case", marked(PASSES, MORE_PASSES))
def test_activations_are_those_of_the_memory_tracker(passes: Any, case: Case, tmp_path: Path) -> None:
    """What the formulas leave out: labels, positions, generators' states, gradients of single weights."""
    work = workload(base_config(tmp_path / "none", case.settings), RANKS)
    found = passes[case.name]
    one, counts = kept_of(work, CPU), work.model.layer_counts
    within = 0.04 if work.decoder_seq_len else 0.01  # matrices of scores, which a bias keeps from being fused
    layers = sum(map(mul, counts, one.layers))
    assert one.stage + layers + one.entry + one.head + one.logits == pytest.approx(found["kept"], rel=within)
    if work.decoder_seq_len and work.recompute != "none":
        within = 0.07  # the peak is in a layer's backward pass, where the order of freeing matters
    moments = full_moments(work, one, counts, 1, 1, (True, True))
    assert max(sum(moment[1:]) for moment in moments) == pytest.approx(found["peak"], rel=within)


@pytest.mark.parametrize("case", marked(STEPS, MORE_STEPS))
def test_most_memory_of_a_step_is_that_of_the_memory_tracker(steps: Any, case: Case, tmp_path: Path) -> None:
    work = workload(base_config(tmp_path / "none", case.settings), RANKS)
    for rank, found in enumerate(steps):
        predicted = tensors_alone(work, CPU, rank if work.pipeline > 1 else 0)
        assert predicted == pytest.approx(found[case.name], rel=0.05)


def tensors_alone(work: Workload, device: Device, rank: int) -> float:
    """The planner's figure without what is no tensor of ours."""
    profile = builtin_profiles()["fsdp_a100"].changed(
        device=device, trainer_state=True, overhead_bytes=0.0, fragmentation=0.0
    )
    return memory(work, profile).ranks[rank].total


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("model", [("gpt", "gpt3_350m"), ("llama", "llama3.2_1b")], ids=lambda model: model[1])
def test_most_memory_of_a_step_on_a_gpu(model: tuple[str, str], mode: str, tmp_path: Path) -> None:
    family, flavor = model
    changed = {
        "model.flavor": flavor,
        "model.overrides": {"num_layers": 8},
        "training.seq_len": 1024,
        "training.micro_batch_size": 4,
        "training.global_batch_size": 16,
    }
    config = base_config(tmp_path, case(family, mode, "bfloat16").settings | changed)
    with process_group(torch.device("cuda", 0)):
        trainer = Trainer(prepare_run(resolve_settings(config)))
        data = trainer._load_data()
        trainer.train_step(data)
        torch.cuda.reset_peak_memory_stats()
        trainer.train_step(data)
        torch.cuda.synchronize()
        data.close()
        device = find_device(torch.cuda.get_device_name())
        predicted = tensors_alone(workload(config, 1), device, 0)
        assert predicted == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.05)
