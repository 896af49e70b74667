import re
from pathlib import Path

import pytest

from titan_like.config import ConfigError, JobConfig, load_config
from titan_like.config.help import json_schema
from titan_like.config.rules import check_rules
from titan_like.models.registry import model_config
from titan_like.parallel.layout import resolve_layout
from titan_like.train.batch_size import total_steps

TRAIN_CONFIGS = Path(__file__).parents[2] / "train_configs"


def write_toml(folder, text):
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return f"--job.config_file={path}"


def problem_of(*argv):
    with pytest.raises(ConfigError) as error:
        load_config(list(argv))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_command_line_beats_toml_beats_default(tmp_path):
    file = write_toml(tmp_path, "[training]\nsteps = 7\nseq_len = 64\n[optimizer]\nlr = 0.5\n")
    config = load_config([file, "--training.steps", "9"])
    assert config.training.steps == 9
    assert config.training.seq_len == 64
    assert config.optimizer.lr == 0.5
    assert config.training.micro_batch_size == JobConfig().training.micro_batch_size


def test_order_of_file_and_overrides_does_not_matter(tmp_path):
    file = write_toml(tmp_path, "[training]\nsteps = 7\n")
    assert load_config(["--training.steps", "9", file]) == load_config([file, "--training.steps", "9"])


@pytest.mark.parametrize(
    ("argv", "section", "key", "value"),
    [
        (["--training.steps", "5"], "training", "steps", 5),
        (["--training.steps=5"], "training", "steps", 5),
        (["--training.steps", "1_000"], "training", "steps", 1000),
        (["--training.steps", "5", "--training.steps", "6"], "training", "steps", 6),
        (["--optimizer.lr", "3"], "optimizer", "lr", 3.0),
        (["--optimizer.lr=1e-3"], "optimizer", "lr", 1e-3),
        (["--parallelism.data_parallel_shard_degree", "-1"], "parallelism", "data_parallel_shard_degree", -1),
        (["--parallelism.data_parallel_shard_degree=-1"], "parallelism", "data_parallel_shard_degree", -1),
        (["--checkpoint.enable"], "checkpoint", "enable", True),
        (["--checkpoint.enable", "false"], "checkpoint", "enable", False),
        (["--training.batch_size_rampup", "2", "2", "64"], "training", "batch_size_rampup", [2, 2, 64]),
        (["--training.batch_size_rampup=[2, 2, 64]"], "training", "batch_size_rampup", [2, 2, 64]),
        (["--optimizer.betas", "0.8", "0.9"], "optimizer", "betas", (0.8, 0.9)),
        (["--data.paths", "a.txt", "b c.txt"], "data", "paths", ["a.txt", "b c.txt"]),
        (["--data.paths=a.txt"], "data", "paths", ["a.txt"]),
        (["--data.paths", '["a.txt", "b.txt"]'], "data", "paths", ["a.txt", "b.txt"]),
        (["--data.split", "8,1,1"], "data", "split", "8,1,1"),
        (["--job.description", "42"], "job", "description", "42"),
        (["--job.dump_folder=a=b"], "job", "dump_folder", "a=b"),
        (["--model.flavor", "1.7b"], "model", "flavor", "1.7b"),
        (["--lr_scheduler.decay", "wsd"], "lr_scheduler", "decay", "wsd"),
        (["--model.overrides.num_layers", "2"], "model", "overrides", {"num_layers": 2}),
        (["--model.overrides.tied_embeddings=false"], "model", "overrides", {"tied_embeddings": False}),
        (["--model.overrides", "{num_layers = 2}"], "model", "overrides", {"num_layers": 2}),
        (["--model.flavors.a.num_layers=2"], "model", "flavors", {"a": {"num_layers": 2}}),
        (
            ["--model.overrides.rope_scaling.factor", "8.0"],
            "model",
            "overrides",
            {"rope_scaling": {"factor": 8.0}},
        ),
    ],
)
def test_override_is_read_as_the_setting_s_type(argv, section, key, value):
    found = getattr(getattr(load_config(argv), section), key)
    assert found == value
    assert type(found) is type(value)


def test_override_of_one_model_field_keeps_the_toml_s_others(tmp_path):
    file = write_toml(tmp_path, "[model.overrides]\nnum_layers = 2\nhidden_size = 64\n")
    config = load_config([file, "--model.overrides.num_layers", "3"])
    assert config.model.overrides == {"num_layers": 3, "hidden_size": 64}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--training.step", "5"], ["--training.step = ", '"5"', "did you mean training.steps?"]),
        (["--trainin.seq_len", "5"], ["did you mean training.seq_len?"]),
        (["--seq_len", "5"], ["did you mean training.seq_len?"]),
        (["--zzz.qqq", "5"], ["--help lists every key"]),
        (["5"], ["command line", "--section.key value"]),
        (["--training.steps", "-3"], ["training.steps = -3", "greater than 0", "optimizer steps"]),
        (["--training.steps", "x"], ["training.steps = ", '"x"', "valid integer"]),
        (["--training.steps", "1.5"], ["training.steps = 1.5", "integer"]),
        (["--training.steps", "true"], ["training.steps = true", "integer"]),
        (["--optimizer.lr", "inf"], ["optimizer.lr = inf", "finite"]),
        (["--training.batch_size_rampup", "1", "2", "x"], ["training.batch_size_rampup", "integer"]),
        (["--model.family", "gtp"], ["model.family", "gtp", "'gpt' or 'llama'"]),
        (["--parallelism.zero_stage", "4"], ["parallelism.zero_stage = 4", "0, 1, 2 or 3"]),
        (["--model.overrides", "3"], ["model.overrides = 3", "dictionary"]),
        (["--model.overrides=3", "--model.overrides.num_layers=2"], ["model.overrides = 3", "table"]),
    ],
)
def test_bad_override_names_key_value_and_cure(argv, words):
    message = problem_of(*argv)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[training]\nstep = 5\n", ["training.step = 5", "did you mean training.steps?"]),
        ("[optimiser]\nlr = 1.0\n", ["optimiser", "unknown section", "did you mean [optimizer]?"]),
        ("[zzzzzzz]\n", ["unknown section", "the sections are job, model"]),
        ("training = 5\n", ["training = 5", "write [training] above its keys"]),
        ("[[training]]\nsteps = 5\n", ["training", "must be a table"]),
        ('[training]\nsteps = "5"\n', ["training.steps = ", '"5"', "integer"]),
        ("[optimizer]\nlr = true\n", ["optimizer.lr = true", "number"]),
        ("[model]\noverrides = 3\n", ["model.overrides = 3", "dictionary"]),
    ],
)
def test_bad_toml_names_key_value_and_cure(tmp_path, toml, words):
    message = problem_of(write_toml(tmp_path, toml))
    for word in words:
        assert word in message


def test_help_lists_every_key_with_its_default_and_meaning(capsys):
    with pytest.raises(SystemExit) as stop:
        load_config(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    listed = set(re.findall(r"^  --(\S+)  ", text, re.MULTILINE))
    schema = JobConfig.model_json_schema()
    definitions = schema["$defs"]
    expected = {
        f"{section}.{key}"
        for section, field in schema["properties"].items()
        for key in definitions[field["$ref"].rpartition("/")[2]]["properties"]
    }
    assert listed == expected
    assert len(expected) > 50
    assert '--lr_scheduler.decay  "cosine" | "linear" | "constant" | "inverse_sqrt" | "wsd", default "cosine"' in text
    assert "--optimizer.lr  number, default 0.0003\n      peak learning rate" in text


def test_every_key_has_a_description():
    for section in JobConfig.model_json_schema()["$defs"].values():
        for key, option in section["properties"].items():
            assert option.get("description"), key


def test_json_schema_file_is_up_to_date():
    assert (TRAIN_CONFIGS / "schema.json").read_text(encoding="utf-8") == json_schema(JobConfig)


@pytest.mark.parametrize("path", sorted(TRAIN_CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_config_passes_its_rules_at_its_smallest_world_size(path):
    assert path.read_text(encoding="utf-8").startswith("#:schema ./schema.json\n")
    config = load_config([f"--job.config_file={path}"])
    degrees = config.parallelism
    world_size = (
        degrees.tensor_parallel_degree
        * degrees.pipeline_parallel_degree
        * degrees.context_parallel_degree
        * degrees.data_parallel_replicate_degree
        * max(degrees.data_parallel_shard_degree, 1)
    )
    layout = resolve_layout(degrees, world_size)
    try:
        check_rules(config, model_config(config.model), layout)
    except ConfigError as error:
        if "not available yet" in str(error):
            pytest.skip(str(error))
        raise
    assert total_steps(config.training) > 0


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ([], 8, (1, 1, 8, 1, 1)),
        (["data_parallel_replicate_degree=2"], 8, (1, 2, 4, 1, 1)),
        (["data_parallel_shard_degree=8"], 8, (1, 1, 8, 1, 1)),
        (["tensor_parallel_degree=2", "pipeline_parallel_degree=2", "context_parallel_degree=2"], 32, (2, 1, 4, 2, 2)),
    ],
)
def test_shard_degree_takes_what_the_other_degrees_leave(overrides, world_size, expected):
    parallelism = load_config([f"--parallelism.{override}" for override in overrides]).parallelism
    layout = resolve_layout(parallelism, world_size)
    assert (layout.pipeline, layout.replicate, layout.shard, layout.context, layout.tensor) == expected
    assert layout.data_parallel == expected[1] * expected[2]


def test_none_on_the_command_line_unsets_what_the_file_sets(tmp_path):
    (tmp_path / "run.toml").write_text("[training]\nsteps = 5\n")
    argv = [f"--job.config_file={tmp_path}/run.toml", "--training.steps", "none", "--training.tokens=4096"]
    training = load_config(argv).training
    assert (training.steps, training.tokens) == (None, 4096)
