"""What the planner says of experts: their GEMMs, their exchange, unequal loads and layouts."""

import itertools
import math

import pytest

from tests.unit.planner_cases import flavor, layer_times, links_of
from tests.unit.test_planner_command import plan
from titan_like.config import load_config
from titan_like.models.registry import model_config
from titan_like.planner.cost import gemm_time
from titan_like.planner.memory import largest_memory
from titan_like.planner.predict import forecast, predict
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.search import MEMORY_MARGIN, search
from titan_like.planner.search_space import Space
from titan_like.planner.step_time import step_time
from titan_like.planner.trace import trace
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.workload import Workload

QWEN = flavor("moe", "qwen3_30b_a3b")
PROFILE = builtin_profiles()["titan_h100"]
PLAIN = PROFILE.changed(nvlink_latency=0.0, network_latency=0.0)


def work(model=QWEN, **changes):
    batch = {"seq_len": 4096, "micro_batch_size": 1, "global_batch_size": 64}
    return Workload(model, **batch | {"shard": 8, "expert": 8, "zero_stage": 1} | changes)


# ---- the exchange


def test_an_all_to_all_across_nodes_shares_their_cards():
    """Of the bytes of 8 processes in a node, the part for other nodes leaves it."""
    links = links_of(8, 1e12, 4e11, 1.0, 0.0, 0.0)
    assert links.all_to_all(8e9, 32, 1) == pytest.approx(8 * 8e9 * 3 / 4 / 4e11)


def test_all_to_alls_between_nodes_are_no_rings():
    slow, fast = (PLAIN.changed(all_to_all_efficiency=share).links for share in (0.2, 0.4))
    assert slow.all_to_all(8e9, 32, 1) == pytest.approx(2 * fast.all_to_all(8e9, 32, 1))
    assert slow.all_gather(8e9, 32, 1) == fast.all_gather(8e9, 32, 1)


def test_a_wide_band_says_what_to_measure():
    """Bands follow from what a profile has not seen: a hypotenuse of 0.33 and 0.34 is too wide, 0.1 is not."""
    assert "because of several GPUs, experts:" in forecast(work(), PROFILE).to_measure
    known = PROFILE.changed(most_gpus=8, fitted_experts=True, error_p90=0.1)
    assert forecast(work(), known).to_measure == ""


def test_a_layer_exchanges_the_rows_of_its_tokens():
    one = work(tensor=2, sequence_parallel=True, shard=4)
    forward = trace(TraceKey.of(one)).layers[0].forward
    rows = 4096 / 2 * 8 * 2048 * 2  # tokens here, experts of each, hidden size, bytes
    sent = sum(n for key, (_, n) in forward.collectives.items() if (key.kind, key.group) == ("all_to_all", "ep"))
    assert 2 * rows <= sent <= 2.01 * rows  # there and back, and how many rows go to each expert
    busy, equal = (layer_times(one._replace(expert_load=load), PLAIN)[0] for load in (1.5, 1.0))
    exchange = sent * 7 / 8 / PLAIN.links.nvlink * PLAIN.expert_exposed
    assert busy.exposed - equal.exposed == pytest.approx(0.5 * exchange, rel=0.01)


# ---- products


def test_experts_multiply_the_rows_of_their_tokens():
    """8 of 128 experts are here, with the rows of 8 processes: as long as 8 products of a sixteenth of these each."""
    exact = PROFILE.changed(grouped_relative=1.0)
    one = work(expert=16, shard=16)
    gemms = trace(TraceKey.of(one)).layers[0].forward.gemms
    grouped = [gemm for gemm, count in gemms.items() if gemm.grouped for _ in range(count)]
    rows = 4096 * 8 / 8
    assert all(gemm.batch == 8 and gemm.m == rows for gemm in grouped)
    assert sum(gemm.flops for gemm in grouped) == 2 * 3 * 4096 * 8 * 768 * 2048
    half, whole = (layer_times(one, exact.changed(grouped_relative=part))[0].compute for part in (0.5, 1.0))
    assert half - whole == pytest.approx(sum(gemm_time(gemm, "bfloat16", exact) for gemm in grouped))


@pytest.mark.parametrize("load", [1.25, 2.0])
def test_unequal_loads_take_longer_and_more_memory(load):
    equal = work()
    busy = equal._replace(expert_load=load)
    assert step_time(busy, PROFILE).total > step_time(equal, PROFILE).total
    kept = [trace(TraceKey.of(one)).layers[0].kept for one in (busy, equal)]
    row = 2 * (2048 + 4 * 768)  # bytes: the input, the gate and its SiLU, what it gates, and the result
    assert kept[0] - kept[1] == pytest.approx((load - 1) * 4096 * 8 * row, rel=0.01)


# ---- layouts

SMALL = [
    "--model.family=moe", "--model.flavor=debug", "--model.overrides.num_layers=4",
    "--model.overrides.hidden_size=4096", "--model.overrides.num_attention_heads=32",
    "--model.overrides.num_kv_heads=8", "--model.overrides.expert_ffn_hidden_size=8192", "--training.seq_len=2048",
    "--model.overrides.max_seq_len=2048", "--training.global_batch_size=8", "--training.micro_batch_size=1",
    "--training.steps=1", "--training.dtype=bfloat16", "--cluster.gpu=H100-80GB", "--cluster.gpus_per_node=2",
]  # fmt: skip


@pytest.mark.slow
def test_search_finds_the_best_of_all_degrees_of_experts():
    """Every layout of the space, judged by itself, and for each kind the search's choice."""
    config = load_config([*SMALL, "--activation_checkpoint.mode=none"])
    fixed = frozenset({"training.micro_batch_size", "activation_checkpoint.mode"})  # fewer layouts
    found = search(config, 4, fixed=fixed, kinds=1000)
    space, best = Space(config, model_config(config.model), 4, fixed), {}
    degrees = set()
    for group in space.groups():
        for choice, split in itertools.product(space.pipelines(group), space.splits(group)):
            one = space.member(group, *choice, *split)
            assert one.shard * one.context * one.tensor % one.expert == 0
            degrees.add(one.expert)
            if largest_memory(one, found.profile) <= (1 - MEMORY_MARGIN) * found.profile.device.memory_bytes:
                kind = one.tensor, one.pipeline
                best[kind] = min(best.get(kind, math.inf), step_time(one, found.profile).total)
    assert degrees == {1, 2, 4}
    assert {(one.work.tensor, one.work.pipeline) for one in found.ranked} == set(best)
    for one in found.ranked:
        assert one.time.total == pytest.approx(best[one.work.tensor, one.work.pipeline])


# ---- commands


def test_predict_knows_the_busiest_process(monkeypatch):
    settings = [*SMALL, "--cluster.nodes=2", "--parallelism.expert_parallel_degree=2"]
    one = predict(load_config(settings))
    assert one.work.expert == 2
    assert predict(load_config(settings), None, 1.5).time.total > one.time.total
    refused = plan("predict", *settings, "--expert_load", 0.5)
    assert "--expert_load = 0.5: must be at least 1" in refused.stderr
