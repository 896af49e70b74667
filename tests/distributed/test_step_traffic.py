"""What `step_traffic` and `rank_memory` say of a step, against what four processes really send and hold."""

import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.launch import Case, base_config, collect, trainer_of
from tests.distributed.layouts import pipeline, recompute, sizes, tensor, zero
from tests.traces import fresh_stages
from titan_like.models.registry import model_config
from titan_like.optim.shards import local
from titan_like.parallel.context import ContextCore
from titan_like.parallel.data import DataParallelGroup
from titan_like.parallel.kv_heads import SharedHeads
from titan_like.parallel.layout import resolve_layout
from titan_like.planner.memory import StepMemory, rank_memory
from titan_like.planner.traffic import Amount, Message, step_traffic
from titan_like.planner.workload import workload_of
from titan_like.train.trainer import Trainer
from titan_like.verify.watch import steps_alone

RANKS = 4


def case(name: str, layout: dict[str, Any], unit_bytes: int = 0, microbatches: int | None = None, **shape: Any) -> Case:
    """A small model of the family that the name begins with, each layer a unit unless ``unit_bytes`` has room for more.

    Without virtual stages, models have two layers unless ``shape`` says how many.
    """
    family = name.split()[0]
    pipeline, tensor, context = (
        layout.get(f"parallelism.{a}_parallel_degree", 1) for a in ("pipeline", "tensor", "context")
    )
    has_few_stages = pipeline <= 2 and layout.get("parallelism.virtual_stages_per_rank", 1) == 1
    size: dict[str, Any] = {"hidden_size": 32, "max_seq_len": 48}
    size |= {"num_layers": 2} if has_few_stages and family != "t5" else {}
    size |= {"num_experts": 4, "expert_ffn_hidden_size": 48} if family == "moe" else {}
    batch = 2 * (microbatches or (3 if pipeline == 1 else 4)) * RANKS // (tensor * pipeline * context)
    settings = sizes(16, 2, batch) | {"model.family": family, "model.overrides": size | shape}
    return Case(name, settings | ({"training.decoder_seq_len": 8} if family == "t5" else {}) | layout, unit_bytes)


def context(method: str = "auto") -> dict[str, Any]:
    return {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_method": method}


def experts(degree: int) -> dict[str, Any]:
    return {"parallelism.expert_parallel_degree": degree}


HALF, FULL, SEQUENCE = {"training.dtype": "bfloat16"}, recompute("full"), tensor(2, True)
SPLIT = SEQUENCE | {"parallelism.expert_tensor_parallel_degree": 2}
V_SHAPED = pipeline(2, "zbv_zero_bubble")
SHARED = {"num_layers": 3, "num_shared_experts": 1, "num_dense_layers": 1, "ffn_hidden_size": 64}
CASES = [
    # Two layers share a unit, and of an odd number the last has its own. GPT's layers have 12,704 parameters. T5's have
    # 28,736 to 32,864, and two of different kinds share one.
    case("gpt 5 layers zero3 half", zero(3) | HALF, 55_000, num_layers=5),
    case(
        "gpt 5 layers pp2 zero3 recompute every 2", pipeline() | zero(3) | recompute("full", 2), 110_000, num_layers=5
    ),
    case("gpt 11 layers split v zero2", V_SHAPED | zero(2), 110_000, num_layers=11),
    case("t5 5 layers zero3", zero(3), 250_000, num_layers=5),
    # data parallelism
    case("gpt zero1 half, sums too", zero(1) | HALF | {"training.reduce_dtype": "bfloat16"}),
    case("llama zero2 half", zero(2) | HALF),
    case("gpt 2 replicas zero0 half", zero(0, 2) | HALF),
    # pipelines
    case("gpt pp4 1f1b x6", pipeline(4), microbatches=6),
    case("gpt pp2 zero3, uneven shards of a tied table", pipeline() | zero(3), vocab_multiple=1),
    # tensor and sequence parallelism
    # context parallelism; how much a ring sends is in test_context.py
    case("llama cp2 all_gather zero3 half recompute", context("all_gather") | zero(3) | HALF | FULL),
    # two ranks for each key-value head
    case("llama tp4 sequence half recompute", tensor(4, True) | HALF | FULL, num_kv_heads=2),
    case("llama cp2 ulysses zero0", context("ulysses") | zero(0), num_kv_heads=4),
    # together
    case("bert pp2 split v sequence", SEQUENCE | V_SHAPED | zero(0)),
    # experts
    case("moe ep2 2 replicas zero0 half", experts(2) | zero(0, 2) | HALF, **SHARED),
    case("moe ep2 tp2 cp2 zero3 half", experts(2) | SEQUENCE | context() | zero(3) | HALF, **SHARED),
    case("moe ep2 etp2 recompute zero2", SPLIT | experts(2) | FULL | zero(2), **SHARED),
]
MORE = [
    case("gpt 5 layers zero0 half", zero(0) | HALF, 55_000, num_layers=5),
    case("gpt 5 layers tp2 zero2", tensor() | zero(2), 55_000, num_layers=5),
    case("gpt 2 replicas zero2", zero(2, 2)),
    case("gpt interleaved zero1", pipeline(2, "interleaved_1f1b") | zero(1)),
    case("llama split v zero3", V_SHAPED | zero(3)),
    case("gpt zero1 half sequence", SEQUENCE | zero(1) | HALF),
    case("t5 cp2 all_gather zero2", context("all_gather") | zero(2)),
    case("t5 split v zero2", V_SHAPED | zero(2), num_layers=6),
    case("t5 recompute sequence zero3", SEQUENCE | FULL | zero(3)),
    case("moe ep4 zero3", experts(4) | zero(3), **SHARED),
    case("moe ep2 tp2 recompute zero0", experts(2) | SEQUENCE | FULL | zero(0), **SHARED),
    case("moe etp2 zero1 half", SPLIT | zero(1) | HALF, **SHARED),
    case("moe ep2 pp2 zero2", experts(2) | pipeline() | zero(2), num_layers=4),
    case("moe ep2 5 layers zero3 half", experts(2) | zero(3) | HALF, 110_000, num_layers=5),
]


Ranks = tuple[int, ...]


class RecordCollectives(TorchDispatchMode):
    """Calls and bytes by (ranks, kind), without sums of up to three numbers, of experts' loads and over a pipeline."""

    _KINDS = (
        ("allreduce", "all_reduce"), ("all_reduce", "all_reduce"),
        ("_allgather_base", "all_gather"), ("all_gather_into", "all_gather"),
        ("reduce_scatter", "reduce_scatter"), ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_all", "all_to_all"), ("send", "send"), ("recv", "receive"),
    )  # fmt: skip

    def __init__(self, stages: Ranks, trainer: Trainer) -> None:
        super().__init__()
        self.stages = stages
        self.calls: Counter[tuple[Ranks, str]] = Counter()
        self.bytes: Counter[tuple[Ranks, str]] = Counter()
        take_loads, self.is_paused = trainer.experts.finish, False

        def unseen(skip: torch.Tensor) -> torch.Tensor:
            self.is_paused = True
            figures = take_loads(skip)
            self.is_paused = False
            return figures

        trainer.experts.finish = unseen  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused:
            return result
        if func.namespace == "c10d":
            group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
            self._record(func, args, args[0], dist.ProcessGroup.unbox(group))
        elif func.namespace == "_c10d_functional" and "wait" not in func._schema.name:
            gives_more = "all_gather" in func._schema.name
            self._record(func, args, result if gives_more else args[0], _resolve_process_group(args[-1]))
        return result

    def _record(self, func: Any, args: Any, tensors: Any, group: dist.ProcessGroup) -> None:
        name = func._schema.name.partition("::")[2]
        kind = next(kind for start, kind in self._KINDS if name.startswith(start))
        if name.startswith("_reduce_scatter_base"):
            tensors = args[1]
        tensors = tensors if isinstance(tensors, list) else [tensors]
        ranks = tuple(dist.get_process_group_ranks(group))
        is_of_numbers = len(tensors) == 1 and (tensors[0].numel() <= 3 or ranks == self.stages)
        if len(ranks) == 1 or (kind == "all_reduce" and is_of_numbers):
            return
        self.calls[ranks, kind] += 1
        self.bytes[ranks, kind] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def held_bytes(trainer: Trainer) -> int:
    """Of master weights and the optimizer's state."""
    state = (value for values in trainer.state.optimizer.state.values() for value in values.values() if value.ndim)
    storages = [local(tensor).untyped_storage() for tensor in (*trainer.model.parameters(), *state)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(rank: int, folder: Path, cases: list[Case]) -> dict[str, dict[str, Any]]:
    return {case.name: measure_case(folder, case) for case in cases}


def measure_case(folder: Path, case: Case) -> dict[str, Any]:
    with case.layer_units():
        trainer = trainer_of(folder, case.settings)
    meshes = [mesh for mesh in (trainer.mesh, trainer.model.expert_mesh) if mesh is not None]
    groups = {name: mesh[name].get_group() for mesh in meshes for name in mesh.mesh_dim_names or ()}
    groups["dp"] = trainer.token_group
    if len(meshes) == 2:
        groups |= {
            "tokens": trainer.experts.token_group,
            "expert_dp": DataParallelGroup(meshes[1], "expert_shard").flat().get_group(),
        }
    for core in trainer.model.stages[0].module.modules():
        if isinstance(core, ContextCore):
            groups["cp"] = _resolve_process_group(core.group.name)
        if isinstance(core, SharedHeads):
            groups["kv"] = _resolve_process_group(core.kv_group.name)
    ranks = {name: tuple(dist.get_process_group_ranks(group)) for name, group in groups.items()}
    with RecordCollectives(ranks["pp"], trainer) as collectives:
        steps_alone(trainer, 1)
    calls, sizes = dict(collectives.calls), dict(collectives.bytes)
    return {"ranks": ranks, "calls": calls, "bytes": sizes, "held": held_bytes(trainer)}


Measured = list[dict[str, dict[str, Any]]]  # by rank and case


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Measured]:
    """Of `CASES`, or of `MORE`."""
    folder = tmp_path_factory.mktemp("traffic")
    return cache(lambda more: collect(measure, RANKS, folder, MORE if more else CASES))


def planned(case: Case, rank: int, folder: Path) -> tuple[dict[Message, Amount], StepMemory]:
    config = base_config(Path(os.devnull), case.settings)
    model, layout = model_config(config.model), resolve_layout(config.parallelism, RANKS)
    rest, tensor_rank = divmod(rank, layout.tensor)
    pipeline_rank, shard = rest // layout.weight_ranks, rest % layout.weight_shards
    inside = layout.expert * layout.expert_tensor
    shards = {"dp_shard": shard, "expert_shard": (shard * layout.tensor + tensor_rank) // inside}
    work = workload_of(config, model, layout)
    with case.layer_units(), fresh_stages(folder):
        return step_traffic(work, pipeline_rank, shards), rank_memory(work, pipeline_rank)


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in MORE)], ids=lambda case: case.name
)
def test_what_every_rank_sends_and_holds(measured: Callable[[bool], Measured], case: Case, tmp_path: Path) -> None:
    rows: Counter[str] = Counter()  # of experts, on all ranks: what a single rank gets depends on the router
    held: dict[StepMemory, int] = {}  # the most of all ranks for which the same is planned
    for rank in range(RANKS):
        found, (traffic, memory) = measured(case in MORE)[rank][case.name], planned(case, rank, tmp_path)
        calls: Counter[tuple[Ranks, str]] = Counter()
        sizes: Counter[tuple[Ranks, str]] = Counter()
        for (group, kind, _), (count, size) in traffic.items():
            calls[found["ranks"][group], kind] += count
            sizes[found["ranks"][group], kind] += size
        assert dict(calls) == found["calls"], rank
        sent = found["bytes"]
        if "moe" in case.name:
            for name in ("ep", "etp"):
                exchange = found["ranks"].get(name), "all_to_all"
                rows.update(planned=sizes.pop(exchange, 0), sent=sent.pop(exchange, 0))
        assert dict(sizes) == sent, rank
        held[memory] = max(found["held"], held.get(memory, 0))
    assert rows["planned"] == rows["sent"]
    assert [memory.parameters + memory.optimizer for memory in held] == [*held.values()]
