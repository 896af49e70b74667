"""Seconds of one optimizer step by what takes them: traced passes in the order of the trainer's schedule tables."""

from collections.abc import Mapping
from typing import NamedTuple

from titan_like.metrics.step_timeline import Phase, StepTimeline, simulated
from titan_like.parallel.schedules.tables import Action
from titan_like.planner.cost import Kernels, Times, segment_times
from titan_like.planner.data_parallel import gathers_every_pass, reduces_every_pass, shard_groups
from titan_like.planner.profile import Profile
from titan_like.planner.stages import PipelineProgram, Source, StageKind, StageProgram, pipeline_program
from titan_like.planner.trace import trace
from titan_like.planner.update_time import update_time
from titan_like.planner.walk import span_of
from titan_like.planner.workload import Workload


class StepTime(NamedTuple):
    """Seconds of the slowest rank. The total is the sum of the others."""

    compute: float  # forward and backward passes, without what is repeated
    recompute: float
    tensor: float  # tensor-, context- and expert-parallel communication that computation waits for
    messages: float  # exposed messages between pipeline stages
    bubble: float
    data: float  # exposed data-parallel communication
    optimizer: float
    other: float  # host and framework
    total: float


class StagePasses(NamedTuple):
    """Seconds of one microbatch in one stage: its passes, counting host and device, and what F and B consist of.

    B is I plus W. The rest of F and B is the host's delay.
    """

    F: float
    B: float
    I: float  # noqa: E741 - the schedules' name
    W: float  # the part of B that a schedule may defer
    compute: float
    recompute: float
    tensor: float
    messages: float  # pipeline messages that the rank itself waits for
    gathered: float  # by ZeRO 3
    host: float  # to launch both passes


class Steps(NamedTuple):
    """A step's passes and what follows them."""

    pipeline: PipelineProgram
    kinds: list[StagePasses]  # of each kind of stages
    busiest: tuple[int, ...]  # kinds of the stages of the rank whose passes take longest
    transfer: float  # seconds of a message during which its sender and its receiver may compute
    data: float  # after the passes
    update: float
    link: float  # time that a rank's messages keep its link busy

    @property
    def stages(self) -> list[StagePasses]:
        """The passes of all stages."""
        return [self.kinds[kind] for kind in self.pipeline.alike.kind_of]

    @property
    def on_busiest(self) -> list[StagePasses]:
        """The passes of the busiest rank's stages."""
        return [self.kinds[kind] for kind in self.busiest]


def step_time(work: Workload, profile: Profile, source: Source = trace) -> StepTime:
    """Predict a step by following every pass of the programs that ``source`` gives."""
    steps = steps_of(work, profile, source)
    return added_up(work, profile, steps, _span(work, steps))


def host_and_device_seconds(work: Workload, profile: Profile) -> tuple[float, float]:
    """Seconds that the host takes to launch a step's operators, and the device to compute them, on the busiest rank.

    A run is bound by the host if the first exceeds the second.
    """
    steps = steps_of(work, profile)
    device = sum(stage.compute + stage.recompute + stage.tensor for stage in steps.on_busiest)
    return work.microbatches * sum(stage.host for stage in steps.on_busiest), work.microbatches * device + steps.update


def timeline(work: Workload, profile: Profile) -> StepTimeline:
    """Every pass of one step, the waits between them, and after the last pass what follows.

    Raises a `ValueError` if the schedule cannot run with this many microbatches.
    """
    steps = steps_of(work, profile)
    passes = steps.stages

    def duration(action: Action) -> float:
        return getattr(passes[action.stage], action.kind)

    step = simulated(*work.pipeline_schedule, duration, steps.transfer)
    end = step.seconds
    for name, seconds in (
        ("gradient reduction", steps.data),
        ("optimizer", steps.update),
        ("rest of the step", profile.step_time),
    ):
        step.phases.extend(Phase(rank, name, end, end + seconds) for rank in range(work.pipeline))
        end += seconds
    return step


def steps_of(work: Workload, profile: Profile, source: Source = trace) -> Steps:
    """The times of all passes, and of what follows them."""
    pipeline, p = pipeline_program(work, source), work.pipeline
    alike = pipeline.alike
    num_stages = len(alike.kind_of)
    message = message_time(work, profile, pipeline.programs[0].message) if p > 1 else 0.0
    # The host waits for the messages of each further stage on the rank, as far as computation does not hide them.
    overhead = profile.microbatch_time * (1 + (num_stages // p - 1) * profile.message_exposed)
    delays = message * profile.message_exposed, overhead * p / num_stages
    programs = zip(pipeline.programs, alike.kinds, strict=True)
    kinds = [_stage_passes(work, profile, program, kind, *delays) for program, kind in programs]
    busy = [(sum([kinds[n].F + kinds[n].B for n in of_rank]), of_rank) for of_rank, _ in alike.rank_kinds]
    backward = sum([kinds[n].B - kinds[n].messages - kinds[n].gathered for n in pipeline.fullest])
    forward = sum([kinds[n].F for n in pipeline.fullest])
    data = _after_backward(work, profile, pipeline.elements, forward, backward)
    if pipeline.copied:  # tables that both ends hold, whose gradients are summed
        stride = work.tensor * work.data_parallel * work.context
        data += profile.links.message(pipeline.copied * profile.gradient_bytes, stride)
    update = update_time(work, profile, pipeline.elements)
    transfer, link = message * (1 - profile.message_exposed), 2 * work.microbatches * num_stages / p * message
    return Steps(pipeline, kinds, max(busy)[1], transfer, data, update, link)


def message_time(work: Workload, profile: Profile, nbytes: int) -> float:
    """Seconds to send one microbatch's hidden states, of ``nbytes`` on a process, to the next stage.

    Other stacks let each tensor-parallel rank send a part of them, and all-gather the parts.
    """
    stride = work.tensor * work.context * work.data_parallel
    if work.tensor > 1 and profile.message_shards and not work.sequence_parallel:
        seconds = profile.links.message(nbytes / work.tensor, stride, work.pipeline)
        return seconds + profile.links.all_gather(nbytes, work.tensor, 1)
    return profile.links.message(nbytes, stride, work.pipeline)


def _stage_passes(
    work: Workload, profile: Profile, stage: StageProgram, kind: StageKind, message: float, overhead: float
) -> StagePasses:
    """The passes of a stage whose rank waits for each ``message`` sent; a third of ``overhead`` is in the forward."""
    forward, backward, weights, first, deferred = _computed(work, profile, stage)
    # Gradients are added to the sums of earlier microbatches.
    added = work.accumulates * profile.accumulation_bytes / profile.memory_rate * stage.elements
    first += overhead / 3
    second = host_and_device(backward.host, backward.device + added, profile) + deferred + 2 * overhead / 3
    sent = message if kind.sends_on else 0.0
    returned = message if kind.sends_back else 0.0
    gathered = scattered = 0.0
    if gathers_every_pass(work.zero_stage):
        gather, scatter = _gather_and_scatter(work, profile, stage)
        gathered = exposed(gather, profile.overlap * first, profile)
        scattered = exposed(gather + scatter, profile.overlap * second, profile)
    return StagePasses(
        first + sent + gathered,
        second + returned + scattered,
        second - deferred + returned + scattered,
        deferred,
        compute=forward.compute + backward.compute + weights.compute + added,
        recompute=backward.recomputed,
        tensor=forward.exposed + backward.exposed,
        messages=sent + returned,
        gathered=gathered + scattered,
        host=forward.host + backward.host + weights.host,
    )


def _computed(work: Workload, profile: Profile, stage: StageProgram) -> tuple[Times, Times, Times, float, float]:
    """A stage's passes without messages, and the seconds of the first and the last of them. The profile keeps them.

    DTensors, where tensor parallelism splits parameters, cost the host time in eager layers.
    """
    cache, key = profile.seconds, (stage, work.dtype, work.compiled, work.tensor > 1)
    if key not in cache:
        kernels, totals = Kernels(work.dtype, work.compiled), [Times(), Times(), Times()]
        for segment, is_layer, count in stage.counts:
            times = segment_times(segment, is_layer, stage.groups, kernels, profile)
            totals = [total.plus(added, count) for total, added in zip(totals, times, strict=True)]
        if work.tensor > 1 and not work.compiled:
            host_times = profile.tensor_host_forward, profile.tensor_host_backward
            for index, host in enumerate(host_times):
                totals[index] = totals[index].plus(Times(host=host), stage.num_layers)
        forward, _, weights = totals
        cache[key] = *totals, *[host_and_device(times.host, times.device, profile) for times in (forward, weights)]
    return cache[key]


def host_and_device(host: float, device: float, profile: Profile) -> float:
    """Seconds of a pass whose operators the host launches while the device works off its queue.

    The result is at least the slower of the two. It is longer if they are close, because some stretches are bound by
    the host (forward and repeated passes of small operators) and others by the device (backward passes of large ones).
    A norm of high degree is a smooth maximum of the two. On a CPU it is the sum.
    """
    if profile.device.is_cpu:
        return host + device
    return (host**profile.launch_norm + device**profile.launch_norm) ** (1 / profile.launch_norm)


def _gather_and_scatter(work: Workload, profile: Profile, stage: StageProgram) -> tuple[float, float]:
    """Seconds to gather a stage's parameters once, layer by layer, and to reduce-scatter their gradients."""
    parts, gather, scatter = max(1, stage.num_layers * profile.gathers_per_layer), 0.0, 0.0
    groups = shard_groups(work)
    for sharers, elements in stage.elements_by_sharers.items():
        size, stride = groups[sharers]
        frozen = sum(unit.frozen_elements for unit in stage.units if unit.sharers == sharers)
        part_elements = (elements + frozen) / parts
        gather += parts * profile.links.all_gather(part_elements * profile.parameter_bytes, size, stride)
        scatter += parts * profile.links.all_gather(elements / parts * profile.gradient_bytes, size, stride)
    return gather, scatter


def exposed(communication: float, hides: float, profile: Profile) -> float:
    """Seconds that communication adds to a step if ``hides`` seconds of computation can run at the same time.

    The hidden part is not free, because its kernels take multiprocessors and memory bandwidth from the computation.
    """
    return communication - (1 - profile.contention) * min(communication, hides)


def _after_backward(
    work: Workload, profile: Profile, elements: Mapping[str, int], forward: float, backward: float
) -> float:
    """Seconds of the data-parallel sums that the last backward pass of a rank with these parameters does not hide."""
    links, zero, replicas = profile.links, work.zero_stage, work.replicate
    time = reduced = gathered = 0.0
    groups = shard_groups(work)
    for sharers, number in elements.items():  # ranks that share a sequence share shards too
        shards, stride = groups[sharers]
        gradients, size = number * profile.gradient_bytes, replicas * shards
        if gathers_every_pass(zero):
            time += links.all_reduce(gradients / shards, replicas, stride * shards) if replicas > 1 else 0.0
        elif size > 1:
            one_way = links.all_gather(gradients, size, stride)
            reduced += one_way
            gathered += links.all_gather(number * profile.parameter_bytes, size, stride) if zero else one_way
    if not reduced:
        return time
    hides = profile.overlap if work.pipeline == 1 or profile.overlap_in_pipeline else 0.0
    hidden = hides * backward
    if reduces_every_pass(zero):
        reduced, hidden = reduced * work.microbatches, hidden * work.microbatches
    if zero and profile.gather_hidden:
        return exposed(gathered, profile.overlap * forward, profile) + exposed(reduced, hidden, profile)
    return exposed(reduced + gathered, hidden, profile)


def _span(work: Workload, steps: Steps) -> float:
    """Seconds from the first pass to the last, over the trainer's own schedule table."""
    if work.pipeline == 1:
        return work.microbatches * sum(stage.F + stage.B for stage in steps.on_busiest)
    durations = [seconds for stage in steps.stages for seconds in stage[:4]]
    return span_of(work.pipeline_schedule, durations, steps.transfer)


def added_up(work: Workload, profile: Profile, steps: Steps, span: float) -> StepTime:
    """The busiest rank's work by what takes its time. Where ranks share cores, their mean work counts."""
    waits = waiting_share(work, profile)
    stages = steps.stages if waits < 1 else steps.on_busiest
    m = work.microbatches / (work.pipeline if waits < 1 else 1)
    busy, parts = m * sum(stage.F + stage.B for stage in stages), list(zip(*stages, strict=True))[4:9]
    compute, recompute, tensor, messages, gathered = (m * sum(part) for part in parts)
    delays = busy - compute - recompute - tensor - messages - gathered
    bubble, other = waits * max(0.0, span - busy), delays + profile.step_time
    total = busy - (1 - waits) * messages + bubble + steps.data + steps.update + profile.step_time
    messages *= waits
    # Messages that overlap with everything else still need the link: the step lasts at least as long as they do.
    late = max(0.0, steps.link + steps.update + profile.step_time - total)
    data = gathered + steps.data
    return StepTime(compute, recompute, tensor, messages + late, bubble, data, steps.update, other, total + late)


def waiting_share(work: Workload, profile: Profile) -> float:
    """The part of the waits in a pipeline that lengthens the step.

    Processes that share cores compute slowly. One that waits gives its cores to the others, so its wait costs nothing
    as long as the others keep all cores busy. While i of p stages work, as when a pipeline fills, i of p processes do.
    """
    cores, n, p = profile.cores * work.num_gpus / profile.gpus_per_node, work.num_gpus, work.pipeline
    if p == 1 or not 0 < cores < n:
        return 1.0
    return 2 / (n * (p - 1)) * sum(max(0.0, cores - i * n / p) for i in range(1, p))
