"""Which method lets processes share a sequence: the rule of `auto`, and the planner's times that it must agree with."""

import pytest

from tests.unit.planner_cases import flavor, layer_times
from titan_like.config import load_config
from titan_like.metrics.devices import find_device
from titan_like.models.registry import flavors, model_config
from titan_like.parallel.layout import Layout, best_method, method_of
from titan_like.parallel.whole_sequences import needs_whole_sequences
from titan_like.planner.memory import memory
from titan_like.planner.profile import builtin_profiles
from titan_like.planner.search_space import Space
from titan_like.planner.stack import default_profile
from titan_like.planner.step_time import step_time
from titan_like.planner.trace import trace
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.workload import Workload
from titan_like.verify.shrink import Options, shrink

METHODS = ("all_gather", "ulysses", "ring")
LLAMA = flavor("llama", "llama3.1_8b", max_seq_len=2**20)  # 32 query heads, 8 key-value heads


@pytest.mark.parametrize(
    ("model", "size", "tensor", "may_be_ring", "expected"),
    [
        (LLAMA, 2, 1, True, "all_gather"),
        (LLAMA, 4, 1, True, "all_gather"),  # ulysses sends (32 + 8) / (4 · 8) = 1.25 times as much
        (LLAMA, 8, 1, True, "ulysses"),  # 0.625 times
        (LLAMA, 8, 2, True, "all_gather"),  # 4 key-value heads on a process
        (LLAMA, 16, 1, True, "all_gather"),  # gathered: 16 · 2048 of 4 · (4096 + 4096 + 14336) elements, 36 %
        (LLAMA, 32, 1, True, "ring"),  # 73 %
        (LLAMA, 32, 1, False, "all_gather"),
        (flavor("llama", "llama3.1_405b"), 16, 8, True, "all_gather"),  # as arXiv 2407.21783 does
        (flavor("gpt", "gpt3_175b"), 4, 8, True, "ulysses"),
        (flavor("gpt", "gpt3_175b"), 2, 8, True, "all_gather"),  # equally much
        (flavor("t5", "debug"), 4, 1, True, "all_gather"),
    ],
)
def test_auto_takes_what_sends_least_and_fits(model, size, tensor, may_be_ring, expected):
    assert best_method(model, size, tensor, may_be_ring).name == expected


def run(*settings):
    base = ["--model.family=llama", "--model.flavor=llama3.1_8b", "--training.steps=1", "--training.dtype=bfloat16"]
    return load_config([*base, "--training.seq_len=131072", *settings])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], "ring"),
        (["--training.dtype=float32"], "all_gather"),
        (["--data.reset_attention_mask=true"], "all_gather"),
        (["--data.prefix_lm=true"], "all_gather"),
        (["--parallelism.context_parallel_method=all_gather"], "all_gather"),
    ],
)
def test_a_ring_is_chosen_only_where_it_has_fast_kernels(settings, expected):
    config = run("--parallelism.context_parallel_degree=32", *settings)
    assert method_of(config, model_config(config.model)).name == expected


def test_a_verified_run_keeps_the_method_of_the_original():
    config = run("--parallelism.context_parallel_degree=8")
    small = shrink(config, Layout(1, 1, 1, 8, 1), Options(3)).config
    degrees = Layout.of(small.parallelism)
    assert small.parallelism.context_parallel_method == "ulysses"
    assert 1 < degrees.context < 8
    assert model_config(small.model).num_kv_heads % (degrees.context * degrees.tensor) == 0


# Model, tokens, tensor and context degrees.
LAYOUTS = [
    (LLAMA, 131072, 1, 4),
    (LLAMA, 131072, 2, 4),
    (LLAMA, 1048576, 1, 16),
    (flavor("gpt", "gpt3_175b", max_seq_len=2**20), 131072, 8, 4),
    (flavor("gpt", "gpt3_175b", max_seq_len=2**20), 131072, 1, 16),  # over two nodes
    *(
        pytest.param(*layout, marks=pytest.mark.exhaustive)
        for layout in [
            (LLAMA, 131072, 1, 8),
            (LLAMA, 1048576, 1, 32),
            (flavor("llama", "llama3.1_405b"), 131072, 8, 16),
            (flavor("gpt", "gpt3_13b", max_seq_len=2**20), 131072, 1, 8),
            (flavor("gpt", "gpt3_175b", max_seq_len=2**20), 131072, 1, 32),
        ]
    ),
]


def of_method(model, seq_len, tensor, size, method):
    """64 sequences in a step, which as many groups of processes share."""
    work = Workload(model, seq_len, 1, 64, tensor, context=size, context_method=method, shard=64, zero_stage=3)
    return work._replace(sequence_parallel=tensor > 1)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "seq_len", "tensor", "size"), LAYOUTS)
def test_auto_is_nearly_the_fastest_and_needs_little_memory(model, seq_len, tensor, size):
    profile = default_profile(find_device("H100"))
    allowed = [m for m in METHODS if m != "ulysses" or model.num_kv_heads // tensor % size == 0]
    works = {m: of_method(model, seq_len, tensor, size, m) for m in allowed}
    seconds = {method: step_time(work, profile).total for method, work in works.items()}
    held = {method: memory(work, profile).ranks[0].activations for method, work in works.items()}
    chosen = best_method(model, size, tensor, True).name
    assert seconds[chosen] <= 1.05 * min(seconds.values())
    assert held[chosen] <= 2.5 * min(held.values())


def test_a_ring_hides_its_messages_behind_attention():
    """Against sums by hand: Llama 3.1 8B, 4 processes of a node, 131,072 tokens in bfloat16."""
    quiet = builtin_profiles()["titan_h100"].changed(nvlink_latency=0.0, tensor_exposed=1.0)
    work = Workload(LLAMA, 131072, 1, 16, context=4, context_method="ring")
    block = 2 * 32768 * 8 * 128 * 2  # bytes of keys and values
    sent = trace(TraceKey.of(work)).layers[0].forward.collectives
    assert sum(size for key, (_, size) in sent.items() if key.kind == "send") == 3 * block
    assert layer_times(work, quiet)[0].exposed == 0
    slow = layer_times(work, quiet.changed(nvlink_efficiency=quiet.nvlink_efficiency / 1e4))[0]
    rate = 450e9 * quiet.nvlink_efficiency / 1e4
    attention = 2 * 131072**2 * 4096 / 4 / (989.4e12 * quiet.attention_efficiency)
    assert slow.exposed == pytest.approx(3 * block / rate - attention)


LONG = ["--cluster.gpu=H100", "--cluster.gpus_per_node=8", "--training.global_batch_size=4"]


@pytest.mark.parametrize(
    ("seq_len", "own", "expected"),
    [(4096, 1, {1}), (4096, 2, {1, 2}), (16384, 1, {1, 2, 4}), (12288, 1, {1, 2, 3}), (12290, 1, {1})],
)
def test_short_sequences_stay_whole(seq_len, own, expected):
    config = run(*LONG, f"--training.seq_len={seq_len}", f"--parallelism.context_parallel_degree={own}")
    groups = Space(config, model_config(config.model), 24).groups()
    assert {group.context for group in groups} == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "decoder", "gpt", "llama", "moe", "t5"])
def test_no_shipped_model_needs_whole_sequences_outside_of_attention(family):
    for name in flavors(family):
        shape = flavor(family, name)
        few = shape.model_copy(update=shape.with_layers(len(shape.layer_counts) + 1))
        is_linear = any(
            kind.mixer in ("gated_delta_net", "kimi_delta", "mamba2") for kind in getattr(shape, "kinds", {}).values()
        )
        assert needs_whole_sequences(few, in_blocks=True) is None, name
        assert (needs_whole_sequences(few, in_blocks=False) is not None) is is_linear, name
