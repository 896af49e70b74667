"""Whatever a file holds, a command that reads it ends at once, with one sentence that names the file or its setting.

Every command, with every file that it reads.
"""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.scripts import REPO, Script, run_here
from tests.unit.attacks import GZIP, INDEX, JSON, PARQUET, SAFETENSORS, SPECIAL, TEXT, TOML, put

RUN = """
job.dump_folder = "out"
model = {family = "llama", overrides = {num_layers = 1, hidden_size = 32, num_attention_heads = 4, num_kv_heads = 4}}
data = {dataset = "text", paths = ["t.txt"], split = "8,2,0"}
training = {seq_len = 16, micro_batch_size = 2, global_batch_size = 4, steps = 1}
checkpoint.enable = true
"""
NEW = "train.py --job.config_file=run.toml --job.dump_folder=new --checkpoint.enable=false"
BERT = "--model.family=bert --model.overrides={vocab_size=384,sentence_head='choice'} --training.micro_batch_size=4"
CONFIG = "--job.config_file=run.toml"
# (a file, what it may hold, commands that read it)
READS = (
    ("run.toml", TOML, (
        f"train.py {CONFIG}", f"scripts/plan.py predict {CONFIG}", f"scripts/resumable.py {CONFIG}",
        f"scripts/compare.py {CONFIG}", f"scripts/verify.py {CONFIG}", f"scripts/evaluate.py {CONFIG}",
        f"scripts/generate.py {CONFIG}", f"scripts/search.py {CONFIG} --processes=1 --dump_folder=s",
    )),
    ("i.toml", TOML, ("scripts/import_config.py i.toml",)),
    ("p.toml", TOML, (f"scripts/plan.py predict {CONFIG} --profile=p.toml",)),
    ("g.toml", TOML, (f"scripts/search.py {CONFIG} --processes=1 --dump_folder=s --grid=g.toml",)),
    ("s/search.json", JSON, (f"scripts/search.py {CONFIG} --processes=1 --dump_folder=s --grid=sizes.toml",)),
    ("p.json", JSON, ("scripts/plan.py calibrate --points=p.json --profile=fsdp_a100",)),
    ("l.json", JSON, (f"scripts/plan.py predict {CONFIG} --cluster.gpu=H100 --profile=fsdp_a100 --links=l.json",)),
    ("m.json", JSON, (f"scripts/plan.py simulate {CONFIG} --cluster.gpu=H100 --measured=m.json",)),
    ("out/checkpoint/step-1/run.json", JSON, (
        "scripts/generate.py --checkpoint=out/checkpoint/step-1",
        "scripts/convert.py to-hf --checkpoint=out/checkpoint/step-1 --output=new_hf",
        f"{NEW} --model.from=out/checkpoint/step-1",
    )),
    ("out/checkpoint/step-1/__0_0.distcp", {}, (f"{NEW} --model.from=out/checkpoint/step-1",)),
    ("hf/config.json", JSON, ("scripts/convert.py from-hf --input=hf --output=new_hf", f"{NEW} --model.from=hf")),
    ("hf/model.safetensors", SAFETENSORS, ("scripts/convert.py from-hf --input=hf --output=new_hf",)),
    ("hf/tokenizer.json", JSON, (
        f"{NEW} --data.tokenizer=hf",
        "scripts/preprocess_data.py --input=t.txt --output=new_idx --tokenizer=hf/tokenizer.json",
    )),
    ("hf/tokenizer_config.json", JSON, (f"{NEW} --data.tokenizer=hf",)),
    ("hf/chat_template.jinja", {}, (f"{NEW} --data.tokenizer=hf",)),
    ("t.txt", TEXT, (NEW, "scripts/preprocess_data.py --input t.txt --output=new_idx",
                     "scripts/evaluate.py --checkpoint=out --task text=t.txt")),
    ("t.jsonl", JSON, (f"{NEW} --data.paths=t.jsonl", "scripts/evaluate.py --checkpoint=out --task lambada=t.jsonl",
                       f"{NEW} --data.dataset=hf --data.paths=t.jsonl --evaluation.interval=0")),
    ("t.csv", {name: JSON[name] for name in ("deep", "long")}, (f"{NEW} --data.paths=t.csv",)),
    ("t.json", {name: b"[" + text for name, text in JSON.items()}, (f"{NEW} --data.paths=t.json",)),
    ("t.parquet", PARQUET, (f"{NEW} --data.paths=t.parquet",)),
    ("t.jsonl.gz", GZIP, (f"{NEW} --data.paths=t.jsonl.gz",)),
    ("t.idx", INDEX, (f"{NEW} --data.dataset=indexed --data.paths=t",)),
    ("saved/state.json", JSON, (f"{NEW} --data.paths=saved",)),
    ("read/README.md", {}, (f"{NEW} --data.paths=read",)),
    ("race/train/1.txt", JSON, (f"{NEW} {BERT} --data.dataset=race --data.paths=race",)),
    ("out/metrics.jsonl", {}, (f"train.py {CONFIG} --training.steps=2",)),
    ("tasks/t.yaml", {}, ("scripts/evaluate.py --checkpoint=out --lm_eval=t --lm_eval_folder=tasks",)),
)  # fmt: skip
# A pipe that nobody writes to would be waited for. A link to itself is no file where only some names matter.
CASES = [(file, name, command) for file, contents, commands in READS for name in contents for command in commands[:1]]
CASES += [(file, "pipe", command) for file, _, commands in READS for command in commands]
CASES += [(file, name, commands[0]) for file, _, commands in READS[:2] for name in SPECIAL[1:]]
CASES += [(file, "deep", command) for file, contents, commands in READS if "deep" in contents for command in commands]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with a checkpoint, its Hugging Face folder and an indexed dataset."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "run.toml").write_text(RUN)
    (folder / "sizes.toml").write_text("training.micro_batch_size = [1, 2]")
    (folder / "t.txt").write_text("some text to learn from, " * 20)
    for command in (
        f"train.py {CONFIG}",
        "scripts/convert.py to-hf --checkpoint=out --output=hf",
        "scripts/preprocess_data.py --input t.txt --output=t",
    ):
        script, *arguments = command.split()
        ended = Script(script, arguments, folder).wait()
        assert ended.returncode == 0, ended.stderr
    for name in ("saved", "read"):
        (folder / name).mkdir()
        (folder / name / "a.jsonl").write_text(json.dumps({"text": "some text " * 50}) + "\n")
    return folder


@pytest.fixture
def files(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("file", "content", "command"), list(dict.fromkeys(CASES)))
def test_a_hostile_file_is_a_sentence(files, capfd, file, content, command):
    contents = next(contents for name, contents, _ in READS if name == file)
    put(Path(file), contents.get(content, content))
    script, *arguments = command.split()
    code = run_here(script, *arguments)
    error = capfd.readouterr().err
    sentences = [line for line in error.splitlines() if line.startswith("error: ")]
    assert code in ((1, 2) if "cannot be loaded" in error else (2,)), error
    assert len(sentences) == 1 and len(sentences[0]) < 500 and "Traceback" not in error, error
    key = [word.removeprefix("--").partition("=")[0] for word in arguments if word.startswith("--")]
    assert any(word in sentences[0] for word in (Path(file).name, *key)), error


def test_a_damaged_file_next_to_tensors_is_a_sentence_and_settings_json_is_replaced(files, capfd):
    run = ("train.py", CONFIG, "--job.dump_folder=new", "--data.tokenizer=hf", "--training.steps=2")
    assert run_here(*run, "--training.steps=1") == 0
    path = Path("new/checkpoint/step-1/generation_config.json")
    put(path, JSON["deep"])
    assert run_here(*run) == 1
    problem = f"{path.parent}: has a {path.name} that cannot be read (it is nested too deeply)"
    assert capfd.readouterr().err.endswith(f"\nerror: rank 0: {problem}\n")
    for fields in ({"temperature": -1}, {"top_k": 0.5}, {"top_p": 10**30}):
        path.write_text(json.dumps(fields))
        assert run_here("scripts/generate.py", "--checkpoint=new", "--chat", "--prompt=x") == 2
        assert f"has a {path.name} whose {next(iter(fields))} is no " in capfd.readouterr().err
    put(Path("new/settings.json"), "pipe")  # nobody reads it
    assert run_here(*run) == 0
    assert json.loads(Path("new/settings.json").read_text())["training"]["steps"] == 2


@pytest.mark.parametrize("command", ["train.py", "scripts/plan.py", "scripts/generate.py", "scripts/compare.py"])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_of_another_encoding_replaces_what_it_lacks(files, monkeypatch, capfd, command, encoding):
    calls = [["--help"]]
    calls += [[CONFIG, "--job.dry_run"]] if command == "train.py" else [[CONFIG]] if "compare" in command else []
    for arguments in calls:
        output = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))
        assert run_here(command, *arguments) == 0, capfd.readouterr().err
        sys.stdout.flush()
        text = output.getvalue().decode(encoding)
        assert len(text) > 100 and "\ufffd" not in text
    monkeypatch.setattr(sys, "stdout", None)  # as if its descriptor were closed
    assert run_here(command, *calls[-1]) == 0, capfd.readouterr().err


def test_a_prompt_that_is_no_utf_8_is_a_sentence(files, capfd):
    assert run_here("scripts/generate.py", "--checkpoint=out", "--prompt", os.fsdecode(b"caf\xe9")) == 2
    assert capfd.readouterr().err.startswith('error: command line = "--prompt": character 3 is not valid UTF-8;')


def test_a_pipe_that_the_shell_offers_is_read(files, capfd):
    """As <(cat run.toml) and /dev/stdin are: this process has it open already, and a TOML is read once."""
    reader, writer = os.pipe()
    os.write(writer, RUN.encode())
    os.close(writer)
    assert run_here("scripts/resumable.py", f"--job.config_file=/dev/fd/{reader}") == 1
    assert "finished: a checkpoint of step 1 of 1" in capfd.readouterr().out
    assert run_here("train.py", CONFIG, f"--data.paths=/dev/fd/{reader}") == 2
    assert f'"/dev/fd/{reader}": is a pipe' in capfd.readouterr().err


@pytest.mark.parametrize("script", ["train.sh", "test.sh"])
def test_a_checkout_that_cannot_be_written_is_a_sentence(tmp_path, script):
    shutil.copytree(REPO / "scripts", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copyfile(REPO / name, tmp_path / name)
    (tmp_path / ".venv").touch()  # a folder cannot take its place, whoever asks
    ended = subprocess.run([tmp_path / "scripts" / script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"error: {tmp_path}/.venv cannot be written: copy the checkout to a folder that you may write to\n"
    )
