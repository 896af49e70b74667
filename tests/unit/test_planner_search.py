"""The search against trying everything, the trainer's rules, and what PTD-P found."""

import itertools
import random
import re
from dataclasses import replace

import pytest

from benchmarks.stack_profiles import profiles
from titan_like.config import ConfigError, load_config
from titan_like.config.schema import Model
from titan_like.models.registry import model_config
from titan_like.models.shape import shape_of
from titan_like.parallel.layout import resolve_layout
from titan_like.planner.auto import differences, why_slower
from titan_like.planner.bounds import least_step_seconds
from titan_like.planner.memory import largest_memory
from titan_like.planner.predict import predict
from titan_like.planner.search import MEMORY_MARGIN, search
from titan_like.planner.search_space import SEARCHED, Space, divisors, layout_of
from titan_like.planner.step_time import step_time
from titan_like.planner.workload import workload_of
from titan_like.train.rules import check_rules

NONE_FIT_WHOLE = [
    "--model.flavor=7.5b", "--model.overrides.num_layers=4", "--model.overrides.hidden_size=8192",
    "--model.overrides.num_attention_heads=64", "--training.seq_len=2048", "--training.global_batch_size=8",
    "--training.micro_batch_size=1", "--training.steps=1", "--training.dtype=float16", "--cluster.gpu=V100-32GB",
    "--cluster.gpus_per_node=2",
]  # fmt: skip


def run(*settings):
    return load_config(["--training.steps=1", *settings])


def fits(work, profile):
    return largest_memory(work, profile) <= (1 - MEMORY_MARGIN) * profile.device.memory_bytes


def setting(config, key):
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def everything(settings, gpus):
    """Every combination of settings that the rules accept, one of those that mean the same: its settings' values."""
    schedules = [("1f1b", 1), ("gpipe", 1), ("zbv_zero_bubble", 2), ("dualpipe_v", 2)]
    loops = ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"]
    schedules += [(name, 2) for name in loops]  # of four layers
    recompute = [("none", 1), ("selective", 1), *(("full", n) for n in (1, 2, 3, 4))]
    for tensor, pipeline in itertools.product((1, 2, 4), (1, 2, 4)):
        data, rest = divmod(gpus, tensor * pipeline)
        if rest:
            continue
        splits = [(0, 1), (1, 1), (2, 1), *((3, r) for r in divisors(data))]
        of_pipeline = schedules if pipeline > 1 else schedules[:1]
        for (schedule, virtual), sequence, (zero, replicas), (mode, every) in itertools.product(
            of_pipeline, (False, True) if tensor > 1 else (False,), splits, recompute
        ):
            layout = tensor, sequence, pipeline, schedule, virtual, replicas, data // replicas, zero, 1, mode, every
            values = zip(SEARCHED, (*layout, 1, 1), strict=True)  # the last are the degrees of context and experts
            config = load_config([*settings, *(f"--{key}={str(value).lower()}" for key, value in values)])
            try:
                check_rules(config, model_config(config.model), resolve_layout(config.parallelism, gpus))
            except ConfigError:
                continue
            yield config


@pytest.mark.slow
def test_search_finds_what_trying_everything_finds():
    found = search(run(*NONE_FIT_WHOLE), 4, fixed=frozenset({"training.micro_batch_size"}), kinds=1000)
    valid, best = 0, {}
    for config in everything(NONE_FIT_WHOLE, 4):
        valid += 1
        expected = predict(config, None)
        if expected.memory.largest > (1 - MEMORY_MARGIN) * 32 * 2**30:
            continue
        kind = expected.work.tensor, expected.work.pipeline
        best[kind] = min(best.get(kind, float("inf")), expected.time.total)
    assert valid > found.counts.valid > 250  # layouts that others beat in any case are not searched
    assert len(best) > 3
    ranked = {(one.work.tensor, one.work.pipeline): one.time.total for one in found.ranked}
    assert ranked == pytest.approx(best, rel=1e-12)
    assert list(ranked.values()) == sorted(ranked.values())
    for one in found.too_large:
        assert one.memory_bytes > found.usable_bytes
        assert one.time.total < found.fastest.time.total


ONE_GPU_NODES = [
    "--model.flavor=1.7b", "--model.overrides.num_layers=4", "--training.seq_len=512", "--training.micro_batch_size=1",
    "--training.global_batch_size=256", "--training.dtype=bfloat16", "--cluster.gpu=A100", "--cluster.gpus_per_node=1",
]  # fmt: skip
OTHER_KERNELS = [  # in larger microbatches
    "--model.family=bert", "--model.flavor=debug", "--model.overrides.num_layers=4", "--training.seq_len=128",
    "--training.global_batch_size=8", "--training.dtype=float32", "--cluster.gpu=H100-PCIe",
    "--cluster.gpus_per_node=2", "--activation_checkpoint.mode=full", "--parallelism.zero_stage=2",
    "--cluster.node_bandwidth=5",
]  # fmt: skip
STAGES_IN_TURN = [  # whose gradients are reduced before others' exist
    "--model.family=moe", "--model.flavor=mixtral_8x7b", "--model.overrides.num_layers=6", "--training.seq_len=1024",
    "--training.global_batch_size=6", "--training.micro_batch_size=1", "--training.dtype=bfloat16", "--cluster.gpu=A40",
    "--cluster.gpus_per_node=2", "--activation_checkpoint.mode=full",
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "gpus", "fixed"),
    [
        (ONE_GPU_NODES, 4, {"training.micro_batch_size"}),
        (OTHER_KERNELS, 4, {"activation_checkpoint.mode", "parallelism.zero_stage"}),
        (STAGES_IN_TURN, 6, {"training.micro_batch_size", "activation_checkpoint.mode"}),
    ],
)
def test_no_bound_hides_the_best_of_any_kind(settings, gpus, fixed):
    found = search(run(*settings), gpus, fixed=frozenset(fixed), kinds=1000)
    space, best = found.space, {}
    for group in space.groups():
        for choice, split in itertools.product(space.pipelines(group), space.splits(group)):
            work = space.member(group, *choice, *split)
            if fits(work, found.profile):
                kind = work.tensor, work.pipeline
                best[kind] = min(best.get(kind, float("inf")), step_time(work, found.profile).total)
    assert {(one.work.tensor, one.work.pipeline): one.time.total for one in found.ranked} == pytest.approx(best)


SLOW_LINKS = ["--model.flavor=gpt2_124m", "--model.overrides.num_layers=6", "--cluster.gpu=H100",
              "--training.global_batch_size=8", "--cluster.gpus_per_node=4", "--cluster.node_bandwidth=1",
              "--training.micro_batch_size=1", "--activation_checkpoint.mode=none"]  # fmt: skip
PLAIN = frozenset({"training.micro_batch_size", "activation_checkpoint.mode"})  # fewer layouts


@pytest.mark.slow
def test_slow_links_do_not_hide_the_best_layout():
    """Where bounds are furthest from what the passes take."""
    found = search(run(*SLOW_LINKS, "--training.dtype=float32"), 6, fixed=PLAIN, kinds=3)
    space, profile, best = found.space, found.profile, float("inf")
    for group in space.groups():
        for choice, split in itertools.product(space.pipelines(group), space.splits(group)):
            work = space.member(group, *choice, *split)
            if least_step_seconds(work, profile) <= found.fastest.time.total and fits(work, profile):
                best = min(best, step_time(work, profile).total)
    assert found.fastest.time.total == pytest.approx(best, rel=1e-9)
    assert all(fits(one.work, profile) for one in found.ranked)


CASES = [
    ("gpt", "gpt3_175b", 768, 1536, ["--model.overrides.dropout=0.1", "--compile.enable=true"]),
    ("llama", "llama3.1_8b", 64, 256, ["--training.batch_size_rampup=[64,64,6400]"]),
    ("llama", "llama3.1_8b", 64, 16, ["--training.seq_len=65536"]),  # which processes may share
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "flavor", "gpus", "batch", "more"), CASES)
def test_every_layout_is_valid(family, flavor, gpus, batch, more):
    settings = [f"--model.family={family}", f"--model.flavor={flavor}", f"--training.global_batch_size={batch}"]
    config = run(*settings, "--training.seq_len=2048", "--training.dtype=bfloat16", "--cluster.gpu=H100", *more)
    model, generator = model_config(config.model), random.Random(7)
    space = Space(config, model, gpus)
    groups = list(space.groups())
    assert len(groups) > 100
    for group in generator.sample(groups, 25):
        schedule, virtual = generator.choice(space.pipelines(group))
        for split in space.splits(group):
            work = space.member(group, schedule, virtual, *split)
            layout = space.configured(work)
            check_rules(layout, model, resolve_layout(layout.parallelism, gpus))
            assert resolve_layout(layout.parallelism, gpus) == layout_of(work)
            # What `predict` makes of the settings; of two ways to say the same either will do.
            again = workload_of(layout, model, layout_of(work))
            assert again._replace(virtual_stages=virtual, recompute_every=work.recompute_every) == work


@pytest.mark.slow
def test_fixed_settings_stay():
    fixed = {"parallelism.tensor_parallel_degree": 4, "parallelism.zero_stage": 2, "training.micro_batch_size": 2}
    fixed |= {"activation_checkpoint.mode": "full", "parallelism.pipeline_schedule": "gpipe"}
    config = run(*(f"--{key}={value}" for key, value in fixed.items()), "--model.flavor=7.5b", "--cluster.gpu=A100",
                 "--training.global_batch_size=64", "--training.dtype=bfloat16")  # fmt: skip
    found = search(config, 32, fixed=frozenset(fixed), kinds=20)
    assert len(found.ranked) > 2
    for one in found.ranked:
        settings = found.space.settings(one.work)
        assert {key: settings[key] for key in fixed} == fixed
        assert {key: setting(found.space.configured(one.work), key) for key in fixed} == fixed


@pytest.mark.parametrize(
    ("fixed", "problem"),
    [
        ({"pipeline_parallel_degree": 5}, "pipeline_parallel_degree = 5: does not divide the 64 GPUs"),
        ({"tensor_parallel_degree": 64, "pipeline_parallel_degree": 2}, "2 × tensor_parallel_degree 64 = 128 does not"),
        ({"tensor_parallel_degree": 4, "pipeline_parallel_degree": 4, "data_parallel_shard_degree": 2,
          "data_parallel_replicate_degree": 1}, "= 32 does not equal the 64 GPUs"),
        ({"tensor_parallel_degree": 64}, "= 64: does not divide the model's num_attention_heads"),
        ({"pipeline_layers": [10, 10]}, "sum to the 36 layers"),
        ({"pipeline_layers": [12, 12, 12]}, "divides the 64 GPUs can share 3 stages evenly"),
        ({"pipeline_schedule": "1f1b", "virtual_stages_per_rank": 3}, "virtual_stages_per_rank = 3: needs"),
        ({"data_parallel_shard_degree": 0}, "data_parallel_shard_degree = 0: must be at least 1"),
    ],
)  # fmt: skip
def test_fixed_settings_that_leave_no_layout_are_named(fixed, problem):
    keys = {f"parallelism.{key}": value for key, value in fixed.items()}
    config = run(*(f"--{key}={value}" for key, value in keys.items()), "--model.flavor=7.5b", "--cluster.gpu=A100",
                 "--training.global_batch_size=64", "--training.dtype=bfloat16")  # fmt: skip
    with pytest.raises(ConfigError, match=re.escape(problem)):
        search(config, 64, fixed=frozenset(keys))


def test_of_layouts_that_predictions_cannot_tell_apart_the_simplest_is_best():
    found = search(run(*SLOW_LINKS, "--training.dtype=float32"), 6, fixed=PLAIN, kinds=20)
    sure = replace(found, profile=found.profile.changed(error_median=0.0))
    assert sure.best is sure.fastest is found.ranked[0]
    unsure = replace(found, profile=found.profile.changed(error_median=1e9))

    def splits(one):
        return sum(degree > 1 for degree in (one.work.tensor, one.work.pipeline, one.work.virtual_stages))

    assert splits(unsure.best) == min(map(splits, found.ranked))


# The configurations of arXiv 2104.04473's Table 1 hold the paper's own layouts.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "gpus"), [("1.7b", 32), pytest.param("7.5b", 128, marks=pytest.mark.exhaustive)])
def test_best_layout_is_no_slower_than_the_paper_s(name, gpus):
    config = load_config(["--job.config_file", f"train_configs/gpt_{name}.toml", "--cluster.gpu=A100",
                          "--cluster.gpus_per_node=8", f"--cluster.nodes={gpus // 8}"])  # fmt: skip
    profile = profiles()["selene_2021"]
    papers = predict(config, profile)
    found = search(config, profile=profile, kinds=1)
    assert found.fastest.time.total <= papers.time.total
    assert found.best.memory_bytes <= (1 - MEMORY_MARGIN) * 80 * 2**30
    again = predict(found.config, profile)
    assert (again.time, again.memory.largest) == (found.best.time, found.best.memory_bytes)


@pytest.mark.slow
def test_tensor_parallelism_over_a_node_is_best_as_in_figure_13():
    """162.2B parameters on 64 GPUs, tensor × pipeline = 64 (arXiv 2104.04473, section 5.4.1)."""
    shape = {"num_layers": 32, "hidden_size": 20480, "num_attention_heads": 128}
    fixed = {
        "parallelism.data_parallel_shard_degree": 1, "parallelism.data_parallel_replicate_degree": 1,
        "parallelism.zero_stage": 0, "parallelism.pipeline_schedule": "1f1b", "parallelism.sequence_parallel": "false",
        "training.micro_batch_size": 1, "activation_checkpoint.mode": "full", "activation_checkpoint.every_n_layers": 1,
    }  # fmt: skip
    config = run("--model.flavor=145b", *(f"--model.overrides.{key}={value}" for key, value in shape.items()),
                 *(f"--{key}={value}" for key, value in fixed.items()), "--training.global_batch_size=128",
                 "--training.seq_len=2048", "--training.dtype=bfloat16", "--cluster.gpu=A100")  # fmt: skip
    found = search(config, 64, profiles()["selene_2021"], frozenset(fixed))
    times = {(one.work.tensor, one.work.pipeline): one.time.total for one in found.ranked}
    assert next(iter(times)) == (8, 8)
    assert set(times) == {(2, 32), (4, 16), (8, 8), (16, 4), (32, 2), (64, 1)}
    across = next(one for one in found.ranked if one.work.tensor == 16)
    assert "traffic within layers" in why_slower(found.fastest, across, found.profile)
    assert "over 2 nodes" in why_slower(found.fastest, across, found.profile)
    deep = next(one for one in found.ranked if one.work.pipeline == 32)
    assert "bubble" in why_slower(found.fastest, deep, found.profile)
    gap = differences(found.fastest, deep)
    assert sum(gap.values()) == pytest.approx(deep.time.total - found.fastest.time.total)


@pytest.mark.parametrize(
    ("family", "flavor"), [("gpt", "gpt3_175b"), ("gpt", "debug"), ("llama", "llama3.1_8b"), ("moe", "mixtral_8x7b"),
                           ("moe", "deepseek_moe_16b"), ("t5", "debug"), ("bert", "debug")],
)  # fmt: skip
def test_a_shape_has_the_parameters_asked_for_and_its_flavor_s_proportions(family, flavor):
    style = model_config(Model(family=family, flavor=flavor))
    for parameters in (3e10, 1e12):
        model = model_config(shape_of(Model(family=family, flavor=flavor), parameters, 2048))
        assert model.num_parameters() == pytest.approx(parameters, rel=0.03)
        assert model.head_dim in (64, 128) and model.num_attention_heads % 8 == 0 and model.max_seq_len >= 2048
        ratio = style.ffn_hidden_size / style.hidden_size
        assert model.ffn_hidden_size / model.hidden_size == pytest.approx(ratio, rel=0.05)
        assert (model.vocab_size, type(model)) == (style.vocab_size, type(style))
        grouped = [one.num_kv_heads < one.num_attention_heads for one in (model, style)]
        assert grouped[0] == grouped[1]


def test_a_budget_of_the_file_is_not_part_of_the_modes_that_are_searched():
    budget = ["--activation_checkpoint.mode=budget", "--activation_checkpoint.budget=0.5", "--compile.enable=true"]
    config = load_config(["--job.config_file=debug_gpt", *budget, "--model.overrides.dropout=0"])
    space = Space(config, model_config(config.model), 2)
    assert {work.recompute for work in space.groups()} == {"none", "selective", "full"}
    with pytest.raises(ConfigError, match="does not predict"):
        Space(config, model_config(config.model), 2, frozenset({"activation_checkpoint.mode"}))
