"""Seconds from the first pass of a step to the last, over the trainer's own schedule tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from titan_like.parallel.schedules.simulate import follow, in_order
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
