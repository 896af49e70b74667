"""The order in which the ranks of a pipeline send and receive."""

from collections import defaultdict
from itertools import pairwise, product

import pytest

from tests.unit.pipeline_cases import SINGLE, cases, unit_run
from titan_like.parallel.schedules.communication import add_communication
from titan_like.parallel.schedules.tables import SCHEDULES, Action, forward_table, stage_ranks


class HangError(Exception):
    pass


def message(step, ranks):
    """(F or B, from stage, to stage, microbatch) and the rank at the other end; None for a computation."""
    if len(step.kind) == 1:
        return None
    there = step.stage + (1 if step.kind in ("SEND_F", "RECV_B") else -1)
    source, target = (step.stage, there) if step.kind.startswith("SEND") else (there, step.stage)
    return (step.kind[-1], source, target, step.microbatch), ranks[there]


def post_in_order(lists, ranks, sends_wait=False):
    """Run lists where a message passes only as the oldest unfinished one of its two ranks, on both of them.

    Computations wait for their input; receives are posted without waiting, and sends too unless ``sends_wait``.
    """
    position, queues, sending = [0] * len(lists), defaultdict(list), [set() for _ in lists]
    made, passed = set(), set()
    progress = True
    while progress:
        progress = False
        for rank, steps in enumerate(lists):
            while position[rank] < len(steps) and sending[rank] <= passed:
                step = steps[position[rank]]
                kind, stage, microbatch = step
                if len(kind) > 1:
                    name, peer = message(step, ranks)
                    queues[rank, peer].append(name)
                    if kind.startswith("SEND"):
                        assert name in made
                        sending[rank] = {name} if sends_wait else set()
                elif kind != "W":
                    step_on = 1 if kind == "F" else -1
                    letter = "F" if kind == "F" else "B"
                    before, after = stage - step_on, stage + step_on
                    if 0 <= before < len(ranks) and (letter, before, stage, microbatch) not in passed:
                        break
                    made.add((letter, stage, after, microbatch))
                    if 0 <= after < len(ranks) and ranks[after] == rank:
                        passed.add((letter, stage, after, microbatch))
                position[rank] += 1
                progress = True
        for (rank, peer), queue in list(queues.items()):
            other = queues[peer, rank]
            while queue and other and queue[0] == other[0]:
                passed.add(queue.pop(0))
                other.pop(0)
                progress = True
    if any(queues.values()) or position != [len(steps) for steps in lists]:
        raise HangError


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sends_wait", [False, True])
def test_messages_never_hang(schedule, sends_wait):
    for degree, virtual, microbatches in cases(schedule, (1, 2, 3, 4, 8)):
        if microbatches > 3 * degree + 2:
            continue
        table, ranks, _ = unit_run(schedule, degree, virtual, microbatches)
        lists = add_communication(table, ranks)
        post_in_order(lists, ranks, sends_wait)
        if sends_wait:
            continue
        orders = defaultdict(list)
        for rank, steps in enumerate(lists):
            for name, peer in filter(None, (message(step, ranks) for step in steps)):
                orders[rank, peer].append(name)
        assert all(rank != peer and order == orders[peer, rank] for (rank, peer), order in list(orders.items()))
        crossings = sum(first != second for first, second in pairwise(ranks))
        assert sum(map(len, orders.values())) == 4 * microbatches * crossings  # there and back, on both sides
        assert [[Action(*step) for step in steps if len(step.kind) == 1] for steps in lists] == table


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_of_forward_tables_never_hang(schedule):
    virtual = 1 if schedule in SINGLE else 2
    for degree, microbatches in product((1, 2, 3, 4, 8), (1, 2, 3, 5, 8, 13)):
        table, ranks = forward_table(schedule, degree, virtual, microbatches), stage_ranks(schedule, degree, virtual)
        lists = add_communication(table, ranks)
        post_in_order(lists, ranks)
        actions = [step for steps in lists for step in steps if len(step.kind) == 1]
        assert sorted(actions) == [("F", stage, i) for stage in range(len(ranks)) for i in range(microbatches)]
        assert [i for _, stage, i in actions if stage == len(ranks) - 1] == list(range(microbatches))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sends_follow_their_computation_and_receives_precede_what_runs_meanwhile(schedule):
    for degree, virtual, microbatches in cases(schedule, (2, 4)):
        table, ranks, events = unit_run(schedule, degree, virtual, microbatches)
        ends = {event.action: event.end for event in events}
        for steps in add_communication(table, ranks):
            for place, (kind, stage, microbatch) in enumerate(steps):
                if kind.startswith("SEND"):
                    assert steps[place - 1] in [(k, stage, microbatch) for k in ("F" if kind[-1] == "F" else "BI")]
                elif kind.startswith("RECV"):
                    source = stage - 1 if kind == "RECV_F" else stage + 1
                    candidates = [Action(k, source, microbatch) for k in ("F" if kind == "RECV_F" else "BI")]
                    made = next(ends[action] for action in candidates if action in ends)
                    computations = [step for step in steps[:place] if len(step.kind) == 1]
                    assert all(ends[Action(*step)] <= made for step in computations)
