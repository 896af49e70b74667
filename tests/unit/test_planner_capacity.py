"""The largest model and the fewest nodes, against every layout tried by itself."""

import itertools
import json

import pytest

from tests.unit.test_planner_command import plan
from titan_like.config import ConfigError, load_config
from titan_like.models.registry import model_config
from titan_like.planner.commands.capacity import fewest_nodes, fits, largest_model
from titan_like.planner.predict import predict
from titan_like.planner.search import MEMORY_MARGIN
from titan_like.train.environment import cluster_size

RUN = ["--training.steps=10", "--training.seq_len=1024", "--training.global_batch_size=48", "--training.dtype=float16",
       "--cluster.gpu=V100-32GB", "--cluster.gpus_per_node=2", "--model.overrides.max_seq_len=1024"]  # fmt: skip
TWO = ("--parallelism.tensor_parallel_degree", "--parallelism.pipeline_parallel_degree")
PLAIN = frozenset(
    key.removeprefix("--") for key in TWO
)  # no tensor or pipeline parallelism, so that few layouts remain


def run(flavor, *words):
    return load_config([*RUN, f"--model.flavor={flavor}", *words])


def quiet(_):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(("flavor", "nodes", "expected"), [("gpt3_2.7b", 1, True), ("gpt3_6.7b", 1, False)])
def test_a_model_fits_if_any_layout_of_all_does(flavor, nodes, expected):
    """Against `predict` for every combination of settings."""
    words = [f"--cluster.nodes={nodes}"]
    assert fits(run(flavor, *words), None, 2 * nodes, frozenset()) == expected == brute_force(flavor, words)


def brute_force(flavor, words):
    gpus = cluster_size(run(flavor, *words))
    degrees = [(t, p) for t in (1, 2) for p in (1, 2) if gpus % (t * p) == 0]
    for (tensor, pipeline), zero, mode in itertools.product(degrees, (0, 1, 2, 3), ("none", "full")):
        settings = {TWO[0]: tensor, TWO[1]: pipeline, "--parallelism.zero_stage": zero}
        settings |= {"--activation_checkpoint.mode": mode, "--training.micro_batch_size": 1}
        settings |= {"--parallelism.sequence_parallel": str(tensor > 1).lower()}
        try:
            memory = predict(run(flavor, *words, *(f"{key}={value}" for key, value in settings.items()))).memory
        except ConfigError:
            continue
        if memory.largest <= (1 - MEMORY_MARGIN) * memory.capacity:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("flavor", ["gpt3_2.7b", "megatron_1.2b"])
def test_the_largest_model_fits_and_a_larger_one_does_not(flavor):
    """Float32 master weights, gradients and two moments take 16 bytes of a parameter, shared by all."""
    config = run(flavor)
    found = largest_model(config, None, 1, PLAIN, quiet)
    usable = (1 - MEMORY_MARGIN) * 32 * 2**30
    assert found.memory.largest <= usable
    assert 0.6 * usable < 16 * found.work.model.num_parameters() / 2 < usable
    assert 64 <= found.work.model.head_dim <= 128
    work = found.work
    assert (work.tensor, work.pipeline, work.shard) == (1, 1, 2)
    names = ("hidden_size", "num_attention_heads", "num_layers")
    wider = {name: getattr(found.work.model, name) for name in names}
    wider["num_layers"] = round(1.1 * wider["num_layers"]) + 1
    larger = run(flavor, *(f"--model.overrides.{name}={value}" for name, value in wider.items()))
    assert not fits(larger, None, 2, PLAIN)


def test_what_is_fixed_stays_and_the_largest_model_is_then_smaller():
    words = ["--parallelism.zero_stage=1", "--training.micro_batch_size=2", "--activation_checkpoint.mode=none"]
    fixed = PLAIN | {word.partition("=")[0].removeprefix("--") for word in words}
    free, found = (
        largest_model(run("gpt3_2.7b", *more), None, 1, keys, quiet) for more, keys in (([], PLAIN), (words, fixed))
    )
    work = found.work
    assert (work.zero_stage, work.micro_batch_size, work.recompute) == (1, 2, "none")
    assert found.work.model.num_parameters() < 0.8 * free.work.model.num_parameters()


def test_fewest_nodes_are_the_first_that_do():
    config = run("gpt3_6.7b")
    found = fewest_nodes(config, None, PLAIN, quiet)
    assert found.memory.fits
    assert not fits(config, None, found.work.num_gpus - 2, PLAIN)
    assert found.work.model == model_config(config.model)


@pytest.mark.slow
def test_the_command_tells_both(tmp_path):
    target = tmp_path / "plan.json"
    words = [*RUN, "--model.family=llama", "--model.flavor=llama3.2_1b", f"{TWO[0]}=1", f"{TWO[1]}=1"]
    done = plan("capacity", *words, "--cluster.nodes=4", "--tokens=1e12", "--price=2", "--json", target)
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())["capacity"]
    one, four = (case["parameters"] for case in found["largest"])
    assert 2.5 * one < four < 6 * one
    fewest = found["fewest"]
    assert fewest["nodes"] == 1
    seconds = 1e12 / fewest["predict"]["tokens_per_second"]
    assert fewest["days"] == pytest.approx(seconds / 86400)
    assert fewest["cost"] == pytest.approx(2 * 2 * seconds / 3600)
    for part in ("largest llama model", "billion parameters", "GiB", "1000 billion tokens in", "GPU hours, cost"):
        assert part in done.stdout
