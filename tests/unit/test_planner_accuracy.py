"""The planner beside published runs, the figures that say how near it is, fits, and profiles in files."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy import Prediction, accuracy, predict_row, rank_correlation, sweeps
from benchmarks.published_rows import published_rows
from benchmarks.stack_profiles import left_out_figures, profiles
from titan_like.config import ConfigError, load_config
from titan_like.models.registry import model_config
from titan_like.planner.commands.calibrate import calibrated, fit, leave_one_group_out, log_errors
from titan_like.planner.commands.predict import describe
from titan_like.planner.predict import predict
from titan_like.planner.profile import profile_from, profile_to_toml

ROOT = Path(__file__).parents[2]
ROWS = published_rows()
SELENE = profiles()["selene_2021"]


@cache
def group(study):
    """A study's rows, predicted."""
    (found,) = accuracy([predict_row(row) for row in ROWS if row.study == study])
    return found


@pytest.mark.slow
def test_ptd_p_table_1_which_no_profile_was_fitted_on():
    found = group("ptdp_table1")
    assert found.n == 10
    assert found.median <= 0.03
    assert found.largest <= 0.08
    sources = [source for profile in profiles().values() for source in profile.fitted_on]
    assert sources
    assert not any("Table 1" in source or "run_table_1" in source for source in sources)


@pytest.mark.slow
def test_rows_of_bloom_s_chronicle():
    found = group("bloom")
    assert (found.median, found.memory_median, found.memory_p90) <= (0.04, 0.05, 0.1)
    assert (found.wrongly_fits, found.wrongly_too_large) == (0, 0)
    (sweep,) = found.sweeps
    assert sweep.layouts == 3
    assert sweep.regret <= 0.02


@pytest.mark.slow
def test_runs_that_were_out_of_memory_are_not_predicted_to_fit():
    failed = [row for row in ROWS if row.out_of_memory]
    assert len(failed) == 7
    assert not any(predict_row(row).fits for row in failed)


@pytest.mark.slow
def test_zero_3_rows_of_ptd_p_table_2_lose_to_its_pipeline_rows_as_measured():
    by_stack = {}
    for row in ROWS:
        if row.study == "ptdp_table2":
            by_stack.setdefault((row.model, row.work.zero_stage), []).append(predict_row(row).seconds * row.gpus)
    sharded = [model for model, zero in by_stack if zero == 3]
    assert len(sharded) >= 1
    for model in sharded:
        assert max(by_stack[model, 3]) > 2 * max(by_stack[model, 0])  # GPU seconds a batch


def test_rank_correlation_and_regret():
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [1, 1, 2]) == pytest.approx(1)
    row = next(row for row in ROWS if row.study == "bloom")

    def member(micro, day, measured, predicted):
        work = row.work._replace(micro_batch_size=micro)
        return Prediction(replace(row, work=work, notes=f"bloom 02-2{day}; x", seconds=measured), "", predicted, 0, 80)

    layouts = [(1, 10.0, 9.0), (2, 8.0, 10.0), (4, 9.0, 8.0)]  # micro-batch, measured, predicted seconds
    (sweep,) = sweeps([member(micro, 4, *times) for micro, *times in layouts])
    assert (sweep.layouts, sweep.regret) == (3, pytest.approx(9 / 8 - 1))
    assert sweep.rank_correlation == pytest.approx(-0.5)
    days = [member(micro, day, 1.0, 1.0) for micro in (1, 2, 4) for day in (4, 5)]  # sessions are not compared
    assert [sweep.layouts for sweep in sweeps(days)] == [3, 3]
    assert sweeps(days[:4]) == []
    assert sweeps([*days, member(1, 4, 2.0, 1.0)])[0].noise == pytest.approx(1)


@pytest.mark.exhaustive
def test_fit_finds_constants_that_made_the_rows():
    truth = SELENE.changed(gemm_efficiency=SELENE.gemm_efficiency * 1.08, nvlink_efficiency=0.68)
    rows = [row for row in ROWS if row.study in ("korthikanti_t5", "tf=hw96")]
    made = [replace(row, seconds=row.predicted(truth)) for row in rows]
    names = ("gemm_efficiency", "nvlink_efficiency")
    found = fit(made, SELENE, names)
    # The priors hold it back a little.
    assert found.gemm_efficiency == pytest.approx(truth.gemm_efficiency, rel=0.02)
    assert found.nvlink_efficiency < SELENE.nvlink_efficiency
    assert np.abs(log_errors(made, found)).max() < 0.01 < np.abs(log_errors(made, SELENE)).max()
    left_out = leave_one_group_out(made, SELENE, names, lambda row: row.model)
    assert sum(len(rows) for _, rows in left_out.values()) == len(made)
    assert max(np.abs(log_errors(rows, profile)).max() for profile, rows in left_out.values()) < 0.02
    made[0] = replace(made[0], seconds=3 * made[0].seconds)  # one bad row does not lead the fit
    assert fit(made, SELENE, names).gemm_efficiency == pytest.approx(found.gemm_efficiency, rel=0.03)


@pytest.mark.slow
def test_rows_of_one_model_are_left_out_by_layout_and_name_the_gpu():
    row = next(row for row in ROWS if row.study == "korthikanti_t5")
    works = [row.work._replace(micro_batch_size=size) for size in (1, 2, 4)]
    seconds = [1.25 * replace(row, work=work).predicted(SELENE) for work in works]
    made = [replace(row, work=work, seconds=time) for work, time in zip(works, seconds, strict=True)]
    found = calibrated(made, SELENE, "mine")
    assert len(found.left_out) == 3
    assert found.profile.error_p90 < 0.1  # 0.2 under the profile that it starts from
    assert found.profile.device is SELENE.device
    other = calibrated([replace(one, gpu="H100-80GB") for one in made], SELENE, "mine")
    assert other.profile.device.name == "H100-80GB"
    assert (other.profile.fitted_gpus, other.profile.most_gpus) == (("H100-80GB",), row.work.num_gpus)
    assert not calibrated(made, SELENE.changed(fitted_experts=True), "mine").profile.fitted_experts


@pytest.mark.parametrize("profile", profiles().values(), ids=lambda profile: profile.name)
def test_profile_says_what_it_was_fitted_on_and_survives_its_file(profile):
    assert profile.fitted_on
    assert profile.description
    assert 0 < profile.error_median <= profile.error_p90 < 1
    assert {"rows", "groups", "mean"} <= left_out_figures()[profile.name].keys()
    again = profile_from(profile.name, tomllib.loads(profile_to_toml(profile)))
    assert profile_to_toml(again) == profile_to_toml(profile)
    assert again.device is profile.device


OWN = json.loads((ROOT / "benchmarks/results/titan_rows.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.slow
@pytest.mark.parametrize("row", OWN, ids=range(len(OWN)))
def test_this_trainer_on_an_h100_and_an_h200(row):
    gpu = f"--cluster.gpu={row['gpu']}", "--cluster.gpus_per_node=1"
    config = load_config([*row["command"].split()[1:], *gpu])
    found = predict(config)
    assert found.profile.name == "titan_h100"
    # When they were measured, a step moved 52 bytes a parameter outside the layers. Now it moves 30.
    then = 22 * model_config(config.model).num_parameters() / found.profile.memory_rate
    assert found.time.total + then == pytest.approx(row["step_time_s"], rel=0.05)
    assert sum(found.memory.ranks[0][:5]) == pytest.approx(row["peak_memory_bytes"], rel=0.11)
    assert ("host-bound: issuing a step's work takes" in describe(found)) == found.is_host_bound


def test_unknown_and_missing_keys_of_a_profile_are_refused():
    table = {"device": "A100", "gpus_per_node": 8, "node_bandwidth": 1e11, "gemm_eficiency": 0.8}
    with pytest.raises(ConfigError, match=r"profile mine: gemm_eficiency = 0\.8: .*did you mean gemm_efficiency\?"):
        profile_from("mine", table)
    with pytest.raises(ConfigError, match=r"profile mine: groups = 3: unknown field; [^,]*profile\.py .*planner\.md"):
        profile_from("mine", {"device": "A100", "gpus_per_node": 8, "node_bandwidth": 1e11, "groups": 3})
    with pytest.raises(ConfigError, match="node_bandwidth"):
        profile_from("mine", {"device": "A100", "gpus_per_node": 8})


@pytest.mark.slow
def test_missing_points_are_one_sentence():
    command = [sys.executable, str(ROOT / "benchmarks/planner_accuracy.py"), "--points", "no.csv"]
    missing = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_page_s_table_is_what_the_planner_says():
    page = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
    for row in (row for row in ROWS if row.study == "ptdp_table1"):
        found = predict_row(row)
        line = next(line for line in page.splitlines() if line.startswith(f"| {row.model.removeprefix('GPT-')} |"))
        assert f"{row.seconds:.2f} s | {found.seconds:.2f} s | {100 * found.error:+.1f} %" in line
