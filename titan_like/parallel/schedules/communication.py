"""The sends and receives between the computations of a pipeline schedule."""

from titan_like.parallel.layout import Layout
from titan_like.parallel.schedules.simulate import simulate, unit_time
from titan_like.parallel.schedules.tables import Action, Table, forward_table, outcome, schedule_table

MAX_PENDING_SENDS = 2  # unfinished sends per rank; without waiting, gloo cannot tell whether one has finished


def add_communication(table: Table, ranks: list[int]) -> list[list[Action]]:
    """Insert the messages between stages of different ranks, in an order that cannot deadlock.

    NCCL runs the messages between two ranks, in both directions, one after the other in the order in which each rank
    posts them. A message blocks the next one until both sides have posted it, so both ranks must post in the same
    order. This function puts all messages of the step in one global order: by the time at which `simulate` with
    `unit_time` produces them, lower rank first on ties. A send follows the computation that produces it. Its receive
    precedes the computation that the receiving rank is busy with at that time, so that the transfer overlaps with it.

    This order cannot deadlock as long as posting a receive does not block, even if sends block. Take the first message
    in the order that is not complete. Both of its ranks have only computations before it that end by then, and these
    need only messages that are complete.

    ``ranks`` has the rank of each stage. Raises a `ValueError` if the table deadlocks even without messages.
    """
    steps: list[list[Action]] = [[] for _ in table]
    # When an action ends, another rank's list holds only what that rank has finished. Appending a receive there thus
    # puts it before the computation that the rank is busy with.
    for event in sorted(simulate(table, ranks, unit_time), key=lambda event: (event.end, event.rank)):
        _, stage, microbatch = event.action
        steps[event.rank].append(event.action)
        # The stage that needs the outcome, if any; it may lie outside the pipeline.
        target = {"F": stage + 1, "I": stage - 1}.get(outcome(event.action).kind)
        if target is not None and 0 <= target < len(ranks) and ranks[target] != event.rank:
            letter = "F" if event.action.kind == "F" else "B"
            steps[event.rank].append(Action(f"SEND_{letter}", stage, microbatch))
            steps[ranks[target]].append(Action(f"RECV_{letter}", target, microbatch))
    return steps


def steps_of_rank(layout: Layout, rank: int, num_microbatches: int, backward: bool) -> list[Action]:
    """One pipeline rank's passes and messages for one batch, in order.

    Raises a `ValueError` if `schedule_table` refuses.
    """
    table = schedule_table if backward else forward_table
    actions = table(layout.schedule, layout.pipeline, layout.virtual_stages, num_microbatches)
    return add_communication(actions, layout.stage_ranks)[rank]
