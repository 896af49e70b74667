"""Sends and receives between the computations of a pipeline schedule."""

from __future__ import annotations

from typing import NamedTuple

from titan_like.parallel.schedules.actions import Action, Table, outcome
from titan_like.parallel.schedules.simulate import simulate, unit_time


class Step(NamedTuple):
    """A computation (F, B, I, W) or one side of a message.

    F messages carry a stage's output to the next stage, B messages the gradient of a stage's input to the stage before.
    ``stage`` is the one that sends or receives: ``SEND_F`` of stage 2 meets ``RECV_F`` of stage 3.
    """

    kind: str
    stage: int
    microbatch: int


def add_communication(table: Table, ranks: list[int]) -> list[list[Step]]:
    """Insert the messages between stages of different ranks, so that posting them in order of the lists can not hang.

    NCCL runs the messages between two ranks, of both directions, one after the other as each rank posts them, and each
    holds up the next until both sides are there. So both ranks must post them in the same order. All messages of the
    step are put in one order here, by the time at which they are made in `simulate` with `unit_time` (lower rank first
    where equal). A send follows the computation that makes it. Its receive comes before whatever the receiving rank is
    busy with at that time, so that the transfer overlaps with it.

    This can not hang as long as posting a receive does not wait, even if sends do: before the first message in order
    that is not through, either rank has only computations that ended by then, and so need only messages that are
    through.

    Args:
        table: per rank, its computations.
        ranks: the rank of each stage.

    Raises:
        ValueError: ranks of the table wait for each other.
    """
    steps: list[list[Step]] = [[] for _ in table]
    # At an action's end, the list of another rank holds what that rank has finished, not what it is busy with.
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
    """The stage that waits for the action's outcome, if there is one."""
    return {"F": action.stage + 1, "I": action.stage - 1}.get(outcome(action).kind)
