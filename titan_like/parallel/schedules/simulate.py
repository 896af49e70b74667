"""The time and memory that a pipeline schedule takes, computed without running it, and the messages between stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from titan_like.parallel.schedules.tables import (
    SPLIT_BACKWARD,
    Action,
    Table,
    forward_table,
    inputs,
    outcome,
    schedule_table,
    stage_ranks,
    stages_per_rank,
)


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
    """The bubble fraction without transfer times, if F, I and W take equally long and B takes twice that.

    With p ranks, v stages per rank and m microbatches:

    - gpipe, 1f1b: (p-1)/m, and interleaved_1f1b: (p-1)/vm (arXiv 2104.04473, sections 2.2.1 and 2.2.2).
    - looped_bfs: (p-1)/vm (arXiv 2211.05953) if m ≥ p. A smaller m does not fill the first v-1 rounds through the
      ranks: (p-1 + (v-1)(p-m))/vm.
    - Schedules with a split backward pass: a lower bound. Each rank has 3vm units of work, and the last rank starts
      after p-1 forward passes: (p-1)/3vm. ZB-H1 of arXiv 2401.10241 has this bubble (v = 1). In the papers ranks may
      end a step at different times, so there ZB-V has no bubble and DualPipeV (arXiv 2412.19437) a different one. Here
      all ranks end a step together. If m < p, the last stage can be the bound: it waits for the vp-1 other stages, does
      m F and m I, and the last I goes back through the others. With W of stage 0 the step takes 2m + 2vp - 1.
    """
    degree, stages = pipeline_degree, stages_per_rank(schedule, virtual_stages)
    chunks = stages * num_microbatches
    if schedule in SPLIT_BACKWARD:
        last_stage = 2 * num_microbatches + 2 * stages * degree - 1
        return max(degree - 1, last_stage - 3 * chunks) / (3 * chunks)
    idle = degree - 1
    if schedule == "looped_bfs":
        idle += (stages - 1) * max(degree - num_microbatches, 0)
    return idle / chunks


def max_in_flight(table: Table, size: Callable[[int], float] = lambda stage: 1) -> list[float]:
    """Per rank, the most chunks that it holds at once. A chunk is a microbatch in a stage, held from F until B or W.

    Args:
        table: per rank, its actions.
        size: the weight of a chunk in each stage, such as the bytes of its activations.
    """
    peaks = []
    for actions in table:
        held: float = 0
        peak: float = 0
        for action in actions:
            if action.kind == "F":
                held += size(action.stage)
                peak = max(peak, held)
            elif action.kind in ("B", "W"):
                held -= size(action.stage)
        peaks.append(peak)
    return peaks


class Step(NamedTuple):
    """A computation (F, B, I, W) or one side of a message.

    F messages carry a stage's output to the next stage. B messages carry the gradient of a stage's input to the
    previous stage. ``stage`` is the one that sends or receives: ``SEND_F`` of stage 2 pairs with ``RECV_F`` of stage 3.
    """

    kind: str
    stage: int
    microbatch: int


def add_communication(table: Table, ranks: list[int]) -> list[list[Step]]:
    """Insert the messages between stages of different ranks, in an order that cannot deadlock.

    NCCL runs the messages between two ranks, in both directions, one after the other in the order in which each rank
    posts them. A message blocks the next one until both sides have posted it, so both ranks must post in the same
    order. This function puts all messages of the step in one global order: by the time at which `simulate` with
    `unit_time` produces them, lower rank first on ties. A send follows the computation that produces it. Its receive
    precedes the computation that the receiving rank is busy with at that time, so that the transfer overlaps with it.

    This order cannot deadlock as long as posting a receive does not block, even if sends block. Take the first message
    in the order that is not complete. Both of its ranks have only computations before it that end by then, and these
    need only messages that are complete.

    Args:
        table: per rank, its computations.
        ranks: the rank of each stage.

    Raises:
        ValueError: the table deadlocks even without messages.
    """
    steps: list[list[Step]] = [[] for _ in table]
    # When an action ends, another rank's list holds only what that rank has finished. Appending a receive there thus
    # puts it before the computation that the rank is busy with.
    for event in sorted(simulate(table, ranks, unit_time), key=lambda event: (event.end, event.rank)):
        _, stage, microbatch = event.action
        steps[event.rank].append(Step(*event.action))
        target = _target(event.action)
        if target is not None and 0 <= target < len(ranks) and ranks[target] != event.rank:
            letter = "F" if event.action.kind == "F" else "B"
            steps[event.rank].append(Step(f"SEND_{letter}", stage, microbatch))
            steps[ranks[target]].append(Step(f"RECV_{letter}", target, microbatch))
    return steps


def _target(action: Action) -> int | None:
    """The stage that needs the action's outcome, if any; it may lie outside the pipeline."""
    return {"F": action.stage + 1, "I": action.stage - 1}.get(outcome(action).kind)


MAX_PENDING_SENDS = 2  # unfinished sends per rank; without waiting, gloo cannot tell whether one has finished


@dataclass(frozen=True)
class PipelineShape:
    """A schedule with its pipeline degree and stages per rank."""

    schedule: str
    degree: int
    virtual_stages: int

    @property
    def ranks(self) -> list[int]:
        """Pipeline rank of each stage."""
        return stage_ranks(self.schedule, self.degree, self.virtual_stages)

    def steps(self, rank: int, num_microbatches: int, backward: bool) -> list[Step]:
        """List one rank's passes and messages for one batch, in order.

        Raises:
            ValueError: the schedule cannot run this number of microbatches.
        """
        table = schedule_table if backward else forward_table
        actions = table(self.schedule, self.degree, self.virtual_stages, num_microbatches)
        return add_communication(actions, self.ranks)[rank]
