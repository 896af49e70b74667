"""Files, environments and sizes that no run can begin with end in one sentence, at once."""

import os
import socket
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

import titan_like.train.job
import titan_like.train.setup
from tests.e2e.test_bad_input import STEPS, TOML, arguments, check_refusal, run_here
from titan_like.checkpoint.step_folders import hold
from titan_like.commands import generate
from titan_like.config import ConfigError, load_config
from titan_like.config.errors import RunError
from titan_like.config.paths import file_problem
from titan_like.data.packed import corpus_files
from titan_like.train.job import meeting_place
from titan_like.train.setup import out_of_memory_names


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text.txt").write_text("some text to learn from, " * 20)
    (tmp_path / "run.toml").write_text(TOML.format(tmp=tmp_path, length=""))
    (tmp_path / "folder.x").mkdir()
    return tmp_path


def test_a_folder_is_named_as_such(monkeypatch, capfd, folder):
    path = f"{folder}/folder.x"
    for argv, words in (
        ([f"--job.config_file={path}"], "is a folder, not a file"),
        (arguments(folder, [STEPS, f"--data.tokenizer={path}"]), "no such file as"),
    ):
        check_refusal(run_here(monkeypatch, capfd, argv), [path, words])
    files = corpus_files(load_config(["--data.dataset=text", f"--data.paths={folder}/*"]).data)
    assert sorted(path.name for path in files) == ["run.toml", "text.txt"]  # a pattern passes over what is no file


def test_unreadable_files_are_named(monkeypatch, capfd, folder):
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(".txt"))
    assert file_problem(folder / "text.txt") == "cannot be read (Permission denied)"
    for argv in (
        [f"--job.config_file={folder}/text.txt"],
        arguments(folder, [STEPS, f"--data.paths={folder}/text.txt"]),
    ):
        check_refusal(run_here(monkeypatch, capfd, argv), ["text.txt", "cannot be read (Permission denied)"])


def test_lock_that_cannot_be_opened_says_so(monkeypatch, tmp_path):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    problem = hold(tmp_path / "checkpoint", "another run writes to it", 0.0)
    assert problem.startswith(f"{tmp_path}/checkpoint.lock cannot be written (Permission denied), and runs lock it")


LOCKED = {  # settings that name something in a folder without permission, words
    "text": (["--data.paths={tmp}/locked/a.txt"], ["data.paths", "a.txt", "cannot be read"]),
    "pattern": (["--data.paths={tmp}/locked/*.txt"], ["data.paths", "*.txt", "cannot be read"]),
    "stream": (["--data.dataset=hf", "--data.paths={tmp}/locked/a.jsonl"], ["data.paths", "a.jsonl", "cannot be read"]),
    "indexed": (["--data.dataset=indexed", "--data.paths={tmp}/locked/a"], ["data.paths", "a.idx", "cannot be read"]),
    "tokenizer": (["--data.tokenizer={tmp}/locked/a.json"], ["data.tokenizer", "a.json cannot be read"]),
    "tokenizer like a name of the hub": (["--data.tokenizer=locked/a"], ["data.tokenizer", "locked/a cannot be read"]),
    "tokenizer of GPT-2": (
        ["--data.tokenizer=gpt2:{tmp}/locked/a,{tmp}/locked/b"],
        ["data.tokenizer", "a cannot be read"],
    ),
    "profile": (["--cluster.profile={tmp}/locked/a.toml"], ["cluster.profile", "a.toml", "cannot be read"]),
    "weights": (
        ["--checkpoint.initial_load_path={tmp}/locked/step-1"],
        ["checkpoint.initial_load_path", "step-1/run.json cannot be read"],
    ),
}


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
    settings, words = LOCKED[case]
    argv = arguments(folder, [STEPS, *settings])
    for dry_run in ([], ["--job.dry_run"]):
        check_refusal(run_here(monkeypatch, capfd, [*argv, *dry_run]), [*words, "(Permission denied)"], folder)


OPTIONS = {
    "large seed": (["--seed=18446744073709551616"], "--seed = 18446744073709551616: must be at most 9.22"),
    "word for a seed": (["--seed=x"], "\"--seed\": invalid int value: 'x'"),
    "temperature": (["--temperature=inf"], "--temperature = inf"),
    "negative temperature": (["--temperature=-1"], "--temperature = -1.0: must be at least 0"),
    "no tokens": (["--max_new_tokens=0"], "--max_new_tokens = 0: must be at least 1"),
    "no such option": (["--top_kk=3"], "top_kk"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_bad_option_of_generate(case):
    argv, words = OPTIONS[case]
    with pytest.raises(ConfigError, match=words) as error:
        generate.main(argv)
    assert "\n" not in str(error.value)


MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29401"}
ENVIRONMENTS = {  # variables, words of each line
    "no rank": ({"WORLD_SIZE": "2"} | MEETING, [["RANK = (not set)", "start with torchrun"]]),
    "no address": (
        {"WORLD_SIZE": "2", "RANK": "1"},
        [["MASTER_ADDR = (not set)", "a job of 2 processes"], ["MASTER_PORT = (not set)"]],
    ),
    "rank alone": ({"RANK": "3"} | MEETING, [["WORLD_SIZE = (not set)", "a process of RANK 3"]]),
    "rank beyond": ({"WORLD_SIZE": "2", "RANK": "2"}, [['RANK = "2"', "at most 1"]]),
    "words": ({"WORLD_SIZE": "two", "RANK": "one"}, [['WORLD_SIZE = "two"', "whole number"]]),
}


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_bad_environment(monkeypatch, capfd, folder, case):
    variables, words = ENVIRONMENTS[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # Each process has an environment of its own: none waits for the first to speak.
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("waits"))
    code, out, err = run_here(monkeypatch, capfd, arguments(folder, [STEPS]))
    lines = err.removeprefix("error: ").splitlines()
    assert (code, out, len(lines)) == (2, "", len(words)), err
    for line, wanted in zip(lines, words, strict=True):
        assert line.strip().startswith("environment variable ")
        assert all(word in line for word in wanted), line


def test_port_in_use_is_named(monkeypatch):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f'MASTER_PORT = "{port}": the port is in use'):
            meeting_place(timedelta(seconds=20))


SIZES = {
    "layers": (
        ["--model.overrides.num_layers=1000000000"],
        ["num_layers = 1000000000", "equal to 2048"],
    ),  # settings, words
    "forged line": (["--model.overrides.a\nerror: fake\x1b=3"], [r"a\nerror: fake\x1b = 3", "unknown field"]),
    "variable without a name": (["--job.dump_folder=${}/x"], ["${}/x", "names no environment variable"]),
    "passes": (
        ["--training.micro_batch_size=1", "--training.global_batch_size=1048576"],
        ["training.global_batch_size = 1048576", "1,048,576 microbatches of 1 × 1 samples", "raise micro_batch_size"],
    ),
    "increments": (
        ["--training.global_batch_size=1048576", "--training.batch_size_rampup=[2, 2, 9000000]"],
        ["training.batch_size_rampup", "increments are more than 10,000", "use larger ones"],
    ),
    "processes": (
        ["--cluster.nodes=32768", "--cluster.gpus_per_node=512", "--job.dry_run"],
        ["cluster.nodes = 32768", "a job of 16,777,216 processes", "at most 262,144"],
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_nothing_could_loop_over(monkeypatch, capfd, folder, case):
    settings, words = SIZES[case]
    for dry_run in ([], ["--job.dry_run=true"]):
        check_refusal(run_here(monkeypatch, capfd, arguments(folder, [STEPS, *settings, *dry_run])), words)


def test_host_without_memory_names_the_model(monkeypatch, capfd, folder):
    monkeypatch.setattr(titan_like.train.setup, "host_memory_bytes", lambda: 100_000)
    wide = ["model.overrides.hidden_size = 32", "this machine has 9.31e-05 GiB", "choose a smaller model"]
    check_refusal(run_here(monkeypatch, capfd, arguments(folder, [STEPS])), wide)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("build", ['model.flavor = "debug"', "does not have enough memory", "choose a smaller model"]),
        ("train", ["training.micro_batch_size = 2", "does not have enough memory", "lower it"]),
    ],
)
def test_allocation_that_fails_names_the_setting(monkeypatch, capfd, folder, place, words):
    def fail():
        torch.empty(1 << 60)  # torch's own words

    trainer = SimpleNamespace(step=0, start_step=0, num_actions=0, train=fail)
    monkeypatch.setattr(titan_like.train.job, "Trainer", lambda run, remark: fail() if place == "build" else trainer)
    check_refusal(run_here(monkeypatch, capfd, arguments(folder, [STEPS])), words)
    assert not torch.distributed.is_initialized()


def test_only_memory_names_a_setting():
    for error in (MemoryError(), RuntimeError("std::bad_alloc"), OSError(12, "Cannot allocate memory")):
        with pytest.raises(ConfigError) as told, out_of_memory_names("model.flavor", "x", "choose another"):
            raise error
        assert str(told.value).startswith('model.flavor = "x": this machine does not have enough memory for it (')
    for error in (RuntimeError("mat1 and mat2"), RunError("stop"), OSError(2, "gone"), KeyError("memory")):
        with pytest.raises(type(error)) as seen, out_of_memory_names("model.flavor", "x", "choose another"):
            raise error
        assert seen.value is error
