"""Bytes of parameters, gradients and optimizer state on one process under each ZeRO stage. Pure formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from titan_like.models.config import TransformerConfig
from titan_like.parallel.schedules.actions import Action
from titan_like.parallel.split import StageLayers
from titan_like.planner.dtypes import BYTES
from titan_like.planner.shapes import ParameterSplit, ShardOf, Unit, stage_units

_FLOAT32 = BYTES["float32"]  # the type of master weights, summed gradients and moments


@dataclass(frozen=True)
class Storage:
    """In what types and parts training state is kept. Sizes of types in bytes."""

    zero_stage: int
    split: ParameterSplit = field(default_factory=ParameterSplit)
    data_parallel: int = 1  # processes that see different samples, sharded over or not
    master: int = _FLOAT32
    compute: int = _FLOAT32
    reduce: int = _FLOAT32
    moments: float = 2  # of each element; plain SGD has none

    @property
    def wrapped(self) -> bool:
        """Whether weights are gathered, or copied to the compute type, before they are used (FSDP2, `replicate`)."""
        return self.compute < self.master or (self.zero_stage > 0 and self.data_parallel > 1)


@dataclass(frozen=True)
class RankState:
    """Bytes on one process between the backward pass and the optimizer's update, without padding of uneven shards."""

    num_parameters: int
    parameters: int
    gradients: int  # freed after the update
    optimizer: int


def rank_state(units: Iterable[Unit], storage: Storage) -> RankState:
    """What one process holds of some units."""
    count = sum(prod(storage.split.here(parameter)) for unit in units for parameter in unit.parameters)
    weights = storage.master * count
    return RankState(count, weights, weights, int(storage.moments * weights))


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank. Communication buffers and activations are not in it."""

    between_steps: int  # gradients are freed after each step
    peak: int  # largest moment of a step with gradient accumulation


def state_bytes(
    model: TransformerConfig, zero_stage: int, shard_degree: int, compute_bytes: int = 4, moments: float = 2
) -> StateBytes:
    """Training state of a model that is not cut into stages, on the first process of the group that shards it.

    With P parameters, N ranks to shard over, and float32 throughout:

    ======  ==================  ==========================================================
    stage   between steps       peak
    ======  ==================  ==========================================================
    0       12P                 16P
    1       12P/N               4P gathered + 4P gradients + 12P/N
    2       12P/N               4P gathered + 16P/N + gradients not yet reduced
    3       12P/N               units gathered + 16P/N + gradients not yet reduced
    ======  ==================  ==========================================================

    ``compute_bytes`` below 4 (bfloat16, float16) makes gathered weights and fresh gradients that much smaller; stage 0
    then also keeps a float32 master copy beside the compute copy. ``moments`` is 2 for AdamW and 0 for plain SGD.
    """
    units = stage_units(model, StageLayers(range(model.num_layers), is_first=True, is_last=True))
    split = ParameterSplit(shard=ShardOf(shard_degree if zero_stage else 1))
    storage = Storage(zero_stage, split, shard_degree, compute=compute_bytes, moments=moments)
    state = rank_state(units, storage)
    two_microbatches = [Action(kind, 0, microbatch) for microbatch in range(2) for kind in "FB"]
    return StateBytes(state.parameters + state.optimizer, peak_state({0: units}, two_microbatches, storage))


def peak_state(stages: Mapping[int, list[Unit]], actions: Sequence[Action], storage: Storage) -> int:
    """Most bytes of state at any moment of a step, for one process's stages and its passes in order.

    Exact where shards are equal and a step has three microbatches or more, but for split backward passes whose
    gradients change type; else a little too much, less than one unit. ``actions`` have I and W
    only where a backward pass is split in fact. At the end of a stage's last backward pass its summed gradients take
    the place of what was added up and gathered.
    """
    sizes = {index: stage_sizes(stage_elements(units, storage.split), storage) for index, units in stages.items()}
    return peak_of(sizes, actions, storage)


def peak_of(sizes: Mapping[int, StageSizes], actions: Sequence[Action], storage: Storage) -> int:
    """`peak_state` of stages whose sizes are known."""
    left = Counter(action.stage for action in actions if action.kind in ("B", "W"))
    several = {index for index, count in left.items() if count > 1}
    sums_early, zero = storage.wrapped and storage.zero_stage >= 2, storage.zero_stage
    # Bytes that each stage holds besides weights and moments: weights gathered, gradients of earlier microbatches, and
    # gradients that first parts of split passes made, until a second part sums them.
    gathered, summed, waiting = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0)
    peak = held = 0  # held: all three, of all stages
    for kind, stage, _ in actions:
        size = sizes[stage]
        before = gathered[stage] + summed[stage] + waiting[stage]
        if kind != "W":
            gathered[stage] = size.kept_gathered
        if kind == "F":
            transient = size.layer_gathered
        elif kind == "I" and sums_early:
            waiting[stage] = size.vectors
            transient = size.layer_gathered
        else:
            transient = size.in_backward if zero != 1 or stage in several else size.fresh
            if kind == "W":
                transient = size.matrices
            if kind == "B" or not sums_early:
                summed[stage] = size.added_up if stage in several else size.gradients
        now = held - before + gathered[stage] + summed[stage] + waiting[stage]
        if now + transient > peak:
            peak = now + transient
        if kind == "W":
            waiting[stage], summed[stage] = 0, max(summed[stage], size.gradients)
        if kind != "F" and zero == 3:
            gathered[stage] = 0
        if kind in ("B", "W"):
            left[stage] -= 1
        if left[stage] == 0:
            gathered[stage], summed[stage] = 0, size.gradients
        held += gathered[stage] + summed[stage] + waiting[stage] - before
    return max(peak, sum(summed.values())) + sum(size.shards for size in sizes.values())


class StageElements(NamedTuple):
    """Numbers of parameters of one stage on one tensor-parallel process, before ZeRO shards them."""

    total: int
    in_root: int
    layer: int  # the largest
    entry: int  # of units before the layers
    early: int  # in the root, whose gradients come first: the head's
    late: int  # whose gradients a split backward pass puts off
    rows: tuple[tuple[int, int], ...]  # each length of first dimensions, and elements of one row of all with it


def stage_elements(units: Sequence[Unit], split: ParameterSplit) -> StageElements:
    """Count a stage's parameters; of ``split`` the tensor-parallel part alone matters."""
    rows: Counter[int] = Counter()
    late = early = 0
    sizes = []
    for unit in units:
        size = 0
        for parameter in unit.parameters:
            length, *others = split.before_sharding(parameter)
            row = prod(others)
            rows[length] += row
            size += length * row
            late += length * row * parameter.can_wait
            # A tied table's gradient is stored only when its second use, the embedding, has added to it.
            early += length * row * (unit is units[-1] and not parameter.at_entry)
        sizes.append(size)
    layers = [size for unit, size in zip(units, sizes, strict=True) if unit.name.startswith("layers.")]
    total, in_root = sum(sizes), sizes[-1]
    return StageElements(total, in_root, max(layers), total - in_root - sum(layers), early, late, tuple(rows.items()))


class StageSizes(NamedTuple):
    """Bytes of one stage."""

    shards: int  # weights and moments, always there
    gradients: int  # summed over processes
    kept_gathered: int  # from a forward pass to the end of the backward pass
    layer_gathered: int  # while one layer's forward pass runs
    added_up: int  # gradients between microbatches
    fresh: int  # gradients of one backward pass before they are reduced or added
    in_backward: int  # most that one backward pass needs besides what is kept
    vectors: int  # gradients that a split backward pass makes in its first part, and keeps
    matrices: int  # those of its second part, all made before any is reduced or added


def stage_sizes(elements: StageElements, storage: Storage) -> StageSizes:
    """What `peak_state` adds up of a stage. All of it is linear in the number of layers, from one layer on."""
    total, in_root, layer, entry, early, late, rows = elements
    part, compute = storage.split.shard, storage.compute
    gradients = storage.master * sum([part.of(length) * row for length, row in rows])  # as many bytes as weights
    shards = int((1 + storage.moments) * gradients)
    if not storage.wrapped:  # gradients are added up in place, and summed over processes in place
        return StageSizes(shards, gradients, 0, 0, gradients, 0, 0, 0, 0)

    # The head's gradients are reduced last, with the root; a layer's are reduced when complete.
    fresh = compute * max(early + layer, in_root + entry)
    vectors, matrices = storage.reduce * (total - late), compute * late
    if storage.zero_stage == 3:
        in_backward = compute * max(layer + early + layer, in_root + 2 * entry)
        kept, gathered = compute * in_root, compute * layer
        return StageSizes(shards, gradients, kept, gathered, gradients, fresh, in_backward, vectors, matrices)
    gathered = compute * total
    if storage.zero_stage == 2:
        return StageSizes(shards, gradients, gathered, 0, gradients, fresh, fresh, vectors, matrices)
    # Stages 0 and 1 add up whole gradients, in place if they have the type already.
    added_up = storage.reduce * total
    if compute == storage.reduce:
        return StageSizes(shards, gradients, gathered, 0, added_up, fresh, 0, 0, 0)
    return StageSizes(shards, gradients, gathered, 0, added_up, fresh, fresh, 0, matrices)
