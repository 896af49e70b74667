"""Bytes of parameters, gradients and optimizer state on one process under each ZeRO stage (arXiv 1910.02054).

`peak_state` follows every pass of a step, which is exact and slow. `trainer_states`, for searches, derives the fullest
moment from the order of the schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from math import prod
from typing import NamedTuple

from titan_like.models.config import TransformerConfig
from titan_like.optim.state_size import ADAMW_STATE, OptimizerState
from titan_like.parallel.gradients import UNIT_BYTES
from titan_like.parallel.schedules.tables import SPLIT_BACKWARD, Action, schedule_table, stage_ranks
from titan_like.parallel.split import units_of_layers
from titan_like.planner.shapes import ParameterSplit, Unit, units_of_counts
from titan_like.planner.workload import BYTES, Counts, RankStages

_FLOAT32 = BYTES["float32"]  # the type of master weights, summed gradients and optimizer state


class Storage(NamedTuple):
    """The types and shards in which training state is kept. Types are given by their bytes per element."""

    zero_stage: int
    split: ParameterSplit = ParameterSplit()
    # Processes with the same weights and other tokens, whether ZeRO shards over them or not: with the same experts, if
    # these are more.
    data_parallel: int = 1
    master: int = _FLOAT32
    compute: int = _FLOAT32
    reduce: int = _FLOAT32
    optimizer: OptimizerState = ADAMW_STATE  # values in the master weights' type

    @property
    def wrapped(self) -> bool:
        """Whether weights are gathered, or cast to the compute type, before use (by FSDP2 or `replicate`)."""
        return self.data_parallel > 1 and (self.compute < self.master or self.zero_stage > 0)

    @property
    def copied(self) -> bool:
        """Whether a process that shares its weights with no other computes with `ComputeCopies`."""
        return self.data_parallel == 1 and self.compute < self.master


@dataclass(frozen=True)
class RankState:
    """Bytes on one process between the backward pass and the optimizer's update, without padding of uneven shards."""

    num_parameters: int
    parameters: int
    gradients: int  # freed after the update
    optimizer: int
    copies: int = 0  # of the weights in the compute type, where `Storage.copied`


def rank_state(units: Iterable[Unit], storage: Storage) -> RankState:
    """What one process holds of some units."""
    parts = [(parameter.name, storage.split.here(parameter)) for unit in units for parameter in unit.parameters]
    count = sum(prod(shape) for _, shape in parts)
    weights = storage.master * count
    optimizer = int(storage.master * sum(storage.optimizer.of(*part) for part in parts))
    return RankState(count, weights, weights, optimizer, storage.compute * count if storage.copied else 0)


def peak_state(stages: Mapping[int, list[Unit]], actions: Sequence[Action], storage: Storage) -> int:
    """The most bytes of state at any moment of a step, from one process's stages and its passes in order.

    Exact if all shards are equal and a step has at least three microbatches, except for split backward passes whose
    gradients change type or are summed over replicas. Otherwise it is too high by less than one unit. ``actions`` have
    I and W only where the trainer really splits the backward pass. When a stage's last backward pass ends, its reduced
    gradients replace the accumulated ones, and its gathered weights are freed.
    """
    sizes = {
        index: stage_sizes(stage_elements([(unit, 1) for unit in units], storage.split, storage.optimizer), storage)
        for index, units in stages.items()
    }
    return peak_of(sizes, actions, storage)


def peak_of(sizes: Mapping[int, StageSizes], actions: Sequence[Action], storage: Storage) -> int:
    """`peak_state` for stages whose sizes are known."""
    left = Counter(action.stage for action in actions if action.kind in ("B", "W"))
    several = {index for index, count in left.items() if count > 1}
    sums_early, zero = storage.wrapped and storage.zero_stage >= 2, storage.zero_stage
    # Bytes per stage, apart from weights and optimizer state: gathered weights, accumulated gradients of earlier
    # microbatches, and gradients made by I passes that wait for a W pass to reduce them.
    gathered, summed, waiting = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0)
    peak = held = 0  # of all three, over all stages
    for kind, stage, _ in actions:
        size = sizes[stage]
        before = gathered[stage] + summed[stage] + waiting[stage]
        # What stays after this pass, and what exists only while it runs.
        if kind != "W":
            gathered[stage] = size.kept_gathered
        if kind == "F":
            transient = size.unit_gathered
        elif kind == "I" and storage.copied:
            transient = size.vectors
            summed[stage] = size.gradients
        elif kind == "I" and sums_early:
            waiting[stage] = size.vectors
            transient = size.unit_gathered
        else:
            transient = size.in_backward if zero != 1 or stage in several else size.fresh
            if kind == "W":
                transient = size.matrices
            if kind == "B" or not sums_early:
                summed[stage] = size.added_up if stage in several else size.gradients
        # Compare with the peak, then free what this pass was the last to need.
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
    entry: int  # in units before the layers
    early: int  # in the root, with gradients that come first: the head's
    deferred: int  # with gradients that a split backward pass defers
    state: float  # values of the optimizer that do not depend on the number of rows
    layers: tuple[int, ...]  # in each layer
    # Of all parameters whose first dimension has this length: (length, whether they are experts', elements per row,
    # optimizer's values per row).
    rows: tuple[tuple[int, bool, int, float], ...]
    # In each layer, if experts are a unit of their own: those with gradients that come after the experts'.
    after_experts: tuple[int, ...]


def stage_elements(
    units: Sequence[tuple[Unit, int]], split: ParameterSplit, optimizer: OptimizerState = ADAMW_STATE
) -> StageElements:
    """Count a stage's parameters on one tensor-parallel process, from its units and how often each of them occurs.

    The ZeRO part of ``split`` is not used.
    """
    rows: Counter[tuple[int, bool]] = Counter()
    state_rows: dict[tuple[int, bool], float] = {}
    total = deferred = early = size = 0
    state = 0.0
    layers: list[int] = []
    after_experts: list[int] = []
    for unit, times in units:
        size = after = 0
        for parameter in unit.parameters:
            length, *others = split.before_sharding(parameter)
            row, key = prod(others), (length, parameter.of_experts)
            rows[key] += times * row
            state_rows[key] = state_rows.get(key, 0) + times * optimizer.per_row(parameter.name, others)
            state += times * optimizer.per_parameter(parameter.name, others)
            size += length * row
            after += length * row * parameter.after_experts
            deferred += times * length * row * parameter.is_deferrable
            # A tied table's gradient is stored only after its second use, the embedding, has added its share.
            early += length * row * (unit is units[-1][0] and not parameter.at_entry)
        total += times * size
        if unit.name.startswith("layers."):
            layers += [size] * times
            after_experts += [after if split.expert else 0] * times
    # The last unit is the root.
    lengths = tuple((*key, row, state_rows[key]) for key, row in rows.items())
    entry = total - size - sum(layers)
    return StageElements(total, size, entry, early, deferred, state, tuple(layers), lengths, tuple(after_experts))


class StageSizes(NamedTuple):
    """Bytes of one stage."""

    shards: int  # weights and optimizer state; always there
    gradients: int  # after the reduction
    kept_gathered: int  # weights, from a forward pass to the end of the backward pass
    unit_gathered: int  # weights, while the forward pass of the largest unit of layers runs
    added_up: int  # gradients kept between microbatches
    fresh: int  # gradients of one backward pass before they are reduced or accumulated
    in_backward: int  # the most that one backward pass needs on top of what is kept
    vectors: int  # gradients that I makes and keeps when the backward pass is split
    matrices: int  # gradients that W makes, all before any is reduced or accumulated


def stage_sizes(elements: StageElements, storage: Storage) -> StageSizes:
    """The terms that `peak_of` adds up for a stage."""
    total, in_root, entry, early, deferred, state, layers, rows, after_experts = elements
    split, compute = storage.split, storage.compute
    here = [(split.shard_of(experts).of(length), row, values) for length, experts, row, values in rows]
    gradients = storage.master * sum([length * row for length, row, _ in here])  # the same bytes as the weights
    state += sum([length * values for length, _, values in here])
    shards = gradients + int(storage.master * state)
    if storage.copied:  # the copies stay; gradients in the compute type are added up by units of the least size
        fresh, matrices = min(compute * total, UNIT_BYTES + compute * max(*layers, in_root, entry)), compute * deferred
        vectors = min(fresh, compute * (total - deferred))
        return StageSizes(shards + compute * total, gradients, 0, 0, gradients, fresh, fresh, vectors, matrices)
    # The weights are used as they are, so nothing is gathered or cast.
    if not storage.wrapped:  # gradients are accumulated and all-reduced in place
        return StageSizes(shards, gradients, 0, 0, gradients, 0, 0, 0, 0)

    # A unit's gradients are reduced as soon as they are complete; the head's are reduced last, with the root. Experts
    # are such a unit inside their layers', before whose first layer has made its other gradients.
    unit = most_fresh = 0
    left = iter(zip(layers, after_experts, strict=True))
    for count in units_of_layers([compute * layer for layer in layers]):
        (first, later), *others = islice(left, count)
        size = first + sum([layer for layer, _ in others])
        unit = max(unit, size)
        most_fresh = max(most_fresh, size - later, later + sum([after for _, after in others]))
    fresh = compute * max(early + most_fresh, in_root + entry)
    vectors, matrices = storage.reduce * (total - deferred), compute * deferred
    if storage.zero_stage == 3:
        in_backward = compute * max(unit + early + most_fresh, in_root + 2 * entry)
        kept, gathered = compute * in_root, compute * unit
        return StageSizes(shards, gradients, kept, gathered, gradients, fresh, in_backward, vectors, matrices)
    gathered = compute * total
    if storage.zero_stage == 2:
        return StageSizes(shards, gradients, gathered, 0, gradients, fresh, fresh, vectors, matrices)
    # Stages 0 and 1 accumulate whole gradients, in place if they already have the reduction's type.
    added_up = storage.reduce * total
    if compute == storage.reduce:
        return StageSizes(shards, gradients, gathered, 0, added_up, fresh, 0, 0, 0)
    return StageSizes(shards, gradients, gathered, 0, added_up, fresh, fresh, 0, matrices)


def rounds_of(schedule: str, pipeline: int, microbatches: int) -> int:
    """How often a rank's stages take turns in a step. 3 means three or more, which `trainer_states` treats alike."""
    if schedule in SPLIT_BACKWARD:  # W passes come late, so stages wait for each other's
        return 3
    if schedule in ("1f1b", "gpipe"):  # for a single stage all numbers give the same, and one shares cached results
        return 3
    return 1 if schedule == "looped_bfs" else min(3, -(-microbatches // pipeline))


@lru_cache(maxsize=65536)
def trainer_states(
    model: TransformerConfig,
    ranks: tuple[RankStages, ...],
    splits_backward: bool,
    rounds: int,
    accumulates: bool,
    storage: Storage,
) -> list[tuple[int, int, int, int]]:
    """Bytes of parameters, gradients and optimizer state between passes, and of temporary copies at the fullest moment.

    Master weights, gradients and optimizer state are float32. The last figure is exact for whole backward passes. For
    split ones it is an estimate: up to half as much again with ZeRO 3 and few microbatches, and in float32, with no
    more microbatches than ranks, too low by up to a tenth of the rank's memory.

    Args:
        model: the model.
        ranks: the stages of each rank.
        splits_backward: whether the schedule splits backward passes.
        rounds: the result of `rounds_of`.
        accumulates: whether a step has several microbatches.
        storage: how the processes keep and share the state.
    """
    stage = _stages(model, storage)
    of_ranks = [_sizes(here, stage) for here in ranks]
    fullest = [_fullest(sizes, splits_backward, rounds, accumulates, storage.zero_stage) for sizes in of_ranks]
    return [_state(sizes, most, storage) for sizes, most in zip(of_ranks, fullest, strict=True)]


@lru_cache(maxsize=4096)
def exact_state(
    model: TransformerConfig,
    here: RankStages,
    schedule: str,
    pipeline: int,
    virtual: int,
    rank: int,
    microbatches: int,
    storage: Storage,
) -> tuple[int, int, int, int]:
    """`trainer_states` of one rank, found by following the rank's passes."""
    sizes = _sizes(here, _stages(model, storage))
    stages = [stage for stage, owner in enumerate(stage_ranks(schedule, pipeline, virtual)) if owner == rank]
    passes = _table(schedule, pipeline, virtual, microbatches)[rank]
    peak = peak_of(dict(zip(stages, sizes, strict=True)), passes, storage)
    return _state(sizes, peak - sum([size.shards for size in sizes]), storage)


_table = lru_cache(maxsize=128)(schedule_table)


def _state(sizes: Sequence[StageSizes], moving: int, storage: Storage) -> tuple[int, int, int, int]:
    """Split up the fullest moment; ``moving`` is the most bytes at once apart from what is always there."""
    weights = gradients = sum([size.gradients for size in sizes])  # both in float32
    copies = weights // storage.master * storage.compute if storage.copied else 0
    state = sum([size.shards for size in sizes]) - weights - copies
    return weights, gradients, state, copies + max(0, moving - gradients)


def _sizes(here: RankStages, stage: Callable[[Counts, bool, bool], StageSizes]) -> list[StageSizes]:
    last = len(here.layers) - 1
    return [
        stage(counts, here.first and index == 0, here.last and index == last)
        for index, counts in enumerate(here.layers)
    ]


def _fullest(sizes: Sequence[StageSizes], split: bool, rounds: int, accumulates: bool, zero: int) -> int:
    """The most bytes at once, apart from weights and optimizer state, on a rank with these stages.

    While one stage runs its backward pass, the later stages hold accumulated gradients, or are done with the step. The
    earlier ones hold gathered weights and, from the second round on, gradients.
    """
    busy = [size.kept_gathered + (size.added_up if accumulates else size.gradients) for size in sizes]
    passing = [size.in_backward if zero != 1 or accumulates else size.fresh for size in sizes]
    if split:
        kept = [size.matrices + (size.vectors if zero >= 2 else 0) for size in sizes]
        passing = list(map(max, passing, kept))
    # With three rounds or more, some stage's backward pass runs while all the others hold everything.
    done_after, busy_after = sum([size.gradients for size in sizes]), sum(busy)
    if rounds == 3:
        return max(done_after, busy_after + max(passing))
    # With fewer rounds, go through the stages and take the fuller of the first round and the last.
    most, gathered_before, busy_before = done_after, 0, 0
    for size, mine, more in zip(sizes, busy, passing, strict=True):
        busy_after -= mine
        done_after -= size.gradients
        first_round = gathered_before + (done_after if rounds == 1 else busy_after)
        last_round = (gathered_before if rounds == 1 else busy_before) + done_after
        most = max(most, mine + more + max(first_round, last_round))
        gathered_before += size.kept_gathered
        busy_before += mine
    return most


@lru_cache(maxsize=1024)
def _stages(model: TransformerConfig, storage: Storage) -> Callable[[Counts, bool, bool], StageSizes]:
    """The sizes of any stage, from its layers and whether it is the first and the last."""

    @cache
    def sizes(counts: Counts, is_first: bool, is_last: bool) -> StageSizes:
        split = ParameterSplit(storage.split.tensor, expert=storage.split.expert)
        return stage_sizes(_elements(model, counts, is_first, is_last, split, storage.optimizer), storage)

    return sizes


@lru_cache(maxsize=4096)
def _elements(
    model: TransformerConfig,
    counts: Counts,
    is_first: bool,
    is_last: bool,
    split: ParameterSplit,
    optimizer: OptimizerState,
) -> StageElements:
    return stage_elements(units_of_counts(model, counts, is_first, is_last), split, optimizer)
