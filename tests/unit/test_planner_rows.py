"""Reading measured rows: what they must say, what is guessed, what is refused."""

import csv
import json
import re
from dataclasses import replace

import pytest

from benchmarks.measured_rows import read_rows, row_from
from benchmarks.published_rows import published_rows
from benchmarks.stack_profiles import profiles
from titan_like.config import ConfigError
from titan_like.metrics.flops import model_flops_per_token
from titan_like.models.llama.config import LlamaConfig
from titan_like.planner import rows
from titan_like.planner.commands.calibrate import usable
from titan_like.planner.profile import builtin_profiles

ROWS = published_rows()
OWN = {
    "model": "m", "layers": "24", "hidden": "1024", "heads": "16", "seq": "1024", "vocab": "50257", "gpu": "A100-80GB",
    "gpus": "8", "tp": "2", "gbs": "64", "step_time_s": "1", "notes": "mine",
}  # fmt: skip


def test_rows_that_say_too_little_are_named(tmp_path):
    path = tmp_path / "points.csv"
    good = OWN | {"notes": "foundry;", "memory": 9}  # it is mem_gib
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(good))
        writer.writeheader()
        bad = [{"layers": ""}, {"step_time_s": ""}, {"gbs": "many"}, {"step_time_s": "nan"}, {"layers": "-3"}]
        writer.writerows([good, *({**good, **change} for change in bad)])
    rows, left_out = read_rows(path)
    assert len(rows) == 1
    assert rows[0].work.zero_stage == 3
    assert [line.split(":")[0] for line in left_out] == ["column memory", *(f"line {number}" for number in range(3, 8))]
    path.write_text("model,gpu,gpus,gbs,notes,gpu\nm,A100,8,8,own,H100\n")
    with pytest.raises(ConfigError, match="two columns gpu"):
        read_rows(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="has no column model"):
        read_rows(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"gpus": "0"}, "gpus = 0: should be greater than or equal to 1"),
        ({"gpus": "12", "tp": "8"}, "gpus = 12: not the product of the degrees, 8 × data 1"),
        ({"dp": "4"}, "gpus = 8: not the product of the degrees, 1 × data 4"),
        ({"tp": "0"}, "tp = 0"),
        ({"gbs": "63"}, "gbs = 63: not a multiple of 8"),
        ({"mbs": "16"}, "gbs = 64: not a multiple of 8 × microbatches of 16"),
        ({"heads": "17"}, "num_attention_heads 17 does not divide"),
        ({"tp": "8", "heads": "4"}, "tp = 8: does not divide the 4 heads"),
        ({"zero": "9"}, "zero = 9: must be 0, 1, 2, 3 or fsdp"),
        ({"recompute": "banana"}, "recompute = banana: must be one of none, full"),
        ({"step_time_s": "1e300"}, "step_time_s = 1e300"),
        ({None: ["left over"]}, "more cells than the file has columns"),
    ],
)
def test_rows_that_cannot_be_are_refused_by_column_and_value(change, problem):
    good = OWN | {"tp": "1", "notes": "foundry;"}
    assert row_from(good).work.data_parallel == 8
    with pytest.raises(ValueError, match=re.escape(problem)):
        row_from(good | change)


def test_rows_that_a_profile_cannot_predict_are_named():
    good = next(row for row in ROWS if row.study == "korthikanti_t5")
    other = replace(good, work=good.work._replace(dtype="float8"))
    kept, left_out = usable([good, replace(good, gpu="Tesla P4"), other], profiles()["selene_2021"])
    assert kept == [good]
    assert ["Tesla P4" in left_out[0], "float8" in left_out[1]] == [True] * 2


def test_rate_becomes_time_by_the_convention_that_the_notes_name():
    table = {
        "model": "GPT-145.6B", "layers": "80", "hidden": "12288", "heads": "96", "seq": "2048", "vocab": "51200",
        "gpu": "A100-80GB", "gpus": "1536", "tp": "8", "pp": "8", "vp": "2", "mbs": "2", "gbs": "2304",
        "tflops_per_gpu": "148", "notes": "ptdp_table1; tf=hw96",
    }  # fmt: skip
    flops = 96 * 2304 * 2048 * 80 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 80 * 12288))
    assert row_from(table).seconds == pytest.approx(flops / (1536 * 148e12), rel=1e-9)


def test_runs_of_this_trainer_are_read_from_their_commands(tmp_path):
    path = tmp_path / "peers.json"
    batch = "--training.seq_len=256 --training.micro_batch_size=2 --training.global_batch_size=4"
    run = {"command": f"python peers.py worker ours --model.family=llama {batch} --compile.enable=true"}
    cases = [
        run | {"side": "ours", "tokens_per_second": 2048},
        run | {"step_time_s": 0.5, "gpus": 2},
        run | {"side": "other", "tokens_per_second": 1},
        run | {"problem": "not run"},
        run,
        run | {"tokens_per_second": 0},
        {"command": "train.py --model.familly=gpt", "tokens_per_second": 1},
        {"tokens_per_second": 1},
        run | {"model": "mine", "tflops_per_gpu": 100, "gpus": 2, "source": "a run"},
    ]
    path.write_text(json.dumps({"machine": {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.13"}, "cases": cases}))
    found, left_out = rows.read_rows(path)
    rate = found.pop()
    assert [(row.seconds, row.work.num_gpus, row.work.microbatches) for row in found] == [(0.5, 1, 2), (0.5, 2, 1)]
    assert (rate.model, rate.source) == ("mine", "a run")
    assert rate.seconds == pytest.approx(model_flops_per_token(rate.work.model, 256) * 4 * 256 / 2e14)
    assert found[0].adapted(builtin_profiles()["fsdp_a100"]).device.name == "H100-80GB"
    assert found[0].work.compiled
    assert type(found[0].work.model) is LlamaConfig
    assert "PyTorch 2.13" in found[0].source
    assert [line.split(":")[0] for line in left_out] == ["row 3", "row 4", "row 5", "row 6"]
    assert "tokens_per_second" in left_out[0]
    path.write_text('{"runs": []}')
    with pytest.raises(ConfigError, match="no list of rows"):
        rows.read_rows(path)
    with pytest.raises(ConfigError, match=r"planner_accuracy\.py --points .* JSON file"):
        rows.read_rows(tmp_path / "points.csv")
