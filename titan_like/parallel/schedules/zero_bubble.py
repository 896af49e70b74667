"""Schedules that split the backward pass and fill idle time with weight gradients.

Ranks start one after the other, as the first microbatch reaches them; from there on none needs to wait. The papers
call this zero bubble and let ranks also end one after the other; here a step ends for all ranks together (gradients are
clipped by one global norm), so that the p-1 forward passes before the last rank starts remain.
"""

from __future__ import annotations

from collections import Counter, deque

from titan_like.parallel.schedules.actions import Action, Table, inputs, outcome


def with_delayed_weights(actions: list[Action], delay: int) -> list[Action]:
    """After each I but the first ``delay`` ones, add the oldest W that is due; the rest at the end.

    With one stage per rank this makes ZB-H1 of arXiv 2401.10241.
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
    """ZB-V of arXiv 2401.10241 for equal times of F, I and W: at most 2p chunks are held on a rank.

    The paper's order is for at least 2p-1 microbatches. Fewer keep its order of F and I, where the missing ones are
    left out, and each W is placed by need: in unit time this is as fast as can be down to p microbatches.
    """
    # Each rank's stages are 0 and 1 here: F0 is a forward pass of its first.
    table = []
    for rank in range(degree):
        hops = degree - 1 - rank
        steady = max(num_microbatches - (2 * degree - 1), 0) + rank
        order = ["F0"] * (2 * hops + 1)
        order += ["F1", "F0"] * rank
        order += ["F1", "I1", "W1"] * (hops + 1)
        order += ["F0", "I0", "W0", "F1", "I1", "W1"] * steady
        order += ["I0", "W0", "F1", "I1", "W1"] * hops
        order += ["I0", "I1"] * rank
        order += ["I0", "W0"] * (hops + 1)
        order += ["W1"] * rank + ["W0"] * rank
        table.append(_numbered(order, rank, 2 * degree - 1 - rank, num_microbatches))
    if num_microbatches >= 2 * degree - 1:
        return table
    return _with_weights_by_need(table, most_held=2 * degree)


def dualpipe_v(degree: int, num_microbatches: int) -> Table:
    """DualPipeV: DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1) with half of its ranks folded onto the others.

    The eight phases of the published schedule. In its main phase, forward and backward passes of different microbatches
    come in pairs whose communication and computation can overlap; here they run one after the other. At most 2p+1
    chunks are held on a rank. Fewer than 2p microbatches leave no main phase: the order is then that of ZB-V.
    """
    if num_microbatches < 2 * degree:
        return zbv_zero_bubble(degree, num_microbatches)
    table = []
    for rank in range(degree):
        hops = degree - 1 - rank
        order = ["F0"] * (2 * hops)
        order += ["F0", "F1"] * (rank + 1)
        order += ["I1", "W1", "F1"] * hops
        order += ["F0", "B1", "F1", "B0"] * (num_microbatches - 2 * degree + rank + 1)
        order += ["B1", "F1", "B0"] * hops
        backwards = ["1", "0"] * (rank + 1)
        whole, split = backwards[: rank + 1], backwards[rank + 1 :]
        order += [f"B{chunk}" for chunk in whole] + [f"I{chunk}" for chunk in split]
        # The weight gradients of the split half, then those of this phase, each as late as its turn comes.
        late = [f"W{chunk}" for chunk in split] + ["W0"] * hops
        for weights in late[:hops]:
            order += [weights, "I0"]
        order += late[hops:]
        table.append(_numbered(order, rank, 2 * degree - 1 - rank, num_microbatches))
    return table


def _numbered(order: list[str], first: int, second: int, num_microbatches: int) -> list[Action]:
    """Turn kinds with 0 or 1, such as F0, into actions: each counts its microbatches up, those too many are left out.

    The order stays valid without a whole microbatch, as no microbatch waits for another.
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
    """Keep each rank's order of F and I, and put a W where the rank would wait or holds too much for another F.

    Runs all ranks in time slots of one action each. The order of F and I alone must hold at most ``most_held``.
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
