"""Step times: what must hold of any prediction, products in waves, rings on links, and what hides behind what."""

import json
import math
import random

import pytest

from benchmarks.stack_profiles import profiles
from tests.distributed.launch import base_config
from tests.unit.planner_cases import links_of, random_workloads
from titan_like.config import ConfigError, load_config
from titan_like.planner.cost import gemm_time
from titan_like.planner.predict import predict
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.stack import of_own_trainer
from titan_like.planner.step_time import exposed, step_time
from titan_like.planner.trace.program import Gemm

SELENE = profiles()["selene_2021"]
WORKLOADS = random_workloads(15, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("profile", profiles().values(), ids=lambda profile: profile.name)
def test_predictions_are_finite_positive_and_the_sum_of_their_parts(profile):
    for work in WORKLOADS:
        if profile.dtype not in ("float8", "float4"):
            work = work._replace(dtype="bfloat16" if "bfloat16" in profile.device.peak else "float32")
        found = step_time(work, profile)
        assert all(math.isfinite(part) and part >= 0 for part in found)
        assert found.compute > 0
        assert found.total == pytest.approx(sum(found[:-1]))


@pytest.mark.parametrize("factor", [1.01, 3])
@pytest.mark.parametrize(
    "rate",
    ["node_bandwidth", "network_efficiency", "message_efficiency", "all_to_all_efficiency", "nvlink_efficiency",
     "network_latency", "gemm_efficiency", "memory_efficiency", "attention_efficiency"],
)  # fmt: skip
def test_no_step_gets_faster_on_slower_links_or_devices(rate, factor):
    for profile in (SELENE, of_own_trainer(builtin_profiles()["titan_h100"], "bfloat16")):
        value = getattr(profile, rate)
        slow = profile.changed(**{rate: value * factor if rate == "network_latency" else value / factor})
        for work in WORKLOADS:
            assert step_time(work, slow).total >= step_time(work, profile).total * (1 - 1e-3)


def random_settings(generator):
    pick = generator.choice
    gpus = [("V100-32GB", "float16"), ("A100-80GB", "float32"), ("H100", "bfloat16"), ("B200", "bfloat16")]
    gpu, dtype = pick(gpus)
    family, name = pick([("gpt", "gpt3_13b"), ("llama", "llama3.1_8b")])
    tensor, schedule = pick([1, 2, 8]), pick(["1f1b", "gpipe", "interleaved_1f1b", "dualpipe_v"])
    return {
        "model.family": family,
        "model.flavor": name,
        "training.seq_len": 1024,
        "training.global_batch_size": pick([64, 256]),
        "training.steps": 100,
        "training.dtype": dtype,
        "parallelism.tensor_parallel_degree": tensor,
        "parallelism.pipeline_parallel_degree": pick([1, 2, 4]),
        "parallelism.pipeline_schedule": schedule,
        "parallelism.virtual_stages_per_rank": 2 if schedule.startswith("inter") else 1,
        "parallelism.data_parallel_replicate_degree": pick([1, 2]),
        "parallelism.zero_stage": pick([0, 1, 2, 3]),
        "activation_checkpoint.mode": pick(["none", "full"]),
        "compile.enable": str(pick([True, False])).lower(),
        "cluster.gpu": gpu,
        "cluster.gpus_per_node": pick([4, 8]),
        "cluster.nodes": pick([1, 2, 8]),
        "cluster.node_bandwidth": pick([3, 400]),
    }


@pytest.mark.slow
def test_predictions_of_random_valid_configurations_are_finite_and_positive():
    generator = random.Random(9)
    accepted = 0
    for _ in range(40):
        words = [f"--{key}={value}" for key, value in random_settings(generator).items()]
        try:
            forecast = predict(load_config(words))
        except ConfigError:  # bad combinations are refused with a sentence, and in no other way
            continue
        accepted += 1
        json.dumps(forecast.as_dict(), allow_nan=False)
        assert 0 < forecast.seconds_low < forecast.time.total < forecast.seconds_high
        assert all(part >= 0 for rank in forecast.memory.ranks for part in rank)
        assert forecast.rates.tokens_per_second > 0
        assert 0 < forecast.rates.hfu < 1
    assert accepted > 12


def test_gemm_pays_for_edge_tiles_and_for_the_last_wave():
    device = SELENE.device
    ideal = 2 * 4096**3 / (device.peak_flops("float16") * SELENE.gemm_efficiency)
    whole = gemm_time(Gemm(4096, 4096, 4096, 1, False, 16), "float16", SELENE)
    assert ideal < whole < 1.25 * ideal
    # One row more needs another row of tiles; another one after that does not.
    more = [gemm_time(Gemm(16 * 1024 + n, 8192, 4096, 1, False, 16), "float16", SELENE) for n in (0, 1, 2)]
    assert more[0] < more[1] == more[2]
    # Short depths, and rows that do not begin where fast kernels need it, are slow.
    assert gemm_time(Gemm(4096, 4096, 128, 1, False, 16), "float16", SELENE) * 32 > 1.5 * whole
    assert gemm_time(Gemm(4096, 4096, 4096, 1, False, 1), "float16", SELENE) > 5 * whole


def test_rings_share_the_node_s_cards():
    links = links_of(8, 200e9, 100e9, 80e9, 0.0, 0.0)
    inside = links.all_reduce(1e9, 8, 1)
    assert inside == pytest.approx(2 * 7 / 8 * 1e9 / 200e9)
    # Sixteen neighbours: one ring over two nodes has all cards. Ranks eight apart: eight rings share them.
    assert links.all_reduce(1e9, 16, 1) == pytest.approx(2 * 15 / 16 * 1e9 / 100e9)
    assert links.all_reduce(1e9, 16, 8) == pytest.approx(2 * 15 / 16 * 1e9 / (100e9 / 8))
    assert links.message(1e9, 1) == pytest.approx(1e9 / 200e9)
    assert links.message(1e9, 8) == pytest.approx(1e9 / 10e9)
    # A row of pipeline ranks that are four apart: two of them to a node, so that longer rows leave it.
    assert links.message(1e9, 4, 2) == links.message(1e9, 1)
    assert links.message(1e9, 4, 3) == links.message(1e9, 8)
    assert links.all_reduce(1e9, 1, 8) == 0


def test_a_ring_s_latency_is_that_of_its_hops():
    links = links_of(8, 200e9, 100e9, 80e9, 1e-6, 1e-5)
    assert links.all_gather(1e-9, 8, 1) == pytest.approx(7e-6)
    assert links.all_gather(1e-9, 16, 1) == pytest.approx(1e-5 + 14e-6)  # one hop between two nodes
    assert links.all_gather(1e-9, 4, 8) == pytest.approx(3e-5)  # ranks eight apart: every hop
    assert links.all_gather(1e-9, 129, 8) == pytest.approx(128e-5)
    assert links.all_reduce(1e-9, 129, 8) == pytest.approx(2 * 64e-5)  # trees


def test_groups_that_nodes_do_not_hold_whole_leave_them():
    links, inside = (links_of(8, 200e9, 100e9, 80e9, 1e-6, 1e-5, one_node=one_node) for one_node in (False, True))
    for size, stride in ((3, 1), (6, 1), (5, 1), (3, 2)):  # some have ranks in two nodes
        assert links.ring_bandwidth(size, stride) == 100e9 / stride
        assert links.ring_latency(size, stride) == pytest.approx(1e-5 + (size - 2) * 1e-6)
        assert inside.ring_bandwidth(size, stride) == 200e9
    for size, stride in ((2, 1), (4, 2), (8, 1), (2, 4)):
        assert links.ring_bandwidth(size, stride) == 200e9


def test_a_job_of_one_node_never_leaves_it(tmp_path):
    def seconds(data: int, network: float) -> float:  # nodes of 6: of three groups of 4, one has ranks in two
        settings = {"cluster.gpu": "A100-80GB", "cluster.gpus_per_node": 6, "cluster.node_bandwidth": network}
        settings |= {"parallelism.tensor_parallel_degree": 4, "parallelism.data_parallel_shard_degree": data}
        settings |= {"training.global_batch_size": 24, "training.dtype": "bfloat16"}
        return predict(base_config(tmp_path / "none", settings)).time.tensor

    assert seconds(1, 100.0) == seconds(1, 1.0)
    assert seconds(3, 100.0) < seconds(3, 1.0)


def test_a_ring_may_use_a_part_of_a_node_s_cards():
    links = links_of(4, 150e9, 50e9, 50e9, 0.0, 0.0, ring_part=0.25)
    whole = links_of(4, 150e9, 50e9, 50e9, 0.0, 0.0)
    assert links.ring_bandwidth(64, 1) == whole.ring_bandwidth(64, 1) / 4
    assert links.ring_bandwidth(16, 4) == whole.ring_bandwidth(16, 4)  # four rings: all cards
    unswitched = links_of(4, 150e9, 50e9, 50e9, 0.0, 0.0, nvlink_switch=False)  # two GPUs have a part of their links
    assert (unswitched.ring_bandwidth(4, 1), unswitched.ring_bandwidth(2, 1)) == (150e9, 50e9)


def test_hidden_communication_is_not_free():
    profile = SELENE.changed(contention=0.2)
    assert exposed(3.0, 0.0, profile) == 3.0
    assert exposed(3.0, 10.0, profile) == pytest.approx(0.6)
    assert exposed(3.0, 2.0, profile) == pytest.approx(1.0 + 0.2 * 2.0)
