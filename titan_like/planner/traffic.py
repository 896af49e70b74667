"""What a process sends in a step, composed from a traced microbatch.

Messages within passes come from the trace, repeated. This module adds what one microbatch does not show: sums of
gradients, gathers of weights, and messages between pipeline stages. Sums of single numbers, and of experts' loads,
are left out.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from titan_like.planner.data_parallel import Sharding, communication, shard_elements, sharding_of
from titan_like.planner.stages import StageProgram, Unit, stages_of_rank
from titan_like.planner.trace.program import Parameter
from titan_like.planner.walk import steps_as_run
from titan_like.planner.workload import Workload


class Message(NamedTuple):
    """Messages of one kind in one group; kinds are named as in a traced `Collective`."""

    group: str  # as the recipe calls it
    kind: str
    what: str


class Amount(NamedTuple):
    """Calls, and their bytes in total: of the result of an all-gather, of the input of any other message."""

    calls: int
    bytes: int


def step_traffic(work: Workload, rank: int, shards: Mapping[str, int] = MappingProxyType({})) -> dict[Message, Amount]:
    """Everything that one process sends and receives in a step, as the first rank of tensor and expert parallelism.

    ``rank`` is of the pipeline, ``shards`` its ranks by mesh dimension over which ZeRO shards; 0 if left out.
    """
    stages, sharding = stages_of_rank(work, rank), sharding_of(work)
    steps = steps_as_run(work.pipeline_schedule, rank, work.splits_backward)
    amounts = defaultdict[Message, Amount](lambda: Amount(0, 0))

    def add(group: str, kind: str, what: str, count: int, size: int) -> None:
        if count:
            calls, total = amounts[message := Message(group, kind, what)]
            amounts[message] = Amount(calls + count, total + size)

    for step in steps:
        if step.kind.startswith(("SEND", "RECV")):
            what = "hidden states" if step.kind.endswith("F") else "gradients of hidden states"
            add("pp", "send" if step.kind.startswith("SEND") else "receive", what, 1, stages[step.stage].message)
    for number, stage in stages.items():
        kinds = [step.kind for step in steps if step.stage == number and step.kind in ("F", "B", "I", "W")]
        forwards, backwards = kinds.count("F"), sum(kind in "BI" for kind in kinds)
        for segment in stage.segments:
            for pass_, times in ((segment.forward, forwards), (segment.backward, backwards)):
                for (kind, group, _), (count, size) in pass_.collectives.items():
                    add(group, kind, "activations", count * times, size * times)
        calls_of_stage = _of_fsdp(stage, kinds, sharding) if sharding.rules.wrapped else _plain_sums(stage, sharding)
        for group, kind, size in calls_of_stage:
            add(group, kind, "parameters" if kind == "all_gather" else "gradients", 1, size)
    parameters = [parameter for stage in stages.values() for unit in stage.units for parameter in unit.parameters]
    local: dict[str, int] = {}
    for p in parameters:
        size = sharding.shards[p.sharers]
        local[p.name] = sharding.rules.master * shard_elements(p, size, shards.get(p.sharers, 0) % size)
    partial = sum(local[p.name] for p in parameters if p.partial)
    add("tp", "all_reduce", "partial gradients", min(partial, 1), partial)
    for name, holders in _copies(work, local).items():
        for kind in ("send", "receive"):
            add("pp", kind, "gradients of shared tables", holders - 1, local[name] * (holders - 1))
    return dict(amounts)


_Call = tuple[str, str, int]  # group, kind, bytes
_WITH_REPLICAS = {"dp_shard": "dp", "expert_shard": "expert_dp"}  # groups over several dimensions of the mesh


def _of_fsdp(stage: StageProgram, kinds: Sequence[str], sharding: Sharding) -> Iterator[_Call]:
    """All-gathers of parameters and sums of gradients, with parameters padded to equal shards."""
    rules = sharding.rules
    for gathered, reduced, sums_replicas in communication(stage, kinds, sharding):
        for unit in gathered:
            if sharding.shards[unit.sharers] > 1:
                parameters = (*unit.parameters, *unit.frozen) if rules.gathers_every_pass else unit.parameters
                yield unit.sharers, "all_gather", rules.compute * _padded(parameters, sharding.shards[unit.sharers])
        for unit in reduced:
            shards = sharding.shards[unit.sharers]
            nbytes = rules.reduce * _padded(unit.parameters, shards)
            if not unit.parameters:
                continue
            if not rules.zero_stage:
                yield _with_replicas(unit.sharers, sharding), "all_reduce", nbytes
                continue
            if shards > 1:
                yield unit.sharers, "reduce_scatter", nbytes
            if sums_replicas and sharding.replicate > 1:
                yield "dp_replicate", "all_reduce", nbytes // shards


def _padded(parameters: Iterable[Parameter], shards: int) -> int:
    """Elements of parameters, padded to equal shards."""
    return shards * sum(shard_elements(parameter, shards) for parameter in parameters)


def _plain_sums(stage: StageProgram, sharding: Sharding) -> Iterator[_Call]:
    """One all-reduce for each unit of layers, and one for all other parameters."""
    units = [unit for unit in stage.units if unit.parameters and sharding.holders[unit.sharers] > 1]
    layers = [unit for unit in units if unit.name == "layers"]
    rest = [parameter for unit in units if unit.name != "layers" for parameter in unit.parameters]
    for unit in [*layers, Unit("", rest[0].sharers, tuple(rest))] if rest else layers:
        yield _with_replicas(unit.sharers, sharding), "all_reduce", sharding.rules.master * unit.elements


def _with_replicas(group: str, sharding: Sharding) -> str:
    return group if sharding.replicate == 1 else _WITH_REPLICAS[group]


def _copies(work: Workload, local: dict[str, int]) -> dict[str, int]:
    """This process's parameters that several pipeline ranks hold → number of these ranks."""
    held: Counter[str] = Counter()
    outside = {name for name in local if not name.startswith("layers.")}
    for rank in range(work.pipeline) if work.pipeline > 1 and outside else ():
        stages = stages_of_rank(work, rank).values()
        held.update({p.name for stage in stages for unit in stage.units for p in unit.parameters} & outside)
    return {name: count for name, count in held.items() if count > 1}
