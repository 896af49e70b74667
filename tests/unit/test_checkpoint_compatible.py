"""What of a checkpoint's run has to stay as it was."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from titan_like.checkpoint.checks import check_same_run
from titan_like.checkpoint.step_folders import RunState
from titan_like.config import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.models.registry import model_config


def config(optimizer=None, **training):
    sections = {"training": {"steps": 2, "seq_len": 64} | training, "optimizer": optimizer or {}}
    return JobConfig.model_validate(sections)


def saved_at(path, step, optimizer=None):
    saved, shape = config(optimizer), model_config(config().model).model_dump(mode="json")
    run = RunState(step, 8 * step, 512 * step, 0, 1.0, 0, shape, saved.model_dump(mode="json"))
    (path / "run.json").write_text(json.dumps(asdict(run)))
    return path


def test_sample_length_stays_once_samples_are_counted(tmp_path):
    model = model_config(config().model)
    with pytest.raises(ConfigError, match=r"training\.seq_len = 128: .* was saved with 64"):
        check_same_run(saved_at(tmp_path, step=1), config(seq_len=128), model)
    check_same_run(saved_at(tmp_path, step=1), config(steps=9), model)


def test_the_optimizer_keeps_what_its_state_holds(tmp_path):
    model, saved = model_config(config().model), saved_at(tmp_path, step=1, optimizer={"name": "adafactor"})
    check_same_run(saved, config({"name": "adafactor", "lr": 1.0}), model)
    with pytest.raises(ConfigError, match=r"optimizer\.beta1 = 0.9: .* was saved with none"):
        check_same_run(saved, config({"name": "adafactor", "beta1": 0.9}), model)


def test_a_shape_that_is_not_written_down_is_no_other_shape(tmp_path):
    path = saved_at(tmp_path, step=1) / "run.json"
    numbers = json.loads(path.read_text())
    del numbers["model"]["norm_eps"]  # a newer field has its default
    path.write_text(json.dumps(numbers))
    check_same_run(tmp_path, config(), model_config(config().model))


def test_converted_weights_may_begin_any_run(tmp_path):
    model = model_config(config().model)
    check_same_run(saved_at(tmp_path, step=0), config(seq_len=128), model)
    other = model.model_copy(update={"num_layers": model.num_layers + 1})
    with pytest.raises(ConfigError, match=r"model\.overrides\.num_layers"):
        check_same_run(saved_at(tmp_path, step=0), config(seq_len=128), other)
