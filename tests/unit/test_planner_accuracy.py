import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.accuracy import Prediction, accuracy, predict_row, profile_for_group, rank_correlation, sweeps
from benchmarks.fit_profiles import left_out_predictions
from benchmarks.measured_rows import read_rows
from benchmarks.profile_recipes import RECIPES
from benchmarks.published_rows import published_rows
from tests.unit.planner_cases import flavor
from titan_like.config import ConfigError, load_config
from titan_like.config.schema import ActivationCheckpoint
from titan_like.metrics.devices import find_device
from titan_like.metrics.flops import hardware_flops_per_token
from titan_like.models.registry import flavors
from titan_like.models.t5.config import T5Config
from titan_like.planner.commands.calibrate import calibrated, fit, leave_one_group_out, log_errors
from titan_like.planner.commands.duration import duration
from titan_like.planner.commands.predict import describe
from titan_like.planner.predict import default_profile, predict
from titan_like.planner.profile import builtin_profiles, load_profile, profile_from, profile_to_toml
from titan_like.planner.step_time import step_time

ROOT = Path(__file__).parents[2]
ROWS = published_rows()


@cache
def groups():
    """The rows' groups by name, predicted."""
    return {group.name: group for group in accuracy([p for p in map(predict_row, ROWS) if p is not None])}


def test_every_published_row_has_a_profile():
    assert all(predict_row(row) is not None for row in ROWS)


def test_ptd_p_table_1_which_no_profile_was_fitted_on():
    found = groups()["A100-80GB ptdp_table1"]
    assert found.n == 10
    assert found.median <= 0.03
    assert found.largest <= 0.06
    sources = [source for profile in builtin_profiles().values() for source in profile.fitted_on]
    assert sources
    assert not any("Table 1" in source or "run_table_1" in source for source in sources)


@pytest.mark.parametrize(
    ("group", "largest"),
    [("A100-80GB korthikanti_t5", 0.04), ("A100-80GB bloom", 0.11), ("A100-80GB production", 0.05)],
)
def test_other_published_rows(group, largest):
    assert groups()[group].largest <= largest


def test_rows_of_bloom_s_chronicle():
    found = groups()["A100-80GB bloom"]
    assert found.median <= 0.04
    assert found.memory_median <= 0.05
    assert found.memory_p90 <= 0.1
    (sweep,) = found.sweeps
    assert sweep.layouts == 3
    assert sweep.regret <= 0.02


def test_runs_that_were_out_of_memory_are_not_predicted_to_fit():
    failed = [row for row in ROWS if row.out_of_memory]
    assert len(failed) == 7
    assert not any(predict_row(row).fits for row in failed)
    for group in groups().values():
        assert group.wrongly_fits == 0
        assert group.wrongly_too_large == 0


def test_runs_on_16_gb_beside_those_that_were_out_of_memory():
    # bigscience experiments/tr3m-1B3.md, "16GB node": (pipeline, micro-batch, GB on the first node).
    base = next(row for row in ROWS if row.gpu == "V100-16GB")
    for pipeline, micro, first in [(2, 1, 11), (2, 2, 12), (2, 4, 13), (4, 1, 9), (4, 4, 11), (8, 1, 9), (8, 4, 11)]:
        work = base.work._replace(pipeline=pipeline, shard=8 // pipeline, micro_batch_size=micro)
        found = predict_row(replace(base, work=work))
        assert found.memory_gib == pytest.approx(first, rel=0.1)
        assert found.largest_gib < 16.5


def test_zero_3_rows_of_ptd_p_table_2_lose_to_its_pipeline_rows_as_measured():
    by_stack = {}
    for row in ROWS:
        if row.study == "ptdp_table2":
            by_stack.setdefault((row.model, row.work.zero_stage), []).append(predict_row(row).seconds * row.gpus)
    sharded = [model for model, zero in by_stack if zero == 3]
    assert len(sharded) >= 1
    for model in sharded:
        assert max(by_stack[model, 3]) > 2 * max(by_stack[model, 0])  # GPU seconds a batch


def test_days_of_the_paper_s_example():
    found = duration(flavor("gpt", "gpt3_175b"), 2048, 300e9, 1024, 140, ActivationCheckpoint(mode="full"))
    assert found.days_by_formula == pytest.approx(34, abs=0.5)
    assert found.days_exact == pytest.approx(34, rel=0.03)


def test_spearman_and_regret():
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [1, 1, 2]) == pytest.approx(1)
    rows = [row for row in ROWS if row.study == "ptdp_table2" and row.work.zero_stage == 0 and "174" in row.model][:1]
    layouts = [(1, 10.0, 9.0), (2, 8.0, 10.0), (4, 9.0, 8.0)]  # micro-batch, measured, predicted seconds
    members = []
    for micro, measured, predicted in layouts:
        row = rows[0]
        work = row.work._replace(micro_batch_size=micro)
        changed = type(row)(**{**row.__dict__, "work": work, "seconds": measured})
        members.append(Prediction(changed, "", predicted, 0, 80))
    (sweep,) = sweeps(members)
    assert sweep.layouts == 3
    assert sweep.regret == pytest.approx(9 / 8 - 1)
    assert sweep.rank_correlation == pytest.approx(-0.5)


def test_sessions_are_not_compared_with_each_other():
    row = next(row for row in ROWS if row.study == "bloom")
    members = [
        Prediction(
            replace(row, work=row.work._replace(micro_batch_size=micro), notes=f"bloom 02-2{day}; x"), "", 1.0, 0, 80
        )
        for micro in (1, 2, 4)
        for day in (4, 5)
    ]
    assert [sweep.layouts for sweep in sweeps(members)] == [3, 3]
    assert sweeps(members[:4]) == []
    again = replace(members[0].row, seconds=2 * row.seconds)
    assert sweeps([*members, replace(members[0], row=again)])[0].noise == pytest.approx(1)


def test_rows_are_predicted_on_their_own_gpu():
    profile = builtin_profiles()["fsdp_a100"]
    row = next(row for row in ROWS if row.gpu == "A100-40GB")
    assert row.adapted(profile).device.memory_bandwidth == 1555e9
    assert predict_row(row).capacity_gib == 40
    assert replace(row, notes="foundry; gpu memory size not stated").adapted(profile).device is profile.device
    assert replace(row, notes="foundry; 400 Gbps").adapted(profile).node_bandwidth == 50e9
    assert replace(row, notes="torchtitan; fp8 rowwise asyncTP").adapted(profile).tensor_exposed == 0.7


def test_fit_finds_constants_that_made_the_rows():
    start = builtin_profiles()["selene_2021"]
    truth = start.changed(gemm_efficiency=start.gemm_efficiency * 1.08, nvlink_efficiency=0.68)
    rows = [row for row in ROWS if row.study in ("korthikanti_t5", "tf=hw96")]
    made = [type(row)(**{**row.__dict__, "seconds": step_time(row.work, truth).total}) for row in rows]
    names = ("gemm_efficiency", "nvlink_efficiency")
    found = fit(made, start, names)
    # The priors hold it back a little.
    assert found.gemm_efficiency == pytest.approx(truth.gemm_efficiency, rel=0.02)
    assert found.nvlink_efficiency < start.nvlink_efficiency
    assert np.abs(log_errors(made, found)).max() < 0.01 < np.abs(log_errors(made, start)).max()
    left_out = leave_one_group_out(made, start, names, lambda row: row.model)
    assert sum(len(rows) for _, rows in left_out.values()) == len(made)
    assert max(np.abs(log_errors(rows, profile)).max() for profile, rows in left_out.values()) < 0.02


@pytest.mark.slow
def test_a_calibrated_profile_is_of_the_rows_gpu():
    rows = [row for row in ROWS if row.study in ("korthikanti_t5", "tf=hw96")]
    start = builtin_profiles()["selene_2021"]
    assert calibrated([replace(row, gpu="H100-80GB") for row in rows], start, "mine").profile.device.name == "H100-80GB"
    unknown = calibrated([replace(row, gpu="NPU-9") for row in rows], start, "mine").profile
    assert unknown.device is start.device
    assert unknown.judged == {}


def test_rows_of_one_model_are_left_out_by_layout():
    start = builtin_profiles()["selene_2021"]
    row = next(row for row in ROWS if row.study == "korthikanti_t5")
    works = [row.work._replace(micro_batch_size=size) for size in (1, 2, 4)]
    made = [replace(row, work=work, seconds=1.25 * step_time(work, start).total) for work in works]
    found = calibrated(made, start, "mine")
    assert len(found.left_out) == 3
    assert found.profile.error_p90 < 0.1  # 0.2 under the profile that it starts from


def test_one_bad_row_does_not_lead_the_fit():
    start = builtin_profiles()["selene_2021"]
    rows = [row for row in ROWS if row.study in ("korthikanti_t5", "tf=hw96")]
    made = [type(row)(**{**row.__dict__, "seconds": step_time(row.work, start).total}) for row in rows]
    made[0] = type(made[0])(**{**made[0].__dict__, "seconds": 3 * made[0].seconds})
    found = fit(made, start, ("gemm_efficiency",))
    assert found.gemm_efficiency == pytest.approx(start.gemm_efficiency, rel=0.03)


@pytest.mark.parametrize("profile", builtin_profiles().values(), ids=lambda profile: profile.name)
def test_profile_says_what_it_was_fitted_on_and_survives_its_file(profile):
    import tomllib

    assert profile.fitted_on
    assert profile.description
    assert 0 < profile.error_median <= profile.error_p90 < 1
    again = profile_from(profile.name, tomllib.loads(profile_to_toml(profile)))
    assert again.groups == profile.groups
    assert again.judged == pytest.approx(profile.judged, rel=1e-3)
    assert {"rows", "groups", "mean"} <= profile.judged.keys()
    assert again.gemm_efficiency == pytest.approx(profile.gemm_efficiency, rel=1e-3)
    assert again.device is profile.device


def test_profile_of_a_row_is_the_most_special_one():
    assert profile_for_group("A100-80GB", "ptdp_table2", 0).name == "selene_2021"
    assert profile_for_group("A100-80GB", "ptdp_table2", 3).name == "selene_2021_zero3"
    assert profile_for_group("V100-32GB (DGX-2)", "tf=hw96", 0).name == "dgx2_v100"
    assert profile_for_group("A100-80GB", "unheard_of", 0) is None
    assert profile_for_group("A100-80GB", "bloom", 1, "bloom 02-21").name == "jean_zay_a100_early"
    assert profile_for_group("A100-80GB", "bloom", 1, "bloom 02-25").name == "jean_zay_a100"


def test_row_of_a_type_that_the_gpu_lacks_is_not_predicted():
    row = next(row for row in ROWS if row.study == "bloom")
    assert predict_row(type(row)(**{**row.__dict__, "work": row.work._replace(dtype="float8")})) is None


OWN_ROWS, OWN_LEFT_OUT = read_rows(ROOT / "benchmarks/results/titan_h100_rows.json")


def test_this_trainer_on_an_h100():
    profile = profile_for_group("H100-80GB", "titan_like")
    assert default_profile(find_device("NVIDIA H100 80GB HBM3")).name == profile.name == "titan_h100"
    assert len(OWN_ROWS) == profile.judged["rows"] == 5
    assert not OWN_LEFT_OUT
    assert max(abs(predict_row(row).error) for row in OWN_ROWS) <= 0.05
    recipe = RECIPES["titan_h100"]
    groups = left_out_predictions(OWN_ROWS, recipe.begin("titan_h100"), recipe)
    held = [prediction.error for found in groups.values() for prediction in found]
    assert np.quantile(np.abs(held), 0.9) == pytest.approx(profile.error_p90, rel=1e-2)


@pytest.mark.parametrize(("row", "is_host_bound"), [(0, True), (1, False), (3, False), (4, False)])
def test_what_the_host_binds_is_told(row, is_host_bound):
    cases = json.loads((ROOT / "benchmarks/results/titan_h100_rows.json").read_text(encoding="utf-8"))["cases"]
    found = predict(
        load_config([*cases[row]["command"].split()[1:], "--cluster.gpu=H100", "--cluster.gpus_per_node=1"])
    )
    assert found.profile.name == "titan_h100"
    assert found.time.total == pytest.approx(OWN_ROWS[row].seconds, rel=0.05)
    assert found.is_host_bound == is_host_bound
    assert ("host-bound: issuing a step's work takes" in describe(found)) == is_host_bound


def test_unknown_key_in_a_profile_is_refused():
    table = {"device": "A100", "gpus_per_node": 8, "node_bandwidth": 1e11, "gemm_eficiency": 0.8}
    with pytest.raises(ConfigError, match="gemm_eficiency"):
        profile_from("mine", table)
    with pytest.raises(ConfigError, match="node_bandwidth"):
        profile_from("mine", {"device": "A100", "gpus_per_node": 8})


def test_a_profile_s_texts_come_back_as_they_were(tmp_path):
    text = 'two\nlines, "quoted", a \\ and \x7f'
    profile = builtin_profiles()["selene_2021"].changed(description=text, judged={"a key": 1.0})
    path = tmp_path / "mine.toml"
    path.write_text(profile_to_toml(profile))
    assert load_profile(str(path)).description == text
    assert load_profile(str(path)).judged == {"a key": 1.0}


def test_missing_points_are_one_sentence():
    command = [sys.executable, str(ROOT / "benchmarks/planner_accuracy.py"), "--points", "no.csv"]
    missing = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1


def test_the_page_s_table_is_what_the_planner_says():
    page = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
    rows = [row for row in ROWS if row.study == "ptdp_table1"]
    assert len(rows) == 10
    for row in rows:
        found = predict_row(row)
        line = next(line for line in page.splitlines() if line.startswith(f"| {row.model.removeprefix('GPT-')} |"))
        assert f"{row.seconds:.2f} s | {found.seconds:.2f} s | {100 * found.error:+.1f} %" in line


def test_duration_counts_the_decoder():
    model, recompute = T5Config.model_validate(flavors("t5")["220m"]), ActivationCheckpoint(mode="none")
    for decoder in (114, 512):
        found = duration(model, 512, 1e12, 8, 100.0, recompute, decoder_seq_len=decoder)
        flops = hardware_flops_per_token(model, 512, recompute, decoder)
        assert found.days_exact == pytest.approx(1e12 * flops / (8 * 100e12) / 86400)
