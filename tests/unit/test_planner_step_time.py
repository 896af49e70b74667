import math
from dataclasses import replace

import pytest

from tests.distributed.launch import base_config
from tests.unit.planner_cases import flavor, random_workloads
from titan_like.parallel.schedules.simulate import ideal_bubble
from titan_like.planner.layer_time import ends_cost, gemm_time, layer_cost, softmax_is_fused
from titan_like.planner.predict import predict
from titan_like.planner.profile import Links, builtin_profiles
from titan_like.planner.step_time import exposed, step_time
from titan_like.planner.workload import Workload, equal_stages

PROFILES = list(builtin_profiles().values())
SELENE = builtin_profiles()["selene_2021"]
WORKLOADS = random_workloads(150, seed=1)


def test_dtensor_weights_take_the_host_s_time_under_tensor_parallelism_unless_compiled():
    profile = SELENE.changed(tensor_host_forward=0.003, tensor_host_backward=0.005)
    work = next(work for work in WORKLOADS if work.tensor > 1 and work.recompute == "full")._replace(compiled=False)
    for tensor, compiled, more in ((work.tensor, False, 0.003), (work.tensor, True, 0.0), (1, False, 0.0)):
        run = work._replace(tensor=tensor, compiled=compiled, sequence_parallel=False)
        found, plain = (layer_cost(run, of) for of in (profile, SELENE))
        assert found.forward_host - plain.forward_host == pytest.approx(more, abs=1e-12)
        recomputed = more  # the forward pass is repeated
        expected = recomputed + (0.005 if more else 0.0)
        assert found.backward_host - plain.backward_host == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_predictions_are_finite_positive_and_the_sum_of_their_parts(profile):
    for work in WORKLOADS:
        found = step_time(work, profile)
        assert all(math.isfinite(part) and part >= 0 for part in found)
        assert found.compute > 0
        assert found.total == pytest.approx(sum(found[:-1]))


def test_more_work_takes_longer():
    for work in WORKLOADS[:60]:
        before = step_time(work, SELENE).total
        assert step_time(work._replace(global_batch_size=2 * work.global_batch_size), SELENE).total > before
        if work.recompute == "none":
            assert step_time(work._replace(recompute="full"), SELENE).total > before


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4)]
)
@pytest.mark.parametrize("microbatches", [8, 32])
def test_bubble_of_equal_stages_is_the_closed_form(schedule, virtual, microbatches):
    degree = 8
    work = workload(schedule, degree, virtual, microbatches)
    quiet = SELENE.changed(
        nvlink_latency=0.0, network_latency=0.0, message_efficiency=1e12, nvlink_efficiency=1e12, microbatch_time=0.0
    )
    found = step_time(work, quiet)
    layer = layer_cost(work, quiet)
    others = work.model.num_layers // degree * (layer.forward + layer.backward)
    assert ideal_bubble(schedule, degree, virtual, microbatches) == (degree - 1) / (virtual * microbatches)
    # The ranks between the ends have layers alone; the last one, which also has the logits, sets the pace.
    entry, head = ends_cost(work, quiet)
    ends = entry.forward + entry.backward
    expected = (degree - 1) / virtual * (others + ends / (degree - 1))
    assert found.messages == pytest.approx(0, abs=1e-9)
    assert found.bubble == pytest.approx(expected, rel=1e-9)
    assert head.forward > entry.forward


def workload(schedule, degree, virtual, microbatches):
    work = Workload(flavor("gpt", "gpt3_175b"), 2048, 1, microbatches, flash=False, dtype="float16")
    return work._replace(pipeline=degree, virtual_stages=virtual, schedule=schedule)


def test_tensor_parallelism_of_one_node_beats_that_of_two():
    model = flavor("gpt", "18b")
    times = {t: step_time(Workload(model, 2048, 2, 1024, tensor=t, shard=256 // t), SELENE).total for t in (8, 16)}
    assert times[16] > 1.3 * times[8]


def test_gemm_pays_for_edge_tiles_and_for_the_last_wave():
    device = SELENE.device
    ideal = 2 * 4096**3 / (device.peak_flops("float16") * SELENE.gemm_efficiency)
    whole = gemm_time(4096, 4096, 4096, 1, "float16", SELENE)
    assert ideal < whole < 1.25 * ideal
    # One row more needs another row of tiles; another one after that does not.
    more = [gemm_time(16 * 1024 + n, 8192, 4096, 1, "float16", SELENE) for n in (0, 1, 2)]
    assert more[0] < more[1] == more[2]
    # Short depths and sizes that miss the fast kernels are slow.
    assert gemm_time(4096, 4096, 128, 1, "float16", SELENE) * 32 > 1.5 * whole
    assert gemm_time(4096, 4096, 4095, 1, "float16", SELENE) > 5 * whole


def test_rings_share_the_node_s_cards():
    links = Links(8, 200e9, 100e9, 80e9, 0.0, 0.0)
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
    links = Links(8, 200e9, 100e9, 80e9, 1e-6, 1e-5)
    assert links.all_gather(1e-9, 8, 1) == pytest.approx(7e-6)
    assert links.all_gather(1e-9, 16, 1) == pytest.approx(1e-5 + 14e-6)  # one hop between two nodes
    assert links.all_gather(1e-9, 4, 8) == pytest.approx(3e-5)  # ranks eight apart: every hop
    assert links.all_gather(1e-9, 129, 8) == pytest.approx(128e-5)
    assert links.all_reduce(1e-9, 129, 8) == pytest.approx(2 * 64e-5)  # trees


def test_groups_that_nodes_do_not_hold_whole_leave_them():
    links = Links(8, 200e9, 100e9, 80e9, 1e-6, 1e-5)
    for size, stride in ((3, 1), (6, 1), (5, 1), (3, 2)):  # some have ranks in two nodes
        assert links.ring_bandwidth(size, stride) == 100e9 / stride
        assert links.ring_latency(size, stride) == pytest.approx(1e-5 + (size - 2) * 1e-6)
        assert replace(links, one_node=True).ring_bandwidth(size, stride) == 200e9
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
    links = Links(4, 150e9, 50e9, 50e9, 0.0, 0.0, ring_part=0.25)
    whole = Links(4, 150e9, 50e9, 50e9, 0.0, 0.0)
    assert links.ring_bandwidth(64, 1) == whole.ring_bandwidth(64, 1) / 4
    assert links.ring_bandwidth(16, 4) == whole.ring_bandwidth(16, 4)  # four rings: all cards


def test_hidden_communication_is_not_free():
    profile = SELENE.changed(contention=0.2)
    assert exposed(3.0, 0.0, profile) == 3.0
    assert exposed(3.0, 10.0, profile) == pytest.approx(0.6)
    assert exposed(3.0, 2.0, profile) == pytest.approx(1.0 + 0.2 * 2.0)


@pytest.mark.parametrize("tensor", [1, 8])
def test_gradients_of_later_microbatches_are_added_in_memory(tensor):
    work = workload("1f1b", 1, 1, 4)._replace(tensor=tensor)
    several, alone = (layer_cost(run, SELENE) for run in (work, work._replace(global_batch_size=1)))
    # Half-precision gradients: one read, the sum read and written.
    moved = 6 * work.model.layer_parameters / tensor
    bandwidth = SELENE.device.memory_bandwidth * SELENE.memory_efficiency
    assert several.backward - alone.backward == pytest.approx(moved / bandwidth)
    fused = SELENE.changed(fused_accumulation=True)
    assert layer_cost(work, fused).backward == pytest.approx(alone.backward)
    assert work._replace(zero_stage=2).accumulates  # one shard is all of it
    assert not work._replace(zero_stage=2, shard=2, global_batch_size=16).accumulates


def test_softmax_is_fused_for_multiples_of_four_matrices():
    model = flavor("gpt", "18b")  # 48 heads
    work = Workload(model, 2048, 1, 64, tensor=8, flash=False, dtype="float16")
    pair = work._replace(micro_batch_size=2)
    assert not softmax_is_fused(work, SELENE)  # six
    assert softmax_is_fused(pair, SELENE)
    assert layer_cost(work, SELENE).forward_host > layer_cost(pair, SELENE).forward_host
    assert layer_cost(pair, SELENE.changed(fused_softmax=False)).forward > layer_cost(pair, SELENE).forward


def test_blocking_launches_add_the_host_s_time():
    work = workload("1f1b", 8, 1, 16)
    profile = SELENE.changed(blocking_launches=True)
    layer = layer_cost(work, profile)
    _, head = ends_cost(work, profile)
    host = (
        work.model.num_layers // 8 * (layer.forward_host + layer.backward_host) + head.forward_host + head.backward_host
    )
    found = step_time(work, profile)
    assert found.other == pytest.approx(16 * (host + profile.microbatch_time) + profile.step_time)
    assert found.total > step_time(work, SELENE).total


def test_the_host_waits_for_the_messages_of_every_stage():
    for virtual, schedule in ((1, "1f1b"), (3, "interleaved_1f1b")):
        work = workload(schedule, 8, virtual, 16)
        more = SELENE.changed(microbatch_time=SELENE.microbatch_time + 0.01)
        assert step_time(work, more).other - step_time(work, SELENE).other == pytest.approx(16 * virtual * 0.01)


def test_unswitched_nvlink_gives_two_gpus_a_part_of_their_links():
    links = Links(4, 150e9, 50e9, 50e9, 0.0, 0.0, switched=False)
    assert links.ring_bandwidth(4, 1) == 150e9
    assert links.ring_bandwidth(2, 1) == 50e9


@pytest.mark.parametrize(("layers", "stages"), [(126, 64), (126, 128), (8, 3), (12, 12)])
def test_equal_stages_hold_all_layers(layers, stages):
    counts = equal_stages(layers, stages)
    assert sum(counts) == layers
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)
