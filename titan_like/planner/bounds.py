"""Lower bounds on a layout's step time and memory, by which a search rules out most layouts.

The closer a bound is, the longer it takes: `least_group_seconds` and `least_bytes` scale up one sample, for all layouts
that share it; `least_step_seconds` has the layout's own passes, and leaves out only what the schedule adds to them.
"""

from itertools import accumulate

from titan_like.planner.cost import EXPERTS, MESSAGES, Groups, Kernels, attention_time, collective_time, gemm_rate
from titan_like.planner.data_parallel import gathers_every_pass, reduces_every_pass
from titan_like.planner.profile import Profile
from titan_like.planner.stages import Source, pipeline_of, pipeline_program
from titan_like.planner.step_time import Steps, added_up, steps_of
from titan_like.planner.trace import estimate, trace
from titan_like.planner.trace.program import Segment
from titan_like.planner.workload import BYTES, Workload, element_bytes, stored_dtype

BREADTH_FIRST = "looped_bfs"  # the schedule with which a stage begins its backward passes once the next one has ended


def least_bytes(work: Workload, profile: Profile) -> float:
    """A lower bound on a rank's memory: what it keeps of its microbatches, and its part of the state.

    With few microbatches, or breadth-first stages, gradients are not summed up yet while a rank keeps most of them, and
    stages have theirs one after the other.
    """
    _, kept, are_alike = _of_one_sample(work, profile)
    # The first rank keeps one for each rank, at least of its share of equal layers. All ranks have one of each layer.
    is_share = are_alike and pipeline_of(work).num_layers[0] * work.pipeline >= len(work.model.layer_kinds)
    held = (min(work.microbatches, work.pipeline) if is_share else 1) / work.pipeline * work.micro_batch_size * kept
    elements = work.model.num_parameters() / work.pipeline / max(work.tensor, work.expert * work.expert_tensor)
    compute, shards = element_bytes(work.dtype), work.shard * work.context
    gathers = gathers_every_pass(work.zero_stage)
    if work.lora.rank:  # the frozen weights alone
        return held + compute * elements / (shards if gathers else 1) + profile.overhead_bytes
    master = max(compute, BYTES["float32"])
    copies = compute if compute < master and not gathers else 0
    weights = master * (1 + work.optimizer.layers.element) / (shards if work.zero_stage else 1)
    sums, at_end = 0.0, compute if work.microbatches == 1 else master  # a single pass's may stay as it made them
    if work.microbatches > work.pipeline and work.schedule != BREADTH_FIRST:
        of_one_pass = work.microbatches == work.pipeline + 1  # while a rank keeps most of its microbatches
        sums = min(compute if of_one_pass else master, BYTES[work.reduce_dtype])
        sums = min(sums, master / shards) if reduces_every_pass(work.zero_stage) else sums
    peak = max(held + elements * (sums + copies), elements * at_end / (shards if work.zero_stage else 1))
    return peak + elements * weights + profile.overhead_bytes


def least_group_seconds(group: Workload, profile: Profile) -> float:
    """A lower bound on the step of all layouts that differ only in the pipeline's schedule and in how ZeRO splits."""
    seconds, *_ = _of_one_sample(group, profile)
    return group.microbatches / group.pipeline * (group.micro_batch_size * seconds)


def _of_one_sample(group: Workload, profile: Profile) -> tuple[float, float, bool]:
    """Lower bounds on one sample's seconds and kept bytes in the whole model, and whether all layers keep as many."""
    probe = group._replace(micro_batch_size=1, shard=1, replicate=1, zero_stage=0, stage_layers=None)
    probe = probe._replace(global_batch_size=2, pipeline=min(2, group.pipeline), schedule="1f1b", virtual_stages=1)
    if probe not in profile.seconds:
        seconds, kept, kernels = 0.0, list[int](), Kernels(probe.dtype, probe.compiled)
        for stage in pipeline_program(probe, estimate).stages:
            kept += [segment.kept for segment in stage.layers]
            for segment, is_layer, count in stage.counts:
                seconds += count * least_seconds(segment, is_layer, stage.groups, kernels, profile)
        profile.seconds[probe] = seconds, sum(kept), len(set(kept)) == 1
    return profile.seconds[probe]


def least_seconds(segment: Segment, is_layer: bool, groups: Groups, kernels: Kernels, profile: Profile) -> float:
    """A lower bound on the device's seconds for all passes over a segment, in proportion to the microbatch's size.

    It leaves out partly empty waves, latencies, and products that are bound by memory or by their depth.
    """
    cache, key = profile.seconds, (segment, is_layer, kernels, "least")
    if key in cache:
        return cache[key]
    dtype, seconds = kernels.dtype if is_layer else stored_dtype(kernels.dtype), 0.0
    fused = 1.0 if kernels.compiled else profile.fusion
    for pass_ in segment.passes:
        flops = sum(count * gemm.flops for gemm, count in pass_.gemms.items())
        seconds += flops / gemm_rate(dtype, profile)
        seconds += sum(count * attention_time(core, dtype, profile) for core, count in pass_.attention.items())
        seconds += ((1 - fused) * pass_.eager_bytes[0] + fused * pass_.fused_bytes[0]) / profile.memory_rate
        for (kind, group, _), (_, nbytes) in pass_.collectives.items():
            if group in groups and kind not in MESSAGES:
                single, double = (collective_time(kind, n * nbytes, *groups[group], profile) for n in (1, 2))
                seconds += (double - single) * (profile.expert_exposed if group == EXPERTS else profile.tensor_exposed)
    cache[key] = seconds
    return seconds


def least_step_seconds(work: Workload, profile: Profile, passes_alone: bool = False, source: Source = trace) -> float:
    """A lower bound on the total of `step_time`, which takes a fraction of its time.

    ``passes_alone``: without what follows the passes. ``source`` as in `pipeline_program`.
    """
    steps = steps_of(work, profile, source)
    if passes_alone:
        steps = steps._replace(data=0.0, update=0.0, link=0.0)
    return added_up(work, profile, steps, _least_span(work, steps)).total


def _least_span(work: Workload, steps: Steps) -> float:
    """A lower bound on `_span`, whatever the schedule is.

    A rank starts when the first microbatch has come to its first stage, computes all passes of its stages, and after
    the last one that other ranks need, a microbatch goes back to the first stage. Exact for equal stages under 1F1B and
    GPipe, and for interleaved stages. Of ranks with equal stages, the last one waits longest.
    """
    alike, kinds, m = steps.pipeline.alike, steps.kinds, work.microbatches
    sent = [steps.transfer * crosses for crosses in alike.crosses]
    # Until a microbatch arrives, and from its backward pass until the end.
    arrival = [0.0, *accumulate([kinds[kind].F + delay for kind, delay in zip(alike.kind_of, sent, strict=False)])]
    back = [0.0, *accumulate([kinds[kind].I + delay for kind, delay in zip(alike.kind_of, sent, strict=False)])]
    longest = 0.0
    for stage_kinds, first in alike.rank_kinds:
        busy = sum([kinds[kind].F + kinds[kind].B for kind in stage_kinds])
        needed = sum([kinds[kind].F + kinds[kind].I for kind in stage_kinds])
        longest = max(longest, arrival[first] + max(m * busy, m * needed + back[first]))
    return longest
