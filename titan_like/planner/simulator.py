"""The pipeline of one step, event by event, in the order of the trainer's own schedule tables. Seconds.

`step_time` uses closed forms, which are fast and exact for equal stages. Here every pass has its own time, so that
uneven stages, the ends of the model and the messages between ranks show where and when ranks wait.
"""

from __future__ import annotations

from titan_like.parallel.schedules import Action, Event, schedule_table, simulate, stage_ranks
from titan_like.parallel.schedules import step_time as end_of
from titan_like.planner.layers import Cost, ends_cost, layer_cost
from titan_like.planner.profile import Profile
from titan_like.planner.step_time import StepTime, message_time, microbatch_of, step_time
from titan_like.planner.workload import Workload, stages_of


def pass_times(work: Workload, profile: Profile) -> list[dict[str, float]]:
    """Of every stage, the time of F, B, I and W: computation, what is repeated, and exposed tensor communication.

    Of a split backward pass, the first part repeats the forward pass and communicates; the products' two halves take
    equally long.
    """
    mb = microbatch_of(work)
    layer = layer_cost(work.model, mb, profile)
    entry, head = ends_cost(work.model, mb, profile)
    counts = stages_of(work)
    times = []
    for stage, layers in enumerate(counts):
        parts: list[tuple[Cost, float, float]] = [(layer, layers, layers / work.recompute_every)]
        if stage == 0:
            parts.append((entry, 1, 1))
        if stage == len(counts) - 1:
            parts.append((head, 1, 1))
        forward = sum(n * (cost.forward + cost.forward_tensor) for cost, n, _ in parts)
        products = sum(n * cost.backward for cost, n, _ in parts)
        rest = sum(n * cost.backward_tensor + again * (cost.again + cost.again_tensor) for cost, n, again in parts)
        times.append({"F": forward, "B": products + rest, "I": products / 2 + rest, "W": products / 2})
    return times


def pipeline_events(work: Workload, profile: Profile) -> list[Event]:
    """Every pass of one step with its start and end, by start.

    Raises:
        ValueError: the schedule can not run with so many microbatches.
    """
    times = pass_times(work, profile)
    ranks = stage_ranks(work.schedule, work.pipeline, work.virtual_stages)
    table = schedule_table(work.schedule, work.pipeline, work.virtual_stages, work.microbatches)

    def duration(action: Action) -> float:
        return times[action.stage][action.kind]

    return simulate(table, ranks, duration, message_time(work, profile) if work.pipeline > 1 else 0.0)


def simulated_step_time(work: Workload, profile: Profile) -> StepTime:
    """`step_time` with the bubble, and what messages add to it, as the simulation finds them."""
    if work.pipeline == 1:
        return step_time(work, profile)
    closed = step_time(work, profile)
    busy = closed.compute + closed.recompute + closed.tensor
    waits = end_of(pipeline_events(work, profile)) - busy
    parts = closed._replace(messages=0.0, bubble=waits)
    return parts._replace(total=sum(parts[:-1]))
