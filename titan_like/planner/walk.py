"""Seconds from the first pass of a step to the last, over the trainer's own schedule tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from titan_like.parallel.schedules.simulate import in_order
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
    shorter = _program(schedule, pipeline, virtual, microbatches - rounds * pipeline)
    seconds = _run(shorter, pipeline, durations, transfer)
    if rounds:
        longer = _program(schedule, pipeline, virtual, microbatches - (rounds - 1) * pipeline)
        round_ = _run(longer, pipeline, durations, transfer) - seconds
        busy = [0.0] * pipeline
        for stage, rank in enumerate(ranks):
            busy[rank] += durations[4 * stage] + durations[4 * stage + 1]
        seconds += rounds * max(round_, pipeline * max(busy))
    return seconds


@lru_cache(maxsize=256)
def _program(schedule: str, pipeline: int, virtual: int, microbatches: int) -> list[tuple[int, int, int]]:
    """The actions `in_order`, each replaced by the index of its duration."""
    table, ranks = schedule_table(schedule, pipeline, virtual, microbatches), stage_ranks(schedule, pipeline, virtual)
    return [(rank, 4 * stage + _KINDS.index(kind), needed) for rank, (kind, stage, _), needed in in_order(table, ranks)]


def _run(program: list[tuple[int, int, int]], num_ranks: int, durations: Sequence[float], transfer: float) -> float:
    ends: list[float] = []
    free = [0.0] * num_ranks
    for rank, duration, needed in program:
        start = free[rank]
        if needed >= 0 and ends[needed] + transfer > start:
            start = ends[needed] + transfer
        free[rank] = start = start + durations[duration]
        ends.append(start)
    return max(free)
