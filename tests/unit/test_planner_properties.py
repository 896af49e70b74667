"""What must hold of any prediction, over random valid runs. Seeds are fixed."""

import json
import math
import random
from itertools import pairwise

import pytest

from benchmarks.stack_memory import memory
from tests.unit.planner_cases import random_workloads
from titan_like.config import ConfigError, load_config
from titan_like.planner.predict import predict
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.step_time import step_time

WORKLOADS = random_workloads(120, seed=77)
STACKS = [
    builtin_profiles()[name].changed(trainer_state=trainer)
    for name in ("selene_2021", "fsdp_a100", "jean_zay_v100", "megatron_bridge_h100")
    for trainer in (False, True)
]
STACK_NAMES = [f"{stack.name}-{'trainer' if stack.trainer_state else 'published'}" for stack in STACKS]


@pytest.mark.parametrize("profile", STACKS, ids=STACK_NAMES)
def test_memory_never_rises_with_more_tensor_parallelism_on_any_stack(profile):
    compared = 0
    for work in WORKLOADS[:50]:
        before = memory(work, profile).largest
        for tensor in (2 * work.tensor, 4 * work.tensor):
            if work.model.num_kv_heads % tensor == 0:
                compared += 1
                for sequence_parallel in {work.sequence_parallel, True}:
                    more = work._replace(tensor=tensor, sequence_parallel=sequence_parallel)
                    assert memory(more, profile).largest <= before
    assert compared > 40


@pytest.mark.parametrize("profile", STACKS, ids=STACK_NAMES)
def test_memory_never_rises_with_a_higher_zero_stage_on_any_stack(profile):
    """Where there is something to shard. What is gathered for a while may add to fragmentation, no more."""
    compared = 0
    for work in WORKLOADS[:50]:
        if work.shard == 1:
            continue
        compared += 1
        used = [memory(work._replace(zero_stage=stage), profile) for stage in range(4)]
        for lower, higher in pairwise(used):
            gathered = max(rank.gathered for rank in higher.ranks)
            assert higher.largest <= lower.largest + profile.fragmentation * gathered
    assert compared > 25


@pytest.mark.parametrize("factor", [1.01, 3])
@pytest.mark.parametrize(
    "rate",
    ["node_bandwidth", "network_efficiency", "message_efficiency", "nvlink_efficiency", "network_latency",
     "gemm_efficiency", "memory_efficiency", "attention_efficiency"],
)  # fmt: skip
def test_step_never_gets_faster_on_slower_links_or_devices_of_any_stack(rate, factor):
    for profile in builtin_profiles().values():
        value = getattr(profile, rate)
        slow = profile.changed(**{rate: value * factor if rate == "network_latency" else value / factor})
        for work in WORKLOADS[:40]:
            assert step_time(work, slow).total >= step_time(work, profile).total * (1 - 1e-12)


GPUS = [("V100-16GB", "float16"), ("V100-32GB", "float16"), ("A100-40GB", "bfloat16"), ("A100-80GB", "float32")]
GPUS += [("H100", "bfloat16"), ("H200", "float16"), ("B200", "bfloat16")]


def random_settings(generator):
    pick = generator.choice
    gpu, dtype = pick(GPUS)
    family, flavor = pick(
        [("gpt", "gpt2_124m"), ("gpt", "gpt3_13b"), ("llama", "llama3.1_8b"), ("llama", "llama3.1_70b")]
    )
    tensor = pick([1, 2, 4, 8])
    schedule = pick(["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "dualpipe_v"])
    return {
        "model.family": family,
        "model.flavor": flavor,
        "training.seq_len": pick([512, 1024]),
        "training.micro_batch_size": pick([1, 2, 4]),
        "training.global_batch_size": pick([64, 256, 1024]),
        "training.steps": 100,
        "training.dtype": dtype,
        "parallelism.tensor_parallel_degree": tensor,
        "parallelism.sequence_parallel": str(tensor > 1 and pick([True, False])).lower(),
        "parallelism.pipeline_parallel_degree": pick([1, 2, 4]),
        "parallelism.pipeline_schedule": schedule,
        "parallelism.virtual_stages_per_rank": 2 if schedule.startswith(("inter", "looped")) else 1,
        "parallelism.data_parallel_replicate_degree": pick([1, 2]),
        "parallelism.zero_stage": pick([0, 1, 2, 3]),
        "activation_checkpoint.mode": pick(["none", "full", "selective"]),
        "activation_checkpoint.every_n_layers": pick([1, 2]),
        "compile.enable": str(pick([True, False])).lower(),
        "cluster.gpu": gpu,
        "cluster.gpus_per_node": pick([4, 8]),
        "cluster.nodes": pick([1, 2, 8]),
        "cluster.node_bandwidth": pick([3, 25, 400]),
    }


def test_predictions_of_random_valid_configurations_are_finite_and_positive():
    generator = random.Random(9)
    accepted = 0
    for _ in range(250):
        settings = random_settings(generator)
        try:
            forecast = predict(
                load_config([word for key, value in settings.items() for word in (f"--{key}", str(value))])
            )
        except ConfigError:  # bad combinations are refused with a sentence, and in no other way
            continue
        accepted += 1
        json.dumps(forecast.as_dict(), allow_nan=False)
        assert all(part >= 0 and math.isfinite(part) for part in forecast.time)
        assert 0 < forecast.seconds_low < forecast.time.total < forecast.seconds_high
        assert forecast.time.compute > 0
        assert forecast.memory.largest > 0
        assert all(part >= 0 for rank in forecast.memory.ranks for part in rank)
        assert forecast.rates.tokens_per_second > 0
        assert 0 < forecast.rates.hfu < 1
    assert accepted > 80
