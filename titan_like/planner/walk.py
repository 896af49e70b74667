"""Seconds from the first pass of a step to the last, over the trainer's own schedule tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from titan_like.parallel.schedules.tables import schedule_table, stage_ranks

_KINDS = "FBIW"


def span_of(
    schedule: str, pipeline: int, virtual: int, microbatches: int, durations: Sequence[float], transfer: float
) -> float:
    """Follow every pass.

    If there are many microbatches, the walk covers three rounds through the ranks and one more. Each further round
    takes as long as that one, but no less than the busiest rank computes. This is mostly exact; with uneven stages and
    slow messages it is off by a few per cent.

    Args:
        schedule: its name.
        pipeline: ranks.
        virtual: stages per rank.
        microbatches: of one step.
        durations: seconds of F, B, I and W of the first stage, then of the next.
        transfer: seconds from a pass's end until another rank has its result.
    """
    ranks = stage_ranks(schedule, pipeline, virtual)
    rounds = max(0, microbatches // pipeline - 3)
    few = _program(schedule, pipeline, virtual, microbatches - rounds * pipeline)
    seconds = _run(few, pipeline, durations, transfer)
    if rounds:
        more = _program(schedule, pipeline, virtual, microbatches - (rounds - 1) * pipeline)
        round_ = _run(more, pipeline, durations, transfer) - seconds
        busy = [0.0] * pipeline
        for stage, rank in enumerate(ranks):
            busy[rank] += durations[4 * stage] + durations[4 * stage + 1]
        seconds += rounds * max(round_, pipeline * max(busy))
    return seconds


Program = list[tuple[int, int, int]]
"""Passes in an order in which each follows all that it needs. A pass is its rank, the index of its duration, and the
number of the pass on another rank that it waits for, or -1. It also waits for all earlier passes of its own rank."""


@lru_cache(maxsize=256)
def _program(schedule: str, pipeline: int, virtual: int, microbatches: int) -> Program:
    # A place stands for the result of a pass: stage × microbatch for forward passes, then the same for backward passes.
    # `numbers` has the pass that gives each result, or -1 until that pass is in the program.
    table, ranks = schedule_table(schedule, pipeline, virtual, microbatches), stage_ranks(schedule, pipeline, virtual)
    num_stages, position, ready = len(ranks), [0] * pipeline, list(range(pipeline))
    backward = num_stages * microbatches  # the first place of backward passes
    numbers = [-1] * (2 * backward)
    waiting: dict[int, int] = {}  # place → the rank that waits for it
    program: Program = []
    while ready:
        rank = ready.pop()
        # Go on with this rank until a pass needs a result that is not there yet.
        for kind, stage, microbatch in table[rank][position[rank] :]:
            needed, place = -1, stage * microbatches + microbatch
            if kind == "F":
                if stage > 0 and ranks[stage - 1] != rank:
                    needed = place - microbatches
            elif kind != "W":
                place += backward
                if stage + 1 < num_stages and ranks[stage + 1] != rank:
                    needed = place + microbatches
            if needed >= 0:
                if numbers[needed] < 0:
                    waiting[needed] = rank
                    break
                needed = numbers[needed]
            if kind != "W":
                numbers[place] = len(program)
                if place in waiting:
                    ready.append(waiting.pop(place))
            program.append((rank, 4 * stage + _KINDS.index(kind), needed))
            position[rank] += 1
    return program


def _run(program: Program, num_ranks: int, durations: Sequence[float], transfer: float) -> float:
    ends: list[float] = []
    free = [0.0] * num_ranks
    for rank, duration, needed in program:
        start = free[rank]
        if needed >= 0 and ends[needed] + transfer > start:
            start = ends[needed] + transfer
        free[rank] = start = start + durations[duration]
        ends.append(start)
    return max(free)
