"""What a process sends in a step, composed from a traced microbatch.

Messages within passes come from the trace, repeated. This module adds what one microbatch does not show: sums of
gradients, gathers of weights, and messages between pipeline stages. Sums of single numbers, and of experts' loads,
are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from titan_like.parallel.layout import Layout
from titan_like.planner.occupancy import splits_backward, steps_as_run
from titan_like.planner.stages import Sharding, StageProgram, Unit, shard_rows, sharding_of, stages_of_rank
from titan_like.planner.trace.program import Parameter
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


class Coordinates(NamedTuple):
    """A process's position in the mesh."""

    pipeline: int
    shards: Mapping[str, int] = MappingProxyType({})  # by mesh dimension over which ZeRO shards; 0 if left out


def step_traffic(work: Workload, coordinates: Coordinates, reduce_bytes: int = 4) -> dict[Message, Amount]:
    """Everything that one process sends and receives in a step, as the first rank of tensor and expert parallelism.

    ``reduce_bytes``: of an element in `training.reduce_dtype`.
    """
    stages, sharding = stages_of_rank(work, coordinates.pipeline), sharding_of(work, reduce_bytes)
    layout = Layout(work.pipeline, schedule=work.schedule, virtual_stages=work.virtual_stages)
    splits = splits_backward(work.schedule, work.pipeline, work.compiled)
    steps = steps_as_run(layout, coordinates.pipeline, work.microbatches, splits)
    calls: Counter[Message] = Counter()
    sizes: Counter[Message] = Counter()

    def add(group: str, kind: str, what: str, count: int, size: int) -> None:
        if count:
            calls[Message(group, kind, what)] += count
            sizes[Message(group, kind, what)] += size

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
        for group, kind, size in _data_parallel(stage, kinds, sharding):
            add(group, kind, "parameters" if kind == "all_gather" else "gradients", 1, size)
    parameters = [parameter for stage in stages.values() for unit in stage.units for parameter in unit.parameters]
    local = {p.name: sharding.master * _local_elements(p, sharding, coordinates) for p in parameters}
    partial = sum(sharding.master * _local_elements(p, sharding, coordinates) for p in parameters if p.partial)
    add("tp", "all_reduce", "partial gradients", min(partial, 1), partial)
    for name, holders in _copies(work, local).items():
        for kind in ("send", "receive"):
            add("pp", kind, "gradients of shared tables", holders - 1, local[name] * (holders - 1))
    return {message: Amount(calls[message], sizes[message]) for message in calls}


def _local_elements(parameter: Parameter, sharding: Sharding, coordinates: Coordinates) -> int:
    rows, *_ = parameter.shape
    shards = sharding.shards[parameter.sharers]
    local_rows = shard_rows(rows, shards, coordinates.shards.get(parameter.sharers, 0) % shards)
    return parameter.elements // rows * local_rows


def _copies(work: Workload, local: dict[str, int]) -> dict[str, int]:
    """This process's parameters that several pipeline ranks hold → number of these ranks."""
    held: Counter[str] = Counter()
    outside = {name for name in local if not name.startswith("layers.")}
    for rank in range(work.pipeline) if work.pipeline > 1 and outside else ():
        stages = stages_of_rank(work, rank).values()
        held.update({p.name for stage in stages for unit in stage.units for p in unit.parameters} & outside)
    return {name: count for name, count in held.items() if count > 1}


_Call = tuple[str, str, int]  # group, kind, bytes
_WITH_REPLICAS = {"dp_shard": "dp", "expert_shard": "expert_dp"}  # groups over several dimensions of the mesh


def _data_parallel(stage: StageProgram, passes: Sequence[str], sharding: Sharding) -> Iterator[_Call]:
    """All-gathers of parameters and sums of gradients.

    FSDP2 gathers a unit when a pass needs it and it is not gathered yet. ZeRO 3 frees all units but the root after each
    pass, and the root after backward passes. Reductions sum the gradients that exist: after several first parts of
    split backward passes, the first second part also has theirs, and the later ones have matrices alone.
    """
    gathers = [unit for unit in stage.units if sharding.holders[unit.sharers] > 1]
    gathers = [unit for unit in gathers if unit.parameters or sharding.zero_stage == 3]
    units = [unit for unit in gathers if unit.parameters]
    if not sharding.wrapped:
        yield from _plain_sums(units, sharding)
        return
    last = max(i for i, kind in enumerate(passes) if kind in "BW")
    zero, gathered, only_matrices = sharding.zero_stage, set[int](), False
    for position, kind in enumerate(passes):
        if kind in "FBI" and zero > 0:
            for number, unit in enumerate(gathers):
                size = sharding.compute * _padded(unit, sharding, sharding.zero_stage == 3)
                is_needed = kind == "F" or unit.parameters or unit.name in ("", "layers")  # unlike a frozen table
                if number not in gathered and is_needed:
                    yield from _call(unit.sharers, "all_gather", size, sharding)
                if zero < 3 or (kind == "F" and not unit.name):
                    gathered.add(number)
                else:
                    gathered.discard(number)
        only_matrices = only_matrices and kind not in "BI"
        if kind in "BW" and (zero >= 2 or position == last):
            reduced = [_matrices(unit) for unit in units] if only_matrices else units
            yield from _reductions(reduced, sharding, position == last)
            if 0 < zero < 3 and position == last and len(gathers) > 1 and gathers[-1].name and _follows_another(passes):
                # Without a root, FSDP2 gathers once more what the forward pass of the microbatch before ended with.
                size = sharding.compute * _padded(gathers[-1], sharding)
                yield from _call(gathers[-1].sharers, "all_gather", size, sharding)
            only_matrices = sharding.replicate == 1  # with replicas, `DataParallel` adds zeros for missing gradients


def _follows_another(passes: Sequence[str]) -> bool:
    """Whether a forward pass precedes the one that FSDP2, which takes back the newest first, takes back last."""
    forward, number, taken = list[int](), 0, 0
    for kind in passes:
        if kind == "F":
            forward.append(number)
            number += 1
        elif kind in "BI":
            taken = forward.pop()
    return taken > 0


def _matrices(unit: Unit) -> Unit:
    return unit._replace(parameters=tuple(parameter for parameter in unit.parameters if parameter.deferred))


def _reductions(units: Iterable[Unit], sharding: Sharding, sums_replicas: bool) -> Iterator[_Call]:
    for unit in units:
        if not unit.parameters:
            continue
        nbytes = sharding.reduce * _padded(unit, sharding)
        if not sharding.zero_stage:
            yield _with_replicas(unit.sharers, sharding), "all_reduce", nbytes
            continue
        yield from _call(unit.sharers, "reduce_scatter", nbytes, sharding)
        if sums_replicas and sharding.replicate > 1:
            yield "dp_replicate", "all_reduce", nbytes // sharding.shards[unit.sharers]


def _plain_sums(units: Sequence[Unit], sharding: Sharding) -> Iterator[_Call]:
    """One all-reduce for each unit of layers, and one for all other parameters."""
    layers = [unit for unit in units if unit.name == "layers"]
    rest = [parameter for unit in units if unit.name != "layers" for parameter in unit.parameters]
    for unit in [*layers, Unit("", rest[0].sharers, tuple(rest))] if rest else layers:
        yield _with_replicas(unit.sharers, sharding), "all_reduce", sharding.master * unit.elements


def _call(group: str, kind: str, size: int, sharding: Sharding) -> Iterator[_Call]:
    if sharding.shards[group] > 1:
        yield group, kind, size


def _with_replicas(group: str, sharding: Sharding) -> str:
    return group if sharding.replicate == 1 else _WITH_REPLICAS[group]


def _padded(unit: Unit, sharding: Sharding, frozen: bool = False) -> int:
    """Elements of a unit's parameters, with or without the ``frozen`` ones, padded to equal shards."""
    shards, parameters = sharding.shards[unit.sharers], (*unit.parameters, *unit.frozen * frozen)
    return sum(shards * shard_rows(p.shape[0], shards) * (p.elements // p.shape[0]) for p in parameters)
