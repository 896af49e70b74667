"""Seconds of one step's pipeline, pass by pass, in the order of the trainer's own schedule tables.

`step_time` uses closed forms, which are fast and exact for equal stages, so searches rank by them. Here every pass has
its own time, so that uneven stages, the ends of the model and the messages between ranks show when and where ranks
wait. Predictions of pipelines are made with this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from titan_like.metrics.step_timeline import Phase, StepTimeline, simulated
from titan_like.parallel.schedules.tables import Action, schedule_table, stage_ranks
from titan_like.planner.profile import Profile
from titan_like.planner.step_time import (
    NOTHING,
    StepTime,
    Weights,
    exposed,
    gather_and_scatter,
    layer_weights,
    load_of,
    loads,
    message_time,
    microbatch_overhead,
    passes,
    sharding,
    step_time,
    waiting_share,
)
from titan_like.planner.workload import Counts, Workload, pipeline_of

_KINDS = "FBIW"


class StagePasses(NamedTuple):
    """Seconds of one microbatch in one stage: its passes, counting host and device, and what F and B consist of.

    B is I plus W. The rest of F and B is the host's delay.
    """

    F: float
    B: float
    I: float  # noqa: E741 - the schedules' name
    W: float
    compute: float
    recompute: float
    tensor: float
    messages: float  # pipeline messages that the rank itself waits for
    gathered: float  # by ZeRO 3


def stage_passes(work: Workload, profile: Profile) -> list[StagePasses]:
    """The passes of every stage."""
    counts, ranks = pipeline_of(work)[:2]
    # Messages across each boundary: before the first stage, between neighbours, and after the last.
    messages = [0, *(int(one != other) for one, other in pairwise(ranks)), 0]
    last = len(counts) - 1
    kinds = [
        (layers, stage == 0, stage == last, messages[stage], messages[stage + 1]) for stage, layers in enumerate(counts)
    ]
    found = {kind: _passes_of(work, profile, len(counts), *kind) for kind in set(kinds)}
    return [found[kind] for kind in kinds]


def _passes_of(
    work: Workload, profile: Profile, num_stages: int, counts: Counts, is_first: bool, is_last: bool, back: int, on: int
) -> StagePasses:
    """The passes of a stage with ``counts`` layers of each kind. It sends ``on`` messages on and ``back`` back.

    The first part of a split backward pass repeats the forward pass, communicates and gathers. The two halves of the
    products take equally long. The trainer does not split compiled layers. A third of `microbatch_overhead`, which the
    rank's stages share, belongs to the forward pass.
    """
    model = work.model
    layers, entry, head, both_ends, _ = loads(work.one_microbatch(), work.recompute_every, profile)
    ends = (both_ends if is_last else entry) if is_first else head if is_last else NOTHING
    load = load_of(counts, layers, ends)
    of_ends, of_layers = is_first * model.parts.entry + is_last * model.parts.head, layer_weights(model, counts)
    parameters = Weights(of_layers.rest + of_ends, of_layers.experts).here(work)

    # Both passes, then the message and ZeRO 3's communication that each of them waits for.
    besides = microbatch_overhead(work, profile) * work.pipeline / num_stages
    forward, backward = load.seconds(profile)
    first, second = forward + besides / 3, backward + 2 * besides / 3
    weights = 0.0 if work.compiled else load.weights
    message = message_time(work, profile) * profile.message_exposed if back + on else 0.0
    sent, returned = on * message, back * message
    gathered = scattered = 0.0
    if work.zero_stage == 3:
        gather, scatter = gather_and_scatter(parameters, sum(counts), work, profile)
        gathered = exposed(gather, profile.overlap * first, profile)
        scattered = exposed(gather + scatter, profile.overlap * second, profile)
    return StagePasses(
        F=first + sent + gathered,
        B=second + returned + scattered,
        I=second - weights + returned + scattered,
        W=weights,
        compute=load.compute,
        recompute=load.recomputed,
        tensor=load.tensor,
        messages=sent + returned,
        gathered=gathered + scattered,
    )


def transfer_time(work: Workload, profile: Profile) -> float:
    """Seconds of a message during which its sender and its receiver may compute."""
    return message_time(work, profile) * (1 - profile.message_exposed) if work.pipeline > 1 else 0.0


def timeline(work: Workload, profile: Profile) -> StepTimeline:
    """Every pass of one step, the waits between them, and after the last pass the phases that `step_time` adds.

    Raises:
        ValueError: the schedule cannot run with this many microbatches.
    """
    times = stage_passes(work, profile)

    def duration(action: Action) -> float:
        return getattr(times[action.stage], action.kind)

    shape = work.schedule, work.pipeline, work.virtual_stages, work.microbatches
    step = simulated(*shape, duration, transfer_time(work, profile))
    end = step.seconds
    found = passes(work, profile)
    added = sharding(work, profile, found)
    for name, seconds in (
        ("gradient reduction", added.data),
        ("optimizer", added.update),
        ("rest of the step", profile.step_time),
    ):
        step.phases.extend(Phase(rank, name, end, end + seconds) for rank in range(work.pipeline))
        end += seconds
    return step


def simulated_step_time(work: Workload, profile: Profile) -> StepTime:
    """`step_time`, with a pipeline's passes and waits taken from the simulation."""
    if work.pipeline == 1:
        return step_time(work, profile)
    times, ranks = stage_passes(work, profile), pipeline_of(work).ranks
    busy = [0.0] * work.pipeline
    for stage, rank in zip(times, ranks, strict=True):
        busy[rank] += stage.F + stage.B
    # The busiest rank's work, by what takes it. Where ranks share cores it is their mean work that counts.
    busiest, waits = max(range(work.pipeline), key=busy.__getitem__), waiting_share(work, profile)
    here = [stage for stage, rank in zip(times, ranks, strict=True) if rank == busiest or waits < 1]
    m = work.microbatches / (work.pipeline if waits < 1 else 1)
    mine, parts = m * sum(stage.F + stage.B for stage in here), list(zip(*here, strict=True))[4:]
    compute, recompute, tensor, messages, gathered = (m * sum(part) for part in parts)
    delays = mine - compute - recompute - tensor - messages - gathered
    # All ranks together, from the first pass to the last, and then what follows the passes.
    durations = [getattr(stage, kind) for stage in times for kind in _KINDS]
    shape = work.schedule, work.pipeline, work.virtual_stages
    span = span_of(*shape, work.microbatches, durations, transfer_time(work, profile))
    found = passes(work, profile)
    added = sharding(work, profile, found)
    bubble, other = waits * max(0.0, span - mine), delays + profile.step_time
    total = mine - (1 - waits) * messages + bubble + added.data + added.update + profile.step_time
    messages *= waits
    late = max(0.0, found.link + added.update + profile.step_time - total)
    data = gathered + added.data
    return StepTime(compute, recompute, tensor, messages + late, bubble, data, added.update, other, total + late)


def span_of(
    schedule: str, pipeline: int, virtual: int, microbatches: int, durations: Sequence[float], transfer: float
) -> float:
    """Seconds from the start of the first pass to the end of the last.

    If there are many microbatches, the simulation covers three rounds through the ranks and one more. Each further
    round takes as long as that one, but no less than the busiest rank computes. This is mostly exact; with uneven
    stages and slow messages it is off by a few per cent.

    Args:
        schedule: its name.
        pipeline: ranks.
        virtual: stages per rank.
        microbatches: of one step.
        durations: seconds of F, B, I and W of the first stage, then of the next.
        transfer: seconds from a pass's end until another rank has its result.
    """
    ranks = stage_ranks(schedule, pipeline, virtual)
    rounds = max(0, microbatches // pipeline - 3)
    few = _program(schedule, pipeline, virtual, microbatches - rounds * pipeline)
    seconds = _run(few, pipeline, durations, transfer)
    if rounds:
        more = _program(schedule, pipeline, virtual, microbatches - (rounds - 1) * pipeline)
        round_ = _run(more, pipeline, durations, transfer) - seconds
        busy = [0.0] * pipeline
        for stage, rank in enumerate(ranks):
            busy[rank] += durations[4 * stage] + durations[4 * stage + 1]
        seconds += rounds * max(round_, pipeline * max(busy))
    return seconds


Program = list[tuple[int, int, int]]
"""Passes in an order in which each follows all that it needs. A pass is its rank, the index of its duration, and the
number of the pass on another rank that it waits for, or -1. It also waits for all earlier passes of its own rank."""


@lru_cache(maxsize=256)
def _program(schedule: str, pipeline: int, virtual: int, microbatches: int) -> Program:
    # A place stands for the result of a pass: stage × microbatch for forward passes, then the same for backward passes.
    # `numbers` has the pass that gives each result, or -1 until that pass is in the program.
    table, ranks = schedule_table(schedule, pipeline, virtual, microbatches), stage_ranks(schedule, pipeline, virtual)
    num_stages, position, ready = len(ranks), [0] * pipeline, list(range(pipeline))
    backward = num_stages * microbatches  # the first place of backward passes
    numbers = [-1] * (2 * backward)
    waiting: dict[int, int] = {}  # place → the rank that waits for it
    program: Program = []
    while ready:
        rank = ready.pop()
        # Go on with this rank until a pass needs a result that is not there yet.
        for kind, stage, microbatch in table[rank][position[rank] :]:
            needed, place = -1, stage * microbatches + microbatch
            if kind == "F":
                if stage > 0 and ranks[stage - 1] != rank:
                    needed = place - microbatches
            elif kind != "W":
                place += backward
                if stage + 1 < num_stages and ranks[stage + 1] != rank:
                    needed = place + microbatches
            if needed >= 0:
                if numbers[needed] < 0:
                    waiting[needed] = rank
                    break
                needed = numbers[needed]
            if kind != "W":
                numbers[place] = len(program)
                if place in waiting:
                    ready.append(waiting.pop(place))
            program.append((rank, 4 * stage + _KINDS.index(kind), needed))
            position[rank] += 1
    return program


def _run(program: Program, num_ranks: int, durations: Sequence[float], transfer: float) -> float:
    ends: list[float] = []
    free = [0.0] * num_ranks
    for rank, duration, needed in program:
        start = free[rank]
        if needed >= 0 and ends[needed] + transfer > start:
            start = ends[needed] + transfer
        free[rank] = start = start + durations[duration]
        ends.append(start)
    return max(free)
