import contextlib
import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from titan_like.commands.plan import main
from titan_like.config import ConfigError, load_config
from titan_like.config.load import edit
from titan_like.data.loading.lengths import sample_length
from titan_like.metrics.flops import hardware_flops_per_token
from titan_like.models.registry import model_config
from titan_like.parallel.layout import resolve_layout
from titan_like.planner.memory import usable_bytes
from titan_like.planner.predict import predict, unseen
from titan_like.planner.profile import load_profile
from titan_like.planner.search import search
from titan_like.train.environment import cluster_size
from titan_like.train.memory import MemoryWatch
from titan_like.train.rules import resolve_settings

ROOT = Path(__file__).parents[2]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def plan(*words):
    """As the command line does it, without a new process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(ROOT):
        try:
            return Done(main([str(word) for word in words]), out.getvalue(), "")
        except ConfigError as error:
            return Done(2, out.getvalue(), f"error: {error}\n")


def documented(command):
    """The fields of its JSON by docs/planner.md."""
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    rows = page.partition(f"| field of `{command}` |")[2].partition("\n\n")[0].splitlines()[2:]
    return {name for row in rows for name in re.findall("`(.*?)`", row.split("|")[1])}


def test_predict_tells_time_and_memory(tmp_path):
    target = tmp_path / "plan.json"
    done = plan("predict", "--job.config_file", "train_configs/gpt_145b.toml", "--json", target)
    assert done.returncode == 0, done.stderr
    for word in ("step time", "compute", "recompute", "bubble", "tokens/s", "HFU", "fits"):
        assert word in done.stdout
    found = json.loads(target.read_text())["predict"]
    seconds = found["step_seconds"]
    assert found.keys() == documented("predict")
    assert found["gpus"] == 1536
    assert sum(seconds.values()) == pytest.approx(2 * seconds["total"])
    assert found["step_seconds_low"] < seconds["total"] < found["step_seconds_high"]
    assert len(found["memory_bytes"]) == 8
    # The paper measured 148 TFLOP/s with unfused attention (its Table 1).
    assert 140 < found["tflops_per_device"] < 185


def test_what_does_not_fit_ends_with_1_and_the_trainer_s_cures():
    degrees = ["--parallelism.tensor_parallel_degree=1", "--parallelism.zero_stage=0"]
    degrees += ["--parallelism.data_parallel_shard_degree=-1", "--training.micro_batch_size=4"]
    words = [f"--job.config_file={ROOT}/train_configs/gpt_7.5b.toml", *degrees]
    config = load_config(words)
    layout = resolve_layout(config.parallelism, cluster_size(config))
    run = SimpleNamespace(config=config, layout=layout, device=torch.device("cpu"))
    cures = MemoryWatch(run).account(MemoryError())
    for command in ("predict", "duration"):
        done = plan(command, *words, *(["--tokens=1e9"] if command == "duration" else []))
        assert done.returncode == (command == "predict"), done.stderr
        assert re.search(f"DOES NOT FIT.*; training.micro_batch_size = 4: {re.escape(cures)}\n", done.stdout + "\n")


def test_predict_names_every_broken_rule_as_the_trainer_does():
    words = [f"--job.config_file={ROOT}/train_configs/gpt_145b.toml", "--training.global_batch_size=1001"]
    words += ["--training.seq_len=4096"]
    with pytest.raises(ConfigError) as of_trainer:
        resolve_settings(load_config(words), 1536)
    assert str(of_trainer.value).count("\n") > 0
    assert plan("predict", *words).stderr == f"error: {of_trainer.value}\n"


# GPU and number of GPUs of the recipes that leave their cluster open. Debug models fit on the smallest.
CLUSTERS = {
    "gpt_1.7b": ("A100-80GB", 32), "llama3.1_8b": ("H100", 8), "finetune_llama3_8b": ("H100", 8),
    "gpt2_124m": ("A100-40GB", 1), "race": ("A100-40GB", 1),
}  # fmt: skip
SLOW_TO_TRACE = ("gpt3_175b", "gpt_1t", "gpt_310b", "gpt_39b", "gpt_530b", "gpt_76b", "gpt_18b")


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(path.stem, marks=[pytest.mark.exhaustive] if path.stem in SLOW_TO_TRACE else [])
        for path in sorted((ROOT / "train_configs").glob("*.toml"))
    ],
)
def test_every_recipe_fits_on_its_own_cluster_as_a_search_would_have_it(recipe):
    words = [f"--job.config_file={ROOT}/train_configs/{recipe}.toml"]
    words += ["--model.from=none", "--model.family=llama", "--model.flavor=llama3.1_8b"] * recipe.startswith("finetune")
    config = load_config(words)
    if config.cluster.gpu is None:
        gpu, number = CLUSTERS.get(recipe, ("T4", 1))
        cluster = {"gpu": gpu, "gpus_per_node": min(number, 8), "nodes": -(-number // 8)}
        config = edit(config, {f"cluster.{key}": value for key, value in cluster.items()})
    forecast = predict(config)
    assert forecast.memory.largest <= usable_bytes(forecast.profile.device), forecast.taken


# Recipes whose layout is this project's choice, with the keys of it that are a paper's. All others are a paper's.
CHOSEN_HERE = {
    "gpt3_175b": (),
    "llama3.1_70b": (),
    "llama3.1_405b": ("tensor_parallel_degree", "pipeline_parallel_degree", "data_parallel_shard_degree"),
}


def test_every_recipe_for_a_cluster_says_where_its_layout_is_from():
    for path in (ROOT / "train_configs").glob("*.toml"):
        head, _, settings = path.read_text(encoding="utf-8").partition("[job]")
        if "[cluster]" in settings:
            words = " ".join(head.replace("#", " ").split())
            assert ("this project's choice" in words) == (path.stem in CHOSEN_HERE), path.stem
            assert "this project's choice" in words or "in the layout of arXiv" in words, path.stem


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("recipe", CHOSEN_HERE)
def test_a_layout_of_this_project_s_choice_is_near_the_best(recipe):
    config = load_config([f"--job.config_file={ROOT}/train_configs/{recipe}.toml"])
    fixed = frozenset(f"parallelism.{name}" for name in CHOSEN_HERE[recipe])
    best = search(config, fixed=fixed, kinds=1).fastest
    assert predict(config).time.total <= 1.1 * best.time.total, best.work


def test_search_tells_why_others_lose_and_what_the_run_costs(tmp_path):
    target = tmp_path / "found.json"
    words = ["--params", "6e9", "--gpus", "8", "--top", "3", "--parallelism.zero_stage", "1", "--json", target]
    words += ["--training.global_batch_size", "8", "--training.seq_len", "1024", "--tokens", "1e11", "--price", "2"]
    words += ["--parallelism.pipeline_parallel_degree", "1", "--training.micro_batch_size", "1"]
    words += ["--activation_checkpoint.mode", "none", "--out", tmp_path / "best.toml"]
    done = plan("search", "--job.config_file", "train_configs/gpt_7.5b.toml", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())["search"]
    assert found.keys() == documented("search")
    assert found["gpus"] == 8
    assert found["valid"] > found["too_large"] >= 0
    assert len(found["ranked"]) == 3
    (best,) = [one for one in found["ranked"] if one["why"] == "best"]
    times = [one["step_seconds"]["total"] for one in found["ranked"]]
    assert times == sorted(times)
    for one in (one for one in found["ranked"] if one is not best):
        assert one["settings"]["parallelism.zero_stage"] == 1, "the command line's settings stay"
        lost, seconds = next(iter(one["seconds_more"].items()))
        assert seconds == pytest.approx(one["step_seconds"][lost] - best["step_seconds"][lost])
        assert one["why"] in done.stdout
    assert "valid layouts on 8 GPUs" in done.stdout
    assert re.match(r"(5.9[0-9]*|6|6.0[0-9]*) billion parameters", done.stdout)
    steps = 1e11 / (8 * 1024)
    assert found["days"] == pytest.approx(steps * best["step_seconds"]["total"] / 86400)
    assert found["gpu_hours"] == pytest.approx(8 * 24 * found["days"]) == found["cost"] / 2
    assert "100 billion tokens in" in done.stdout
    config_of_best = load_config(["--job.config_file", str(tmp_path / "best.toml")])
    assert config_of_best.training.tokens == 10**11 and config_of_best.training.steps is None
    parameters = model_config(config_of_best.model).num_parameters()
    assert parameters == pytest.approx(6e9, rel=0.02)
    description = (
        f"gpt 7.5b, {parameters / 1e9:.4g} billion parameters, 8 GPUs, 100 billion tokens in {int(steps):,} steps"
    )
    assert config_of_best.job.description == description
    forecast = predict(config_of_best)
    limits = [steps * seconds / 86400 for seconds in (forecast.seconds_low, forecast.seconds_high)]
    assert [found["days_low"], found["days_high"]] == pytest.approx(limits)
    shown = " and ".join(f"{days:.3g}" if days < 10 else f"{days:,.0f}" for days in limits)
    assert f" days (between {shown} in nine of ten cases), " in done.stdout


RUN = ["--training.seq_len=512", "--training.steps=1", "--training.global_batch_size=64", "--cluster.gpu=H100",
       "--training.dtype=bfloat16", "--training.micro_batch_size=1", "--cluster.nodes=8",
       "--cluster.gpus_per_node=8"]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "tokens", "rate", "days", "within"),
    [
        (["--job.config_file=train_configs/gpt_1t.toml"], 450e9, 163, 84, 0.03),
        (["--job.config_file=train_configs/gpt3_175b.toml", "--activation_checkpoint.mode=full"], 300e9, 140, 34, 0.03),
        (["--model.family=moe", "--model.flavor=mixtral_8x7b", *RUN], 1e12, 400, None, 0.4),
        (["--model.family=t5", "--model.flavor=220m", *RUN], 1e12, 400, None, None),
    ],
    ids=["a trillion", "GPT-3", "experts", "a decoder"],
)
def test_days_of_the_paper_s_examples_of_experts_and_of_a_decoder(words, tokens, rate, days, within, tmp_path):
    target = tmp_path / "plan.json"
    done = plan("duration", *words, "--tokens", tokens, "--tflops", rate, "--price", "2", "--json", target)
    assert done.returncode == 0, done.stderr
    found, config = json.loads(target.read_text())["duration"], load_config(words)
    model, speed = model_config(config.model), cluster_size(config) * rate * 1e12
    assert found["days_by_formula"] == pytest.approx(8 * tokens * model.active_parameters / speed / 86400)
    assert found["cost"] == 2 * found["gpu_hours"] and "between" not in done.stdout  # a given rate has no band
    if days:
        assert found["days_by_formula"] == pytest.approx(days, abs=0.5)
    if within:
        assert found["days_exact"] == pytest.approx(days or found["days_by_formula"], rel=within)
    else:
        encoder, decoder = sample_length(config, model)[1:]
        flops = hardware_flops_per_token(model, encoder, config.activation_checkpoint, decoder)
        assert found["days_exact"] == pytest.approx(tokens * flops / speed / 86400)


@pytest.mark.slow
def test_calibrate_writes_a_profile_that_gives_the_rows_back(tmp_path):
    words = ["--training.steps=1", "--model.flavor=7.5b", "--training.global_batch_size=128", "--cluster.gpu=A100",
             "--cluster.nodes=8", "--cluster.gpus_per_node=8", "--training.dtype=bfloat16"]  # fmt: skip
    truth = load_profile("fsdp_a100").changed(gemm_efficiency=0.7, nvlink_efficiency=0.5)
    points, out, runs, cases = tmp_path / "points.json", tmp_path / "mine.toml", [], []
    for tensor, zero, micro in ((8, 1, 4), (4, 3, 2), (2, 3, 1), (8, 0, 2)):
        settings = [*words, f"--parallelism.tensor_parallel_degree={tensor}",
                    f"--parallelism.zero_stage={zero}", f"--training.micro_batch_size={micro}"]  # fmt: skip
        run = load_config(settings)
        seconds = predict(run, truth).time.total
        cases.append({"model": f"m{tensor}", "command": " ".join(["train.py", *settings]), "step_time_s": seconds})
        runs.append((run, seconds))
    points.write_text(json.dumps({"gpu": "A100-80GB", "gpus": 64, "cases": cases}))
    done = plan("calibrate", "--points", points, "--profile", "fsdp_a100", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "gemm_efficiency" in done.stdout
    assert "left out: 0" in done.stdout
    fitted = load_profile(str(out))
    assert fitted.error_median < 0.1
    for run, seconds in runs:
        assert predict(run, fitted).time.total == pytest.approx(seconds, rel=0.01)
    mixed = [*cases, {**cases[0], "command": cases[0]["command"].replace("bfloat16", "float16")}]
    points.write_text(json.dumps({"gpu": "A100-80GB", "gpus": 64, "cases": mixed}))
    refused = plan("calibrate", "--points", points, "--profile", "fsdp_a100")
    assert refused.returncode == 2 and "has rows in bfloat16 and float16; a profile is for one" in refused.stderr
    for change, causes in (("training.dtype=float16", ["another type"]), ("cluster.gpu=H100", ["another GPU"])):
        forecast = predict(load_config([*settings, f"--{change}"]), fitted)
        assert unseen(forecast.work, forecast.profile) == causes


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["forecast"], "command"),
        (["predict", "--job.config_file", "train_configs/debug_gpt.toml"], "cluster.gpu"),
        (["predict", "--job.config_file", "train_configs/gpt_1t.toml", "--profile", "nobody"], "--profile"),
        (["predict", "--job.config_file", "train_configs/gpt_1t.toml", "--cluster.nodes", "3"], "shard_degree"),
        (["predict", "--job.config_file", "train_configs/gpt_1t.toml", "--cluster.gpu", "V100"], "training.dtype"),
        (["duration", "--job.config_file", "train_configs/gpt_1t.toml", "--tokens", "-1"], "--tokens"),
        (["duration", "--job.config_file", "train_configs/gpt_1t.toml", "--price", "nan"], "--price"),
        (["search", "--job.config_file", "train_configs/gpt_7.5b.toml", "--gpus", "0"], "--gpus"),
        (["search", "--job.config_file", "train_configs/gpt_7.5b.toml", "--out", "/tmp/best.json"], "--out"),
        (["duration", "--job.config_file", "train_configs/gpt_1t.toml", "--tokens", "1e300"], "--tokens"),
        (["duration", "--job.config_file", "train_configs/gpt_1t.toml", "--tflops", "313"], "peak of A100-80GB"),
        (["search", "--job.config_file", "train_configs/gpt_7.5b.toml", "--params", "0"], "--params"),
        (["search", "--job.config_file", "train_configs/gpt_7.5b.toml", "--gpus"], "expected one argument"),
        (["calibrate", "--profile", "fsdp_a100", "--points", "no.json", "--out", "mine"], "ends with .toml"),
        (["search", "--job.config_file", "train_configs/gpt_7.5b.toml", "--gpus", "10000000"], "at most 1,000,000"),
        (["predict", "--job.config_file", "train_configs/gpt_1t.toml", "--profile", ""], "--profile"),
        (["calibrate", "--profile", "fsdp_a100"], "--points"),
        (["calibrate", "--profile", "fsdp_a100", "--points", "no.json"], "--points"),
        (["calibrate", "--profile", "fsdp_a100", "--points", "no.csv"], "benchmarks/planner_accuracy.py"),
        (["duration", "--job.config_file", "train_configs/gpt_1t.toml", "--tflops", "1e-300"], "at least 1e-06"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(words, named):
    done = plan(*words)
    assert done.returncode == 2, done.stdout
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


@pytest.mark.slow
def test_who_reads_only_the_first_line_gets_no_traceback():
    command = f"{sys.executable} {ROOT}/scripts/plan.py predict --job.config_file train_configs/gpt3_175b.toml"
    shell = ["bash", "-c", f"{command} | true"]  # nobody reads
    done = subprocess.run(shell, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stderr == ""
