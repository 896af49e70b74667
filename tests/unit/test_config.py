import ast
import errno
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.e2e.scripts import write_llama
from titan_like import __version__
from titan_like.config import ConfigError, JobConfig, load, load_config
from titan_like.config.load import run_command, setting
from titan_like.config.section import options_of
from titan_like.data.loading.batch_size import total_steps
from titan_like.parallel.layout import resolve_layout
from titan_like.train.rules import resolve_settings

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
    assert (config.training.steps, config.training.seq_len, config.optimizer.lr) == (9, 64, 0.5)
    assert config.training.micro_batch_size == JobConfig().training.micro_batch_size
    assert load_config(["--training.steps", "9", file]) == config


# Arguments => the value of a key
OVERRIDES = """
--training.steps 5 => training.steps = 5
--training.steps 1_000 => training.steps = 1000
--optimizer.lr=1e-3 => optimizer.lr = 1e-3
--parallelism.data_parallel_shard_degree -1 => parallelism.data_parallel_shard_degree = -1
--checkpoint.enable => checkpoint.enable = True
--training.batch_size_rampup 2 2 64 => training.batch_size_rampup = [2, 2, 64]
--optimizer.betas 0.8 0.9 => optimizer.betas = (0.8, 0.9)
--data.paths a.txt 'b c.txt' => data.paths = ["a.txt", "b c.txt"]
--data.paths '["a.txt", "b.txt"]' => data.paths = ["a.txt", "b.txt"]
--data.paths 2023 2024 => data.paths = ["2023", "2024"]
--data.paths 0.7 web 0.3 books => data.paths = [0.7, "web", 0.3, "books"]
--data.paths 0.5 web => data.paths = [0.5, "web"]
--data.paths=.5 web 1. books => data.paths = [0.5, "web", 1.0, "books"]
--data.paths 3 a b c => data.paths = ["3", "a", "b", "c"]
--data.paths '[2023,"2024"]' => data.paths = [2023.0, "2024"]
--job.description 42 => job.description = "42"
--job.dump_folder=a=b => job.dump_folder = "a=b"
--model.flavor 1.7b => model.flavor = "1.7b"
--model.overrides.num_layers 2 => model.overrides = {"num_layers": 2}
--model.overrides.tied_embeddings=false => model.overrides = {"tied_embeddings": False}
--model.flavors.a.num_layers=2 => model.flavors = {"a": {"num_layers": 2}}
--model.overrides.rope_scaling.factor 8.0 => model.overrides = {"rope_scaling": {"factor": 8.0}}
--model.overrides.qk_norm none => model.overrides = {"qk_norm": "none"}
--training.steps=3 --training.steps none => training.steps = None
--training.dtype bf16 => training.dtype = "bfloat16"
--training.dtype=FP16 => training.dtype = "float16"
--training.dtype half => training.dtype = "float16"
--training.reduce_dtype torch.bfloat16 => training.reduce_dtype = "bfloat16"
--optimizer.newton_schulz_dtype fp32 => optimizer.newton_schulz_dtype = "float32"
""".strip().splitlines()


@pytest.mark.parametrize("case", OVERRIDES)
def test_override_is_read_as_the_setting_s_type(case):
    given, _, expected = case.partition(" => ")
    key, _, text = expected.partition(" = ")
    found, value = setting(load_config(shlex.split(given)), key), ast.literal_eval(text)
    assert found == value
    assert type(found) is type(value)


def test_a_word_that_may_be_a_weight_or_a_path_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2023").mkdir()
    with pytest.raises(ConfigError, match=r'^data\.paths = .*: is "2023" a weight or an existing path\? W'):
        load_config(["--data.paths", "2023", "web"])
    assert load_config(["--data.paths", "2022", "web"]).data.paths == [2022.0, "web"]


def test_override_of_one_model_field_keeps_the_toml_s_others(tmp_path):
    file = write_toml(tmp_path, "[model.overrides]\nnum_layers = 2\nhidden_size = 64\n")
    config = load_config([file, "--model.overrides.num_layers", "3"])
    assert config.model.overrides == {"num_layers": 3, "hidden_size": 64}


# Arguments => words of the message
BAD = """
--trainin.seq_len 5 => trainin = "[table]": unknown section; did you mean training?
--seq-len 5 => did you mean training.seq_len?
--training.learning_rate 3 => training.learning_rate = 3 ; did you mean optimizer.lr?
--training.lr 3 => training.lr = 3 ; did you mean optimizer.lr?
--training.dtype int8 => training.dtype = "int8" ; 'bfloat16'
--tensor-model-parallel-size 2 => did you mean parallelism.tensor_parallel_degree?
--validation.freq 5 => validation.freq = 5 ; did you mean evaluation.interval?
--model.name=llama3 => model.name = "llama3" ; did you mean model.family?
--model.n_layer=3 => did you mean model.overrides.num_layers?
--compile => compile = true ; did you mean compile.enable?
--gradient_accumulation_steps=4 => set training.global_batch_size to this × micro_batch_size × data-parallel ranks
--config a.toml => config = "a.toml" ; --job.config_file
-c a.toml => command line = "-c" ; --job.config_file
--zzz.qqq 5 => unknown section; there are job, model
--data.qqqqqqqqqqq 5 => --help lists them
5 => command line ; --section.key value
--training.steps -3 => training.steps = -3 ; greater than 0 ; optimizer steps
--training.steps 1.5 => training.steps = 1.5 ; integer
--optimizer.lr inf => optimizer.lr = inf ; finite
--parallelism.zero_stage 4 => parallelism.zero_stage = 4 ; less than or equal to 3
--checkpoint.enable yes => checkpoint.enable = "yes" ; write true
--checkpoint.enable=1 => checkpoint.enable = 1 ; write true
training.steps=5 => command line = "training.steps=5" ; two dashes; write --training.steps=5
--job.seed=1 -training.steps 5 => "-training.steps" ; write --training.steps VALUE
--job.seed=18446744073709551616 => job.seed = 18446744073709551616 ; less than or equal to 9223372036854
""".strip().splitlines()
BAD_TOML = r"""
[zzzzzzz] => unknown section; there are job, model
training = 5 => training = 5 ; valid dictionary
[training]\nlocal_batch_size = 5 => training.local_batch_size = 5 ; did you mean training.micro_batch_size?
[training]\nsteps = "5" => training.steps = "5" ; integer
[model]\noverrides = 3 => model.overrides = 3 ; dictionary
[checkpoint]\nenable = yes # please => line 2 ; write true instead of yes
[training]\nsteps = 2026-02-30 => not valid TOML ; correct that
""".strip().splitlines()


@pytest.mark.parametrize("case", [*BAD, *BAD_TOML])
def test_bad_input_names_key_value_and_cure(tmp_path, case):
    given, _, words = case.partition(" => ")
    message = (
        problem_of(*given.split()) if case in BAD else problem_of(write_toml(tmp_path, given.replace(r"\n", "\n")))
    )
    assert all(word in message for word in words.split(" ; ")), message


def test_a_file_that_stands_alone_is_told_with_the_whole_command(monkeypatch):
    for program, command in {"train.py": "python train.py", "/bin/titan-train": "titan-train"}.items():
        for words in ("{}mine.toml", "{}mine.toml --training.steps 5", "--training.steps=5 {}'my mine.toml'"):
            argv = shlex.split(words.format(""))
            monkeypatch.setattr(sys, "argv", [program, *argv])
            assert problem_of(*argv).endswith(f": {command} {words.format('--job.config_file ')}")
        monkeypatch.setattr(sys, "argv", [program, "predict", "debug_gpt"])
        assert problem_of("debug_gpt").endswith(f": {command} predict --job.config_file debug_gpt")
    assert problem_of("a.toml").endswith("--job.config_file a.toml")  # another program's arguments


def test_version(monkeypatch, capsys):
    for argv in (["--version"], ["predict", "--version"]):
        monkeypatch.setattr(sys, "argv", ["plan.py", *argv])
        with pytest.raises(SystemExit) as stop:
            run_command(lambda _: 1)
        assert stop.value.code == 0
        # A CUDA build from PyPI does not have the toolkit's version in its own.
        versions = f"titan_like {__version__}, torch {torch.__version__.partition('+')[0]}"
        assert capsys.readouterr().out.partition("+")[0].strip() == versions


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


def test_what_follows_from_the_schema_is_up_to_date():
    root = TRAIN_CONFIGS.parent
    for name, text in runpy.run_path(str(root / "scripts" / "write_schema.py"))["written"]().items():
        assert (root / name).read_text(encoding="utf-8") == text, f"run python scripts/write_schema.py for {name}"
    page = (root / "docs" / "settings.md").read_text(encoding="utf-8")
    for name, section in JobConfig.model_fields.items():
        table = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        rows = [re.split(r" (?<!\\)\| ", row.strip("| ")) for row in table.splitlines() if row.startswith("| `")]
        assert [row[0] for row in rows] == [f"`{key}`" for key in options_of(section.annotation)]
        assert all(len(row) == 4 for row in rows)


PAPERS_GPUS = {  # of GPT in arXiv 2104.04473, Table 1
    "gpt_3.6b": 64, "gpt_7.5b": 128, "gpt_18b": 256, "gpt_39b": 512, "gpt_76b": 1024, "gpt_145b": 1536,
    "gpt_310b": 1920, "gpt_530b": 2520, "gpt_1t": 3072, "gpt3_175b": 1024, "llama3.1_70b": 256, "llama3.1_405b": 16384,
}  # fmt: skip


LARGEST = ("llama3.1_405b", "llama3.1_70b", "gpt3_175b")  # which take longest


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in LARGEST))
        for path in sorted(TRAIN_CONFIGS.glob("*.toml"))
    ],
)
def test_shipped_config_passes_its_rules_at_its_own_or_its_smallest_world_size(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if source := tomllib.loads(path.read_text(encoding="utf-8")).get("model", {}).get("from"):
        write_llama(Path(source))
    assert path.read_text(encoding="utf-8").startswith("#:schema ./schema.json\n")
    config = load_config([f"--job.config_file={path}"])
    degrees, cluster = config.parallelism, config.cluster
    world_size = math.prod(
        max(getattr(degrees, f"{axis}_degree"), 1)
        for axis in ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate",
                     "data_parallel_shard")
    )  # fmt: skip
    if cluster.nodes is not None and cluster.gpus_per_node is not None:
        world_size = cluster.nodes * cluster.gpus_per_node
    assert world_size == PAPERS_GPUS.get(path.stem, world_size)
    run = resolve_settings(config, world_size)
    assert run.layout.num_processes == world_size
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


def refuse(error, _):
    raise error


def test_a_file_that_cannot_be_opened_is_a_sentence_and_a_bug_a_traceback(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run_command(lambda _: open(tmp_path / "a.txt"))
    assert (stop.value.code, capsys.readouterr().err) == (2, f"error: {tmp_path}/a.txt: No such file or directory\n")
    with pytest.raises(FileNotFoundError):
        run_command(lambda _: open(f"{load.__file__}.x"))
    for number in (errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EIO):
        with pytest.raises(SystemExit) as stop:
            run_command(partial(refuse, OSError(number, os.strerror(number), "there/a")))
        assert (stop.value.code, capsys.readouterr().err) == (2, f"error: there/a: {os.strerror(number)}\n")


WRONG = """
steps = 3
[training]
stepz = 5
seq_len = "long"
[optimizer]
lr = true
"""
WRONG_ARGUMENTS = ["--checkpoint.enable=yes", "--job.sed=1", "training.tokens=5", "--lr_scheduler.decay=cosinus"]
WRONG_ARGUMENTS += ["--model.family=gpt", "--model.flavor=debuk", "--optimizer.name=AdamX", "--data.dataset=texts"]
WRONG_KEYS = [
    "steps = 3: unknown key; did you mean training.steps?",
    "training.stepz = 5: unknown key; did you mean training.steps?",
    'training.seq_len = "long": should be a valid integer',
    "optimizer.lr = true: should be a valid number",
    'checkpoint.enable = "yes": should be a valid boolean; write true',
    "job.sed = 1: unknown key; did you mean job.seed?",
    'command line = "training.tokens=5": a setting needs two dashes; write --training.tokens=5',
    "lr_scheduler.decay = \"cosinus\": should be 'cosine', 'linear'",
    'model.flavor = "debuk": unknown flavor of gpt; did you mean debug?',
    'optimizer.name = "AdamX": unknown name; did you mean adamw?',
    'data.dataset = "texts": unknown name; did you mean text?',
]


def test_all_wrong_keys_are_named_at_once_without_torch(tmp_path):
    file = write_toml(tmp_path, WRONG)
    rules = ["--training.steps=5", "--training.seq_len=9999", "--training.global_batch_size=5"]
    rules += ["--lr_scheduler.decay=wsd", "--lr_scheduler.decay_steps=6", "--training.reduce_dtype=bfloat16"]
    code = f"""
import runpy, sys
sys.modules["torch"] = None  # an import of it raises
for arguments in {[[file, *WRONG_ARGUMENTS], rules, ["--help"]]!r}:
    sys.argv = ["train.py", *arguments]
    try:
        runpy.run_path("train.py", run_name="__main__")
    except SystemExit as stop:
        print("ended with", stop.code, file=sys.stderr, flush=True)
"""
    root = TRAIN_CONFIGS.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    first, second, third, _ = re.split(r"ended with (?=\d)", done.stderr)
    lines = first.removeprefix("error: ").splitlines()
    for wanted in WRONG_KEYS:
        assert sum(line.strip().startswith(wanted) for line in lines) == 1, (wanted, first)
    assert len(lines) == len(WRONG_KEYS), first
    assert second.startswith("2\nerror: ")
    for key in ("training.seq_len", "training.global_batch_size", "lr_scheduler.decay_steps", "training.reduce_dtype"):
        assert len(re.findall(rf"^(?:error: |       ){key} = ", second, re.MULTILINE)) == 1, second
    assert third == "2\n"
    assert done.stderr.endswith("ended with 0\n")


@pytest.mark.parametrize(
    "key", ["job.dump_folder", "checkpoint.folder", "checkpoint.initial_load_path", "cluster.profile", "data.tokenizer"]
)
def test_paths_are_expanded(key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("RUNS", "/scratch/runs")
    monkeypatch.delenv("NOWHERE", raising=False)
    section, _, name = key.partition(".")
    paths = {"~/a": "/home/ada/a", "$RUNS/a": "/scratch/runs/a", "${RUNS}x/$HOME": "/scratch/runsx//home/ada"}
    for text, path in {**paths, "a$/~b": "a$/~b"}.items():
        assert getattr(getattr(load_config([f"--{key}={text}"]), section), name) == path
    for text, words in {"$NOWHERE/a": "variable NOWHERE, which is not set", "": "is empty", "  ": "is empty"}.items():
        message = problem_of(f"--{key}={text}")
        assert message.startswith(f'{key} = "{text}"') and words in message


def test_lists_of_paths_and_the_file_itself_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TEXTS", "/texts")
    write_toml(tmp_path, '\ufeff[data]\npaths = ["$TEXTS/*.txt", "~/b"]\ntokenizer = "gpt2:~/v.json,$TEXTS/m.txt"\n')
    config = load_config(["--job.config_file=~/run.toml"])  # which begins with a byte-order mark
    assert config.job.config_file == f"{tmp_path}/run.toml"
    assert config.data.paths == ["/texts/*.txt", f"{tmp_path}/b"]
    assert config.data.tokenizer == f"gpt2:{tmp_path}/v.json,/texts/m.txt"
    assert "variable NOWHERE, which is not set" in problem_of("--job.config_file=$NOWHERE/run.toml")
    assert "variable NOWHERE, which is not set" in problem_of("--data.paths", "a", "${NOWHERE}/b")


def test_every_number_has_a_limit():
    for name, section in JobConfig.model_json_schema()["$defs"].items():
        for key, option in section["properties"].items():
            for kind in [option, *option.get("anyOf", [])]:
                kind = kind.get("items", kind)
                if kind.get("type") == "integer" and "enum" not in kind:
                    assert {"maximum", "exclusiveMaximum"} & kind.keys(), f"{name}.{key}"


def test_configurations_of_the_package_have_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def steps_of(path):
        return load_config([f"--job.config_file={path}"]).training.steps

    shipped = tomllib.loads((TRAIN_CONFIGS / "debug_gpt.toml").read_text())["training"]["steps"]
    names = ("debug_gpt", "debug_gpt.toml", "train_configs/debug_gpt.toml", "train_configs/debug_gpt")
    assert [steps_of(name) for name in names] == 4 * [shipped]
    (tmp_path / "debug_gpt.toml").write_text("training.steps = 7")
    assert [steps_of(name) for name in names] == [7, 7, shipped, shipped]
    (tmp_path / "debug_gpt").mkdir()
    with pytest.raises(ConfigError, match='"debug_gpt": is a folder, not a file; give a readable TOML file'):
        steps_of("debug_gpt")
    with pytest.raises(ConfigError, match=r'"debug_lama": no such file; .+ a shipped one.s name, such as debug_llama'):
        steps_of("debug_lama")
    for path in ("configs/debug_gpt.toml", "quite_another.toml"):
        with pytest.raises(ConfigError, match=r"no such file; give the path of a TOML file$"):
            steps_of(path)
