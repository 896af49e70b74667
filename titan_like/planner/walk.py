"""Walks over the trainer's own schedule tables: the seconds that a step's passes take, and what a rank holds meanwhile.

A rank's memory is a sum over its stages: activations of microbatches between forward and backward pass, gathered
weights, gradients in several states, and what the running pass needs. The schedule alone says how much of each there
is. `occupancy` counts it, whatever the model, and keeps the moments that may be the fullest; they are few, because a
schedule repeats itself.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from titan_like.parallel.schedules.communication import MAX_PENDING_SENDS, add_communication
from titan_like.parallel.schedules.simulate import follow, in_order, max_in_flight
from titan_like.parallel.schedules.tables import Action, schedule_table, stages_per_rank
from titan_like.planner.data_parallel import Gradients, PassKind, StageState, Weights
from titan_like.planner.workload import PipelineSchedule

_KINDS = "FBIW"


def span_of(schedule: PipelineSchedule, durations: Sequence[float], transfer: float) -> float:
    """Follow every pass.

    If there are many microbatches, the walk covers three rounds through the ranks and one more. Each further round
    takes as long as that one, but no less than the busiest rank computes. This is mostly exact; with uneven stages and
    slow messages it is off by a few per cent.

    Args:
        schedule: the order of the passes.
        durations: seconds of F, B, I and W of the first stage, then of the next.
        transfer: seconds from a pass's end until another rank has its result.
    """
    pipeline = schedule.pipeline
    rounds = max(0, schedule.microbatches // pipeline - 3)
    few = schedule.microbatches - rounds * pipeline
    seconds = _run(_program(schedule._replace(microbatches=few)), pipeline, durations, transfer)
    if rounds:
        longer = _program(schedule._replace(microbatches=few + pipeline))
        round_ = _run(longer, pipeline, durations, transfer) - seconds
        busy = [0.0] * pipeline
        for stage, rank in enumerate(schedule.ranks):
            busy[rank] += durations[4 * stage] + durations[4 * stage + 1]
        seconds += rounds * max(round_, pipeline * max(busy))
    return seconds


@lru_cache(maxsize=256)
def _program(schedule: PipelineSchedule) -> list[tuple[int, int, int]]:
    """The actions `in_order`, each replaced by the index of its duration."""
    program = in_order(schedule.table, schedule.ranks)
    return [(rank, 4 * stage + _KINDS.index(kind), needed) for rank, (kind, stage, _), needed in program]


def _run(program: list[tuple[int, int, int]], num_ranks: int, durations: Sequence[float], transfer: float) -> float:
    times = follow([(rank, durations[index], needed) for rank, index, needed in program], num_ranks, transfer)
    return max([end for _, end in times])


class Occupancy(NamedTuple):
    """The moments of one pipeline rank that may be the fullest."""

    stages: tuple[int, ...]  # numbers in the pipeline
    passes: tuple[tuple[PassKind, ...], ...]  # of each stage
    held: np.ndarray  # [moments, stages]: microbatches between forward and backward pass
    waiting: np.ndarray  # [moments, stages]: of these, all but the one whose backward pass runs
    deferred: np.ndarray  # [moments, stages]: microbatches between the two parts of a backward pass
    # [moments, stages]: states of gathered weights and of gradients. The running stage has 0, because its states
    # are part of the pass, except the weights of a second part of a backward pass.
    weights: np.ndarray
    gradients: np.ndarray
    messages: np.ndarray  # [moments]
    running: np.ndarray  # [moments]: number of the pass that runs, among ``passes`` of all stages


# By position of the stage, its pass and the states of all stages' weights and gradients → what is held then.
_Moments = dict[tuple[int, PassKind, tuple[int, ...], tuple[int, ...]], list[tuple[int, ...]]]


def occupancy(schedule: PipelineSchedule, rank: int, splits_backward: bool, messages: bool = True) -> Occupancy:
    """The moments of a rank. More than three rounds of microbatches through the ranks repeat the same ones.

    Without ``messages``, which need the order of all ranks, it takes a fraction of the time.
    """
    pipeline, microbatches = schedule.pipeline, schedule.microbatches
    if not _holds_all(schedule.name):
        enough = min(microbatches, max(3 * pipeline, 4))  # a first, second, later and last one
        enough += (microbatches - enough) % pipeline if microbatches > enough else 0
        schedule = schedule._replace(microbatches=enough)
    return _occupancy(schedule, rank, splits_backward, messages)


@cache
def _holds_all(schedule: str) -> bool:
    """Whether a rank holds all microbatches of a step, and so more of them the more there are."""
    stages = stages_per_rank(schedule, 2)
    few, many = (max(max_in_flight(schedule_table(schedule, 2, stages, microbatches))) for microbatches in (8, 16))
    return many > few


@lru_cache(maxsize=4096)
def _occupancy(schedule: PipelineSchedule, rank: int, splits_backward: bool, with_messages: bool) -> Occupancy:
    ranks = schedule.ranks
    stages = tuple(stage for stage, owner in enumerate(ranks) if owner == rank)
    place, count, last_stage = {stage: n for n, stage in enumerate(stages)}, len(stages), len(ranks) - 1
    held, deferred = [0] * count, [0] * count
    states = [StageState(schedule.microbatches) for _ in stages]
    weights, gradients = [Weights.NOT_GATHERED] * count, [Gradients.NONE] * count
    waiting = sent = 0  # messages: between a pass and its transfer, and on their way
    # For equal states, only the moments that no other moment matches or exceeds in every count.
    moments: _Moments = {}
    for kind, stage, _ in steps_as_run(schedule, rank, splits_backward, with_messages):
        if kind not in _KINDS:
            is_send = kind[0] == "S"  # SEND_F or SEND_B; the others are RECV_F and RECV_B
            waiting += -1 if is_send else 1
            sent += is_send
            continue
        n = place[stage]
        takes = stage != (0 if kind == "F" else last_stage) and kind != "W"  # a message
        waiting -= takes
        messages = waiting + min(sent, MAX_PENDING_SENDS) if with_messages else 0
        weights_before, gradients_before = tuple(weights), tuple(gradients)
        key = n, states[n].advance(kind), weights_before, gradients_before
        weights[n], gradients[n] = states[n].weights, states[n].gradients
        _keep(moments.setdefault(key, []), (*held, *deferred, messages))
        waiting += stage != (last_stage if kind == "F" else 0) and kind != "W"
        if kind == "F":
            held[n] += 1
        else:
            held[n] -= kind != "W"
            deferred[n] += (kind == "I") - (kind == "W")
    return _as_arrays(stages, moments)


def steps_as_run(schedule: PipelineSchedule, rank: int, splits_backward: bool, messages: bool = True) -> list[Action]:
    """A rank's passes and messages in order, with all backward passes in two parts, or none.

    Where the trainer does not split them, a schedule's first part is the whole pass and its second part nothing.
    """
    steps = []
    for step in _steps(schedule, messages)[rank]:
        if step.kind == "B" and splits_backward:
            steps += [step._replace(kind="I"), step._replace(kind="W")]
        elif step.kind == "I" and not splits_backward:
            steps.append(step._replace(kind="B"))
        elif step.kind != "W" or splits_backward:
            steps.append(step)
    return steps


@lru_cache(maxsize=64)
def _steps(schedule: PipelineSchedule, messages: bool) -> list[list[Action]]:
    """The passes and messages of all ranks."""
    return add_communication(schedule.table, schedule.ranks) if messages else schedule.table


def _keep(moments: list[tuple[int, ...]], new: tuple[int, ...]) -> None:
    """Add ``new`` to a list of moments, none of which matches or exceeds another in every count."""
    if not any(all(map(int.__ge__, moment, new)) for moment in moments):
        moments[:] = [moment for moment in moments if not all(map(int.__ge__, new, moment))]
        moments.append(new)


def _as_arrays(stages: tuple[int, ...], moments: _Moments) -> Occupancy:
    passes = tuple(tuple({pass_: None for n, pass_, *_ in moments if n == stage}) for stage in range(len(stages)))
    number = {key: number for number, key in enumerate((n, kind) for n, kinds in enumerate(passes) for kind in kinds)}
    rows = [
        (*held, *weights, *gradients, messages, number[n, pass_], n)
        for (n, pass_, weights, gradients), kept in moments.items()
        for *held, messages in kept
    ]
    parts = np.split(np.array(rows), [len(stages) * part for part in (1, 2, 3, 4)], axis=1)
    held, deferred, weights, gradients, (messages, running, position) = *parts[:4], parts[4].T
    every, kinds = np.arange(len(rows)), np.array([pass_.kind for _, pass_ in number])[running]
    weights[every, position] *= kinds == "W"
    gradients[every, position] = 0
    waiting = held.copy()
    waiting[every, position] -= np.isin(kinds, ("B", "I"))
    return Occupancy(stages, passes, held, waiting, deferred, weights, gradients, messages, running)
