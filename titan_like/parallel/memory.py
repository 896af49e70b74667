"""Bytes of parameters, gradients and optimizer state on one process under each ZeRO stage. Pure formulas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from titan_like.models.config import TransformerConfig
from titan_like.parallel.schedules.actions import Action
from titan_like.parallel.shapes import Part, Split, Unit, stage_units
from titan_like.parallel.split import StageLayers

_FLOAT32 = 4  # bytes of the type of master weights, summed gradients and moments


@dataclass(frozen=True)
class Storage:
    """In what types and parts training state is kept. Sizes of types in bytes."""

    zero_stage: int
    split: Split = field(default_factory=Split)
    data_parallel: int = 1  # processes that see different samples, sharded over or not
    master: int = _FLOAT32
    compute: int = _FLOAT32
    reduce: int = _FLOAT32
    moments: int = 2  # AdamW; plain SGD has none

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
    return RankState(count, weights, weights, storage.moments * weights)


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank. Communication buffers and activations are not in it."""

    between_steps: int  # gradients are freed after each step
    peak: int  # largest moment of a step with gradient accumulation


def state_bytes(
    model: TransformerConfig, zero_stage: int, shard_degree: int, compute_bytes: int = 4, moments: int = 2
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
    split = Split(shard=Part(shard_degree if zero_stage else 1))
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
    sizes = {index: stage_sizes(units, storage) for index, units in stages.items()}
    return peak_of(sizes, actions, storage)


def peak_of(sizes: Mapping[int, StageSizes], actions: Sequence[Action], storage: Storage) -> int:
    """`peak_state` of stages whose sizes are known."""
    held = {index: _Held() for index in sizes}
    left = Counter(action.stage for action in actions if action.kind in ("B", "W"))
    several = {index for index, count in left.items() if count > 1}
    sums_early = storage.wrapped and storage.zero_stage >= 2
    peak = kept = 0  # kept: what all stages hold between this pass and the next
    for kind, stage, _ in actions:
        size, mine = sizes[stage], held[stage]
        before = mine.total
        if kind != "W":
            mine.gathered = size.kept_gathered
        if kind == "F":
            transient = size.layer_gathered
        elif kind == "I" and sums_early:
            mine.waiting = size.vectors
            transient = size.layer_gathered
        else:
            whole = size.in_backward if storage.zero_stage != 1 or stage in several else size.fresh
            transient = size.matrices if kind == "W" else whole
            if kind == "B" or not sums_early:
                mine.summed = size.added_up if stage in several else size.gradients
        peak = max(peak, transient + kept - before + mine.total)
        if kind == "W":
            mine.waiting, mine.summed = 0, max(mine.summed, size.gradients)
        if kind != "F" and storage.zero_stage == 3:
            mine.gathered = 0
        left[stage] -= kind in ("B", "W")
        if left[stage] == 0:
            mine.gathered, mine.summed = 0, size.gradients
        kept += mine.total - before
    peak = max(peak, sum(h.summed for h in held.values()))
    return peak + sum(size.shards for size in sizes.values())


@dataclass
class _Held:
    """Bytes that a stage holds besides weights and moments."""

    gathered: int = 0
    summed: int = 0  # gradients of earlier microbatches
    waiting: int = 0  # gradients that first parts of split passes made, until a second part sums them

    @property
    def total(self) -> int:
        return self.gathered + self.summed + self.waiting


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


def stage_sizes(units: list[Unit], storage: Storage) -> StageSizes:
    """What `peak_state` adds up of a stage. All of it is linear in the number of layers, from one layer on."""
    state = rank_state(units, storage)
    shards = state.parameters + state.optimizer
    if not storage.wrapped:  # gradients are added up in place, and summed over processes in place
        return StageSizes(shards, state.gradients, 0, 0, state.gradients, 0, 0, 0, 0)

    before = storage.split.before_sharding
    parameters = [[(parameter, prod(before(parameter))) for parameter in unit.parameters] for unit in units]
    whole = [sum([size for _, size in of_unit]) for of_unit in parameters]
    total, in_root = sum(whole), whole[-1]
    layers = [size for unit, size in zip(units, whole, strict=True) if unit.name.startswith("layers.")]
    layer, entry = max(layers), total - in_root - sum(layers)
    # The head's gradients come first and are reduced last, with the root; a layer's are reduced when complete. A tied
    # table's gradient is stored only when its second use, the embedding, has added to it.
    early = sum([size for parameter, size in parameters[-1] if not parameter.at_entry])
    fresh = storage.compute * max(early + layer, in_root + entry)
    late = sum([size for of_unit in parameters for parameter, size in of_unit if parameter.can_wait])
    vectors, matrices = storage.reduce * (total - late), storage.compute * late
    if storage.zero_stage == 3:
        kept, gathered_layer = storage.compute * in_root, storage.compute * layer
        in_backward = storage.compute * max(layer + early + layer, in_root + 2 * entry)
        gradients = state.gradients
        return StageSizes(shards, gradients, kept, gathered_layer, gradients, fresh, in_backward, vectors, matrices)
    gathered = storage.compute * total
    if storage.zero_stage == 2:
        return StageSizes(shards, state.gradients, gathered, 0, state.gradients, fresh, fresh, vectors, matrices)
    # Stages 0 and 1 add up whole gradients, in place if they have the type already.
    in_place = storage.compute == storage.reduce
    added_up = storage.reduce * total
    if in_place:
        return StageSizes(shards, state.gradients, gathered, 0, added_up, fresh, 0, 0, 0)
    return StageSizes(shards, state.gradients, gathered, 0, added_up, fresh, fresh, 0, matrices)
