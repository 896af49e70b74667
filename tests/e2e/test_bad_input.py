"""Wrong input ends a run with exit code 2 and one sentence that names the key, the value and the cure.

Cases of every stage before a run begins. All that one stage refuses is in its unit tests.
"""

import runpy
import subprocess
import sys
import time

import pytest

from tests.e2e.scripts import REPO, Script
from titan_like.train.environment import number_of_processes

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
    "unknown key": ([STEPS, "--training.step=5"], ["training.step = 5", "did you mean training.steps?"]),
    "two TOMLs": (["--job.config_file", "a.toml", "b.toml"], ["job.config_file", "a.toml", "path of one TOML file"]),
    "unknown flavor": ([STEPS, "--model.flavor=gpt2_124"], ["model.flavor", '"gpt2_124"', "did you mean gpt2_124m?"]),
    "no length": ([], ["training.steps | samples | tokens = (not set)", "set exactly one"]),
    "two lengths": ([STEPS, "--training.tokens=999"], ["'steps': 5, 'tokens': 999", "set exactly one"]),
    "indivisible batch": (
        [STEPS, "--training.global_batch_size=5"],
        ["training.global_batch_size = 5", "2 × 1 = 2", "use a multiple such as 4 or 6"],
    ),
    "long sequence": (
        [STEPS, "--training.seq_len=1025"],
        ["training.seq_len = 1025", "max_seq_len is 1024", "model.overrides.max_seq_len"],
    ),
    "reduce dtype": (
        [STEPS, "--training.reduce_dtype=bfloat16"],
        ["training.reduce_dtype", '"bfloat16"', 'set it to "float32"'],
    ),
    "no validation data": (
        [STEPS, "--data.split=1,0,0", "--evaluation.interval=1"],
        ["data.split", '"1,0,0"', "give it more weight or set evaluation.interval to 0"],
    ),
    "evaluation data never read": (
        [STEPS, "--evaluation.interval=0", "--evaluation.datasets", "text={tmp}/latin.txt"],
        ["evaluation.datasets", "set evaluation.interval"],
    ),
    "data not UTF-8": (
        [STEPS, "--data.paths={tmp}/latin.txt"],
        ["data.paths", "{tmp}/latin.txt", "byte 3 is not valid UTF-8", "convert"],
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
}

TOMLS = {
    "not TOML": (b"[training]\nsteps = \n", ["job.config_file", "bad.toml", "not valid TOML", "line 2"]),
    "not UTF-8": (
        b'[job]\ndescription = "\xe9"\n',
        ["job.config_file", "bad.toml", "byte 21", "save the file as UTF-8"],
    ),
}

WORLDS = {  # WORLD_SIZE, settings, words
    "shard times replicate": (
        "4",
        ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=4"],
        ["parallelism.data_parallel_shard_degree = 4", "= 8, but the job has 4 processes", "start 8 or use -1"],
    ),
    "batch for three": (
        "3",
        [],
        ["training.global_batch_size = 4", "2 × 3 = 6", "use a multiple such as 6"],
    ),
    "no process": ("0", [], ["WORLD_SIZE", '"0"', "at least 1"]),
    "experts of a dense model": (
        "2",
        ["--parallelism.expert_parallel_degree=2"],
        ["parallelism.expert_parallel_degree = 2", "gpt has no experts; use 1"],
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
    "sequence in two": (
        "2",
        ["--parallelism.tensor_parallel_degree=2", "--parallelism.sequence_parallel=true", "--training.seq_len=15"],
        ["training.seq_len = 15", "context × tensor degrees = 2", "use a multiple"],
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
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
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


SLURM_JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SLURM_STEP = SLURM_JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (SLURM_STEP, ['SLURM_STEP_NUM_TASKS = "2": srun has started', "one torchrun a machine", "SLURM_PROCID"]),
        (SLURM_JOB | {"SLURM_PROCID": "1"}, ['SLURM_NTASKS = "4": srun has started']),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            ['OMPI_COMM_WORLD_SIZE = "2": mpirun has started'],
        ),
        (SLURM_JOB, []),  # in the script of sbatch
        (SLURM_STEP | {"SLURM_STEP_NUM_TASKS": "1"}, []),  # in the shell of salloc
        (SLURM_STEP | {"SLURM_PTY_PORT": "4000"}, []),
        (SLURM_STEP | {"WORLD_SIZE": "1"}, []),  # under torchrun
    ],
)
def test_processes_of_another_launcher(monkeypatch, capfd, folder, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if words:
        check_refusal(run_here(monkeypatch, capfd, arguments(folder, [STEPS])), words)
    else:
        assert number_of_processes() == 1


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
    command = [sys.executable, "train.py", *arguments(folder, settings)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)
    check_refusal((done.returncode, done.stdout, done.stderr), words, folder)


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
