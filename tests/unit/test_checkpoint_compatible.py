"""What of a checkpoint's run has to stay as it was."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from titan_like.checkpoint.checks import check_same_run
from titan_like.checkpoint.step_folders import RunState
from titan_like.config import ConfigError, load_config
from titan_like.config.schema import JobConfig
from titan_like.models.registry import model_config


def config_of(settings: str) -> JobConfig:
    return load_config([f"--{word}" for word in ("training.steps=2", "training.seq_len=64", *settings.split())])


def saved_at(path: Path, settings: str, step: int = 1) -> Path:
    config = config_of(settings)
    shape = model_config(config.model).model_dump(mode="json")
    run = RunState(step, 8 * step, 512 * step, 0, 1.0, 0, shape, config.model_dump(mode="json"))
    (path / "run.json").write_text(json.dumps(asdict(run)))
    return path


def check(path: Path, settings: str) -> None:
    config = config_of(settings)
    check_same_run(path, config, model_config(config.model))


# Settings of the run that was saved | of the run now => what is said
OTHERS = """
| training.seq_len=128 => training.seq_len = 128: .* was saved with 64; keep that, or start a run .*: model.from = "/
model.family=t5 | model.family=t5 training.decoder_seq_len=40 => saved with 0; keep that, or start a run .*: model.from
| model.overrides.max_seq_len=2048 => was saved with 1024; that many positions are learned; keep that
| model.overrides.num_layers=2 => model.overrides.num_layers = 2: .* was saved with 4; .*another folder
model.overrides.tied_embeddings=false | model.overrides.tied_embeddings=true => tied_embeddings = true: .* with False
| model.family=llama => model.family = "llama": .* was saved with gpt; .*another folder
| optimizer.name=sgd => optimizer.name = "sgd": .* was saved with adamw; .*another folder
optimizer.name=adafactor | optimizer.name=adafactor optimizer.beta1=0.9 => optimizer.beta1 = 0.9: .* was saved with none
model.family=t5 | model.family=t5 data.noise_density=0.14 => data.noise_density = 0.14: .* was saved with 0.15
| job.seed=5 => job.seed = 5: .* was saved with 1234
""".strip().splitlines()


@pytest.mark.parametrize("case", OTHERS)
def test_another_run_is_refused(tmp_path: Path, case: str) -> None:
    settings, _, problem = case.partition(" => ")
    saved, _, now = settings.partition("|")
    with pytest.raises(ConfigError, match=problem):
        check(saved_at(tmp_path, saved), now)


@pytest.mark.parametrize(
    ("saved", "now"),
    [("", "training.steps=9"), ("optimizer.name=adafactor", "optimizer.name=adafactor optimizer.lr=1")],
)
def test_the_same_run_may_change_the_rest(tmp_path: Path, saved: str, now: str) -> None:
    check(saved_at(tmp_path, saved), now)


def test_a_shape_that_is_not_written_down_is_no_other_shape(tmp_path: Path) -> None:
    path = saved_at(tmp_path, "") / "run.json"
    numbers = json.loads(path.read_text())
    del numbers["model"]["norm_eps"]  # a newer field has its default
    path.write_text(json.dumps(numbers))
    check(tmp_path, "")


def test_kinds_of_layers_may_lack_newer_fields(tmp_path: Path) -> None:
    settings = "model.family=decoder model.flavor=debug_kinds"
    path = saved_at(tmp_path, settings) / "run.json"
    numbers = json.loads(path.read_text())
    for kind in numbers["model"]["kinds"].values():
        del kind["mixer"], kind["options"]
    path.write_text(json.dumps(numbers))
    check(tmp_path, settings)
    numbers["model"]["kinds"]["sliding"]["window"] = 32
    path.write_text(json.dumps(numbers))
    with pytest.raises(ConfigError, match=r"model\.overrides\.kinds"):
        check(tmp_path, settings)


def test_converted_weights_may_begin_any_run_of_their_model(tmp_path: Path) -> None:
    check(saved_at(tmp_path, "", step=0), "training.seq_len=128")
    with pytest.raises(ConfigError, match=r"model\.overrides\.num_layers"):
        check(tmp_path, "model.overrides.num_layers=5")
