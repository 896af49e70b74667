"""Schedules that split the backward pass and fill idle time with weight gradients.

Ranks start one after the other, as the first microbatch reaches them. From then on no rank needs to wait. The papers
call this zero bubble, because their ranks also end a step one after the other. Here all ranks end a step together,
since gradients are clipped by one global norm. So a bubble of p-1 forward passes remains, before the last rank starts.
"""

from __future__ import annotations

from collections import Counter, deque

from titan_like.parallel.schedules.actions import Action, Table, inputs, outcome


def with_delayed_weights(actions: list[Action], delay: int) -> list[Action]:
    """Add the oldest pending W after each I except the first ``delay`` ones, and the remaining W at the end.

    With one stage per rank this is ZB-H1 of arXiv 2401.10241.
    """
    table, due = [], deque[Action]()
    for action in actions:
        table.append(action)
        if action.kind == "I":
            due.append(action._replace(kind="W"))
            if len(due) > delay:
                table.append(due.popleft())
    return table + list(due)


def zbv_zero_bubble(degree: int, num_microbatches: int) -> Table:
    """ZB-V of arXiv 2401.10241 for equal times of F, I and W. A rank holds at most 2p chunks.

    The paper's order needs at least 2p-1 microbatches. With fewer, F and I keep that order without the missing
    microbatches, and each W goes where it is needed. In unit time this is optimal down to p microbatches.
    """
    # The digit numbers the rank's own two stages: F0 is a forward pass of its first stage.
    table = []
    for rank in range(degree):
        hops = degree - 1 - rank
        steady = max(num_microbatches - (2 * degree - 1), 0) + rank
        order = ["F0"] * (2 * hops + 1)  # warm-up
        order += ["F1", "F0"] * rank
        order += ["F1", "I1", "W1"] * (hops + 1)
        order += ["F0", "I0", "W0", "F1", "I1", "W1"] * steady
        order += ["I0", "W0", "F1", "I1", "W1"] * hops  # cool-down, without first forwards
        order += ["I0", "I1"] * rank
        order += ["I0", "W0"] * (hops + 1)
        order += ["W1"] * rank + ["W0"] * rank
        table.append(_numbered(order, rank, 2 * degree - 1 - rank, num_microbatches))
    if num_microbatches >= 2 * degree - 1:
        return table
    return _with_weights_by_need(table, most_held=2 * degree)


def dualpipe_v(degree: int, num_microbatches: int) -> Table:
    """DualPipeV: DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1) with half of its ranks folded onto the others.

    The order has the eight phases of the published schedule. Its main phase pairs forward and backward passes of
    different microbatches so that communication and computation can overlap; here the two run one after the other. A
    rank holds at most 2p+1 chunks. Fewer than 2p microbatches leave no main phase, and the order is that of ZB-V.
    """
    if num_microbatches < 2 * degree:
        return zbv_zero_bubble(degree, num_microbatches)
    table = []
    for rank in range(degree):
        hops = degree - 1 - rank
        order = ["F0"] * (2 * hops)  # phase 1
        order += ["F0", "F1"] * (rank + 1)  # 2
        order += ["I1", "W1", "F1"] * hops  # 3
        order += ["F0", "B1", "F1", "B0"] * (num_microbatches - 2 * degree + rank + 1)  # 4, the main phase
        order += ["B1", "F1", "B0"] * hops  # 5
        # Phase 6 has only backward passes. Its second half is split, so that other ranks get their gradients sooner.
        backwards = ["1", "0"] * (rank + 1)
        whole, split = backwards[: rank + 1], backwards[rank + 1 :]
        order += [f"B{chunk}" for chunk in whole] + [f"I{chunk}" for chunk in split]
        # Phase 7 alternates W and I0, and phase 8 has the remaining W. Weight gradients take their turn as late as
        # possible: first those of the split half, then those of phase 7.
        late = [f"W{chunk}" for chunk in split] + ["W0"] * hops
        for weights in late[:hops]:
            order += [weights, "I0"]
        order += late[hops:]
        table.append(_numbered(order, rank, 2 * degree - 1 - rank, num_microbatches))
    return table


def _numbered(order: list[str], first: int, second: int, num_microbatches: int) -> list[Action]:
    """Turn entries such as F0 into actions, with microbatches numbered in order; surplus entries are dropped.

    Dropping a microbatch keeps the order valid, because no microbatch waits for another.
    """
    count: Counter[tuple[str, int]] = Counter()
    actions = []
    for entry in order:
        kind, stage = entry[0], first if entry[1] == "0" else second
        halves = ("I", "W") if kind == "B" else (kind,)  # a whole backward pass counts as both
        microbatch = count[halves[0], stage]
        count.update((half, stage) for half in halves)
        if microbatch < num_microbatches:
            actions.append(Action(kind, stage, microbatch))
    return actions


def _with_weights_by_need(table: Table, most_held: int) -> Table:
    """Keep each rank's order of F and I, and insert a W where the rank would wait or has no room for another F.

    All ranks advance in time slots of one action each. F and I alone must never hold more than ``most_held`` chunks.
    """
    todo = [deque(action for action in actions if action.kind != "W") for actions in table]
    due = [deque[Action]() for _ in table]
    held = [0] * len(table)
    done: set[Action] = set()
    filled: Table = [[] for _ in table]
    num_stages = 2 * len(table)
    while any(todo) or any(due):
        slot = []
        for rank, actions in enumerate(filled):
            if todo[rank] and _can_run(todo[rank][0], done, num_stages, held[rank] < most_held):
                action = todo[rank].popleft()
            elif due[rank]:
                action = due[rank].popleft()
            else:
                continue
            held[rank] += {"F": 1, "I": 0, "W": -1}[action.kind]
            if action.kind == "I":
                due[rank].append(action._replace(kind="W"))
            actions.append(action)
            slot.append(outcome(action))
        done.update(slot)
    return filled


def _can_run(action: Action, done: set[Action], num_stages: int, has_room: bool) -> bool:
    return (has_room or action.kind != "F") and done.issuperset(inputs(action, num_stages))
