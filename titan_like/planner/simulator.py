"""The pipeline of one step, event by event, in the order of the trainer's own schedule tables. Seconds.

`step_time` uses closed forms, which are fast and exact for equal stages. Here every pass has its own time, so that
uneven stages, the ends of the model and the messages between ranks show where and when ranks wait.
"""

from __future__ import annotations

from titan_like.metrics.step_timeline import Phase, StepTimeline, simulated
from titan_like.parallel.schedules import Action, Event
from titan_like.planner.layers import Cost, ends_cost, layer_cost
from titan_like.planner.profile import Profile
from titan_like.planner.step_time import (
    StepTime,
    host_and_device,
    message_time,
    microbatch_of,
    microbatch_overhead,
    step_time,
)
from titan_like.planner.workload import Workload, stages_of


def pass_times(work: Workload, profile: Profile) -> list[dict[str, float]]:
    """Of every stage, the time of F, B, I and W, as the host and the device have it.

    Computation, what is repeated, exposed tensor communication, delays of the host. Of a split backward pass, the first
    part repeats the forward pass and communicates; the products' two halves take equally long. A third of what a
    microbatch costs besides (`microbatch_overhead`) is the forward pass's.
    """
    mb = microbatch_of(work)
    layer = layer_cost(work.model, mb, profile)
    entry, head = ends_cost(work.model, mb, profile)
    counts = stages_of(work)
    besides = microbatch_overhead(work, profile) * work.pipeline / len(counts)  # of a rank, shared by its stages
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
        forward = host_and_device(sum(n * cost.forward_host for cost, n, _ in parts), forward, profile) + besides / 3
        backward = host_and_device(sum(n * cost.backward_host for cost, n, _ in parts), products + rest, profile)
        backward += 2 * besides / 3
        times.append({"F": forward, "B": backward, "I": backward - products / 2, "W": products / 2})
    return times


def timeline(work: Workload, profile: Profile) -> StepTimeline:
    """Every pass of one step, the waits between them, and after the last pass what `step_time` has for it.

    What ZeRO 3 gathers for every microbatch is put there too.

    Raises:
        ValueError: the schedule can not run with so many microbatches.
    """
    times = pass_times(work, profile)

    def duration(action: Action) -> float:
        return times[action.stage][action.kind]

    transfer = message_time(work, profile) if work.pipeline > 1 else 0.0
    step = simulated(work.schedule, work.pipeline, work.virtual_stages, work.microbatches, duration, transfer)
    closed, end = step_time(work, profile), step.seconds
    for name, seconds in (
        ("gradient reduction", closed.data),
        ("optimizer", closed.optimizer),
        ("rest of the step", profile.step_time),
    ):
        step.phases.extend(Phase(rank, name, end, end + seconds) for rank in range(work.pipeline))
        end += seconds
    return step


def pipeline_events(work: Workload, profile: Profile) -> list[Event]:
    """Every pass of one step with its start and end, by start.

    Raises:
        ValueError: the schedule can not run with so many microbatches.
    """
    return timeline(work, profile).passes


def simulated_step_time(work: Workload, profile: Profile) -> StepTime:
    """`step_time` with the bubble, and what messages add to it, as the simulation finds them."""
    closed = step_time(work, profile)
    if work.pipeline == 1:
        return closed
    step = timeline(work, profile)
    busy = [0.0] * work.pipeline
    for event in step.passes:
        busy[event.rank] += event.end - event.start
    delays = max(busy) - closed.compute - closed.recompute - closed.tensor
    parts = closed._replace(messages=0.0, bubble=step.seconds - max(busy), other=delays + profile.step_time)
    return parts._replace(total=sum(parts[:-1]))
