"""Seconds of one optimizer step, by what takes them, in closed form.

With equal stages, a rank computes for m microbatches and waits for the schedule's bubble, as in `ideal_bubble`. With
unequal stages the slowest rank sets the pace, and the others count once on the way in and out. This is fast, so
searches rank layouts by it. Predictions come from
`titan_like.planner.simulator`, which follows every pass.
"""

from __future__ import annotations

from functools import lru_cache
from operator import add, mul
from typing import NamedTuple

from titan_like.models.config import TransformerConfig
from titan_like.optim.state_size import ADAMW_WORK, newton_schulz_products
from titan_like.parallel.schedules.simulate import ideal_bubble
from titan_like.parallel.schedules.tables import SPLIT_BACKWARD, stages_per_rank
from titan_like.planner.layer_time import Cost, ends_cost, gemm_time, layer_cost
from titan_like.planner.profile import Profile
from titan_like.planner.shapes import description
from titan_like.planner.workload import Counts, RankLayers, Workload, element_bytes, pipeline_of


class StepTime(NamedTuple):
    """Seconds of the slowest rank. The total is the sum of the others."""

    compute: float  # forward and backward passes, without what is repeated
    recompute: float
    tensor: float  # tensor- and context-parallel communication that computation waits for
    messages: float  # exposed messages between pipeline stages
    bubble: float
    data: float  # exposed data-parallel communication
    optimizer: float
    other: float  # host and framework
    total: float


class _Rank(NamedTuple):
    """Seconds of one microbatch on the slowest rank, and on the mean of the other ranks."""

    compute: float
    recomputed: float
    tensor: float
    forward: float  # from the first operator to the last, with the host's delays and all communication
    backward: float
    others: float  # both passes on the mean of the other ranks
    others_forward: float  # F alone, there
    others_weights: float  # W alone, there, if the backward pass is split; else 0
    host: float  # to launch both passes


class Weights(NamedTuple):
    """Parameters of some layers and ends of a model."""

    rest: float
    experts: float  # if other processes share them than share the rest

    def here(self, work: Workload) -> Weights:
        """Those on one process before ZeRO, of these that the processes of a stage share."""
        if not work.shares_experts:
            return Weights((self.rest + self.experts) / work.tensor, 0.0)
        return Weights(self.rest / work.tensor, self.experts / work.expert)

    def groups(self, work: Workload) -> list[tuple[float, int, int]]:
        """Each part of those on one process, over how many others ZeRO shards it, and the stride of their ranks."""
        found = [(self.rest, work.shard * work.context, work.tensor)]
        return [*found, (self.experts, work.expert_shards, work.expert)] if self.experts else found


class Passes(NamedTuple):
    """The part of a step that layouts share if they differ only in how ZeRO shards. Times in seconds."""

    rank: _Rank
    parameters: Weights  # on the GPU that holds the most, before ZeRO
    others: Weights  # parameters on the mean of the other ranks
    ends_together: bool  # one rank holds both ends of the model
    largest: int  # the most layers on any rank
    parts: tuple[float, float, float, float, float, float]  # `StepTime.compute` to `bubble`, and `other`
    seconds: float  # the sum of the parts
    bubble: float  # its length in microbatches of another rank; each also takes `Sharding.elsewhere`
    link: float  # time that a rank's messages keep its link busy


class Sharding(NamedTuple):
    """Seconds that data parallelism adds."""

    gathered: float  # per microbatch
    elsewhere: float  # the same on the pipeline's other ranks
    data: float  # once per step
    update: float


def step_time(work: Workload, profile: Profile) -> StepTime:
    """Estimate one step by closed forms."""
    return sharded_step_time(work, profile, passes(work, profile))


def sharded_step_time(work: Workload, profile: Profile, found: Passes) -> StepTime:
    """`step_time` for passes that are known."""
    gathered, elsewhere, data, update = sharding(work, profile, found)
    compute, recomputed, tensor, messages, bubble, other = found.parts
    data += work.microbatches * gathered
    waiting = found.bubble * elsewhere
    bubble += waiting
    total = found.seconds + waiting + data + update
    # Messages that overlap with everything else still need the link: the step lasts at least as long as they do.
    late = max(0.0, found.link + update + profile.step_time - total)
    return StepTime(compute, recomputed, tensor, messages + late, bubble, data, update, other, total + late)


def passes(work: Workload, profile: Profile) -> Passes:
    """The forward and backward passes of a step, without what data parallelism adds."""
    return _passes(work.sharded_alike(0 if work.gradients_are_whole else 2), profile)


@lru_cache(maxsize=4096)
def _passes(work: Workload, profile: Profile) -> Passes:
    counts = pipeline_of(work).counts
    m, p, split = work.microbatches, work.pipeline, work.schedule in SPLIT_BACKWARD
    rank = _slowest_rank(counts, p, work.one_microbatch(), work.recompute_every, split, profile)
    overhead = microbatch_overhead(work, profile)
    waits = rank.forward + rank.backward - rank.compute - rank.recomputed - rank.tensor + overhead
    bubble = messages = repeats = link = 0.0
    if p > 1:
        message = message_time(work, profile)
        stages = stages_per_rank(work.schedule, work.virtual_stages)
        # `repeats` is the length of the bubble in microbatches of another rank.
        repeats = ideal_bubble(work.schedule, p, work.virtual_stages, m) * m
        bubble = repeats * (rank.others + overhead)
        if split:
            others = rank.others_forward + overhead / 3, rank.others + overhead, rank.others_weights
            bubble, of_last = _split_bubble(work.schedule, p, stages, m, *[part / stages for part in others])
            repeats = (stages * p - 1 + m) / stages - m if of_last else (p - 1) / stages
        # The first message of each hop, there and back, is on the critical path.
        hops = p - 1 if m >= p else stages * p - 1
        counted = waiting_share(work, profile)
        bubble = counted * (bubble + 2 * hops * message)
        messages = counted * 2 * m * stages * message * profile.message_exposed
        link = 2 * m * stages * message
    other = m * waits + profile.step_time
    parts = (m * rank.compute, m * rank.recomputed, m * rank.tensor, messages, bubble, other)
    most, all_parameters = most_parameters(work.model, counts)
    parameters = most.here(work)
    left = zip(all_parameters.here(work), parameters, strict=True)
    elsewhere = Weights(*(max(0.0, of_all - of_one) / (p - 1) if p > 1 else 0.0 for of_all, of_one in left))
    return Passes(rank, parameters, elsewhere, counts.ends_together, counts.most, parts, sum(parts), repeats, link)


def waiting_share(work: Workload, profile: Profile) -> float:
    """The part of the waits in a pipeline that lengthens the step.

    Processes that share cores compute slowly. One that waits gives its cores to the others, so its wait costs nothing
    as long as the others keep all cores busy. While i of p stages work, as when a pipeline fills, i of p processes do.
    """
    cores, n, p = profile.cores * work.num_gpus / profile.gpus_per_node, work.num_gpus, work.pipeline
    if p == 1 or not 0 < cores < n:
        return 1.0
    return 2 / (n * (p - 1)) * sum(max(0.0, cores - i * n / p) for i in range(1, p))


def _split_bubble(
    schedule: str, p: int, stages: int, m: int, forward: float, both: float, weights: float
) -> tuple[float, bool]:
    """The bubble of equal stages, in seconds, and whether the last stage sets its length.

    The arguments are F, F + I + W, and W of one stage.

    Ranks wait (p-1)(F + I - W), because W fills the rest (ZB-H1 of arXiv 2401.10241, table 2). Here I includes the
    repeated forward pass and the tensor-parallel communication. In a V they wait (p-1) I, as long as I is not much
    longer than F and W together. The term for DualPipeV is fitted to the trainer's tables. With few microbatches the
    last stage sets the length, as in `ideal_bubble`.
    """
    inputs = both - forward - weights
    of_last = (stages * p - 1 + m) * (forward + inputs) + weights - m * stages * both
    if schedule == "zbv_zero_bubble":
        filled = (p - 1) * max(forward, inputs) + (p - 2) * max(0.0, forward - inputs)
    else:
        filled = (p - 1) * max(forward, forward + inputs - weights)
    if schedule == "dualpipe_v":
        filled += max(0.0, (p - 1) * (inputs - forward) - forward)
    return max(of_last, filled), of_last > filled


def sharding(work: Workload, profile: Profile, found: Passes) -> Sharding:
    """What data parallelism adds to the passes."""
    gathered = elsewhere = 0.0
    rank = found.rank
    if work.zero_stage == 3:
        gather, scatter = gather_and_scatter(found.parameters, found.largest, work, profile)
        gathered = exposed(2 * gather + scatter, profile.overlap * (rank.forward + rank.backward), profile)
        if work.pipeline > 1:
            gather, scatter = gather_and_scatter(found.others, work.model.num_layers // work.pipeline, work, profile)
            elsewhere = exposed(2 * gather + scatter, profile.overlap * rank.others, profile)
    return Sharding(gathered, elsewhere, *_after_backward(work, profile, found))


def microbatch_overhead(work: Workload, profile: Profile) -> float:
    """Seconds that a microbatch costs a rank besides its passes.

    The host waits for the messages of each further stage on the rank, as far as they do not overlap with computation.
    """
    stages = stages_per_rank(work.schedule, work.virtual_stages) if work.pipeline > 1 else 1
    return profile.microbatch_time * (1 + (stages - 1) * profile.message_exposed)


def host_and_device(host: float, device: float, profile: Profile) -> float:
    """Seconds of a pass whose operators the host launches while the device works off its queue.

    The result is at least the slower of the two. It is longer if they are close, because some stretches are bound by
    the host (forward and repeated passes of small operators) and others by the device (backward passes of large ones).
    A norm of high degree is a smooth maximum of the two. On a CPU, or if the host must wait for each operator, it is
    the sum.
    """
    if profile.device.is_cpu or profile.blocking_launches:
        return host + device
    return (host**profile.launch_norm + device**profile.launch_norm) ** (1 / profile.launch_norm)


def host_and_device_seconds(work: Workload, profile: Profile) -> tuple[float, float]:
    """Seconds that the host takes to launch a step's operators, and the device to compute them, on the slowest rank.

    A run is bound by the host if the first exceeds the second.
    """
    found = passes(work, profile)
    rank = found.rank
    device = rank.compute + rank.recomputed + rank.tensor
    return work.microbatches * rank.host, work.microbatches * device + sharding(work, profile, found).update


class Load(NamedTuple):
    """One microbatch's passes on a rank, in seconds of the device and of the host, summed over what the rank holds."""

    forward: float  # with exposed communication
    backward: float  # including what is repeated
    weights: float  # the part of the backward pass that a schedule may defer
    host_forward: float
    host_backward: float
    compute: float
    recomputed: float
    tensor: float

    def seconds(self, profile: Profile) -> tuple[float, float]:
        """Seconds of the forward pass and of the backward pass."""
        return (
            host_and_device(self.host_forward, self.forward, profile),
            host_and_device(self.host_backward, self.backward, profile),
        )

    def deferrable(self, profile: Profile) -> float:
        """Seconds of the backward pass that a schedule may defer, counting host and device."""
        half = self.host_backward / 2
        inputs = host_and_device(half, self.backward - self.weights, profile)
        weights = host_and_device(half, self.weights, profile)
        return self.seconds(profile)[1] * weights / (inputs + weights)


def _load(cost: Cost, recompute_every: int) -> Load:
    """The load of an end of the model, or of the mean layer if only some layers are recomputed."""
    recomputed, recomputed_tensor = cost.recomputed / recompute_every, cost.recomputed_tensor / recompute_every
    return Load(
        cost.forward + cost.forward_tensor,
        cost.backward + cost.backward_tensor + recomputed + recomputed_tensor,
        cost.backward / 2,
        cost.forward_host,
        cost.backward_host,
        cost.forward + cost.backward,
        recomputed,
        cost.forward_tensor + cost.backward_tensor + recomputed_tensor,
    )


_LayerLoads = tuple[tuple[float, ...], ...]
"""Each field of `Load`, of a layer of each kind."""


@lru_cache(maxsize=65536)
def loads(one: Workload, recompute_every: int, profile: Profile) -> tuple[_LayerLoads, Load, Load, Load, Load]:
    """The loads of layers, of the model's entry, of its head, of both ends together, and of the whole model."""
    counts = one.model.layer_counts
    kinds = [_load(layer_cost(one, profile, kind), recompute_every) for kind in range(len(counts))]
    layers = tuple(zip(*kinds, strict=True))
    entry, head = [_load(end, 1) for end in ends_cost(one, profile)]
    both_ends = Load(*map(add, entry, head))
    return layers, entry, head, both_ends, load_of(counts, layers, both_ends)


def load_of(counts: Counts, layers: _LayerLoads, ends: Load) -> Load:
    """The load of some layers of each kind and of what the ends of the model add."""
    return Load(*[sum(map(mul, counts, kinds)) + end for kinds, end in zip(layers, ends, strict=True)])


NOTHING = Load(*[0.0] * len(Load._fields))


@lru_cache(maxsize=4096)
def _slowest_rank(
    counts: RankLayers, pipeline: int, one: Workload, recompute_every: int, split: bool, profile: Profile
) -> _Rank:
    """One microbatch on the rank whose passes take longest: the one with the most layers, or an end of the model."""
    layers, entry, head, both_ends, whole = loads(one, recompute_every, profile)
    apart = [(counts.first, entry), (counts.last, head)]
    choices = [(counts.first, both_ends)] if counts.ends_together else apart
    choices += [(here, NOTHING) for here in counts.largest if here not in (counts.first, counts.last)]
    most = -1.0
    for here, ends in choices:
        load = load_of(here, layers, ends)
        forward, backward = load.seconds(profile)
        if forward + backward > most:
            most, slowest, passes = forward + backward, load, (forward, backward)
    others = others_forward = weights = 0.0
    if pipeline > 1:
        ranks = pipeline - 1
        mean = Load(*[(of_all - of_one) / ranks for of_all, of_one in zip(whole, slowest, strict=True)])
        others_forward, others = mean.seconds(profile)
        others += others_forward
        if split and not one.compiled:  # the trainer does not split compiled layers
            weights = mean.deferrable(profile)
    host = slowest.host_forward + slowest.host_backward
    return _Rank(slowest.compute, slowest.recomputed, slowest.tensor, *passes, others, others_forward, weights, host)


def message_time(work: Workload, profile: Profile) -> float:
    """Seconds to send one microbatch's hidden states to the next stage.

    Tensor-parallel ranks may each send a part of them, which sequence parallelism leaves split and others all-gather.
    """
    nbytes = work.positions * work.model.hidden_size * element_bytes(work.dtype)
    stride = work.tensor * work.context * work.data_parallel
    t = work.tensor
    if t > 1 and work.sequence_parallel:
        return profile.links.message(nbytes / t, stride, work.pipeline)
    if t > 1 and profile.message_shards:
        return profile.links.message(nbytes / t, stride, work.pipeline) + profile.links.all_gather(nbytes, t, 1)
    return profile.links.message(nbytes, stride, work.pipeline)


@lru_cache(maxsize=65536)
def most_parameters(model: TransformerConfig, counts: RankLayers) -> tuple[Weights, Weights]:
    """Parameters of the rank that holds the most, and of the whole model, before any parallelism but the pipeline's."""
    whole = layer_weights(model, model.layer_counts)
    whole = Weights(model.num_parameters() - whole.experts, whole.experts)
    first = layer_weights(model, counts.first)
    if counts.ends_together:
        return Weights(first.rest + model.parts.entry + model.parts.head, first.experts), whole
    table = model.padded_vocab_size * model.hidden_size
    ranks = [*(layer_weights(model, here) for here in counts.largest), Weights(first.rest + table, first.experts)]
    return max(ranks, key=sum), whole


def layer_weights(model: TransformerConfig, counts: Counts) -> Weights:
    """Parameters of ``counts`` layers of each kind."""
    rest = experts = 0
    for count, sizes, kind in zip(counts, model.parts.kinds, description(model).kinds, strict=True):
        own = kind.experts.parameters if kind.experts else 0
        rest, experts = rest + count * (sizes.parameters - own), experts + count * own
    return Weights(rest, experts)


def gather_and_scatter(parameters: Weights, layers: int, work: Workload, profile: Profile) -> tuple[float, float]:
    """Seconds to gather parameters once, and to reduce-scatter their gradients, for one microbatch under ZeRO 3.

    Layers are gathered one by one, in the forward pass and again in the backward pass (arXiv 1910.02054, 2304.11277).
    """
    parts, gather, scatter = max(1, layers * profile.gathers_per_layer), 0.0, 0.0
    for here, size, stride in parameters.groups(work):
        part = here / parts
        gather += parts * profile.links.all_gather(part * profile.parameter_bytes, size, stride)
        scatter += parts * profile.links.all_gather(part * profile.gradient_bytes, size, stride)
    return gather, scatter


def exposed(communication: float, hides: float, profile: Profile) -> float:
    """Seconds that communication adds to a step if ``hides`` seconds of computation can run at the same time.

    The hidden part is not free, because its kernels take multiprocessors and memory bandwidth from the computation.
    """
    return communication - (1 - profile.contention) * min(communication, hides)


def _after_backward(work: Workload, profile: Profile, found: Passes) -> tuple[float, float]:
    """Seconds of the data-parallel sums that the last backward pass does not hide, and of the update."""
    rank, links, zero, replicas = found.rank, profile.links, work.zero_stage, work.replicate
    time = reduced = gathered = 0.0
    for parameters, shards, stride in found.parameters.groups(work):  # ranks that share a sequence share shards too
        gradients, size = parameters * profile.gradient_bytes, replicas * shards
        if zero == 3:
            time += links.all_reduce(gradients / shards, replicas, stride * shards) if replicas > 1 else 0.0
        elif size > 1:
            one_way = links.all_gather(gradients, size, stride)
            reduced += one_way
            gathered += links.all_gather(parameters * profile.parameter_bytes, size, stride) if zero else one_way
    if reduced:
        hides = profile.overlap if work.pipeline == 1 or profile.overlap_in_pipeline else 0.0
        backward = hides * rank.backward
        if zero == 2:  # gradients are reduced and scattered after every microbatch
            reduced, backward = reduced * work.microbatches, backward * work.microbatches
        if zero and profile.gather_hidden:
            gathered = exposed(gathered, profile.overlap * rank.forward, profile)
            time = gathered + exposed(reduced, backward, profile)
        else:
            time = exposed(reduced + gathered, backward, profile)
    if work.pipeline > 1 and work.model.tied_embeddings and not found.ends_together:
        table = work.model.padded_vocab_size * work.model.hidden_size / work.tensor
        time += links.message(table * profile.gradient_bytes, work.tensor * work.data_parallel * work.context)
    return time, update_time(work, profile, found.parameters, found.largest)


def update_time(work: Workload, profile: Profile, parameters: Weights, layers: int) -> float:
    """Seconds on a rank that holds ``layers`` layers, and ``parameters`` before ZeRO splits them.

    Muon's matrices are gathered, each on one of the processes that share it, and their updates are sent back.
    """
    update, shards = work.update, work.shard * work.context if work.zero_stage else 1
    here = sum([part / (size if work.zero_stage else 1) for part, size, _ in parameters.groups(work)])
    # The profile's figure is AdamW's.
    nbytes = here * (profile.optimizer_traffic + update.traffic - ADAMW_WORK.traffic)
    if update.newton_schulz_steps == 0:
        return nbytes / profile.memory_rate
    dtype = update.newton_schulz_dtype or ("float32" if profile.device.is_cpu else "bfloat16")
    if dtype not in profile.device.peak:  # as on GPUs before Ampere, which emulate bfloat16
        dtype = "float32"
    elements, longest, products = _matrices(work.model, dtype, profile)
    processes, share = work.tensor * shards, layers / sum(work.model.layer_counts)
    own = share * elements / processes
    computes = update.newton_schulz_steps * max(longest, share * products / processes)
    sends = 2 * profile.links.all_gather(own * element_bytes(dtype), processes, 1)  # two all-to-alls
    return (nbytes + own * update.matrix_traffic) / profile.memory_rate + computes + sends


@lru_cache(maxsize=1024)
def _matrices(model: TransformerConfig, dtype: str, profile: Profile) -> tuple[int, float, float]:
    """The elements of all layers' matrices, and seconds of a Newton-Schulz step: the longest one's, and the sum."""
    elements, longest, total = 0, 0.0, 0.0
    for kind, count in zip(description(model).kinds, model.layer_counts, strict=True):
        for rows, columns in (parameter.shape for parameter in kind.parameters if len(parameter.shape) == 2):
            step = sum(gemm_time(*sizes, 1, dtype, profile) for sizes in newton_schulz_products(rows, columns))
            elements, longest, total = elements + count * rows * columns, max(longest, step), total + count * step
    return elements, longest, total
