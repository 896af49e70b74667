import itertools
import json

import pytest

from tests.unit.planner_cases import flavor
from tests.unit.test_planner_command import plan
from titan_like.config import ConfigError, load_config
from titan_like.metrics.devices import find_device
from titan_like.planner.commands.capacity import (
    CHOSEN,
    depth,
    fewest_nodes,
    fits,
    gpt3_style,
    largest_model,
    valid_layouts,
)
from titan_like.planner.memory import largest_memory, memory
from titan_like.planner.predict import default_profile, for_run, predict
from titan_like.planner.search_space import Space
from titan_like.planner.step_time import step_time
from titan_like.train.environment import cluster_size

GPT3 = ("--job.config_file", "train_configs/gpt3_175b.toml")
V100 = ("--cluster.gpu", "V100-32GB", "--cluster.gpus_per_node", "4", "--training.dtype", "float16")
SMALL = ("--model.flavor", "gpt3_13b", "--training.global_batch_size", "48")


def run_of(*words):
    config = load_config(list(map(str, (*GPT3, *words))))
    device = find_device(config.cluster.gpu)
    return config, for_run(default_profile(device), config, device)


@pytest.mark.parametrize("name", ["gpt3_2.7b", "gpt3_6.7b", "gpt3_13b", "gpt3_175b", "530b", "1t"])
def test_shapes_are_those_of_the_papers(name):
    published = flavor("gpt", name)
    assert depth(published.hidden_size) == published.num_layers
    found = gpt3_style(published.hidden_size, 8, published.vocab_size, published.vocab_multiple, 2048)
    assert found.num_parameters() == published.num_parameters()


def test_heads_are_64_to_128_wide_and_can_be_shared():
    for width, tensor in itertools.product(range(768, 26000, 128), (1, 2, 3, 4, 8, 16)):
        model = gpt3_style(width, tensor, 50257, 128, 2048)
        if model is not None:
            assert 64 <= model.head_dim <= 128
            assert model.head_dim % 8 == 0
            assert model.num_attention_heads % tensor == 0
    assert all(gpt3_style(width, 8, 50257, 128, 2048) for width in range(1024, 26000, 512))


@pytest.mark.parametrize("gpus", [4, 32])
def test_with_hardly_any_activations_zero_3_holds_memory_over_16_bytes_a_parameter(gpus):
    """float32 master weights, gradients and two moments: 16 bytes of a parameter, shared by all."""
    words = ("--training.seq_len", 64, "--training.global_batch_size", 1024, "--training.tokens", 10**9)
    config, profile = run_of(*V100, *words)
    profile = profile.changed(overhead_bytes=0.0, fragmentation=0.0)
    found = largest_model(config, profile, flavor("gpt", "debug"), gpus // 4)
    memory = 0.9 * profile.device.memory_bytes
    parameters = found.model.num_parameters()
    assert 16 * parameters / gpus < memory
    # Two layers' weights and gradients in the compute type are whole now and then, and the next width is 128 more.
    two_layers = 2 * 4 * found.model.layer_parameters
    following = gpt3_style(found.model.hidden_size + 128, 1, 257, 128, 64).num_parameters()
    assert 16 * following / gpus + two_layers > 0.97 * memory


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_model_fits_if_any_layout_of_all_does(nodes):
    """Against `predict` for every combination of settings."""
    words = (*V100, *SMALL, "--cluster.nodes", nodes)
    answers = {name: brute_force((*words, "--model.flavor", name)) for name in ("gpt3_6.7b", "gpt3_13b")}
    for name, expected in answers.items():
        config, profile = run_of(*words, "--model.flavor", name)
        assert fits(config, profile, lambda _, name=name: flavor("gpt", name), 4 * nodes) == expected
    # Four GPUs of 32 GiB hold 18 bytes of each of 6.7 billion parameters, but not the activations as well.
    assert answers == {"gpt3_6.7b": nodes > 1, "gpt3_13b": nodes > 1}


def brute_force(words):
    config, _ = run_of(*words)
    gpus, sections = cluster_size(config), config.parallelism
    degrees = [(t, p) for t in (1, 2, 4, 8) for p in range(1, gpus + 1) if gpus % (t * p) == 0]
    for (tensor, pipeline), zero, mode, size in itertools.product(
        degrees, range(4), ("none", "full", "selective"), (1, 2)
    ):
        changes = {"tensor_parallel_degree": tensor, "pipeline_parallel_degree": pipeline, "zero_stage": zero}
        changes |= {"sequence_parallel": tensor > 1, "pipeline_schedule": "1f1b", "virtual_stages_per_rank": 1}
        changes |= {"data_parallel_shard_degree": -1}
        run = config.model_copy(
            update={
                "parallelism": sections.model_copy(update=changes),
                "training": config.training.model_copy(update={"micro_batch_size": size}),
                "activation_checkpoint": config.activation_checkpoint.model_copy(update={"mode": mode}),
            }
        )
        try:
            memory = predict(run).memory
            if memory.largest <= 0.9 * memory.capacity:
                return True
        except ConfigError:
            continue
    return False


def test_layouts_are_valid_and_none_is_missing():
    words = (*V100, *SMALL, "--cluster.nodes", 6, "--activation_checkpoint.mode", "full")
    config, profile = run_of(*words, "--training.micro_batch_size", 1)
    model = flavor("gpt", "gpt3_13b")  # 40 layers, 40 heads
    fixed = frozenset({"activation_checkpoint.mode", "training.micro_batch_size"})
    found = list(valid_layouts(config, lambda _: model, 24, fixed))
    degrees = {(work.tensor, work.pipeline, work.shard) for work in found}
    # Of the divisors of 24, heads and the batch of 48 allow these.
    expected = {(t, p, 24 // t // p) for t in (1, 2, 4, 8) for p in range(1, 25) if 24 % (t * p) == 0}
    assert degrees == expected
    assert len(found) == 4 * len(expected)
    space = Space(config, model, 24)
    for work in found[::7]:
        forecast = predict(space.configured(work))
        assert forecast.work == work._replace(model=forecast.work.model)
        assert largest_memory(work, profile) == pytest.approx(forecast.memory.largest)


def test_what_is_fixed_stays_and_the_largest_model_is_then_smaller():
    words = ("--parallelism.zero_stage", 1, "--training.micro_batch_size", 2, "--activation_checkpoint.mode", "none",
             "--parallelism.tensor_parallel_degree", 2, "--parallelism.pipeline_parallel_degree", 1)  # fmt: skip
    config, profile = run_of(*V100, *SMALL, *words)
    table = flavor("gpt", "gpt3_13b")
    free = largest_model(config, profile, table, 1)
    found = largest_model(config, profile, table, 1, frozenset(CHOSEN))
    work = found.forecast.work
    assert (work.zero_stage, work.micro_batch_size, work.recompute) == (1, 2, "none")
    assert (work.tensor, work.pipeline, work.shard) == (2, 1, 2)
    assert found.model.num_parameters() < 0.8 * free.model.num_parameters()
    wider = gpt3_style(found.model.hidden_size + 128, 2, table.vocab_size, table.vocab_multiple, 2048)
    assert memory(work._replace(model=wider), profile).largest > 0.9 * 32 * 2**30


def test_no_model_fits_where_the_software_takes_all_memory():
    config, profile = run_of(*V100, *SMALL)
    full = profile.changed(overhead_bytes=31e9)
    assert largest_model(config, full, flavor("gpt", "gpt3_13b"), 1) is None
    assert fewest_nodes(config, full, flavor("gpt", "gpt3_13b")) is None


def test_fewest_nodes_are_the_first_that_do():
    config, profile = run_of(*V100, *SMALL)
    model = flavor("gpt", "gpt3_13b")
    found = fewest_nodes(config, profile, model)
    assert found.nodes == 2
    assert found.forecast.memory.fits
    assert not fits(config, profile, lambda _: model, 4)
    assert fewest_nodes(config, profile, model, most=1) is None


def test_the_layout_named_is_the_fastest_that_fits():
    config, profile = run_of(*V100, *SMALL)
    found = largest_model(config, profile, flavor("gpt", "gpt3_13b"), 1)
    width = found.model.hidden_size

    def of_width(width):
        return lambda tensor: gpt3_style(width, tensor, 50257, 128, 2048)

    works = list(valid_layouts(config, of_width(width), 4))
    seconds = [step_time(work, profile).total for work in works if memory(work, profile).largest <= 0.9 * 32 * 2**30]
    assert found.forecast.memory.fits
    assert found.forecast.time.total == min(seconds)
    assert len(seconds) < len(works)
    wider = valid_layouts(config, of_width(width + 128), 4)
    assert not any(memory(work, profile).largest <= 0.9 * 32 * 2**30 for work in wider)


def test_more_nodes_hold_more(tmp_path):
    target = tmp_path / "plan.json"
    done = plan("capacity", *GPT3, *V100, "--cluster.nodes", 4, "--model.flavor", "gpt3_13b", "--json", target)
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())["capacity"]
    one, four = (case["parameters"] for case in found["largest"])
    assert 3 * one < four < 5 * one
    assert found["fewest"]["nodes"] == 2
    assert "billion parameters" in done.stdout
    assert "GiB" in done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--cluster.gpu", "V100-32GB"], "training.dtype"),
        (["--tokens", "0"], "--tokens"),
        (["--tokens", "many"], "--tokens"),
        (["--training.seq_len", "4096"], "max_seq_len is 2048"),
        (["--parallelism.pipeline_schedule", "gpipe"], "cannot be fixed here"),
        (["--parallelism.context_parallel_degree", "2"], "context_parallel_degree"),
        (["--training.global_batch_size", "1", "--training.batch_size_rampup", "[2, 2, 100]"], "batch_size_rampup"),
    ],
)
def test_bad_input_is_one_sentence(words, named):
    done = plan("capacity", *GPT3, *words)
    assert done.returncode == 2, done.stdout
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_a_run_without_nodes_is_refused():
    done = plan("capacity", "--job.config_file", "train_configs/debug_gpt.toml")
    assert done.returncode == 2
    assert "cluster.gpu" in done.stderr
