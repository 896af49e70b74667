"""The order of forward and backward passes on each pipeline rank, by the name of the schedule.

With p ranks, v stages on each, m microbatches, and times of 1 for F, I and W and 2 for B:

=======================  =========  ==============  ============================================================
schedule                 placement  idle / compute  most chunks that a rank holds (never more than vm)
=======================  =========  ==============  ============================================================
gpipe                    loop       (p-1)/m         m
1f1b                     loop       (p-1)/m         p - rank
interleaved_1f1b         loop       (p-1)/vm        (v-1)p + 2(p - rank) - 1; as 1f1b where v = 1
looped_bfs               loop       (p-1)/vm        vm
interleaved_zero_bubble  loop       (p-1)/3vm       vp
zbv_zero_bubble          V (v = 2)  (p-1)/6m        2p
dualpipe_v               V (v = 2)  (p-1)/6m        2p + 1
=======================  =========  ==============  ============================================================

A chunk is one microbatch in one stage, whose activations are held from F until B or W. With v stages per rank each
stage has 1/v of the rank's layers, so v chunks take as much memory as one chunk of 1f1b. Fewer microbatches than ranks
leave a larger bubble, except in gpipe, 1f1b and interleaved_1f1b.

Schedules that split the backward pass fill idle time with weight gradients. Ranks start one after the other, as the
first microbatch reaches them. From then on no rank needs to wait. The papers call this zero bubble, because their ranks
also end a step one after the other. Here all ranks end a step together, since gradients are clipped by one global norm.
So a bubble of p-1 forward passes remains, before the last rank starts.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple


class Action(NamedTuple):
    """One computation of one stage, or one side of a message.

    ``kind`` is F (forward), B (whole backward), or one of B's two halves. I computes the gradient of the stage's input,
    for which the previous stage waits. W computes the gradients of the weights; no stage waits for it, so it can fill
    idle time. ``stage`` sends or receives: SEND_F of stage 2, its output, pairs with RECV_F of stage 3, and SEND_B, the
    gradient of its input, with RECV_B of stage 1.
    """

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


Table = list[list[Action]]
"""Per pipeline rank, its actions in the order of execution, without idle slots."""


def outcome(action: Action) -> Action:
    """The action under whose name others wait for the result: I for a B, because B also computes what I does."""
    return action._replace(kind="I") if action.kind == "B" else action


def inputs(action: Action, num_stages: int) -> list[Action]:
    """The actions whose outcomes this one needs before it can start."""
    kind, stage, microbatch = action
    if kind == "W":
        return [Action("I", stage, microbatch)]
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage > 0 else []
    own_forward = Action("F", stage, microbatch)
    return [own_forward, Action("I", stage + 1, microbatch)] if stage + 1 < num_stages else [own_forward]


def _with_delayed_weights(actions: list[Action], delay: int) -> list[Action]:
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


def _zbv_zero_bubble(degree: int, _stages: int, num_microbatches: int) -> Table:
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


def _dualpipe_v(degree: int, stages: int, num_microbatches: int) -> Table:
    """DualPipeV: DeepSeek's DualPipe (arXiv 2412.19437, section 3.2.1) with half of its ranks folded onto the others.

    The order has the eight phases of the published schedule. Its main phase pairs forward and backward passes of
    different microbatches so that communication and computation can overlap; here the two run one after the other. A
    rank holds at most 2p+1 chunks. Fewer than 2p microbatches leave no main phase, and the order is ZB-V's.
    """
    if num_microbatches < 2 * degree:
        return _zbv_zero_bubble(degree, stages, num_microbatches)
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
        # possible: first of the split half, then of phase 7.
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
            following = todo[rank][0] if todo[rank] else None
            has_room = following is not None and (following.kind != "F" or held[rank] < most_held)
            if following is not None and has_room and done.issuperset(inputs(following, num_stages)):
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


def _all_forward_all_backward(degree: int, stages: int, num_microbatches: int) -> Table:
    """GPipe (arXiv 1811.06965) or, with several stages per rank, breadth-first scheduling (arXiv 2211.05953).

    All microbatches go through one stage before the rank turns to its next. A stage's parameters are thus gathered, and
    its gradients reduced, only once per pass.
    """
    microbatches = range(num_microbatches)
    table = []
    for rank in range(degree):
        local = range(rank, degree * stages, degree)
        forwards = [Action("F", stage, microbatch) for stage in local for microbatch in microbatches]
        backwards = [Action("B", stage, microbatch) for stage in reversed(local) for microbatch in microbatches]
        table.append(forwards + backwards)
    return table


def _one_forward_one_backward(
    rank: int, degree: int, stages: int, num_microbatches: int, forwards_per_hop: int, backward: str
) -> list[Action]:
    """One rank's actions: warm-up forwards, then one forward and one backward in turn, then the remaining backwards.

    The order follows arXiv 2104.04473, section 2.2. Microbatches go in groups of p through the rank's first stage,
    then its second, and so on; backwards go through the stages in reverse. The warm-up has (v-1)p forwards for the
    rounds of the first group, plus ``forwards_per_hop`` for each hop to the last rank.
    """
    local = range(rank, degree * stages, degree)
    forwards = _in_groups("F", local, degree, num_microbatches)
    backwards = _in_groups(backward, local[::-1], degree, num_microbatches)
    warm_up = min(forwards_per_hop * (degree - 1 - rank) + (stages - 1) * degree, len(forwards))
    steady = len(forwards) - warm_up
    pairs = zip(forwards[warm_up:], backwards[:steady], strict=True)
    return forwards[:warm_up] + [action for pair in pairs for action in pair] + backwards[steady:]


def _in_groups(kind: str, local: range, size: int, num_microbatches: int) -> list[Action]:
    return [
        Action(kind, stage, microbatch)
        for first in range(0, num_microbatches, size)
        for stage in local
        for microbatch in range(first, min(first + size, num_microbatches))
    ]


def _one_forward_one_backward_each(degree: int, stages: int, num_microbatches: int) -> Table:
    """1F1B, interleaved with several stages per rank.

    A rank's warm-up covers the time until its first backward arrives. With several stages, that is two forwards per hop
    to the last rank: one for the way there, one for the way back.
    """
    hop = 2 if stages > 1 else 1
    return [_one_forward_one_backward(rank, degree, stages, num_microbatches, hop, "B") for rank in range(degree)]


def _interleaved_zero_bubble(degree: int, stages: int, num_microbatches: int) -> Table:
    """Interleaved 1F1B with split backward passes.

    Only I is on the way back, so one forward per hop suffices. Rank r starts r forwards late and leaves r weight
    gradients for the end, so all ranks hold equally many chunks and finish together.
    """
    table = [_one_forward_one_backward(rank, degree, stages, num_microbatches, 1, "I") for rank in range(degree)]
    return [_with_delayed_weights(actions, delay=rank) for rank, actions in enumerate(table)]


class Schedule(NamedTuple):
    """One schedule. A new one is a function, an entry of `SCHEDULES`, and a name in the schema of the configuration."""

    table: Callable[[int, int, int], Table]  # of (ranks, stages on each, microbatches)
    stages: int | None = None  # on each rank; None: any number
    is_v_shaped: bool = False
    in_groups: bool = False  # whether microbatches go through a rank's stages in groups of p
    splits_backward: bool = False  # whether the table holds I and W


SCHEDULES = {
    "gpipe": Schedule(_all_forward_all_backward, stages=1),
    "1f1b": Schedule(_one_forward_one_backward_each, stages=1),
    "interleaved_1f1b": Schedule(_one_forward_one_backward_each, in_groups=True),
    "looped_bfs": Schedule(_all_forward_all_backward),
    "interleaved_zero_bubble": Schedule(_interleaved_zero_bubble, in_groups=True, splits_backward=True),
    "zbv_zero_bubble": Schedule(_zbv_zero_bubble, stages=2, is_v_shaped=True, splits_backward=True),
    "dualpipe_v": Schedule(_dualpipe_v, stages=2, is_v_shaped=True, splits_backward=True),
}
SPLIT_BACKWARD = tuple(name for name, schedule in SCHEDULES.items() if schedule.splits_backward)
V_SHAPED = tuple(name for name, schedule in SCHEDULES.items() if schedule.is_v_shaped)


def stages_per_rank(schedule: str, virtual_stages: int) -> int:
    """Number of stages on each rank: as the schedule prescribes, else ``virtual_stages``."""
    return SCHEDULES[schedule].stages or virtual_stages


def stage_ranks(schedule: str, pipeline_degree: int, virtual_stages: int) -> list[int]:
    """Rank of each stage. Stages are dealt round-robin, or placed in a V: to the last rank and back.

    In a V the last rank's two stages are neighbours, and rank 0 holds both the first and the last stage.
    """
    num_stages = pipeline_degree * stages_per_rank(schedule, virtual_stages)
    if schedule in V_SHAPED:
        return [min(stage, num_stages - 1 - stage) for stage in range(num_stages)]
    return [stage % pipeline_degree for stage in range(num_stages)]


def check_schedule(schedule: str, pipeline_degree: int, virtual_stages: int, num_microbatches: int) -> str | None:
    """The reason why the schedule cannot run, as one clause that says what would be valid; None if it can run.

    Whether it takes this many stages on a rank is a rule of the configuration (`titan_like.train.layout_rules`).
    """
    if schedule not in SCHEDULES:
        return f"{schedule} is not a pipeline schedule; use one of {', '.join(SCHEDULES)}"
    # An incomplete last group would take as long as a full one, so incomplete groups are refused.
    if SCHEDULES[schedule].in_groups and virtual_stages > 1 and num_microbatches % pipeline_degree:
        below = num_microbatches // pipeline_degree * pipeline_degree
        nearest = f"{below} or {below + pipeline_degree}" if below else f"{pipeline_degree}"
        return (
            f"{schedule} needs microbatches in multiples of pipeline_parallel_degree ({pipeline_degree}), not the "
            f"{num_microbatches} that each data-parallel rank has per step; use {nearest}, or a schedule "
            "that takes any number, such as 1f1b"
        )
    return None


def schedule_table(schedule: str, pipeline_degree: int, virtual_stages: int, num_microbatches: int) -> Table:
    """The actions of each rank in one step, in order.

    The forward passes of a stage visit the microbatches in the order 0, 1, 2, …, and so do its backward passes. Raises
    a `ValueError` if `check_schedule` refuses; the message is its reason.
    """
    reason = check_schedule(schedule, pipeline_degree, virtual_stages, num_microbatches)
    if reason is not None:
        raise ValueError(reason)
    stages = stages_per_rank(schedule, virtual_stages)
    return SCHEDULES[schedule].table(pipeline_degree, stages, num_microbatches)


def forward_table(schedule: str, pipeline_degree: int, virtual_stages: int, num_microbatches: int) -> Table:
    """Only the forward passes of `schedule_table`, for validation, with any number of microbatches."""
    padded = num_microbatches
    if SCHEDULES[schedule].in_groups:
        padded += -num_microbatches % pipeline_degree
    table = schedule_table(schedule, pipeline_degree, virtual_stages, padded)
    return [
        [action for action in actions if action.kind == "F" and action.microbatch < num_microbatches]
        for actions in table
    ]
