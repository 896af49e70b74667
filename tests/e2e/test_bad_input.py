"""Wrong input ends a run with exit code 2 and one sentence that names the key, the value and the cure."""

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.scripts import Script

REPO = Path(__file__).parents[2]
TOML = """
[job]
dump_folder = "{tmp}/out"
[model.overrides]
num_layers = 1
hidden_size = 32
[data]
dataset = "text"
paths = ["{tmp}/text.txt"]
split = "8,2,0"
[training]
seq_len = 16
micro_batch_size = 2
global_batch_size = 4
{length}
"""
STEPS = "--training.steps=5"

# (command-line settings, words that the message must contain); {tmp} is the test's folder
OVERRIDES = {
    "unknown key": ([STEPS, "--training.step=5"], ["--training.step", '"5"', "did you mean training.steps?"]),
    "unknown section": ([STEPS, "--optimiser.lr=1"], ["--optimiser.lr", '"1"', "did you mean optimizer.lr?"]),
    "two TOMLs": (["--job.config_file", "a.toml", "b.toml"], ["job.config_file", "a.toml", "path of one TOML file"]),
    "no TOML": ([STEPS, "--job.config_file"], ["job.config_file = true", "path of one TOML file"]),
    "text for a number": (["--training.steps=many"], ["training.steps", '"many"', "valid integer"]),
    "bool for a number": (["--training.steps=true"], ["training.steps = true", "valid integer"]),
    "number for a bool": ([STEPS, "--checkpoint.enable=2"], ["checkpoint.enable = 2", "valid boolean"]),
    "unknown choice": ([STEPS, "--training.dtype=int8"], ["training.dtype", '"int8"', "'bfloat16'"]),
    "negative lr": ([STEPS, "--optimizer.lr", "-0.1"], ["optimizer.lr = -0.1", "greater than 0"]),
    "NaN lr": ([STEPS, "--optimizer.lr=nan"], ["optimizer.lr = nan", "finite number"]),
    "unknown flavor": ([STEPS, "--model.flavor=gpt2_124"], ["model.flavor", '"gpt2_124"', "did you mean gpt2_124m?"]),
    "unknown override": (
        [STEPS, "--model.overrides.layers=2"],
        ["model.overrides.layers = 2", "unknown field", "did you mean num_layers?"],
    ),
    "indivisible heads": (
        [STEPS, "--model.overrides.num_attention_heads=5"],
        ["num_attention_heads 5 does not divide hidden_size 32", "choose a divisor"],
    ),
    "no length": ([], ["training.steps | samples | tokens = (not set)", "set exactly one"]),
    "two lengths": ([STEPS, "--training.tokens=999"], ["'steps': 5, 'tokens': 999", "set exactly one"]),
    "less than one batch": (["--training.tokens=63"], ["training.tokens = 63", "give at least 64"]),
    "indivisible batch": (
        [STEPS, "--training.global_batch_size=5"],
        ["training.global_batch_size = 5", "2 × 1 = 2", "use a multiple such as 4 or 6"],
    ),
    "long sequence": (
        [STEPS, "--training.seq_len=1025"],
        ["training.seq_len = 1025", "max_seq_len is 1024", "model.overrides.max_seq_len"],
    ),
    "long decay": (
        [STEPS, "--lr_scheduler.decay=wsd", "--lr_scheduler.decay_steps=6"],
        ["lr_scheduler.decay_steps = 6", "does not fit the 5", "use at most 5"],
    ),
    "short ramp-up": (
        ["--training.samples=99", "--training.batch_size_rampup=[2, 2]"],
        ["training.batch_size_rampup = [2, 2]", "[start, increment, samples]"],
    ),
    "ramp-up that misses": (
        [STEPS, "--training.batch_size_rampup", "3", "2", "9"],
        ["training.batch_size_rampup = [3, 2, 9]", "must reach global_batch_size (4)"],
    ),
    "reduce dtype": (
        [STEPS, "--training.reduce_dtype=bfloat16"],
        ["training.reduce_dtype", '"bfloat16"', 'set it to "float32"'],
    ),
    "bad split": ([STEPS, "--data.split=8,2"], ["data.split", '"8,2"', "three weights", '"969,30,1"']),
    "no validation data": (
        [STEPS, "--data.split=1,0,0", "--evaluation.interval=1"],
        ["data.split", '"1,0,0"', "give it more weight or set evaluation.interval to 0"],
    ),
    "missing evaluation data": (
        [STEPS, "--evaluation.interval=1", "--evaluation.datasets", "lambada={tmp}/no.jsonl"],
        ["evaluation.datasets", "lambada={tmp}/no.jsonl", "no.jsonl does not exist; name a readable text file"],
    ),
    "unknown evaluation task": (
        [STEPS, "--evaluation.interval=1", "--evaluation.datasets", "lambda={tmp}/empty.txt"],
        ["evaluation.datasets", "must be NAME=PATH, where NAME is text, wikitext103, lambada"],
    ),
    "evaluation data never read": (
        [STEPS, "--evaluation.interval=0", "--evaluation.datasets", "text={tmp}/latin.txt"],
        ["evaluation.datasets", "set evaluation.interval"],
    ),
    "unknown dataset": (
        [STEPS, "--data.dataset=texts"],
        ["data.dataset", '"texts"', "unknown name; did you mean text? there are hf, indexed, race, stdlib, text"],
    ),
    "options of text": ([STEPS, "--data.options.size=4"], ["data.options = {'size': 4}", '"text" has no options']),
    "missing data": ([STEPS, "--data.paths={tmp}/no.txt"], ["data.paths", "{tmp}/no.txt", "no such file"]),
    "no data named": ([STEPS, "--data.paths=[]"], ["data.paths = (not set)", "give paths or glob patterns"]),
    "empty data": ([STEPS, "--data.paths={tmp}/empty.txt"], ["data.paths", "{tmp}/empty.txt", "empty", "remove it"]),
    "data not UTF-8": (
        [STEPS, "--data.paths={tmp}/latin.txt"],
        ["data.paths", "{tmp}/latin.txt", "byte 3 is not valid UTF-8", "convert"],
    ),
    "line not JSON": (
        [STEPS, "--data.paths={tmp}/broken.jsonl"],
        ["data.paths", "{tmp}/broken.jsonl:2", "not JSON", "correct it"],
    ),
    "line without text": (
        [STEPS, "--data.paths={tmp}/broken.jsonl", "--data.text_key=body"],
        ["data.paths", "{tmp}/broken.jsonl:1", '"body"', "set data.text_key"],
    ),
    "too little data": ([STEPS, "--training.seq_len=999"], ["training.seq_len = 999", "add text or lower it"]),
    "missing tokenizer": (
        [STEPS, "--data.tokenizer=no.json"],
        ["data.tokenizer", '"no.json"', "no such file", 'give "byte"'],
    ),
    "tokenizer larger than model": (
        [STEPS, "--model.overrides.vocab_size=256"],
        ["data.tokenizer", '"byte"', "257 tokens", "set model.overrides.vocab_size to 257"],
    ),
    "dump folder is a file": (
        [STEPS, "--job.dump_folder={tmp}/text.txt"],
        ["job.dump_folder", "{tmp}/text.txt", "cannot be created", "name one"],
    ),
    "checkpoint folder is a file": (
        [STEPS, "--checkpoint.enable", "--checkpoint.folder={tmp}/text.txt"],
        ["checkpoint.folder", "{tmp}/text.txt", "cannot be created", "name one"],
    ),
    "unknown GPU": ([STEPS, "--cluster.gpu=RTX 4080"], ["cluster.gpu", '"RTX 4080"', "known are V100-PCIe, V100-16GB"]),
    "disk too small for a checkpoint": (
        [STEPS, "--checkpoint.enable", "--model.overrides.hidden_size=1048576"],
        ["checkpoint.folder", "{tmp}/out/checkpoint", "a checkpoint takes", "GiB left; make room, or name a folder"],
    ),
    "nothing to go back to": (
        [STEPS, "--health.loss_spike_factor=6", "--health.loss_spike_action=rewind", "--checkpoint.enable=false"],
        ["health.loss_spike_action", '"rewind"', "set checkpoint.enable to true", 'use "skip"'],
    ),
    "missing checkpoint": (
        [STEPS, "--checkpoint.enable", "--checkpoint.load_step=7"],
        ["checkpoint.load_step = 7", "no such checkpoint in {tmp}/out/checkpoint", "there are none"],
    ),
    "no initial weights": (
        [STEPS, "--checkpoint.initial_load_path={tmp}"],
        ["checkpoint.initial_load_path", "{tmp}", "neither a checkpoint's step-N folder nor", "name one with run.json"],
    ),
    "missing TOML": (["--job.config_file={tmp}/no.toml"], ["job.config_file", "{tmp}/no.toml", "no such file"]),
    "folder as TOML": (["--job.config_file={tmp}"], ["job.config_file", "{tmp}", "give a readable TOML file"]),
}

TOMLS = {
    "unknown key": (b"[training]\nstep = 5\n", ["training.step = 5", "did you mean training.steps?"]),
    "unknown section": (b"[traning]\nsteps = 5\n", ["traning", "unknown section", "did you mean [training]?"]),
    "key outside a table": (b"training = 5\n", ["training = 5", "write [training] above its keys"]),
    "wrong type": (b'[training]\nsteps = "5"\n', ["training.steps", '"5"', "valid integer"]),
    "not TOML": (b"[training]\nsteps = \n", ["job.config_file", "bad.toml", "not valid TOML", "line 2"]),
    "not UTF-8": (
        b'[job]\ndescription = "\xe9"\n',
        ["job.config_file", "bad.toml", "byte 21", "save the file as UTF-8"],
    ),
}

FOUR_LAYERS = ["--model.overrides.num_layers=4"]
WORLDS = {  # WORLD_SIZE, settings, words
    "shard times replicate": (
        "4",
        ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=4"],
        ["parallelism.data_parallel_shard_degree = 4", "= 8, but the job has 4 processes", "start 8 or use -1"],
    ),
    "replicate does not divide": (
        "3",
        ["--parallelism.data_parallel_replicate_degree=2"],
        ["parallelism.data_parallel_shard_degree = -1", "does not divide the 3 processes", "multiple of 2"],
    ),
    "batch for three": (
        "3",
        [],
        ["training.global_batch_size = 4", "2 × 3 = 6", "use a multiple such as 6"],
    ),
    "not a number": ("two", [], ["WORLD_SIZE", '"two"', "must be a whole number", "torchrun sets it"]),
    "no process": ("0", [], ["WORLD_SIZE", '"0"', "at least 1"]),
    "degree that is not available": (
        "2",
        ["--parallelism.context_parallel_degree=2"],
        ["parallelism.context_parallel_degree = 2", "not available yet; use 1"],
    ),
    "heads over three": (
        "3",
        ["--parallelism.tensor_parallel_degree=3"],
        ["parallelism.tensor_parallel_degree = 3", "num_attention_heads (4)", "use a divisor"],
    ),
    "key-value heads over four": (
        "4",
        ["--parallelism.tensor_parallel_degree=4", "--model.overrides.num_kv_heads=2"],
        ["parallelism.tensor_parallel_degree = 4", "num_kv_heads (2)", "use a divisor"],
    ),
    "vocabulary for fewer": (
        "32",
        [
            "--parallelism.tensor_parallel_degree=32",
            "--model.overrides.num_attention_heads=32",
            "--model.overrides.vocab_multiple=1",
        ],
        ["parallelism.tensor_parallel_degree = 32", "without a row of the vocabulary (257)", "use a smaller one"],
    ),
    "sequence parallelism alone": (
        "1",
        ["--parallelism.sequence_parallel=true"],
        ["parallelism.sequence_parallel = true", "raise tensor_parallel_degree"],
    ),
    "sequence in two": (
        "2",
        ["--parallelism.tensor_parallel_degree=2", "--parallelism.sequence_parallel=true", "--training.seq_len=15"],
        ["training.seq_len = 15", "context × tensor degrees = 2", "use a multiple"],
    ),
    "more stages than layers": (
        "2",
        ["--parallelism.pipeline_parallel_degree=2"],
        ["parallelism.pipeline_parallel_degree = 2", "2 stages for 1 layers", "at most 1"],
    ),
    "layers of stages": (
        "2",
        [*FOUR_LAYERS, "--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_layers=[1,2]"],
        ["parallelism.pipeline_layers = [1, 2]", "must be 2 numbers", "sum to the 4 layers"],
    ),
    "layers of one stage": (
        "1",
        ["--parallelism.pipeline_layers=[1]"],
        ["parallelism.pipeline_layers = [1]", "there is one stage"],
    ),
    "virtual stages of 1F1B": (
        "2",
        [*FOUR_LAYERS, "--parallelism.pipeline_parallel_degree=2", "--parallelism.virtual_stages_per_rank=2"],
        ["parallelism.virtual_stages_per_rank = 2", "use 1 or interleaved_1f1b"],
    ),
    "interleaving one stage": (
        "2",
        [*FOUR_LAYERS, "--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_schedule=looped_bfs"],
        ["parallelism.pipeline_schedule", '"looped_bfs"', "at least 2", "use 1f1b"],
    ),
    "three stages of a V": (
        "2",
        [
            *FOUR_LAYERS,
            "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.pipeline_schedule=dualpipe_v",
            "--parallelism.virtual_stages_per_rank=3",
        ],
        ["parallelism.virtual_stages_per_rank = 3", "dualpipe_v has exactly 2", "use 2"],
    ),
    "ragged microbatches": (
        "2",
        [
            *FOUR_LAYERS,
            "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.pipeline_schedule=interleaved_1f1b",
            "--parallelism.virtual_stages_per_rank=2",
            "--training.global_batch_size=6",
        ],
        ["training.global_batch_size = 6", "multiples of pipeline_parallel_degree (2)", "use 2 or 4", "such as 1f1b"],
    ),
    "compiled recomputation of products": (
        "2",
        ["--parallelism.tensor_parallel_degree=2", "--compile.enable=true", "--activation_checkpoint.mode=selective"],
        ["activation_checkpoint.mode", '"selective"', 'use "full" or "none"', "compile.enable to false"],
    ),
    "compiled dropout of heads": (
        "2",
        ["--parallelism.tensor_parallel_degree=2", "--compile.enable=true", "--model.overrides.dropout=0.1"],
        ["compile.enable = true", "sequence_parallel", "set that to true"],
    ),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("some text to learn from, " * 20)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "run.toml").write_text(TOML.format(tmp=tmp_path, length=""))
    return tmp_path


def arguments(folder, settings):
    given = [setting.replace("{tmp}", str(folder)) for setting in settings]
    return [*([] if "job.config_file" in "".join(given) else [f"--job.config_file={folder}/run.toml"]), *given]


def run_here(monkeypatch, capfd, argv):
    """train.py as a script, in this process; (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(REPO / "train.py"), run_name="__main__")
    return stop.value.code, *capfd.readouterr()


def run_there(argv, **environment):
    """train.py as a user runs it."""
    command = [sys.executable, "train.py", *argv]
    done = subprocess.run(
        command, cwd=REPO, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout, done.stderr


def check_refusal(result, words, folder=""):
    code, out, err = result
    # Data that had to be read before it could be found wanting has said so.
    lines = [line for line in err.splitlines() if not line.startswith("tokenized ")]
    assert code == 2, err
    assert out == ""
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    for word in words:
        assert word.replace("{tmp}", str(folder)) in lines[0]


@pytest.mark.parametrize("case", OVERRIDES)
def test_bad_setting(monkeypatch, capfd, folder, case):
    settings, words = OVERRIDES[case]
    check_refusal(run_here(monkeypatch, capfd, arguments(folder, settings)), words, folder)


@pytest.mark.parametrize("case", TOMLS)
def test_bad_toml(monkeypatch, capfd, folder, case):
    content, words = TOMLS[case]
    (folder / "bad.toml").write_bytes(content)
    check_refusal(run_here(monkeypatch, capfd, [f"--job.config_file={folder}/bad.toml"]), words)


@pytest.mark.parametrize("case", WORLDS)
def test_bad_number_of_processes(monkeypatch, capfd, folder, case):
    world_size, settings, words = WORLDS[case]
    monkeypatch.setenv("WORLD_SIZE", world_size)
    check_refusal(run_here(monkeypatch, capfd, arguments(folder, [STEPS, *settings])), words)


def test_compiler_without_a_folder(monkeypatch, capfd, folder):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "text.txt"))
    words = ["TORCHINDUCTOR_CACHE_DIR", "{tmp}/text.txt", "cannot be created", "name one"]
    check_refusal(run_here(monkeypatch, capfd, arguments(folder, [STEPS])), words, folder)


def test_other_processes_of_a_job_leave_the_first_time_to_speak(monkeypatch, capfd, folder):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "3")
    argv = arguments(folder, [STEPS])
    monkeypatch.setenv("RANK", "0")
    first = run_here(monkeypatch, capfd, argv)
    assert waited == []
    monkeypatch.setenv("RANK", "1")
    assert run_here(monkeypatch, capfd, argv) == first
    assert len(waited) == 1 and waited[0] >= 5


def test_good_settings_pass_the_checks_that_the_bad_ones_fail(monkeypatch, capfd, folder):
    code, out, _ = run_here(monkeypatch, capfd, arguments(folder, [STEPS, "--job.dry_run"]))
    assert code == 0
    assert out.startswith("gpt debug: ")


@pytest.mark.parametrize("case", ["unknown key", "data not UTF-8"])  # without torch, and with it
def test_bad_setting_in_a_process_of_its_own(folder, case):
    settings, words = OVERRIDES[case]
    check_refusal(run_there(arguments(folder, settings)), words, folder)


def test_exit_code_is_the_same_where_the_sentence_cannot_be_written(folder):
    argv = [sys.executable, "train.py", *arguments(folder, ["--training.steps=x"])]
    with open("/dev/full", "w") as full:
        assert subprocess.run(argv, cwd=REPO, stderr=full, timeout=120, check=False).returncode == 2


def test_bad_toml_and_world_size_in_a_process_of_its_own(folder):
    content, words = TOMLS["not TOML"]
    (folder / "bad.toml").write_bytes(content)
    check_refusal(run_there([f"--job.config_file={folder}/bad.toml"]), words)
    world_size, settings, words = WORLDS["shard times replicate"]
    argv = arguments(folder, [STEPS, *settings])
    check_refusal(run_there(argv, WORLD_SIZE=world_size, RANK="0"), words)


def test_folder_with_another_model_s_checkpoint(monkeypatch, capfd, folder):
    enable = ["--training.steps=1", "--checkpoint.enable"]
    done = Script("train.py", arguments(folder, [*enable, "--model.overrides.tied_embeddings=false"])).wait()
    assert done.returncode == 0, done.stderr
    assert "saved" in done.stdout
    path = f"{folder}/out/checkpoint/step-1"
    for settings, words in [
        (
            ["--model.overrides.num_layers=2"],
            ["model.overrides.num_layers = 2", f"{path} was saved with 1", "another folder"],
        ),
        (
            ["--model.overrides.tied_embeddings=true"],
            ["model.overrides.tied_embeddings = true", "was saved with False"],
        ),
        (["--model.family=llama"], ["model.family", '"llama"', f"{path} was saved with gpt", "another folder"]),
        (
            ["--model.overrides.tied_embeddings=false", "--optimizer.name=sgd"],
            ["optimizer.name", '"sgd"', "was saved with adamw", "another folder"],
        ),
        (["--model.overrides.tied_embeddings=false", "--job.seed=5"], ["job.seed = 5", "was saved with 1234"]),
        (["--checkpoint.load_step=1", "--checkpoint.enable=false"], ["checkpoint.load_step = 1", "checkpoint.enable"]),
        (["--checkpoint.load_step=2"], ["checkpoint.load_step = 2", "no such checkpoint", "there are 1"]),
    ]:
        check_refusal(run_here(monkeypatch, capfd, arguments(folder, [*enable, *settings])), words)
