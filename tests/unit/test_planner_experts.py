"""What the planner says of experts: their products, exchange, memory, layouts, and a dry run of published shapes."""

import itertools
import math

import pytest

from tests.unit.planner_cases import flavor, layer_times, links_of
from tests.unit.test_planner_command import plan
from titan_like.config import load_config
from titan_like.models.registry import model_config
from titan_like.parallel.layout import Layout
from titan_like.planner.cost import gemm_time
from titan_like.planner.memory import largest_memory, memory
from titan_like.planner.predict import predict
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.search import MEMORY_MARGIN, search
from titan_like.planner.search_space import Space
from titan_like.planner.step_time import step_time
from titan_like.planner.trace import trace
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.workload import Workload, workload_of

QWEN, MIXTRAL = flavor("moe", "qwen3_30b_a3b"), flavor("moe", "mixtral_8x7b")
DEEPSEEK = flavor(
    "moe", "deepseek_moe_16b", num_layers=61, num_dense_layers=3, hidden_size=7168, ffn_hidden_size=18432,
    num_experts=256, experts_per_token=8, num_shared_experts=1, expert_ffn_hidden_size=2048, num_attention_heads=128,
    num_kv_heads=128, head_size=128, vocab_size=129280,
)  # fmt: skip
PROFILE = builtin_profiles()["titan_h100"]
PLAIN = PROFILE.changed(nvlink_latency=0.0, network_latency=0.0)


def work(model=QWEN, **changes):
    batch = {"seq_len": 4096, "micro_batch_size": 1, "global_batch_size": 64}
    return Workload(model, **batch | {"shard": 8, "expert": 8, "zero_stage": 1} | changes)


# ---- the exchange


def test_an_all_to_all_inside_a_node_moves_what_leaves_a_process():
    links = links_of(8, 1e11, 4e11, 1.0, 0.0, 0.0)
    assert links.all_to_all(8e9, 8, 1) == pytest.approx(8e9 * 7 / 8 / 1e11)
    assert links.all_to_all(8e9, 4, 1) == pytest.approx(8e9 * 3 / 4 / 1e11)


def test_an_all_to_all_across_nodes_shares_their_cards():
    """Of the bytes of 8 processes in a node, the part for other nodes leaves it."""
    links = links_of(8, 1e12, 4e11, 1.0, 0.0, 0.0)
    assert links.all_to_all(8e9, 32, 1) == pytest.approx(8 * 8e9 * 3 / 4 / 4e11)


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


def test_a_step_computes_what_a_token_uses():
    """At equal rates, a layer of Mixtral takes about as long as a dense one with an MLP of two experts."""
    dense = flavor(
        "llama", "llama3.1_8b", num_layers=32, hidden_size=4096, num_attention_heads=32, num_kv_heads=8,
        ffn_hidden_size=2 * 14336, vocab_size=32000,
    )  # fmt: skip
    exact = PROFILE.changed(grouped_relative=1.0)
    one = work(MIXTRAL, expert=1, micro_batch_size=4)
    theirs, ours = (layer_times(one._replace(model=of), exact)[0].compute for of in (dense, MIXTRAL))
    assert 1 < ours / theirs < 1.2  # copies of rows and the router


@pytest.mark.parametrize("load", [1.25, 2.0])
def test_unequal_loads_take_longer_and_more_memory(load):
    equal = work()
    busy = equal._replace(expert_load=load)
    assert step_time(busy, PROFILE).total > step_time(equal, PROFILE).total
    kept = [trace(TraceKey.of(one)).layers[0].kept for one in (busy, equal)]
    row = 2 * (2048 + 4 * 768)  # bytes: the input, the gate and its SiLU, what it gates, and the result
    assert kept[0] - kept[1] == pytest.approx((load - 1) * 4096 * 8 * row, rel=0.01)


# ---- weights

EXPERTS = 32 * 8 * 3 * 4096 * 14336


@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (1, 4), (2, 4), (2, 8)])
def test_tensor_parallelism_splits_all_but_experts(tensor, expert):
    one = work(MIXTRAL, tensor=tensor, expert=expert, shard=8 // tensor, sequence_parallel=tensor > 1, zero_stage=0)
    (rank,) = memory(one, PROFILE).ranks
    others = MIXTRAL.num_parameters() - EXPERTS
    norms = 4096 * (2 * 32 + 1 + 8 * 32) * (1 - 1 / tensor)  # norms and routers, which tensor ranks all have
    # Four bytes a parameter, and twice as many of moments.
    assert rank.parameters == pytest.approx(4 * (EXPERTS / expert + others / tensor + norms), rel=1e-6)
    assert rank.optimizer == 2 * rank.parameters


@pytest.mark.parametrize("zero", [1, 3])
def test_zero_shards_experts_over_the_processes_with_the_same(zero):
    """With one process for each expert, ZeRO splits the rest alone."""
    total = MIXTRAL.num_parameters()
    (rank,) = memory(work(MIXTRAL, zero_stage=zero), PROFILE).ranks
    assert rank.parameters == pytest.approx(4 * total / 8, rel=1e-5)
    (rank,) = memory(work(MIXTRAL, zero_stage=zero, shard=4, replicate=2, expert=2), PROFILE).ranks
    assert rank.parameters == pytest.approx(4 * total / 4, rel=1e-5)


# ---- layouts

SMALL = [
    "--model.family=moe", "--model.flavor=debug", "--model.overrides.num_layers=4",
    "--model.overrides.hidden_size=4096", "--model.overrides.num_attention_heads=32",
    "--model.overrides.num_kv_heads=8", "--model.overrides.expert_ffn_hidden_size=8192", "--training.seq_len=2048",
    "--model.overrides.max_seq_len=2048", "--training.global_batch_size=8", "--training.micro_batch_size=1",
    "--training.steps=1", "--training.dtype=bfloat16", "--cluster.gpu=H100-80GB", "--cluster.gpus_per_node=2",
]  # fmt: skip


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


def test_a_fixed_degree_of_experts_stays():
    keys = {"expert_parallel_degree": 4, "pipeline_parallel_degree": 1, "zero_stage": 1}
    config = load_config([*SMALL, *(f"--parallelism.{key}={value}" for key, value in keys.items())])
    fixed = {"training.micro_batch_size", *(f"parallelism.{key}" for key in keys)}
    found = search(config, 8, fixed=frozenset(fixed), kinds=2)
    assert {one.work.expert for one in found.ranked} == {4}
    assert found.config.parallelism.expert_parallel_degree == 4


def test_dense_models_have_no_choice_of_experts():
    config = load_config(["--model.flavor=gpt2_124m", "--training.steps=1", "--cluster.gpu=H100"])
    space = Space(config, model_config(config.model), 8)
    assert {(group.expert, group.recompute) for group in space.groups()} == {
        (1, "none"),
        (1, "selective"),
        (1, "full"),
    }


# ---- commands


def test_predict_knows_the_busiest_process(monkeypatch):
    settings = [*SMALL, "--cluster.nodes=2", "--parallelism.expert_parallel_degree=2"]
    one = predict(load_config(settings))
    assert one.work.expert == 2
    assert predict(load_config(settings), None, 1.5).time.total > one.time.total
    refused = plan("predict", *settings, "--expert_load", 0.5)
    assert "--expert_load = 0.5: must be at least 1" in refused.stderr


def test_deepseek_v3_s_shape_is_planned_with_ordinary_attention():
    """671 billion parameters without their latent attention, whose matrices are smaller."""
    attention = 61 * (4 * 7168 * 128 * 128 - 187_000_000)
    assert (DEEPSEEK.num_parameters() - attention) / 1e9 == pytest.approx(671, abs=1)
    assert (DEEPSEEK.active_parameters - attention) / 1e9 == pytest.approx(37.5, abs=1)
    config = load_config(
        [
            "--model.family=moe", "--model.flavor=debug", "--training.steps=1", "--training.seq_len=1024",
            "--parallelism.zero_stage=1", "--parallelism.pipeline_parallel_degree=16",
            "--parallelism.expert_parallel_degree=64", "--training.global_batch_size=2048",
        ]
    )  # fmt: skip
    layout = Layout(pipeline=16, replicate=1, shard=128, context=1, tensor=1, expert=64)
    one = workload_of(config, DEEPSEEK, layout)._replace(seq_len=4096, stage_layers=None)
    assert step_time(one, PROFILE).total > 0
