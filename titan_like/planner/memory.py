"""The most bytes that one process holds during a step, composed from a traced microbatch.

`occupancy` says how much of each state a schedule holds at each moment, and `stage_memory` what each of them takes. The
fullest moment is the largest product of the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from titan_like.metrics.devices import Device
from titan_like.optim.state_size import OptimizerState
from titan_like.planner.occupancy import FINISHED, occupancy, splits_backward
from titan_like.planner.pass_gradients import Keeping
from titan_like.planner.profile import Profile
from titan_like.planner.stage_memory import StageMemory, Usage
from titan_like.planner.stages import (
    Sharding,
    StageProgram,
    pipeline_program,
    shard_rows,
    sharding_of,
    stages_of_rank,
)
from titan_like.planner.trace.program import Parameter, Segment
from titan_like.planner.workload import Workload, pipeline_of

MEMORY_MARGIN = 0.1  # share of a GPU's memory that a prediction must leave free


class StepMemory(NamedTuple):
    """Bytes of tensors on one process at the fullest moment of a step."""

    parameters: int  # master weights, and frozen ones
    gradients: int
    optimizer: int
    gathered: int  # weights in the type of computation, and buffers to gather them
    activations: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self)


class RankMemory(NamedTuple):
    """`StepMemory` of a pipeline rank, and what the process holds besides tensors."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    overhead: float
    total: float


class Memory(NamedTuple):
    """Bytes on the GPUs of a job."""

    ranks: tuple[RankMemory, ...]  # by pipeline rank
    largest: float
    capacity: float

    @property
    def fits(self) -> bool:
        """Whether every rank's total is below the device's memory."""
        return self.largest <= self.capacity


def usable_bytes(device: Device) -> float:
    """Bytes of a GPU's memory that a layout chosen by its prediction may take."""
    return device.memory_bytes * (1 - MEMORY_MARGIN)


def memory(work: Workload, profile: Profile) -> Memory:
    """Memory of all pipeline ranks."""
    memories = step_memory(work, range(work.pipeline), profile.gradient_bytes).values()
    ranks = tuple(with_overhead(profile, *parts) for parts in memories)
    return Memory(ranks, max(rank.total for rank in ranks), profile.device.memory_bytes)


def largest_memory(work: Workload, profile: Profile, limit: float = math.inf, messages: bool = True) -> float:
    """The largest total of `memory`, found without computing every rank, or the first one above ``limit``.

    Without ``messages`` between stages it is a lower bound, which takes a fraction of the time.
    """
    largest = 0.0
    for rank in candidates(work):
        parts = rank_memory(work, rank, profile.gradient_bytes, messages)
        largest = max(largest, with_overhead(profile, *parts).total)
        if largest > limit:
            break
    return largest


def with_overhead(profile: Profile, *parts: float) -> RankMemory:
    """A rank's memory from its parts, parameters to activations."""
    overhead = profile.overhead_bytes + profile.fragmentation * sum(parts[3:])
    return RankMemory._make([*parts, overhead, sum(parts) + overhead])


def step_memory(work: Workload, ranks: Iterable[int] | None = None, reduce_bytes: int = 4) -> dict[int, StepMemory]:
    """Memory of some pipeline ranks, by default of the ranks that may be the fullest.

    ``reduce_bytes``: of an element in `training.reduce_dtype`.
    """
    chosen = candidates(work) if ranks is None else ranks
    return {rank: rank_memory(work, rank, reduce_bytes) for rank in chosen}


def rank_moments(
    work: Workload, rank: int, reduce_bytes: int = 4, messages: bool = True
) -> tuple[StepMemory, StepMemory]:
    """The fullest moments of a step's forward and backward passes and of its update, on one pipeline rank.

    Arguments are as for `step_memory` and `occupancy`.
    """
    sharding, shape = sharding_of(work, reduce_bytes), (work.pipeline, work.virtual_stages, work.microbatches)
    splits = splits_backward(work.schedule, work.pipeline, work.compiled)
    occupied = occupancy(work.schedule, *shape, rank, splits, messages)
    programs, keeping, shards = stages_of_rank(work, rank), _keeping(sharding), tuple(sharding.shards.items())
    stages = [_stage_memory(programs[number], keeping) for number in occupied.stages]
    elements = [_sharded(stage.stage, shards, work.optimizer) for stage in stages]
    usages: list[Usage] = []
    for stage, passes, (shard, _) in zip(stages, occupied.passes, elements, strict=True):
        usages += stage.usages(passes, shard)
    # Bytes at each moment. The states of weights and gradients say which of their stage's amounts there are.
    weights, gradients = zip(
        *(stage.states(shard) for stage, (shard, _) in zip(stages, elements, strict=True)), strict=True
    )
    every = np.arange(len(stages))
    gathered = np.array(weights)[every, occupied.weights].sum(1)
    kept = np.array(gradients)[every, occupied.gradients].sum(1)
    totals = occupied.held @ [stage.held for stage in stages] + occupied.deferred @ [stage.deferred for stage in stages]
    totals += occupied.messages * programs[occupied.stages[0]].message + gathered + kept
    totals += np.array([sum(usage[:3]) for usage in usages])[occupied.running]
    fullest = int(totals.argmax())
    running = usages[occupied.running[fullest]]
    at_peak = int(gathered[fullest]) + running.gathered, int(kept[fullest]) + running.gradients
    copies = round(sharding.compute * sharding.copied * sum(stage.elements for stage in stages))
    frozen = sharding.compute * sum(_frozen(stage.stage, sharding) for stage in stages)
    master, kept_state = sum(shard for shard, _ in elements), sum(state for _, state in elements)
    held = sharding.master * master + frozen, round(sharding.master * kept_state)
    at_update = sum(
        stage.at_update(shard, work.microbatches, work.update)
        for stage, (shard, _) in zip(stages, elements, strict=True)
    )
    at_update += max(
        round(stage.workspace(work.update, shard)) for stage, (shard, _) in zip(stages, elements, strict=True)
    )
    # Before it, ranks exchange the gradients of a table that both ends hold.
    ends, copied = pipeline_of(work).ranks, pipeline_program(work).copied
    if copied and rank in (ends[0], ends[-1]):
        received = -(-copied // sharding.shards[stages[0].stage.sharers])
        sums = sum(stage.gradients(FINISHED, shard) for stage, (shard, _) in zip(stages, elements, strict=True))
        at_update = max(at_update, sums + sharding.master * received)
    in_passes = StepMemory(held[0], at_peak[1], held[1], at_peak[0] + copies, int(totals[fullest]) - sum(at_peak))
    return in_passes, StepMemory(held[0], at_update, held[1], copies, 0)


def rank_memory(work: Workload, rank: int, reduce_bytes: int = 4, messages: bool = True) -> StepMemory:
    """The fullest moment of a step on one pipeline rank; arguments as for `step_memory` and `occupancy`."""
    return max(rank_moments(work, rank, reduce_bytes, messages), key=lambda moment: moment.total)


def candidates(work: Workload) -> tuple[int, ...]:
    """Both end ranks, and the first of each kind between them: later ranks of a kind hold fewer microbatches."""
    if splits_backward(work.schedule, work.pipeline, work.compiled):
        return tuple(dict.fromkeys((0, work.pipeline - 1, *range(work.pipeline))))
    return pipeline_of(work).largest


def _keeping(sharding: Sharding) -> Keeping:
    single = tuple([name for name, shards in sharding.shards.items() if shards == 1])
    sizes = sharding.compute, sharding.reduce, sharding.master
    return Keeping(sharding.zero_stage, sharding.wrapped, sharding.copied, sharding.replicate > 1, single, *sizes)


@lru_cache(maxsize=65536)
def _stage_memory(stage: StageProgram, keeping: Keeping) -> StageMemory:
    return StageMemory(stage, keeping)


def _frozen(stage: StageProgram, sharding: Sharding) -> int:
    """Elements of frozen parameters on the first process, which ZeRO 3 alone shards."""
    parameters = [parameter for unit in stage.units for parameter in unit.frozen]
    shards = [sharding.shards[p.sharers] if sharding.zero_stage == 3 else 1 for p in parameters]
    rows = [shard_rows(p.shape[0], size) for p, size in zip(parameters, shards, strict=True)]
    return sum(count * (p.elements // p.shape[0]) for p, count in zip(parameters, rows, strict=True))


@lru_cache(maxsize=65536)
def _sharded(stage: StageProgram, shards: tuple[tuple[str, int], ...], optimizer: OptimizerState) -> tuple[int, float]:
    """Elements of the first process's shard of a stage, and values that the optimizer keeps for them."""
    elements, state = 0, 0.0
    for segment in stage.layers:
        shard, kept = _sharded_segment(segment, shards, optimizer)
        elements, state = elements + shard, state + kept
    for parameter in [parameter for unit in stage.ends for parameter in unit.parameters]:
        shard, kept = _sharded_parameter(parameter, dict(shards), optimizer)
        elements, state = elements + shard, state + kept
    return elements, state


@lru_cache(maxsize=65536)
def _sharded_segment(
    segment: Segment, shards: tuple[tuple[str, int], ...], optimizer: OptimizerState
) -> tuple[int, float]:
    counts = [_sharded_parameter(parameter, dict(shards), optimizer) for parameter in segment.parameters]
    return sum(elements for elements, _ in counts), sum(kept for _, kept in counts)


def _sharded_parameter(parameter: Parameter, shards: dict[str, int], optimizer: OptimizerState) -> tuple[int, float]:
    (rows, *dims), size, matrices = parameter.shape, shards[parameter.sharers], parameter.matrices
    shape = shard_rows(rows, size), *dims
    return prod(shape), optimizer.of(parameter.name, shape, matrices if matrices % size else matrices // size)
