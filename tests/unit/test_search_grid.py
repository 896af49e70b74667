"""The measured search without processes: which layouts a grid stands for, what is tried next, and what is told."""

import itertools
import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from titan_like.commands import search as command
from titan_like.config import ConfigError, load_config
from titan_like.config.errors import RunError
from titan_like.config.load import setting
from titan_like.planner.commands.search import run_as_toml
from titan_like.planner.rows import read_rows
from titan_like.search import results, trial
from titan_like.search.cases import Case, grid_cases, layout_name, next_size, own_profile, planned_cases, read_grid
from titan_like.search.trial import FAILED, OK, TOO_LARGE, Place, Plan, settings_of
from titan_like.train.rules import resolve_settings

REPO = Path(__file__).parents[2]
DEBUG = ["--job.config_file", str(REPO / "train_configs" / "debug_gpt.toml")]
TENSOR, PIPELINE = "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"
MICRO, GLOBAL = "training.micro_batch_size", "training.global_batch_size"


def names(cases: list[Case]) -> list[str]:
    return [layout_name(case.config, case.processes) for case in cases if case.sizes]


def tried(sizes: list[int], rate: Any) -> list[int]:
    """The sizes that a search tries when a size of s has ``rate(s)``."""
    rates: dict[int, float | None] = {}
    while (size := next_size(sizes, rates)) is not None:
        assert size not in rates
        rates[size] = rate(size)
    return list(rates)


@pytest.mark.parametrize(
    ("sizes", "rate", "expected"),
    [
        ([1, 2, 3, 4, 6, 8, 12, 24], lambda size: size if size <= 6 else None, [1, 2, 4, 8, 6]),
        ([1, 2, 3, 4, 6, 8, 12, 24], lambda size: size if size <= 3 else None, [1, 2, 4, 3]),
        ([1, 2, 4, 8, 16], lambda size: {1: 1.0, 2: 2.0, 4: 1.9, 8: 1.5}[size], [1, 2, 4, 8]),  # falls below 80 %
        ([3], lambda size: 1.0, [3]),
        ([4, 6], lambda size: 1.0, [4, 6]),  # no doubling fits
    ],
)
def test_microbatch_sizes_double_until_one_does_not_fit(sizes: list[int], rate: Any, expected: list[int]) -> None:
    assert tried(sizes, rate) == expected


def test_the_largest_size_that_fits_is_always_found() -> None:
    generator = random.Random(0)
    for _ in range(300):
        batch, limit = generator.randint(1, 720), generator.randint(1, 100)
        sizes = [size for size in range(1, batch + 1) if batch % size == 0]
        found = tried(sizes, lambda size: 1.0 if size <= limit else None)  # noqa: B023
        assert max(size for size in found if size <= limit) == max(size for size in sizes if size <= limit)


def test_the_grid_is_the_product_of_what_divides() -> None:
    """Against the rule as the study states it: GBS % (MBS · GPUs / TP / PP) == 0."""
    values = {TENSOR: [1, 2, 4], PIPELINE: [1, 2, 4], MICRO: [1, 2, 3], GLOBAL: [12, 16]}
    counts = [1, 2, 4, 8]
    cases = grid_cases(load_config(DEBUG), counts, values)
    expected = {
        (gpus, tensor, pipeline, size, batch)
        for gpus, tensor, pipeline, size, batch in itertools.product(counts, *values.values())
        if gpus % (tensor * pipeline) == 0 and batch % (size * gpus // tensor // pipeline) == 0
    }
    keys = (TENSOR, PIPELINE, MICRO, GLOBAL)
    found = {(case.processes, *(setting(case.config, key) for key in keys)) for case in cases if case.sizes}
    assert found == expected and len(names(cases)) == len(set(names(cases))) == len(expected)
    assert len(cases) == 4 * 3 * 3 * 3 * 2
    why = next(case.reason for case in cases if not case.sizes and case.processes == 2)
    assert "does not divide the 2 processes" in why or "is not divisible by micro_batch_size" in why


def test_layouts_that_are_the_same_are_measured_once() -> None:
    values = {
        PIPELINE: [1, 2],
        "parallelism.pipeline_schedule": ["1f1b", "gpipe", "zbv_zero_bubble"],
        "parallelism.virtual_stages_per_rank": [1, 2],
        "parallelism.zero_stage": [0, 1],
        "activation_checkpoint.every_n_layers": [1, 2],
    }
    cases = grid_cases(load_config(DEBUG), [2], values)
    # On 2 ranks, ZBV has 2 stages on each whatever is asked for, and there is nobody to share state with.
    assert names(cases) == [
        "n2-dp2-mbs4-gbs8",
        "n2-dp2-z1-mbs4-gbs8",
        "n2-pp2-mbs4-gbs8",
        "n2-pp2-gpipe-mbs4-gbs8",
        "n2-pp2-zbv_zero_bubble-v2-mbs4-gbs8",
    ]


@pytest.mark.slow
def test_the_planner_chooses_what_is_measured() -> None:
    config = load_config([*DEBUG, "--cluster.gpu=A100-80GB", "--cluster.gpus_per_node=8"])
    cases = planned_cases(config, {2: None, 5: None}, frozenset(), top=3)
    assert [case.processes for case in cases] == [2, 2, 2, 5]
    assert all(len(case.sizes) == 1 for case in cases[:3])
    assert len(set(names(cases))) == 3
    assert not cases[3].sizes and cases[3].reason  # five share neither 4 layers, 4 heads nor a batch of 8


# A grid => what is said about it, next to --parallelism.pipeline_parallel_degree=1
WRONG_GRIDS = """
parallelism.tensor_paralel_degree = [1] => did you mean parallelism.tensor_parallel_degree
parallelism.zero_stage = [4] => parallelism.zero_stage = 4
parallelism.zero_stage = [] => lists nothing
parallelism.pipeline_parallel_degree = [1, 2] => lists it too
processes = [0] => must be whole numbers of at least 1
model.flavor = ["debug"] => unknown key of a grid
zero_stage = 1 => unknown key of a grid
""".strip().splitlines()


@pytest.mark.parametrize("case", WRONG_GRIDS)
def test_a_wrong_grid_gets_a_sentence(case: str, tmp_path: Path) -> None:
    path, (table, _, sentence) = tmp_path / "grid.toml", case.partition(" => ")
    path.write_text(table)
    with pytest.raises(ConfigError) as caught:
        read_grid(str(path), [*DEBUG, "--parallelism.pipeline_parallel_degree=1"])
    assert sentence in str(caught.value)


BAD_OPTIONS = """
--processes 2 --grid g.toml --top 3 => give --grid or --top
--processes 2,x => must be whole numbers
--processes 2 --steps 0 => --steps = 0
--processes 2 --top 2 --training.steps=none => set exactly one of the four
--grid none.toml => no such file
--processes 4 --top 1 --profile titan_h100 --training.global_batch_size=3 \
--parallelism.data_parallel_shard_degree=4 => no layout is valid
""".strip().splitlines()


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_input_ends_before_anything_is_started(case: str, tmp_path: Path) -> None:
    out, (words, _, sentence) = tmp_path / "out", case.partition(" => ")
    with pytest.raises(ConfigError) as caught:
        command.main([*DEBUG, "--dump_folder", str(out), *words.split()])
    assert sentence in str(caught.value) and not out.exists()


@pytest.mark.parametrize("works", [True, False])
def test_a_cpu_is_measured_once(works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(command: list[str], **_: object) -> subprocess.CompletedProcess:
        measured.append(command)
        out = next(word for word in command if word.startswith("--out="))
        device = {"memory_gib": 8, "memory_bandwidth": 10, "nvlink": 1, "multiprocessors": 1, "tensor_element": 1}
        table = {"device": "CPU", "gpus_per_node": 2, "node_bandwidth": 0.0}
        table |= {"device_table": device | {"peak": {"float32": 0.1}}}
        if works:
            Path(out.partition("=")[2]).write_text(tomli_w.dumps(table))
        return subprocess.CompletedProcess(command, 0 if works else 1)

    monkeypatch.setattr(subprocess, "run", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = Place(("scripts/plan.py",))
    if not works:
        with pytest.raises(RunError, match="could not be measured, see above; give --profile or --grid"):
            own_profile(2, place)
        return
    profiles = [own_profile(2, place) for _ in range(2)]
    assert len(measured) == 1 and {"scripts/plan.py", "microbenchmark", "--nproc_per_node=2"} <= set(measured[0])
    assert profiles[0].name == profiles[1].name and profiles[0].device.name == "CPU"
    own_profile(4, place)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    own_profile(2, place)
    assert len(measured) == 3


def test_a_folder_of_something_else_is_kept(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("mine")
    (tmp_path / "grid.toml").write_text(tomli_w.dumps({"parallelism": {"zero_stage": [0]}}))
    words = ["--dump_folder", str(tmp_path), "--grid", str(tmp_path / "grid.toml"), "--processes", "1"]
    with pytest.raises(ConfigError, match=r"has results\.csv, but no search; name another folder"):
        command.main([*DEBUG, *words])
    assert not (tmp_path / "trials").exists() and not (tmp_path / "search.json").exists()
    assert (tmp_path / "results.csv").read_text() == "mine"


def test_a_trial_that_is_ended_from_outside_has_no_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, place, plan = tmp_path / "trials" / "one", Place(("train.py",)), Plan(1, 2, 60.0, None)
    for script in ("kill -TERM $$", 'echo "elastic...SignalException: Process 7 got signal: 15"; exit 1'):
        monkeypatch.setattr(Place, "command", lambda *_, script=script: ["sh", "-c", script])
        with pytest.raises(KeyboardInterrupt):
            trial.run_trial(folder, load_config(DEBUG), 1, place, plan, 1)


def test_settings_as_arguments_are_the_same_run() -> None:
    config = load_config([
        *DEBUG, "--checkpoint.async=true", "--job.description=a [run] of = 2 words", "--data.dataset=text",
        '--data.paths=["a b.txt", "c.txt"]', '--data.options={name = "true", depth = {two = [1, 2]}}',
        "--model.overrides.hidden_size=64", "--optimizer.betas=[0.9, 0.99]", "--training.batch_size_rampup=[2, 2, 64]",
        "--cluster.gpu=H100",
    ])  # fmt: skip
    again = load_config(settings_of(config)).model_dump()
    assert again == config.model_dump() | {"job": again["job"]}
    assert again["job"] == config.job.model_dump() | {"config_file": None}


def test_what_is_measured_is_training_alone() -> None:
    config = load_config(
        [*DEBUG, "--metrics.wandb=true", "--evaluation.datasets=text=a.txt", "--training.batch_size_rampup=[2,2,64]"]
    )
    run = load_config(trial.measured(config, 7, "there"))
    resolve_settings(run, 1)
    assert (run.training.steps, run.job.dump_folder, run.metrics.log_interval) == (7, "there", 7)
    assert not (run.checkpoint.enable or run.metrics.wandb or run.evaluation.interval or run.evaluation.datasets)
    assert run.training.batch_size_rampup is None
    for same in ("model", "data", "optimizer", "parallelism", "activation_checkpoint", "compile"):
        assert getattr(run, same) == getattr(config, same)


def test_the_command_of_a_trial_on_this_machine() -> None:
    plan = Plan(1, 2, 60.0, None)
    words = Place(("train.py",)).command(4, ["--a.b=c d"], 3, plan)
    assert words[1:3] == ["-m", "torch.distributed.run"] and "--nproc_per_node=4" in words
    assert words[-2:] == ["train.py", "--a.b=c d"]
    shared = Place(("train.py",), memory_gib=8.0).command(4, [], 3, plan)
    own = Place(("train.py",), memory_gib=8.0).command(4, [], 3, Plan(1, 2, 60.0, 0.5))
    assert [line[:1] + line[4:5] for line in (shared, own)] == [["sh", str(2 * 2**20)], ["sh", str(2**19)]]


def test_the_command_of_a_trial_on_the_nodes_of_a_slurm_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$3" = "n[1-3]" ] && printf "n1\\nn2\\nn3\\n"\n')
    scontrol.chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "31234", "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_GPUS_ON_NODE": "4",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NPROC", raising=False)
    place, plan = Place.of_slurm(("train.py",)), Plan(1, 2, 300.0, None)
    assert (place.per_node, place.hosts) == (4, ("n1", "n2", "n3"))
    words = place.command(8, ["--x.y=1"], 5, plan)
    at = words.index("-m")
    assert words[0] == "srun" and {"--nodes=2", "--ntasks=2", "--nodelist=n1,n2", "--time=7"} <= set(words[:at])
    assert words[at + 1] == "torch.distributed.run"
    assert {"--nnodes=2", "--nproc_per_node=4", "--rdzv_endpoint=n1:21239", f"--rdzv_id=31234.5.{os.getpid()}"} <= set(
        words[at:]
    )
    assert words[-2:] == ["train.py", "--x.y=1"]
    few = place.command(2, [], 6, plan)
    assert {"--nodes=1", "--nnodes=1", "--nproc_per_node=2", "--nodelist=n1"} <= set(few)
    place.check(12)
    for count, sentence in ((16, "3 nodes of 4; use at most 12"), (6, "use a multiple of 4")):
        with pytest.raises(ConfigError, match=sentence):
            place.check(count)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "other")
    with pytest.raises(ConfigError, match="scontrol does not name its nodes"):
        Place.of_slurm(("train.py",))
    Place(("train.py",)).check(64)  # a machine without GPUs takes any number
    with pytest.raises(ConfigError, match="there are 2 GPUs; use at most 2"):
        Place(("train.py",), 2).check(4)


TORCHRUN = """E0801 10:00:00.000 1 torch/distributed/elastic failed (exitcode: {code}) local_rank: 0 (pid: 7) of binary
Traceback (most recent call last):
  File "/venv/torch/distributed/run.py", line 9, in main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
"""


TRACEBACK = 'Traceback (most recent call last):\n  File "/a/x.py", line 3, in f\n'


@pytest.mark.parametrize(
    ("log", "outcome", "reason"),
    [
        ("hello\nerror: data.paths = 3: no such file\n", FAILED, "data.paths = 3: no such file"),
        ("error: training.micro_batch_size = 8: does not have enough memory for it\n", TOO_LARGE, "not have"),
        (f"{TRACEBACK}torch.OutOfMemoryError: CUDA out.\n".replace("\n", "\n[rank1]: "), TOO_LARGE, "CUDA out"),
        (f"{TRACEBACK}KeyError: 5\n", FAILED, "KeyError: 5 (/a/x"),
        ("", FAILED, "exit code 3"),
        ("traceback : Signal 9 (SIGKILL) received by PID 7\n", TOO_LARGE, "the system killed a process, perhaps"),
    ],
)
def test_failures_are_told_apart(log: str, outcome: str, reason: str) -> None:
    found = trial.failure(log + TORCHRUN.format(code=3), 3)
    assert found["outcome"] == outcome and reason in found["reason"]


def row(seconds: float, predicted: float | None, processes: int = 2, batch: int = 8, **more: Any) -> results.Row:
    known = {"outcome": OK, "step_time_s": seconds, "predicted_step_time_s": predicted, "processes": processes}
    return known | {"global_batch_size": batch} | more


def test_regret_is_that_of_choices_between_equal_processes_and_batches() -> None:
    rows = [
        row(1.0, 2.0), row(1.1, 1.0),  # chosen: 1.1 for 1.0
        row(0.5, 0.4, processes=4), row(0.7, 0.6, processes=4),
        row(9.0, None), row(0.1, 0.1) | {"outcome": FAILED},
    ]  # fmt: skip
    found = results.judgement(rows)
    assert found is not None and found["layouts"] == 4
    assert found["regrets"] == {"2 processes, batch 8": pytest.approx(0.1), "4 processes, batch 8": 0.0}
    assert found["worst_regret"] == pytest.approx(0.1)
    assert results.judgement(rows[:1]) is None


def test_rows_are_read_by_calibrate_and_the_best_file_trains(tmp_path: Path) -> None:
    values = {TENSOR: [1, 2], MICRO: [2]}
    runs = []
    for case in grid_cases(load_config(DEBUG), [1, 2], values):
        if case.sizes:
            found = {"outcome": OK, "step_time_s": 0.5 + case.processes, "tokens_per_second": 1.0}
            runs.append((case.config, results.row_of(case.config, case.processes, found)))
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(results.calibration_rows(runs, 8, "CPU")))
    rows, left_out = read_rows(path)
    assert not left_out
    assert [(one.work.num_gpus, one.work.tensor, one.work.shard, one.seconds) for one in rows] == [
        (1, 1, 1, 1.5),
        (2, 1, 2, 2.5),
        (2, 2, 1, 2.5),
    ]
    best = tmp_path / "best.toml"
    best.write_text(run_as_toml(runs[2][0], 2, best, ["best"]))
    run = resolve_settings(load_config(["--job.config_file", str(best)]), 2)
    assert (run.layout.tensor, run.config.training.steps, run.config.checkpoint.enable) == (2, 800, True)


def test_the_median_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    times = [9.0, 8.0, 4.0, 1.0, 3.0, 2.0]
    records = [
        {"step_time_s": time, "tokens_per_second": 640 / time, "tflops_per_device": 1 / time, "mfu_model": None,
         "global_batch_size": 10, "peak_memory_bytes": 100 + step}
        for step, time in enumerate(times)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = trial.figures(path, Plan(2, 4, 1.0, None))
    assert found["step_time_s"] == 2.0  # the lower one of 2 and 3
    assert (found["samples_per_second"], found["tokens_per_second"], found["peak_memory_bytes"]) == (5.0, 320.0, 105)
    short = trial.figures(path, Plan(2, 5, 1.0, None))
    assert (short["outcome"], short["reason"]) == (FAILED, "it ended after 6 of 7 steps")


def test_rank_correlation_is_spearmans() -> None:
    from scipy.stats import spearmanr

    generator = np.random.default_rng(0)
    for _ in range(50):
        first, second = generator.integers(0, 6, (2, 12)).astype(float)  # with ties
        assert results.rank_correlation(first, second) == pytest.approx(spearmanr(first, second).statistic, abs=1e-12)
