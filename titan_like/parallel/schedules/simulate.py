"""The time and memory that a pipeline schedule takes, computed without running it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from titan_like.parallel.schedules.tables import Action, Table, inputs, outcome, schedule_table, stage_ranks


class Event(NamedTuple):
    """A rank's action with its start and end, in the unit of the durations."""

    rank: int
    action: Action
    start: float
    end: float


def unit_time(action: Action) -> float:
    """Durations as in the papers' figures: each half of the backward pass takes as long as the forward pass."""
    return 2.0 if action.kind == "B" else 1.0


def simulate(table: Table, ranks: list[int], duration: Callable[[Action], float], transfer: float = 0.0) -> list[Event]:
    """Run each rank's list in order, every action as soon as its rank is free and its inputs have arrived.

    Args:
        table: per rank, its actions.
        ranks: the rank of each stage.
        duration: time of an action.
        transfer: time from an action's end until another rank has its result.

    Returns:
        All actions, sorted by start, then rank.

    Raises:
        ValueError: ranks wait for each other, or for an action that no list holds. The message names the stuck ones.
    """
    ends: dict[Action, float] = {}
    waiting: dict[Action, list[int]] = {}  # ranks whose next action needs an outcome
    position = [0] * len(table)
    free = [0.0] * len(table)
    events = []
    # A rank that lacks an input is parked in `waiting` until that outcome exists, so no rank is ever polled.
    ready = list(range(len(table)))
    while ready:
        rank = ready.pop()
        if position[rank] == len(table[rank]):
            continue
        action = table[rank][position[rank]]
        needed = inputs(action, len(ranks))
        missing = next((other for other in needed if other not in ends), None)
        if missing is not None:
            waiting.setdefault(missing, []).append(rank)
            continue
        arrivals = (ends[other] + (transfer if ranks[other.stage] != rank else 0.0) for other in needed)
        start = max([free[rank], *arrivals])
        free[rank] = ends[outcome(action)] = start + duration(action)
        position[rank] += 1
        events.append(Event(rank, action, start, free[rank]))
        ready += [rank, *waiting.pop(outcome(action), [])]
    stuck = [
        f"rank {rank} at {actions[done]}"
        for rank, (actions, done) in enumerate(zip(table, position, strict=True))
        if done < len(actions)
    ]
    if stuck:
        raise ValueError(f"the schedule deadlocks: {'; '.join(stuck)}")
    return sorted(events, key=lambda event: (event.start, event.rank))


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
