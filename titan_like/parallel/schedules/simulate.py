"""The time and memory that a pipeline schedule takes, computed without running it."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from titan_like.parallel.schedules.tables import Action, Table, schedule_table, stage_ranks


class Event(NamedTuple):
    """A rank's action with its start and end, in the unit of the durations."""

    rank: int
    action: Action
    start: float
    end: float


def unit_time(action: Action) -> float:
    """Durations as in the papers' figures: each half of the backward pass takes as long as the forward pass."""
    return 2.0 if action.kind == "B" else 1.0


Program = list[tuple[int, Action, int]]
"""Actions in an order in which each follows all that it needs. With each its rank, and the place of the action on
another rank that it waits for, or -1. It also waits for all earlier actions of its own rank."""


def in_order(table: Table, ranks: list[int]) -> Program:
    """Find such an order of a table's actions; ``ranks`` has the rank of each stage.

    Raises a `ValueError` that names the stuck ranks if some wait for each other, or for an action that no list holds.
    """
    microbatches = 1 + max((action.microbatch for actions in table for action in actions), default=0)
    backward = len(ranks) * microbatches  # results of forward passes by stage and microbatch, then of B or I
    numbers = [-1] * (2 * backward)  # of the actions that give the results
    position, ready = [0] * len(table), list(range(len(table)))
    waiting: dict[int, int] = {}  # result → the rank that waits for it, so no rank is ever polled
    program: Program = []
    while ready:
        rank = ready.pop()
        for action in table[rank][position[rank] :]:
            kind, stage, microbatch = action
            result = stage * microbatches + microbatch
            needed = finished = -1
            if kind == "F":
                needed = result - microbatches
            elif kind == "W":
                finished = result + backward
            else:
                finished, result = result, result + backward
                needed = result + microbatches if stage + 1 < len(ranks) else -1
            if finished >= 0 and numbers[finished] < 0:
                waiting[finished] = rank
                break
            if needed >= 0 and numbers[needed] < 0:
                waiting[needed] = rank
                break
            place = numbers[needed] if needed >= 0 else -1
            if kind != "W":
                numbers[result] = len(program)
                if result in waiting:
                    ready.append(waiting.pop(result))
            program.append((rank, action, place if place >= 0 and program[place][0] != rank else -1))
            position[rank] += 1
    stuck = [
        f"rank {rank} at {actions[done]}"
        for rank, (actions, done) in enumerate(zip(table, position, strict=True))
        if done < len(actions)
    ]
    if stuck:
        raise ValueError(f"the schedule deadlocks: {'; '.join(stuck)}")
    return program


def simulate(table: Table, ranks: list[int], duration: Callable[[Action], float], transfer: float = 0.0) -> list[Event]:
    """Run each rank's list in order, every action as soon as its rank is free and its inputs have arrived.

    ``transfer`` is the time from an action's end until another rank has its result. Returns all actions, sorted by
    start, then rank; raises as `in_order`.
    """
    program = in_order(table, ranks)
    times = follow([(rank, duration(action), needed) for rank, action, needed in program], len(table), transfer)
    events = [Event(rank, action, *time) for (rank, action, _), time in zip(program, times, strict=True)]
    return sorted(events, key=lambda event: (event.start, event.rank))


def follow(program: Sequence[tuple[int, float, int]], num_ranks: int, transfer: float) -> list[tuple[float, float]]:
    """Start and end of every action of a `Program` that gives its duration in the place of the action."""
    times: list[tuple[float, float]] = []
    free = [0.0] * num_ranks
    for rank, duration, needed in program:
        start = free[rank]
        if needed >= 0 and times[needed][1] + transfer > start:
            start = times[needed][1] + transfer
        free[rank] = end = start + duration
        times.append((start, end))
    return times


def step_time(events: list[Event]) -> float:
    """The time at which the last rank finishes."""
    return max(event.end for event in events)


def bubble_fraction(events: list[Event], num_ranks: int) -> float:
    """Idle time of the busiest rank divided by its compute time, as in arXiv 2104.04473, section 2.2.1."""
    compute = [0.0] * num_ranks
    for event in events:
        compute[event.rank] += event.end - event.start
    return (step_time(events) - max(compute)) / max(compute)


def ideal_bubble(schedule: str, pipeline_degree: int, virtual_stages: int, num_microbatches: int) -> float:
    """The bubble fraction without transfer times, if F, I and W take equally long and B takes twice that."""
    table = schedule_table(schedule, pipeline_degree, virtual_stages, num_microbatches)
    return bubble_fraction(
        simulate(table, stage_ranks(schedule, pipeline_degree, virtual_stages), unit_time), pipeline_degree
    )


def max_in_flight(table: Table) -> list[int]:
    """Per rank, the most chunks that it holds at once. A chunk is a microbatch in a stage, held from F until B or W."""
    change = {"F": 1, "I": 0, "B": -1, "W": -1}
    return [max(accumulate(change[action.kind] for action in actions), default=0) for actions in table]
