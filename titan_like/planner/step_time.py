"""Time of one optimizer step, and where it goes. Seconds.

The pipeline: with equal stages, a rank computes for m microbatches and waits for the schedule's bubble, the closed
forms of `titan_like.parallel.schedules.ideal_bubble`. With unequal ones the slowest rank sets the pace and the others
are passed once on the way in and out.
"""

from __future__ import annotations

from typing import NamedTuple

from titan_like.parallel.schedules.simulate import ideal_bubble
from titan_like.parallel.schedules.tables import stages_per_rank
from titan_like.planner.layers import Cost, Microbatch, ends_cost, layer_cost
from titan_like.planner.profile import Profile
from titan_like.planner.workload import RankLayers, Workload, rank_layers, stages_of


class StepTime(NamedTuple):
    """Seconds of the slowest rank; their sum is the step."""

    compute: float  # forward and backward passes without what is repeated
    recompute: float
    tensor: float  # tensor- and context-parallel communication that computation waits for
    messages: float  # between pipeline stages, not hidden
    bubble: float
    data: float  # data-parallel communication, not hidden
    optimizer: float
    other: float  # host and framework
    total: float


class _Rank(NamedTuple):
    """One microbatch on the slowest rank. Seconds."""

    compute: float
    again: float
    tensor: float
    forward: float  # from the first operator to the last, the host's delays and all communication included
    backward: float
    others: float  # mean of the other ranks' passes, without delays


def step_time(work: Workload, profile: Profile) -> StepTime:
    """Predict one step."""
    counts = rank_layers(stages_of(work), work.schedule, work.pipeline, work.virtual_stages)
    rank = _slowest_rank(counts, work, profile)
    m, p = work.microbatches, work.pipeline
    besides = microbatch_overhead(work, profile)
    waits = rank.forward + rank.backward - rank.compute - rank.again - rank.tensor + besides

    gathered = _sharded_parameters(work, profile, counts, rank) if work.zero_stage == 3 else 0.0
    bubble = messages = 0.0
    if p > 1:
        fraction = ideal_bubble(work.schedule, p, work.virtual_stages, m)
        message = message_time(work, profile)
        stages = stages_per_rank(work.schedule, work.virtual_stages)
        bubble = fraction * m * (rank.others + waits + gathered) + 2 * (p - 1) * message
        messages = 2 * m * stages * message * profile.message_exposed
    data, update = _after_backward(work, profile, counts, rank)
    other = m * waits + profile.step_time
    parts = (
        m * rank.compute,
        m * rank.again,
        m * rank.tensor,
        messages,
        bubble,
        data + m * gathered,
        update,
        other,
    )
    return StepTime(*parts, sum(parts))


def microbatch_overhead(work: Workload, profile: Profile) -> float:
    """What a microbatch costs a rank besides its passes: the host waits for the messages of each of the rank's stages,
    as far as nothing else runs meanwhile."""
    stages = stages_per_rank(work.schedule, work.virtual_stages) if work.pipeline > 1 else 1
    return profile.microbatch_time * (1 + (stages - 1) * profile.message_exposed)


def microbatch_of(work: Workload) -> Microbatch:
    """What the layers' costs depend on."""
    return Microbatch(
        work.micro_batch_size,
        work.seq_len,
        work.tensor,
        work.context,
        work.sequence_parallel,
        work.recompute,
        work.flash,
        work.dropout,
        work.dtype,
        work.compiled,
        work.zero_stage < 2 and work.microbatches > 1,  # else there is nothing to add to, or only a shard
    )


def host_and_device(host: float, device: float, profile: Profile) -> float:
    """Time of a pass that the host starts operator by operator while the device works off its queue.

    At least the slower of the two; more where they are close, because stretches bound by one and by the other alternate
    (forward and repeated passes of small operators, backward passes of large ones). Both, if the host is made to wait.
    """
    if profile.blocking_launches:
        return host + device
    return (host**4 + device**4) ** 0.25


def _slowest_rank(counts: RankLayers, work: Workload, profile: Profile) -> _Rank:
    """The rank whose passes take longest: the one with most layers, or an end of the model."""
    mb = microbatch_of(work)
    layer = layer_cost(work.model, mb, profile)
    entry, head = ends_cost(work.model, mb, profile)
    again, again_tensor = layer.again / work.recompute_every, layer.again_tensor / work.recompute_every
    forward = layer.forward + layer.forward_tensor
    backward = layer.backward + layer.backward_tensor + again + again_tensor
    whole, first, last = forward + backward, _sum(entry), _sum(head)
    choices: list[tuple[float, int, tuple[Cost, ...]]]
    if counts.ends_together:
        choices = [(counts.first * whole + first + last, counts.first, (entry, head))]
    else:
        choices = [
            (counts.first * whole + first, counts.first, (entry,)),
            (counts.last * whole + last, counts.last, (head,)),
        ]
    slowest, layers, ends = max(*choices, (counts.largest * whole, counts.largest, ()), key=lambda choice: choice[0])
    once, tensor = layer.forward + layer.backward, layer.forward_tensor + layer.backward_tensor + again_tensor
    compute, talk = layers * once, layers * tensor
    forward, backward = layers * forward, layers * backward
    host_forward, host_backward = layers * layer.forward_host, layers * layer.backward_host
    for end in ends:
        compute += end.forward + end.backward
        talk += end.forward_tensor + end.backward_tensor
        forward += end.forward + end.forward_tensor
        backward += end.backward + end.backward_tensor
        host_forward += end.forward_host
        host_backward += end.backward_host
    p = work.pipeline
    others = work.model.num_layers * whole + first + last - slowest
    return _Rank(
        compute,
        layers * again,
        talk,
        host_and_device(host_forward, forward, profile),
        host_and_device(host_backward, backward, profile),
        others / (p - 1) if p > 1 else 0.0,
    )


def _sum(cost: Cost) -> float:
    return cost.forward + cost.backward + cost.forward_tensor + cost.backward_tensor


def message_time(work: Workload, profile: Profile) -> float:
    """One microbatch's hidden states to the next stage; tensor-parallel ranks may each send a part and gather it."""
    element = 4 if work.dtype == "float32" else 2
    nbytes = work.micro_batch_size * work.seq_len / work.context * work.model.hidden_size * element
    stride = work.tensor * work.context * work.data_parallel
    t = work.tensor
    if t > 1 and work.sequence_parallel:
        return profile.links.message(nbytes / t, stride, work.pipeline)
    if t > 1 and profile.message_shards:
        return profile.links.message(nbytes / t, stride, work.pipeline) + profile.links.all_gather(nbytes, t, 1)
    return profile.links.message(nbytes, stride, work.pipeline)


def parameters_per_gpu(work: Workload, counts: RankLayers) -> float:
    """Parameters of the rank that holds most, before ZeRO."""
    model, t = work.model, work.tensor
    table = model.padded_vocab_size * model.hidden_size
    layers = max(counts.largest * model.layer_parameters, counts.first * model.layer_parameters + table)
    if counts.ends_together:
        layers = counts.first * model.layer_parameters + model.entry_parameters + model.head_parameters
    return layers / t


def _sharded_parameters(work: Workload, profile: Profile, counts: RankLayers, rank: _Rank) -> float:
    """ZeRO 3: what a microbatch waits for parameters and for sums of gradients (arXiv 1910.02054; FSDP, 2304.11277).

    Gathered layer by layer in the forward and in the backward pass, gradients scattered in the backward pass;
    computation of other layers hides a part.
    """
    size, parts = work.shard * work.context, max(1, counts.largest * profile.gathers_per_layer)
    part = parameters_per_gpu(work, counts) / parts
    gather = parts * profile.links.all_gather(part * profile.parameter_bytes, size, work.tensor)
    scatter = parts * profile.links.all_gather(part * profile.gradient_bytes, size, work.tensor)
    return exposed(2 * gather + scatter, profile.overlap * (rank.forward + rank.backward), profile)


def exposed(communication: float, hides: float, profile: Profile) -> float:
    """What communication adds to a step of whose computation ``hides`` seconds can run at the same time.

    The hidden part is not free: its kernels take multiprocessors and memory bandwidth from the computation.
    """
    return communication - (1 - profile.contention) * min(communication, hides)


def _after_backward(work: Workload, profile: Profile, counts: RankLayers, rank: _Rank) -> tuple[float, float]:
    """Data-parallel sums that the last backward pass does not hide, and the update."""
    parameters = parameters_per_gpu(work, counts)
    links, size, zero, stride = profile.links, work.data_parallel * work.context, work.zero_stage, work.tensor
    shard = work.shard * work.context  # the ranks of a sequence hold the same weights
    gradients = parameters * profile.gradient_bytes
    time = 0.0
    if zero == 3:
        if work.replicate > 1:
            time = links.all_reduce(gradients / shard, work.replicate, stride * shard)
    elif size > 1:
        reduced = links.all_gather(gradients, size, stride)
        gathered = reduced if zero == 0 else links.all_gather(parameters * profile.parameter_bytes, size, stride)
        hides = profile.overlap if work.pipeline == 1 or profile.overlap_in_pipeline else 0.0
        backward = hides * rank.backward
        if zero == 2:  # gradients are scattered after every microbatch
            reduced, backward = reduced * work.microbatches, backward * work.microbatches
        if zero and profile.gather_hidden:
            gathered = exposed(gathered, profile.overlap * rank.forward, profile)
            time = gathered + exposed(reduced, backward, profile)
        else:
            time = exposed(reduced + gathered, backward, profile)
    if work.pipeline > 1 and work.model.tied_embeddings and not counts.ends_together:
        table = work.model.padded_vocab_size * work.model.hidden_size / work.tensor
        time += profile.links.message(table * profile.gradient_bytes, stride * size)
    shards = shard if zero else 1
    bandwidth = profile.device.memory_bandwidth * profile.memory_efficiency
    return time, parameters / shards * profile.optimizer_traffic / bandwidth
