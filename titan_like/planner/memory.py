"""Bytes of memory on one GPU of every pipeline rank, by what takes them.

Parameters, gradients and optimizer state come from `training_state`, which is exact, and activations from
`activations`. `titan_like.parallel.schedules.tables` says how many microbatches' activations each schedule holds at
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from titan_like.metrics.devices import Device
from titan_like.parallel.schedules.tables import SPLIT_BACKWARD, stages_per_rank
from titan_like.planner.activations import Moment, full_moments, kept_of
from titan_like.planner.profile import Profile
from titan_like.planner.shapes import ParameterSplit, ShardOf
from titan_like.planner.training_state import Storage, exact_state, rounds_of, trainer_states
from titan_like.planner.workload import RankStages, Workload, element_bytes, pipeline_of

MEMORY_MARGIN = 0.1  # share of a GPU's memory that a prediction must leave free; nine in ten errors are smaller


class RankMemory(NamedTuple):
    """Bytes on one GPU of a pipeline rank at its fullest moment."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float  # gathered weights, and gradients that are not summed yet
    activations: float
    logits: float
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
    ranks = tuple(rank_memories(work, profile, range(work.pipeline)))
    return Memory(ranks, max(rank.total for rank in ranks), profile.device.memory_bytes)


def largest_memory(work: Workload, profile: Profile, exact: bool = True) -> float:
    """The largest total of `memory`, found without computing every rank.

    Candidates are the first and the last rank, and the first rank with each combination of stages: once among all
    ranks, once among those that hold fewer microbatches than the step has. With ``exact`` unset, the trainer's state
    under a schedule that splits backward passes is a much faster estimate.
    """
    return max([rank.total for rank in rank_memories(work, profile, exact=exact)])


def _first_with_gradients(work: Workload) -> int:
    """The first rank that already has gradients when it holds the most activations.

    It does not hold all microbatches of the step at once: solve `in_flight` < v·m for the rank.
    """
    p, m, stages = work.pipeline, work.microbatches, stages_per_rank(work.schedule, work.virtual_stages)
    if work.schedule not in ("1f1b", "interleaved_1f1b"):
        return p
    return p - m + 1 if stages == 1 else ((stages + 1) * p - 1 - stages * m) // 2 + 1


def rank_memories(
    work: Workload, profile: Profile, ranks: Sequence[int] | None = None, exact: bool = True
) -> Iterator[RankMemory]:
    """Memory of some pipeline ranks, by default of those that may be fullest; ``exact`` as in `largest_memory`."""
    if ranks is None and exact and work.schedule in SPLIT_BACKWARD:
        ranks = range(work.pipeline)  # any rank may be the fullest
    held = _held(work.sharded_alike(0), profile.device, ranks)
    for (parameters, all_gradients, optimizer, gathered), moments in zip(
        _states(work, held, exact), held.moments, strict=True
    ):
        share, activations, logits = max(
            moments, key=lambda one: all_gradients * one.gradients + one.activations + one.logits
        )
        yield with_overhead(profile, parameters, all_gradients * share, optimizer, gathered, activations, logits)


def with_overhead(profile: Profile, *parts: float) -> RankMemory:
    """A rank's memory from its parts, parameters to logits, with the software's overhead and the total."""
    overhead = profile.overhead_bytes + profile.fragmentation * sum(parts[3:])
    return RankMemory._make([*parts, overhead, sum(parts) + overhead])


class _Held(NamedTuple):
    """What some ranks hold, apart from state. Each field has an entry per rank."""

    ranks: Sequence[int]
    here: tuple[RankStages, ...]
    moments: list[list[Moment]]  # see `full_moments`


@lru_cache(maxsize=4096)
def _held(work: Workload, device: Device, ranks: Sequence[int] | None) -> _Held:
    pipeline, one, moments = pipeline_of(work), kept_of(work, device), []
    if ranks is None:
        start = _first_with_gradients(work)
        # The first rank with each combination of stages among those that already have gradients.
        later = reversed(range(start, work.pipeline) if start > 0 else ())
        ranks = *pipeline.largest, *{pipeline.here[rank].layers: rank for rank in later}.values()
    for rank in ranks:
        stages, *ends = pipeline.here[rank]
        chunks = in_flight(work.schedule, work.pipeline, len(stages), work.microbatches, rank)
        moments.append(full_moments(work, one, pipeline.layers[rank], chunks, len(stages), ends))
    return _Held(ranks, tuple(pipeline.here[rank] for rank in ranks), moments)


def in_flight(schedule: str, pipeline: int, stages: int, microbatches: int, rank: int) -> int:
    """The most chunks (one microbatch in one of the rank's stages) held at once; the formulas are those of `tables`."""
    everything = stages * microbatches
    if schedule in ("gpipe", "looped_bfs"):
        return everything
    if schedule == "1f1b" or (schedule == "interleaved_1f1b" and stages == 1):
        return min(everything, pipeline - rank)
    if schedule == "interleaved_1f1b":
        return min(everything, (stages - 1) * pipeline + 2 * (pipeline - rank) - 1)
    return min(everything, stages * pipeline + (schedule == "dualpipe_v"))


def _states(work: Workload, held: _Held, exact: bool) -> Iterable[tuple[int, int, int, int]]:
    """Of each rank, bytes of parameters, gradients and optimizer state, and of temporary copies of the first two."""
    m, split = work.microbatches, work.schedule in SPLIT_BACKWARD
    several = max(work.data_parallel * work.context, work.replicate * work.expert_shards * work.shares_experts) > 1
    zero, element = work.zero_stage if several else 0, element_bytes(work.dtype)
    shards, of_experts = (ShardOf(n if zero else 1) for n in (work.shard * work.context, work.expert_shards))
    own = (ShardOf(work.expert), of_experts) if work.shares_experts else ()
    # All degrees above 1 share cached results.
    storage = Storage(
        zero, ParameterSplit(ShardOf(work.tensor), shards, *own), 1 + several, compute=element, optimizer=work.optimizer
    )
    if exact and split:
        # More than three rounds of microbatches through the ranks repeat the same moments.
        shape, few = (work.schedule, work.pipeline, work.virtual_stages), min(m, 3 * work.pipeline)
        ranks = zip(held.here, held.ranks, strict=True)
        return (exact_state(work.model, here, *shape, rank, few, storage) for here, rank in ranks)
    turns = split, rounds_of(work.schedule, work.pipeline, m), m > 1
    return trainer_states(work.model, held.here, *turns, storage)
