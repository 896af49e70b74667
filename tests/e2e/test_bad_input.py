"""Wrong input ends a run with exit code 2 and one sentence that names the key, the value and the cure.

Cases of every stage before a run begins. All that one stage refuses is in its unit tests.
"""

import os
import re
import socket
import time
from datetime import timedelta

import pytest
import torch

import titan_like.train.job
import titan_like.train.setup
from tests.e2e.scripts import run_here
from titan_like.checkpoint.step_folders import hold
from titan_like.config import ConfigError
from titan_like.config.errors import RunError
from titan_like.train.environment import number_of_processes
from titan_like.train.job import meeting_place
from titan_like.train.setup import out_of_memory_names
from titan_like.train.trainer import Trainer

TOML = """
job.dump_folder = "{tmp}/out"
model.overrides = {{num_layers = 1, hidden_size = 32}}
data = {{dataset = "text", paths = ["{tmp}/text.txt"], split = "8,2,0"}}
training = {{seq_len = 16, micro_batch_size = 2, global_batch_size = 4}}
"""
STEPS = "--training.steps=5"

# Environment and settings => words of the sentence; {tmp} is the test's folder
CASES = (
    """
--job.config_file a.toml b.toml => job.config_file ; a.toml ; path of one TOML file
--job.config_file=none => job.config_file = (not set) ; --job.config_file debug_gpt
--training.steps=none => training.steps | samples | tokens | epochs = (not set) ; set exactly one
--training.tokens=999 => 'steps': 5, 'tokens': 999 ; set exactly one
--training.global_batch_size=5 => training.global_batch_size = 5 ; 2 × 1 = 2 ; use a multiple such as 4 or 6
--training.reduce_dtype=bfloat16 => training.reduce_dtype ; "bfloat16" ; set it to "float32"
--data.split=1,0,0 --evaluation.interval=1 => data.split ; "1,0,0" ; more weight or set evaluation.interval to 0
--evaluation.datasets text={tmp}/latin.txt => evaluation.datasets ; set evaluation.interval
--data.paths={tmp}/latin.txt => data.paths ; {tmp}/latin.txt ; byte 3 is not valid UTF-8 ; convert
--model.overrides.vocab_size=256 => data.tokenizer ; "byte" ; 257 tokens ; set model.overrides.vocab_size to 257
--job.dump_folder={tmp}/text.txt => job.dump_folder ; {tmp}/text.txt ; cannot be created ; name one
--checkpoint.enable --checkpoint.folder={tmp}/text.txt => checkpoint.folder ; {tmp}/text.txt ; cannot be created
--checkpoint.enable --model.overrides.hidden_size=1048576 \
=> {tmp}/out/checkpoint ; a checkpoint needs ; GiB left; make room
--health.loss_spike_factor=6 --health.loss_spike_action=rewind => health.loss_spike_action ; "rewind" ; use "skip"
--checkpoint.load_step=1 --checkpoint.enable=false => checkpoint.load_step = 1 ; checkpoint.enable
--checkpoint.enable --checkpoint.load_step=7 \
=> checkpoint.load_step = 7 ; no such checkpoint in {tmp}/out ; there are none
--checkpoint.initial_load_path={tmp} \
=> checkpoint.initial_load_path ; {tmp} ; neither a checkpoint's ; name one with run.json
--job.config_file={tmp}/latin.toml => job.config_file ; latin.toml ; byte 21 ; save the file as UTF-8
--data.tokenizer={tmp}/folder.x => {tmp}/folder.x ; no such file as
--training.micro_batch_size=1 --training.global_batch_size=1048576 \
=> 1,048,576 microbatches of 1 × 1 ; raise micro_batch_size
--cluster.nodes=32768 --cluster.gpus_per_node=512 --job.dry_run \
=> cluster.nodes = 32768 ; 16,777,216 processes ; at most 262,144
TORCHINDUCTOR_CACHE_DIR={tmp}/text.txt => TORCHINDUCTOR_CACHE_DIR ; {tmp}/text.txt ; cannot be created ; name one
WORLD_SIZE=4 --parallelism.data_parallel_replicate_degree=2 --parallelism.data_parallel_shard_degree=4 \
=> = 8, but ; start 8
WORLD_SIZE=3 => training.global_batch_size = 4 ; 2 × 3 = 6 ; use a multiple such as 6
WORLD_SIZE=0 => WORLD_SIZE ; "0" ; at least 1
WORLD_SIZE=3 --parallelism.tensor_parallel_degree=3 \
=> tensor_parallel_degree = 3 ; num_attention_heads (4) ; use a divisor
WORLD_SIZE=4 --parallelism.tensor_parallel_degree=4 --model.overrides.num_kv_heads=2 => num_kv_heads (2) ; use a divisor
WORLD_SIZE=32 --parallelism.tensor_parallel_degree=32 --model.overrides.num_attention_heads=32 \
--model.overrides.vocab_multiple=1 => tensor_parallel_degree = 32 ; a row of the vocabulary (257) ; use a smaller one
WORLD_SIZE=2 --parallelism.tensor_parallel_degree=2 --parallelism.sequence_parallel=true --training.seq_len=15 \
=> training.seq_len = 15 ; context × tensor degrees = 2 ; use a multiple
WORLD_SIZE=2 --parallelism.tensor_parallel_degree=2 --compile.enable=true --activation_checkpoint.mode=selective \
=> activation_checkpoint.mode ; "selective" ; use "full" or "none" ; compile.enable to false
WORLD_SIZE=2 --parallelism.tensor_parallel_degree=2 --compile.enable=true --model.overrides.dropout=0.1 \
=> compile.enable = true ; set sequence_parallel to true
WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29401 => RANK = (not set) ; start with torchrun
WORLD_SIZE=2 RANK=1 MASTER_PORT=29401 => MASTER_ADDR = (not set) ; a job of 2 processes
RANK=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29401 => WORLD_SIZE = (not set) ; a process of RANK 3
WORLD_SIZE=2 RANK=2 => RANK = "2" ; at most 1
WORLD_SIZE=two => WORLD_SIZE = "two" ; whole number
""".replace("\\\n", "")
    .strip()
    .splitlines()
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("some text to learn from, " * 20)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "latin.toml").write_bytes(b'[job]\ndescription = "\xe9"\n')
    (tmp_path / "run.toml").write_text(TOML.format(tmp=tmp_path))
    (tmp_path / "folder.x").mkdir()
    return tmp_path


def arguments(folder, settings):
    given = [setting.replace("{tmp}", str(folder)) for setting in settings]
    return [*([] if "job.config_file" in "".join(given) else [f"--job.config_file={folder}/run.toml"]), *given]


def train(capfd, argv):
    """(exit code, stdout, stderr)"""
    return run_here("train.py", *argv), *capfd.readouterr()


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


def split(case, folder):
    """(environment, arguments, words)"""
    given, _, words = case.partition("=> ")
    given = [word.replace("{tmp}", str(folder)) for word in given.split()]
    variables = dict(word.split("=", 1) for word in given if word[0].isupper())
    settings = [word for word in given if not word[0].isupper()]
    length = [] if "config_file" in case else [STEPS]
    return variables, arguments(folder, [*length, *settings]), words.split(" ; ")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", CASES)
def test_bad_input(monkeypatch, capfd, folder, case):
    variables, argv, words = split(case, folder)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if variables.get("RANK"):  # each process has an environment of its own: none waits for the first to speak
        monkeypatch.setattr("time.sleep", lambda _: pytest.fail("waits"))
    check_refusal(train(capfd, argv), words, folder)


SLURM_JOB = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SLURM_STEP = SLURM_JOB | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (SLURM_STEP, ['SLURM_STEP_NUM_TASKS = "2": srun has started', "one torchrun a machine", "SLURM_PROCID"]),
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
        check_refusal(train(capfd, arguments(folder, [STEPS])), words)
    else:
        assert number_of_processes() == 1


def test_other_processes_of_a_job_leave_the_first_time_to_speak(monkeypatch, capfd, folder):
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("WORLD_SIZE", "3")
    argv = arguments(folder, [STEPS])
    monkeypatch.setenv("RANK", "0")
    first = train(capfd, argv)
    assert waited == []
    monkeypatch.setenv("RANK", "1")
    assert train(capfd, argv) == first
    assert len(waited) == 1 and waited[0] >= 5


def test_lock_that_cannot_be_opened_says_so(monkeypatch, tmp_path):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    problem = hold(tmp_path / "checkpoint", "another run writes to it", 0.0)
    assert problem.startswith(f"{tmp_path}/checkpoint.lock cannot be written (Permission denied), and runs lock it")


# Settings that name something in a folder without permission => words
LOCKED = """
--data.paths={tmp}/locked/a.txt => data.paths ; a.txt ; cannot be read
--data.paths={tmp}/locked/*.txt => data.paths ; *.txt ; cannot be read
--data.tokenizer={tmp}/locked/a.json => data.tokenizer ; a.json cannot be read
--cluster.profile={tmp}/locked/a.toml => cluster.profile ; a.toml ; cannot be read
--checkpoint.initial_load_path={tmp}/locked/step-1 => checkpoint.initial_load_path ; step-1/run.json cannot be read
""".strip().splitlines()


@pytest.mark.parametrize("case", LOCKED)
def test_what_is_in_a_folder_without_permission(monkeypatch, capfd, folder, case):
    def refusing(real):
        def call(path, *args, **options):
            if not isinstance(path, int) and os.path.abspath(path).startswith(f"{folder}/locked/"):
                raise PermissionError(13, "Permission denied", path)
            return real(path, *args, **options)

        return call

    monkeypatch.chdir(folder)
    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    _, argv, words = split(case, folder)
    for dry_run in ([], ["--job.dry_run"]):
        check_refusal(train(capfd, [*argv, *dry_run]), [*words, "(Permission denied)"], folder)


def test_port_in_use_is_named(monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f'MASTER_PORT = "{port}": the port is in use'):
            meeting_place(timedelta(seconds=20))


def test_host_without_memory_names_the_model(monkeypatch, capfd, folder):
    monkeypatch.setattr(titan_like.train.setup, "host_memory_bytes", lambda: 100_000)
    wide = ['model.flavor = "debug"', "this machine has 9.31e-05 GiB", "choose a smaller model"]
    check_refusal(train(capfd, arguments(folder, [STEPS])), wide)


def test_allocation_that_fails_names_the_setting(monkeypatch, capfd, folder):
    monkeypatch.setattr(titan_like.train.job, "Trainer", lambda *_: torch.empty(1 << 60))  # torch's own words
    words = ['model.flavor = "debug"', "does not have enough memory", "choose a smaller model"]
    check_refusal(train(capfd, arguments(folder, [STEPS])), words)
    assert not torch.distributed.is_initialized()


NO_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is "
    "free. Including non-PyTorch memory, this process has 77.90 GiB memory in use."
)


def test_a_step_that_runs_out_of_memory_tells_what_holds_it(monkeypatch, capfd, folder):
    """The third step fails before its update, so there are gradients and AdamW's two moments of each weight."""
    update = Trainer._update

    def fail(self, *arguments, **options):
        if self.state.step == 2:
            raise torch.OutOfMemoryError(NO_MEMORY)
        update(self, *arguments, **options)

    monkeypatch.setattr(Trainer, "_update", fail)
    code, out, error = train(capfd, arguments(folder, [STEPS, "--metrics.log_interval=1"]))
    assert code == 2 and " step 2/" in out, error
    first, held, cure = [line for line in error.splitlines() if not line.startswith("tokenized ")]
    assert first == (
        "error: training.micro_batch_size = 2: this machine does not have enough memory for it (CUDA out of memory. "
        "Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free.); lower it or "
        'training.seq_len, set activation_checkpoint.mode = "full", set training.dtype = "bfloat16", '
        "or use more processes"
    )
    state, *weights = re.findall(r"([\d.e-]+) GiB of ([a-z ]+)", held.removeprefix("       rank 0 holds "))
    size = 4 * int(re.search(r"([\d,]+) parameters", out)[1].replace(",", "")) / 2**30
    assert state[1] == "optimizer state" and float(state[0]) == pytest.approx(2 * size, rel=0.01)
    assert {name: float(one) for one, name in weights} == pytest.approx(
        dict.fromkeys(("parameters", "gradients"), size), rel=0.01
    )
    assert cure == "       --profiling.memory_snapshot_steps 1 records which lines allocate it"


def test_only_memory_names_a_setting():
    for error in (MemoryError(), RuntimeError("std::bad_alloc"), OSError(12, "Cannot allocate memory")):
        with pytest.raises(ConfigError) as told, out_of_memory_names("model.flavor", "x", str):
            raise error
        assert str(told.value).startswith('model.flavor = "x": this machine does not have enough memory for it (')
    for error in (RuntimeError("mat1 and mat2"), RunError("stop"), OSError(2, "gone"), KeyError("memory")):
        with pytest.raises(type(error)) as seen, out_of_memory_names("model.flavor", "x", str):
            raise error
        assert seen.value is error
