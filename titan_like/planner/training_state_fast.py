"""Bytes of our own trainer's state on one pipeline rank, fast enough for a search.

`training_state.peak_state` follows every pass of a step, which is exact and slow. `trainer_states` derives the fullest
moment from the order of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

from titan_like.models.config import TransformerConfig
from titan_like.optim.state_size import OptimizerState
from titan_like.parallel.schedules.tables import SPLIT_BACKWARD, schedule_table, stage_ranks
from titan_like.planner.shapes import ParameterSplit, units_of_counts
from titan_like.planner.training_state import StageElements, StageSizes, Storage, peak_of, stage_elements, stage_sizes
from titan_like.planner.workload import Counts, RankStages


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
        split = ParameterSplit(storage.split.tensor)
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
