"""Devices that a user describes, and the trainer's line about its own steps."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.launch import base_config
from titan_like.config import ConfigError
from titan_like.models.registry import model_config
from titan_like.parallel.layout import resolve_layout
from titan_like.planner.forecast import MEASURED, WARM_UP, StepForecast, step_forecast
from titan_like.planner.predict import predict
from titan_like.planner.profile import load_profile, profile_to_toml
from titan_like.planner.stages import pipeline_program
from titan_like.train.job import process_group
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer

OWN = """
device = "NPU-9"
gpus_per_node = 4
node_bandwidth = 5e10
error_p90 = 0.25
[device_table]
memory_gib = 48
memory_bandwidth = 1000
nvlink = 100
multiprocessors = 64
tensor_element = 8
peak = { bfloat16 = 200, float32 = 20 }
"""
SLOW_CPU = (
    OWN.replace("NPU-9", 'CPU"\ndtype = "float32')
    .replace("48", "16\nis_cpu = true")
    .replace("{ bfloat16 = 200, float32 = 20 }", "{ float32 = 0.05 }")
)


def write(folder: Path, text: str) -> str:
    path = folder / "own.toml"
    path.write_text(text)
    return str(path)


def test_device_of_the_user_is_predicted_without_naming_a_gpu(tmp_path):
    config = base_config(tmp_path / "none", {"cluster.profile": write(tmp_path, OWN), "training.dtype": "bfloat16"})
    found = predict(config)
    assert found.profile.device.name == "NPU-9"
    assert found.memory.capacity == 48 * 2**30
    assert found.seconds_high == pytest.approx(found.time.total / (1 - 0.25))
    half = OWN.replace("200", "100").replace("= 1000", "= 500")
    slower = predict(config, load_profile(write(tmp_path, half)))
    assert slower.time.compute == pytest.approx(2 * found.time.compute, rel=0.01)


def test_profile_s_own_device_is_not_replaced_by_the_cluster_s_gpu(tmp_path):
    settings = {"cluster.profile": write(tmp_path, OWN), "cluster.gpu": "A100-80GB", "training.dtype": "bfloat16"}
    assert predict(base_config(tmp_path / "none", settings)).profile.device.name == "NPU-9"
    shipped = settings | {"cluster.profile": "titan_h100"}
    assert predict(base_config(tmp_path / "none", shipped)).profile.device.name == "A100-80GB"


def test_profile_survives_being_written(tmp_path):
    before = load_profile(write(tmp_path, OWN))
    path = tmp_path / "again.toml"
    path.write_text(profile_to_toml(before))
    after = load_profile(str(path))
    assert profile_to_toml(after) == profile_to_toml(before)
    assert vars(after.device) == vars(before.device)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("memory_gib = 48\n", "", "device_table.memory_gib"),
        ("multiprocessors = 64", "multiprocessors = 0", "device_table.multiprocessors"),
        ("nvlink = 100", 'nvlink = "fast"', "device_table.nvlink"),
        ("nvlink = 100", "nvlink = 100\ncolour = 3", "device_table.colour"),
        ("{ bfloat16 = 200, float32 = 20 }", "200", "device_table.peak"),
        ("bfloat16 = 200", "bfloat16 = -1", "device_table.peak.bfloat16"),
        ("[device_table]", "[device_tables]", "device_tables"),
    ],
)
def test_device_that_is_not_whole_is_refused_by_name(old, new, named, tmp_path):
    with pytest.raises(ConfigError, match=named):
        load_profile(write(tmp_path, OWN.replace(old, new)))


def test_profile_of_one_process_does_not_guess_at_links(tmp_path):
    settings = {"cluster.profile": write(tmp_path, OWN.replace("5e10", "0")), "training.dtype": "bfloat16"}
    predict(base_config(tmp_path / "none", settings))
    split = settings | {"parallelism.tensor_parallel_degree": 2}
    with pytest.raises(ConfigError, match="measured with one process"):
        predict(base_config(tmp_path / "none", split))


def test_cpu_starts_operators_and_computes_one_after_the_other(tmp_path):
    config = base_config(tmp_path / "none", {})
    cpu = load_profile(write(tmp_path, SLOW_CPU))
    slower = cpu.changed(operator_time=cpu.operator_time + 1e-4)
    found = predict(config, cpu)
    segments = pipeline_program(found.work).stages[0].counts  # of the one stage, in each of 4 microbatches
    launches = sum(count * one.launches for segment, _, count in segments for one in segment.passes)
    assert predict(config, slower).time.total - found.time.total == pytest.approx(4 * launches * 1e-4)


def run(config, profile):
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"profile": profile})})
    layout = resolve_layout(config.parallelism, 1)
    return SimpleNamespace(config=config, model=model_config(config.model), layout=layout, device=torch.device("cpu"))


def record(step, seconds, memory, batch=16):
    return SimpleNamespace(step=step, step_time_s=seconds, peak_memory_bytes=memory, global_batch_size=batch)


def lines(forecast, records):
    return [line for line in map(forecast.add, records) if line is not None]


def test_trainer_compares_once_after_warm_up_and_warns_past_the_band(tmp_path):
    config, profile = base_config(tmp_path / "none", {}), write(tmp_path, SLOW_CPU)
    found = predict(config, load_profile(profile))
    seconds, memory = found.time.total, int(found.memory.ranks[0].total)

    def steps(factor, size):
        slow = [record(step, 9.0, size) for step in range(1, WARM_UP + 1)]
        return slow + [record(step, factor * seconds, size) for step in range(WARM_UP + 1, 30)]

    (line,) = lines(StepForecast(run(config, profile)), steps(1.32, memory))  # the band is 25 % of what is measured
    assert f"steps {WARM_UP + 1} to {WARM_UP + MEASURED}:" in line
    assert "(-24.2%)" in line and "(+0.0%)" in line and "WARNING" not in line
    (line,) = lines(StepForecast(run(config, profile)), steps(1.35, memory))
    assert "WARNING: the step time is outside" in line
    (line,) = lines(StepForecast(run(config, profile)), steps(1.0, int(memory / 1.2)))
    assert "WARNING: memory is more than 10% off" in line


def test_growing_batch_is_compared_where_it_stays(tmp_path):
    config, profile = base_config(tmp_path / "none", {}), write(tmp_path, SLOW_CPU)
    sizes = [8] * (WARM_UP + 2) + [16] * MEASURED
    records = [record(step, 1.0, 2**30, size) for step, size in enumerate(sizes, start=1)]
    (line,) = lines(StepForecast(run(config, profile)), records)
    assert f"steps {WARM_UP + 3} to {len(sizes)}:" in line
    assert f"{predict(config, load_profile(profile)).time.total:.4g} s predicted" in line


def test_trainer_says_nothing_of_a_cpu_without_a_profile_of_one(tmp_path):
    config = base_config(tmp_path / "none", {"cluster.gpu": "A100-80GB"})
    for profile in (None, "fsdp_a100"):
        assert lines(StepForecast(run(config, profile)), [record(step, 1.0, 1) for step in range(1, 30)]) == []


def test_trainer_goes_on_where_nothing_can_be_predicted(tmp_path, monkeypatch):
    config, profile = base_config(tmp_path / "none", {}), write(tmp_path, SLOW_CPU)
    broken = run(config, profile)
    broken.layout = replace(broken.layout, tensor=0)
    (line,) = lines(StepForecast(broken), [record(step, 1.0, 1) for step in range(1, 30)])
    assert line.startswith(" no prediction of steps: ")


def test_training_prints_the_line_once(tmp_path, capfd):
    settings = {
        "cluster.profile": write(tmp_path, SLOW_CPU),
        "training.seq_len": 32,
        "training.micro_batch_size": 1,
        "training.global_batch_size": 2,
        "training.steps": WARM_UP + MEASURED + 2,
    }
    config = base_config(tmp_path, settings)
    run = prepare_run(resolve_settings(config))
    callback = step_forecast(run)  # before there is a process group, as in train.py
    with process_group(torch.device("cpu")):
        Trainer(run, callback).train()
    out = capfd.readouterr().out
    told = [line for line in out.splitlines() if " predicted, " in line]
    assert told, out
    assert len(told) == 1
    assert told[0].startswith(f" steps {WARM_UP + 1} to {WARM_UP + MEASURED}: ")
    assert f"{predict(config).time.total:.4g} s predicted" in told[0]
