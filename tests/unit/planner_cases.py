"""Shapes and random valid workloads for the planner's tests, and the times of one traced layer."""

import random

from titan_like.metrics.devices import Device
from titan_like.models.registry import config_class, flavors
from titan_like.parallel.schedules.tables import check_schedule, stages_per_rank
from titan_like.planner.cost import Kernels, segment_times
from titan_like.planner.profile import Links, Profile
from titan_like.planner.trace import trace
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.workload import Workload


def flavor(family, name, **changes):
    return config_class(family).model_validate(flavors(family)[name] | changes)


MODELS = [flavor("gpt", "7.5b"), flavor("llama", "llama3.1_8b")]


def links_of(gpus_per_node, nvlink, node, messages, nvlink_latency, network_latency, **changes):
    """Links with these bandwidths and latencies."""
    device = Device("GPU", 1.0, 1.0, nvlink, 1, 1, {})
    latencies = {"nvlink_latency": nvlink_latency, "network_latency": network_latency}
    shares = {"nvlink_efficiency": 1.0, "network_efficiency": node, "message_efficiency": messages}
    shares |= {"all_to_all_efficiency": node}
    return Links(Profile("links", device, gpus_per_node, 1.0, **latencies, **shares, **changes))


def layer_times(work, profile):
    """Seconds of the forward pass, the backward pass and the deferred part of a backward pass over a run's layer."""
    program = trace(TraceKey.of(work))
    return segment_times(program.layers[0], True, program.groups, Kernels(work.dtype, work.compiled), profile)


def random_workloads(count, seed):
    """Valid ones: what the configuration's rules refuse is not drawn."""
    generator = random.Random(seed)
    pick = generator.choice
    found = []
    while len(found) < count:
        model, tensor, pipeline = pick(MODELS), pick([1, 2, 8]), pick([1, 1, 2, 4, 8])
        schedule = pick(["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "dualpipe_v"])
        virtual = 1 if schedule in ("1f1b", "gpipe") else 2
        if pipeline == 1:
            schedule, virtual = "1f1b", 1
        microbatches, shard, replicate = pick([1, 2, 4, 8, 32]) * pipeline, pick([1, 2, 8, 64]), pick([1, 1, 2])
        stages = pipeline * stages_per_rank(schedule, virtual)
        if check_schedule(schedule, pipeline, virtual, microbatches) or stages > model.num_layers:
            continue
        work = Workload(
            model,
            seq_len=2048,
            micro_batch_size=1,
            global_batch_size=microbatches * shard * replicate,
            tensor=tensor,
            pipeline=pipeline,
            replicate=replicate,
            shard=shard,
            schedule=schedule,
            virtual_stages=virtual,
            sequence_parallel=tensor > 1 and pick([True, False]),
            zero_stage=pick([0, 1, 2, 3]),
            recompute=pick(["none", "full", "selective"]),
            recompute_every=pick([1, 1, 3]),
        )
        found.append(work)
    return found
