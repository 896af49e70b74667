"""Everything that one process sends and receives in a step, planned before it runs.

Tests compare these counts with what real processes send. Sums of single numbers (tokens, loss, gradient norm, health
flags) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from titan_like.config.schema import JobConfig
from titan_like.data.lengths import sample_length
from titan_like.models.config import TransformerConfig
from titan_like.models.layers.cross_entropy import num_chunks
from titan_like.models.parts import is_table
from titan_like.parallel.layout import Layout, method_of
from titan_like.parallel.schedules.tables import Action
from titan_like.parallel.split import StageLayers, kinds_of_layers
from titan_like.planner.shapes import (
    OF_EXPERTS,
    Unit,
    description,
    joined,
)
from titan_like.planner.training_state import Storage
from titan_like.planner.workload import BYTES


@dataclass(frozen=True)
class Collective:
    """All calls of one kind in one group that one process makes in one step."""

    group: str  # dimension of the mesh, or several joined by "_"
    size: int  # processes in the group
    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, send, receive
    what: str
    count: int
    bytes: int  # over all calls; the result of an all-gather, the input of a reduce-scatter


@dataclass(frozen=True)
class StageTraffic:
    """One pipeline stage of the process, as far as the counts depend on it."""

    index: int
    layers: StageLayers
    units: list[Unit]  # from `shapes.stage_units`


_INT32, _INT64 = 4, 8  # bytes
_WITH_REPLICAS = {"dp_shard": "dp", "expert_shard": "expert_dp"}


_Call = tuple[str, str, str, int]  # group, kind, what, bytes


def step_collectives(
    config: JobConfig,
    model: TransformerConfig,
    layout: Layout,
    stages: Sequence[StageTraffic],
    steps: Sequence[Action],
    storage: Storage,
    copies: Mapping[str, int],
) -> list[Collective]:
    """Everything that one process takes part in.

    Args:
        config: the run.
        model: its model.
        layout: its parallel degrees.
        stages: the process's stages.
        steps: the process's passes and messages in order, after `steps_as_run`.
        storage: how the process keeps parameters and gradients.
        copies: of each parameter here that other processes of the pipeline hold too, how many of them do.
    """
    calls: Counter[_Call] = Counter()
    calls.update(_pipeline_calls(config, model, steps))
    for stage in stages:
        passes = [step.kind for step in steps if step.stage == stage.index and step.kind in ("F", "B", "I", "W")]
        calls.update(_data_parallel_calls(stage, passes, layout, storage))
        if layout.tensor > 1:
            calls.update(_tensor_parallel_calls(config, model, stage, passes, layout.tensor))
        if layout.context > 1:
            calls.update(_context_parallel_calls(config, model, stage, passes))
        if layout.expert > 1:
            calls.update(_expert_calls(config, model, stage, passes, layout))
    calls.update(_loads(stages, model, layout, storage))
    calls.update(_partial_gradients(stages, storage) if config.parallelism.sequence_parallel else ())
    held = {parameter.name: parameter for stage in stages for unit in stage.units for parameter in unit.parameters}
    for name, others in copies.items():
        size = storage.master * prod(storage.split.here(held[name]))
        what = "gradient of the tied table" if is_table(name) else "gradients of shared tables"
        for kind in ("send", "receive"):
            calls["pp", kind, what, size] += others
    sizes = {"tp": layout.tensor, "cp": layout.context, "pp": layout.pipeline}
    sizes |= {"dp_shard": layout.weight_shards, "dp_replicate": layout.replicate}
    sizes["dp"] = layout.replicate * layout.weight_shards
    sizes |= {
        "ep": layout.expert,
        "expert_shard": layout.expert_shards,
        "expert_dp": layout.replicate * layout.expert_shards,
    }
    sizes["tokens"] = layout.replicate * layout.token_shards
    # Add up calls that differ only in their size.
    merged: dict[tuple[str, str, str], tuple[int, int]] = {}
    for (group, kind, what, size), count in calls.items():
        before = merged.get((group, kind, what), (0, 0))
        merged[group, kind, what] = before[0] + count, before[1] + count * size
    return [
        Collective(group, sizes[group], kind, what, count, total)
        for (group, kind, what), (count, total) in merged.items()
        if sizes[group] > 1
    ]


def hidden_bytes(config: JobConfig, model: TransformerConfig) -> int:
    """Bytes of one microbatch's hidden states, [micro_batch_size, positions, hidden_size], unsharded."""
    positions, training = sample_length(config, model).positions, config.training
    return training.micro_batch_size * positions * model.hidden_size * BYTES[training.dtype]


def _pipeline_calls(config: JobConfig, model: TransformerConfig, steps: Sequence[Action]) -> Iterator[_Call]:
    section = config.parallelism
    shards = section.tensor_parallel_degree if section.sequence_parallel else 1
    shards *= section.context_parallel_degree
    size = hidden_bytes(config, model) // shards
    for step in steps:
        if step.kind.startswith(("SEND", "RECV")):
            what = "hidden states" if step.kind.endswith("F") else "gradients of hidden states"
            yield "pp", "send" if step.kind.startswith("SEND") else "receive", what, size


def _data_parallel_calls(
    stage: StageTraffic, passes: Sequence[str], layout: Layout, storage: Storage
) -> Iterator[_Call]:
    """All-gathers of parameters and sums of gradients.

    FSDP2 gathers a unit when a pass needs it and it is not gathered yet. ZeRO 3 frees the layers after every pass. It
    frees the root only after backward passes, which begin with it. Every reduction sums the gradients that exist: if
    several I passes come before their W passes, the first W sums all that these I passes made and its own matrices; the
    later ones sum matrices alone.
    """
    units = [unit for unit in joined(stage.units, storage.split, storage.compute) if unit.parameters]
    if not storage.wrapped:
        yield from _plain_all_reduces(units, layout, storage)
        return
    last = max(i for i, kind in enumerate(passes) if kind in "BW")
    gathered: set[str] = set()
    reduces_early = storage.zero_stage >= 2
    only_matrices = False
    for position, kind in enumerate(passes):
        if kind in "FBI" and storage.zero_stage > 0:
            for unit in units if kind == "F" else reversed(units):
                if unit.name not in gathered:
                    group, shards = _sharers(unit, layout)
                    yield group, "all_gather", "parameters", storage.compute * _padded(unit, storage, shards)
                if storage.zero_stage < 3 or (kind == "F" and not unit.name):
                    gathered.add(unit.name)
                else:
                    gathered.discard(unit.name)
        only_matrices = only_matrices and kind not in "BI"
        if kind in "BW" and (reduces_early or position == last):
            there = [_matrices(unit) for unit in units] if only_matrices else units
            yield from _reductions(there, layout, storage, sums_replicas=position == last)
            only_matrices = layout.replicate == 1  # with replicas, `DataParallel` adds zeros for missing gradients


def _matrices(unit: Unit) -> Unit:
    return Unit(unit.name, tuple(parameter for parameter in unit.parameters if parameter.is_deferrable))


def _reductions(units: Iterable[Unit], layout: Layout, storage: Storage, sums_replicas: bool) -> Iterator[_Call]:
    for unit in units:
        if not unit.parameters:
            continue
        shard, (group, shards) = storage.reduce * _padded(unit, storage, 1), _sharers(unit, layout)
        if storage.zero_stage == 0:
            yield _whole_group(group, layout), "all_reduce", "gradients", shard
            continue
        yield group, "reduce_scatter", "gradients", shard * shards
        if sums_replicas:
            yield "dp_replicate", "all_reduce", "gradients", shard


def _plain_all_reduces(units: Sequence[Unit], layout: Layout, storage: Storage) -> Iterator[_Call]:
    """One all-reduce for each unit of layers, and one for all other parameters."""
    outside = [parameter for unit in units if not unit.name.startswith("layers.") for parameter in unit.parameters]
    layers = [unit for unit in units if unit.name.startswith("layers.")]
    for unit in [*layers, Unit("", tuple(outside))] if outside else layers:
        group = _whole_group(_sharers(unit, layout)[0], layout)
        yield group, "all_reduce", "gradients", storage.master * _padded(unit, storage, 1)


def _sharers(unit: Unit, layout: Layout) -> tuple[str, int]:
    """The dimension of the mesh over which ZeRO shards a unit, and its size."""
    if unit.name.endswith(OF_EXPERTS):
        return "expert_shard", layout.expert_shards
    return "dp_shard", layout.weight_shards


def _whole_group(shards: str, layout: Layout) -> str:
    """All processes that hold what is sharded over this dimension, which may be wider than its processes alone."""
    return shards if layout.replicate == 1 else _WITH_REPLICAS[shards]


def _padded(unit: Unit, storage: Storage, shards: int) -> int:
    return shards * sum(storage.split.padded(parameter) for parameter in unit.parameters)


def _tensor_parallel_calls(
    config: JobConfig, model: TransformerConfig, stage: StageTraffic, passes: Sequence[str], degree: int
) -> Iterator[_Call]:
    """Collectives around every attention, MLP and vocabulary product, as `titan_like.parallel.collectives` makes them.

    A fully recomputed layer repeats its forward collectives, except the last sum, whose result its backward pass does
    not need. Selective recomputation repeats no sums.
    """
    training, section = config.training, config.activation_checkpoint
    element, length, slices = BYTES[training.dtype], sample_length(config, model), config.parallelism
    lengths = [whole // slices.context_parallel_degree for whole in (length.encoder, length.decoder)]
    rows = training.micro_batch_size * model.hidden_size * element
    is_last, kinds, parts = stage.layers.is_last, kinds_of_layers(model), description(model)
    labelled = training.micro_batch_size * (lengths[1] or lengths[0])
    # Of each chunk of positions, two numbers a position from every process. A CPU may take more chunks than a GPU.
    chunks = num_chunks(labelled, -(-model.padded_vocab_size // degree), "cuda")
    positions = [labelled // chunks + (chunk < labelled % chunks) for chunk in range(chunks)]
    losses = [degree * 2 * count * max(element, BYTES["float32"]) for count in positions]
    spread = "all_gather" if config.parallelism.sequence_parallel else None
    add_up = "reduce_scatter" if config.parallelism.sequence_parallel else "all_reduce"
    # By size: how often activations enter split parts and leave them, and how often recomputation repeats that.
    enters, leaves, enters_again, leaves_again = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
    for number in stage.layers.layers:
        layer = parts.kinds[kinds[number]]
        is_recomputed = section.mode != "none" and number % section.every_n_layers == 0
        of_shared = layer.experts is not None and layer.experts.has_shared
        for stack, size in enumerate(rows * length for length in lengths):
            enters[size] += layer.enters[stack]
            leaves[size] += layer.leaves[stack]
            of_mode = layer.enters[stack] if section.mode != "experts" else of_shared and stack == 0
            enters_again[size] += is_recomputed * of_mode
            leaves_again[size] += is_recomputed * (section.mode == "full") * layer.leaves[stack]
        # The weights of experts' results need these, which attention's sum comes before.
        ends_with_sum = not layer.ends_with_norm and (layer.experts is None or of_shared)
        if is_recomputed and section.mode == "full" and ends_with_sum:
            leaves_again[rows * lengths[layer.regions[-1].stack]] -= 1
    if is_last:
        enters[labelled * model.hidden_size * element] += parts.head_enters
    if stage.layers.is_first:
        leaves[rows * sum(lengths)] += parts.entry_leaves
    forwards, backwards = sum(kind == "F" for kind in passes), sum(kind in "BI" for kind in passes)

    def calls(kind: str | None, *counts: Counter[int]) -> Iterator[_Call]:
        if kind is not None:
            for size, count in sum(counts, Counter()).items():
                yield from [("tp", kind, "hidden states", size)] * count

    for _ in range(forwards):
        yield from calls(add_up, leaves)
        yield from calls(spread, enters)
        if is_last:
            yield from [("tp", "all_gather", "parts of the loss", size) for size in losses]
    for _ in range(backwards):
        yield from calls(add_up, enters, leaves_again)
        yield from calls(spread, leaves, enters_again)


def _context_parallel_calls(
    config: JobConfig, model: TransformerConfig, stage: StageTraffic, passes: Sequence[str]
) -> Iterator[_Call]:
    """What attention moves between the processes that share a sequence; see `titan_like.parallel.context`.

    A recomputed layer repeats what its forward pass moves.
    """
    training, section, recompute = config.training, config.parallelism, config.activation_checkpoint
    size, method, length = section.context_parallel_degree, method_of(config, model).name, sample_length(config, model)
    element, kinds, parts = BYTES[training.dtype], kinds_of_layers(model), description(model)
    lengths, row = (length.encoder, length.decoder), training.micro_batch_size * model.head_dim
    heads, kv_heads = (n // section.tensor_parallel_degree for n in (model.num_attention_heads, model.num_kv_heads))
    for number in stage.layers.layers:
        again = recompute.mode in ("selective", "full") and number % recompute.every_n_layers == 0
        for core in filter(None, parts.kinds[kinds[number]].cores):
            queries = row * lengths[core.queries] // size * heads * element  # bytes on one process
            values = 2 * row * lengths[core.keys] // size * kv_heads * element
            gradients = values // element * max(element, BYTES["float32"])
            if method == "all_gather":
                forward = [("all_gather", "keys and values", values * size, 1)]
                backward = [("reduce_scatter", "gradients of keys and values", values * size, 1)]
            elif method == "ulysses":
                what = "queries, keys, values and results"
                forward = [("all_to_all", what, queries + values, 1), ("all_to_all", what, queries, 1)]
                backward = forward
            else:
                forward = [(kind, "keys and values", values, size - 1) for kind in ("send", "receive")]
                of_values = [(kind, "gradients of keys and values", gradients, size) for kind in ("send", "receive")]
                backward = [*forward, *of_values]
            for kind in passes:
                if kind in "FBI":
                    for name, what, moved, count in forward if kind == "F" else backward + forward * again:
                        yield from [("cp", name, what, moved)] * count


def _expert_calls(
    config: JobConfig, model: TransformerConfig, stage: StageTraffic, passes: Sequence[str], layout: Layout
) -> Iterator[_Call]:
    """The all-to-alls around experts, as `titan_like.parallel.experts` makes them, at equal loads.

    A forward pass, and a recomputed one, tells numbers of rows and sends the rows there and back; a backward pass sends
    gradients. Bytes are those that a process holds before each of them, of which a part stays.
    """
    training, section = config.training, config.activation_checkpoint
    tokens = training.micro_batch_size * sample_length(config, model).encoder // (layout.context * layout.tensor)
    kinds, parts = kinds_of_layers(model), description(model)
    for number in stage.layers.layers:
        experts = parts.kinds[kinds[number]].experts
        if experts is None:
            continue
        rows = tokens * experts.per_token * experts.hidden * BYTES[training.dtype]
        again = section.mode != "none" and number % section.every_n_layers == 0
        for kind in passes:
            if kind in "FBI":
                if kind == "F" or again:
                    yield "ep", "all_to_all", "numbers of rows", experts.num_experts * _INT32
                    yield from [("ep", "all_to_all", "rows of experts", rows)] * 2
                if kind != "F":
                    yield from [("ep", "all_to_all", "gradients of rows", rows)] * 2


def _loads(
    stages: Sequence[StageTraffic], model: TransformerConfig, layout: Layout, storage: Storage
) -> Iterator[_Call]:
    """Sums over all tokens of how many each expert got, and of two losses, for all routers at once."""
    kinds, parts = kinds_of_layers(model), description(model)
    found = [parts.kinds[kinds[number]].experts for stage in stages for number in stage.layers.layers]
    routers = [experts for experts in found if experts is not None]
    if routers:
        group = "tokens" if layout.tensor > 1 else _whole_group("dp_shard", layout)
        for size in (_INT64 * routers[0].num_experts, storage.master * 2):
            yield group, "all_reduce", "loads of experts", len(routers) * size


def _partial_gradients(stages: Sequence[StageTraffic], storage: Storage) -> Iterator[_Call]:
    """One all-reduce of all gradients that sequence parallelism leaves partial."""
    parameters = [p for stage in stages for unit in stage.units for p in unit.parameters if p.partial]
    if parameters:
        size = storage.master * sum(prod(storage.split.here(parameter)) for parameter in parameters)
        yield "tp", "all_reduce", "partial gradients", size
