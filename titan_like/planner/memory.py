"""The most bytes that one process holds during a step, composed from a traced microbatch.

`occupancy` says how much of each state a schedule holds at each moment, and `stage_memory` what each of them takes. The
fullest moment is the largest product of the two.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from titan_like.metrics.devices import Device
from titan_like.optim.state_size import OptimizerState
from titan_like.planner.data_parallel import Gradients, Rules, Sharding, shard_elements, shard_rows, sharding_of
from titan_like.planner.profile import Profile
from titan_like.planner.stage_memory import StageMemory, Usage
from titan_like.planner.stages import StageProgram, pipeline_of, pipeline_program, stages_of_rank
from titan_like.planner.update_time import unsplit_key, update_workspace
from titan_like.planner.walk import occupancy
from titan_like.planner.workload import Workload

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
    ranks = tuple(with_overhead(profile, *rank_memory(work, rank)) for rank in range(work.pipeline))
    return Memory(ranks, max(rank.total for rank in ranks), profile.device.memory_bytes)


def largest_memory(work: Workload, profile: Profile, limit: float = math.inf, messages: bool = True) -> float:
    """The largest total of `memory`, found without computing every rank, or the first one above ``limit``.

    Without ``messages`` between stages it is a lower bound, which takes a fraction of the time.
    """
    largest = 0.0
    for rank in candidates(work):
        largest = max(largest, with_overhead(profile, *rank_memory(work, rank, messages)).total)
        if largest > limit:
            break
    return largest


def with_overhead(profile: Profile, *parts: float) -> RankMemory:
    """A rank's memory from its parts, parameters to activations."""
    overhead = profile.overhead_bytes + profile.fragmentation * sum(parts[3:])
    return RankMemory._make([*parts, overhead, sum(parts) + overhead])


def candidates(work: Workload) -> Sequence[int]:
    """Both end ranks, and the first of each kind between them: later ranks of a kind hold fewer microbatches."""
    if work.splits_backward:
        return tuple(dict.fromkeys((0, work.pipeline - 1, *range(work.pipeline))))
    return pipeline_of(work).may_be_fullest


def rank_memory(work: Workload, rank: int, messages: bool = True) -> StepMemory:
    """The fullest moment of a step on one pipeline rank; ``messages`` as for `occupancy`."""
    return max(rank_moments(work, rank, messages), key=lambda moment: moment.total)


def rank_moments(work: Workload, rank: int, messages: bool = True) -> tuple[StepMemory, StepMemory]:
    """The fullest moments of a step's passes and of its update, on one pipeline rank; ``messages`` as above."""
    sharding = sharding_of(work)
    rules, shards = sharding.rules, tuple(sharding.shards.items())
    occupied = occupancy(work.pipeline_schedule, rank, work.splits_backward, messages)
    programs = stages_of_rank(work, rank)
    stages = [_stage_memory(programs[number], rules) for number in occupied.stages]
    elements, kept_by_optimizer = zip(*[_sharded(stage.stage, shards, work.optimizer) for stage in stages], strict=True)
    usages: list[Usage] = []
    for stage, passes, shard in zip(stages, occupied.passes, elements, strict=True):
        usages += stage.usages(passes, shard)
    # Bytes at each moment. The states of weights and gradients say which of their stage's amounts there are.
    states = [stage.states(shard) for stage, shard in zip(stages, elements, strict=True)]
    weights, gradients = zip(*states, strict=True)
    every = np.arange(len(stages))
    gathered = np.array(weights)[every, occupied.weights].sum(1)
    kept = np.array(gradients)[every, occupied.gradients].sum(1)
    totals = occupied.held @ [stage.held for stage in stages] + occupied.deferred @ [stage.deferred for stage in stages]
    totals += (occupied.waiting > 0) @ [stage.leaving for stage in stages]
    totals += occupied.messages * programs[occupied.stages[0]].message + gathered + kept
    totals += np.array([sum(usage[:3]) for usage in usages])[occupied.running]
    fullest = int(totals.argmax())
    running = usages[occupied.running[fullest]]
    gathered_at_peak = int(gathered[fullest]) + running.gathered
    gradients_at_peak = int(kept[fullest]) + running.gradients
    copies = rules.compute * sum(stage.stage.elements for stage in stages) if rules.copied else 0
    frozen = rules.compute * sum(_frozen(stage.stage, sharding) for stage in stages)
    in_passes = StepMemory(
        parameters=rules.master * sum(elements) + frozen,
        gradients=gradients_at_peak,
        optimizer=round(rules.master * sum(kept_by_optimizer)),
        gathered=gathered_at_peak + copies,
        activations=int(totals[fullest]) - gathered_at_peak - gradients_at_peak,
    )
    gradients_of = [(stage.gradients, shard) for stage, shard in zip(stages, elements, strict=True)]
    at_update = sum(of_stage.at_update(shard, work.microbatches, work.update) for of_stage, shard in gradients_of)
    at_update += round(work.update.held * sum(elements))
    at_update += update_workspace(work.update, unsplit_key(work), tuple(stage.stage for stage in stages), shards)
    # Before it, ranks exchange the gradients of a table that both ends hold.
    ends, copied = pipeline_of(work).ranks, pipeline_program(work).copied
    if copied and rank in (ends[0], ends[-1]):
        received = -(-copied // sharding.shards[stages[0].stage.sharers])
        sums = sum(of_stage.between_passes(Gradients.FINISHED, shard) for of_stage, shard in gradients_of)
        at_update = max(at_update, sums + rules.master * received)
    return in_passes, in_passes._replace(gradients=at_update, gathered=copies, activations=0)


@lru_cache(maxsize=65536)
def _stage_memory(stage: StageProgram, rules: Rules) -> StageMemory:
    return StageMemory(stage, rules)


def _frozen(stage: StageProgram, sharding: Sharding) -> int:
    """Elements of frozen parameters on the first process, which ZeRO 3 alone shards."""
    shards = sharding.shards if sharding.rules.gathers_every_pass else dict.fromkeys(sharding.shards, 1)
    return sum(shard_elements(p, shards[p.sharers]) for unit in stage.units for p in unit.frozen)


Shards = tuple[tuple[str, int], ...]
"""The items of `Sharding.shards`."""


@lru_cache(maxsize=65536)
def _sharded(stage: StageProgram, shards: Shards, optimizer: OptimizerState) -> tuple[int, float]:
    """Elements of the first process's shard of a stage, and values that the optimizer keeps for them."""
    sizes, elements, kept = dict(shards), 0, 0.0
    parameters = [(p, count) for segment, is_layer, count in stage.counts if is_layer for p in segment.parameters]
    for parameter, count in (*parameters, *((p, 1) for unit in stage.ends for p in unit.parameters)):
        (rows, *dims), size, matrices = parameter.shape, sizes[parameter.sharers], parameter.matrices
        shape = shard_rows(rows, size), *dims
        elements += count * prod(shape)
        kept += count * optimizer.of(parameter.name, shape, matrices if matrices % size else matrices // size)
    return elements, kept
