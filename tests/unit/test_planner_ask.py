import json
import re
from argparse import Namespace
from math import log2

import pytest

from titan_like.commands.plan import main
from titan_like.config import ConfigError, load_config
from titan_like.data.loading.batch_size import total_steps
from titan_like.models.registry import model_config
from titan_like.planner.commands import ask, microbenchmark
from titan_like.planner.commands.outcome import Outcome
from titan_like.planner.dry_run import dry_run
from titan_like.planner.predict import predict
from titan_like.planner.profile import load_profile, profile_to_toml

# Optimizer steps to a loss at batches of 256, 512, …, 8,192 sequences of 512 tokens, and the tokens of the run that set
# this loss (plots/chinchilla.ipynb of the paper's repository, hlzhang109/critical-batch-size).
STEPS = {
    "85M": (13282, [13282, 7000, 3840, 2500, 1800, 1600]),
    "151M": (23438, [24000, 11951, 7128, 4200, 2760, 2400]),
    "302M": (46875, [46000, 23400, 13300, 7224, 4980, 3400]),
    "604M": (93750, [81000, 37440, 21320, 11400, 7199, 4700]),
    "1.2B": (187500, [176000, 94000, 46500, 25000, 15360, 8900]),
}
# What a search chooses, so that it has few layouts to compare.
FEW = ["--parallelism.tensor_parallel_degree=1", "--parallelism.pipeline_parallel_degree=1",
       "--training.micro_batch_size=1", "--activation_checkpoint.mode=none", "--parallelism.zero_stage=1"]  # fmt: skip


@pytest.mark.parametrize("size", STEPS)
def test_the_critical_batch_is_the_one_that_the_paper_measured(size):
    """The largest batch with at most a fifth more steps than linear scaling; known to a factor of two, its grid."""
    steps_of_run, steps = STEPS[size]
    overheads = [count * 2**doublings / min(steps[0], 2 * steps[1]) - 1 for doublings, count in enumerate(steps)]
    last = max(doublings for doublings, overhead in enumerate(overheads) if overhead <= 0.2)
    measured = 512 * (256 << last)
    rule = ask.critical_batch(steps_of_run * 256 * 512)
    assert abs(log2(rule / measured)) <= 1


def test_the_learning_rate_is_the_paper_s():
    # arXiv 2401.02954, Table 2: the rates of 7B and 67B, each on 2T tokens
    assert ask.learning_rate(6.9e9, 2e12) == pytest.approx(4.2e-4, rel=0.05)
    assert ask.learning_rate(67e9, 2e12) == pytest.approx(3.2e-4, rel=0.05)


@pytest.mark.parametrize(("tokens", "seq_len"), [(2e9, 1024), (2e10, 4096), (15e12, 8192), (1e6, 8192)])
@pytest.mark.parametrize("gpus", [1, 4, 6, 40, 1000, 1536, 16384])
def test_the_batch_is_the_largest_below_the_critical_one_that_gpus_share(tokens, seq_len, gpus):
    batch, most = ask.global_batch(tokens, seq_len, gpus), max(1, int(ask.critical_batch(tokens) / seq_len))
    assert 1 <= batch <= most
    assert batch % gpus == 0 or gpus % batch == 0 or batch < gpus
    if gpus <= most:
        share = batch // gpus
        assert share in {n << k for n in (1, 3) for k in range(30)}
        assert 3 * share > 2 * (most // gpus) - 2  # the next of 1, 2, 3, 4, 6, 8, 12, … is at most half as large again


@pytest.mark.parametrize(
    ("name", "words", "scaled"),
    [
        ("7b", ["--model.family=llama", "--model.flavor=llama2_7b"], None),
        ("30B", ["--model.family=llama", "--model.flavor=llama2_70b"], 30e9),
        ("500m", ["--model.family=llama", "--model.flavor=llama3.2_1b"], 5e8),
        ("qwen3_30b_a3b", ["--model.family=moe", "--model.flavor=qwen3_30b_a3b"], None),
        ("org/name", ["--model.from=org/name"], None),
    ],
)
def test_a_model_is_a_size_a_flavor_or_a_folder(name, words, scaled):
    options = Namespace(model=name, params=None)
    assert ask.model_settings(options, "llama") == words
    assert options.params == scaled


def test_an_unknown_model_is_refused_with_those_near():
    with pytest.raises(ConfigError, match=r'--model = "lama2_7b": no such flavor; near are llama2_7b'):
        ask.model_settings(Namespace(model="lama2_7b", params=None), "llama")


def asked(capsys, target, *words):
    """The exit status, the text, and the JSON of `ask` and of the search in it."""
    status = main(["ask", *words, "--json", str(target)])
    found = json.loads(target.read_text())
    return status, capsys.readouterr().out, found["ask"], found.get("search")


def test_the_toml_has_the_answer_s_numbers_and_the_dry_run_agrees(tmp_path, capsys):
    """Between flavors, so that the model is scaled, on two nodes."""
    path = tmp_path / "run.toml"
    words = ["--model=200m", "--gpu=H100", "--gpus=16", "--tokens=2e9", "--price=2", f"--out={path}", *FEW]
    status, text, found, best = asked(capsys, tmp_path / "found.json", *words, "--training.seq_len=1024")
    assert status == 0
    assert text.startswith("YES, it fits on 16 GPUs (H100-80GB)\n")
    config = load_config(["--job.config_file", str(path), "--job.dump_folder", str(tmp_path / "outputs")])
    assert config.training.tokens == found["tokens"] == 2 * 10**9
    assert total_steps(config.training) == found["steps"]
    assert model_config(config.model).num_parameters() == found["parameters"] == pytest.approx(2e8, rel=0.2)
    forecast = predict(config)
    assert str(forecast) in text
    assert forecast.memory.fits
    assert forecast.time.total == pytest.approx(best["ranked"][0]["step_seconds"]["total"])
    days = found["steps"] * forecast.time.total / 86400
    assert best["days"] == pytest.approx(days, rel=1 / found["steps"])  # the last part of a batch is left out
    assert best["days_low"] < best["days"] < best["days_high"]
    assert best["cost"] == pytest.approx(2 * 16 * 24 * best["days"])
    report = dry_run(config)
    assert (report.steps, report.num_parameters, report.world_size) == (found["steps"], found["parameters"], 16)
    assert report.global_batch_size == config.training.global_batch_size == found["global_batch_size"]
    for part in ("2 billion tokens", f"{found['steps']:,} steps", "16 GPUs"):
        assert part in config.job.description
    # What is assumed, and from where
    assert "400 GB/s of a node; --bandwidth sets this" in text
    assert config.cluster.node_bandwidth == 400
    assert "Zhang et al. 2024" in text
    assert f"torchrun --nproc_per_node 8 train.py --job.config_file {path}" in text


def test_settings_of_the_command_line_and_of_a_file_stay(tmp_path, capsys):
    words = ["--gpu=H100", "--gpus=16", "--bandwidth=50", "--tokens=1e9", *FEW, "--job.config_file=debug_llama"]
    _, text, found, best = asked(capsys, tmp_path / "found.json", *words, "--training.global_batch_size=32")
    assert "50 GB/s of a node" in text and "50 GB/s between nodes (cluster.node_bandwidth)" in text
    assert found["global_batch_size"] == 32
    assert found["steps"] == 10**9 // (32 * load_config(["--job.config_file=debug_llama"]).training.seq_len)
    assert best["ranked"][0]["settings"]["parallelism.zero_stage"] == 1


def test_what_does_not_fit_is_told_with_what_does(tmp_path, capsys):
    words = ["--model=gpt2_1558m", "--gpu=T4", "--gpus=1", "--tokens=1e9", "--training.seq_len=1024", *FEW[:4]]
    status, text, found, _ = asked(capsys, tmp_path / "found.json", *words)
    assert status == 1
    assert text.startswith("NO, it does not fit on 1 GPU (T4): no layout")
    gpus = int(re.search(r"it fits on (\d+) GPUs: ", text)[1])
    assert gpus > 1 and found["predict"]["gpus"] == gpus and found["predict"]["fits"]


def test_without_a_gpu_this_machine_is_measured(tmp_path, capsys, monkeypatch):
    measured = load_profile("titan_h100").changed(name="mine", gpus_per_node=1)
    measure = lambda options, _: Outcome("", {}, files={ask.Path(options.out): profile_to_toml(measured)})  # noqa: E731
    monkeypatch.setattr(microbenchmark, "run", measure)
    path = tmp_path / "run.toml"
    words = ["--model=gpt2_124m", "--gpus=1", "--tokens=1e9", f"--out={path}", *FEW]
    status, text, _, best = asked(capsys, tmp_path / "found.json", *words)
    assert status == 0
    config = load_config(["--job.config_file", str(path)])
    assert config.cluster.profile == str(tmp_path / "run.profile.toml")
    assert predict(config).time.total == pytest.approx(best["ranked"][0]["step_seconds"]["total"])
    assert "torchrun --nproc_per_node 1 train.py --job.config_file" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model=7b", "--gpu=H1000"], "the nearest are H100-80GB"),
        (["--model=7b", "--gpu=H100", "--training.steps=5"], "training.steps = 5: use --tokens"),
        (["--model=7b", "--gpu=H100", "--tokens=100"], "is less than a batch"),
        (["--gpu=H100"], "--model"),
    ],
)
def test_bad_questions_get_a_sentence(words, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        main(["ask", *words])
