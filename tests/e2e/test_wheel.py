"""The built wheel in an empty folder, and a checkout that nobody has installed: what a stranger has.

The environments' other packages are those of the one that runs the tests, so nothing is downloaded.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.e2e.jobs import short
from tests.e2e.scripts import REPO

SMALL = [*short(3, batch=4, warmup=1), "--metrics.log_interval=1"]
COMMANDS = {
    *("titan-train", "titan-plan", "titan-verify", "titan-evaluate", "titan-generate", "titan-convert"),
    *("titan-preprocess", "titan-compare", "titan-report", "titan-sweep", "titan-search", "titan-bench-comm"),
    *("titan-resumable", "titan-import"),
}
# A checkout compiles and converts as well.
TINY = [
    "--job.config_file=train_configs/debug_gpt.toml", "--job.dump_folder=out", *short(1, 1, 1, 0),
    "--model.overrides={num_layers = 1, hidden_size = 32}", "--compile.enable=true",
]  # fmt: skip
RUNS = {
    "train": ["train.py", *TINY, "--checkpoint.enable=true"],
    "convert": ["scripts/convert.py", "to-hf", "--checkpoint=out/checkpoint", "--output=exported"],
    "verify": ["scripts/verify.py", *TINY, "--compile.enable=false"],
}
# What the programs do, one after the other in one process; then a line for each.
ALL_HELP = """
import contextlib, io, sys
from importlib.metadata import entry_points
for command in entry_points(group="console_scripts"):
    if command.name.startswith("titan-"):
        sys.argv = [command.name, "--help"]
        with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
            command.load()()
        told = told.getvalue()
        print(command.name, command.name in told, "scripts/" in told or "train.py" in told)
"""

pytestmark = pytest.mark.slow


def done(command, **options):
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def copy(folder, *names):
    for name in names:
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(REPO / name, folder)


def see(home, packages):
    """Let the interpreter of a fresh environment see the packages in a folder."""
    (site,) = home.glob("lib/*/site-packages")
    # Lines of .pth files in a folder that is named here are not followed, such as those that name the checkout.
    (site / "other_packages.pth").write_text(str(packages))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of an environment's programs, with the wheel installed in it."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"  # a build leaves files next to its sources
    source.mkdir()
    copy(source, "titan_like", "train_configs", "pyproject.toml", "README.md", "LICENSE")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    done([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(home), str(source)])
    (wheel,) = home.glob("*.whl")
    venv.create(home / "venv", symlinks=True)
    python = home / "venv" / "bin" / "python"
    done([*pip, "--python", str(python), "install", "--no-deps", str(wheel)])
    see(home / "venv", sysconfig.get_path("purelib"))  # now: pip would put the wheel in place of one that it sees
    return python.parent


def variables(**changes):
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return plain | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | changes


@pytest.fixture
def run(programs, tmp_path):
    """Run one of the programs in an empty folder; what it prints."""
    path = f"{programs}:{os.environ['PATH']}"

    def run(program, *arguments):
        return done([str(programs / program), *arguments], cwd=tmp_path, env=variables(PATH=path))

    return run


@pytest.mark.exhaustive
def test_a_checkout_that_is_not_installed_does_what_an_installed_one_does(tmp_path):
    others = tmp_path / "packages"
    others.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "titan_like" not in entry.name:
            (others / entry.name).symlink_to(entry)
    venv.create(tmp_path / "venv", symlinks=True)
    see(tmp_path / "venv", others)
    python = str(tmp_path / "venv" / "bin" / "python")
    copy(tmp_path, "titan_like", "train_configs", "scripts", "train.py")
    probe = "import torch, importlib.metadata as m; m.version('torch'); m.version('titan_like')"
    failed = subprocess.run([python, "-c", probe], cwd=tmp_path, env=variables(), capture_output=True, text=True)
    assert "PackageNotFoundError: No package metadata was found for titan_like" in failed.stderr
    for arguments in RUNS.values():
        done([python, *arguments], cwd=tmp_path, env=variables())


def test_commands_are_the_wheels(programs, run):
    assert {path.name for path in programs.glob("titan-*")} == COMMANDS
    files = run("python", "-c", "import sys, titan_like as t; print(t.__file__, t.load_config.__module__, *sys.path)")
    where, *path = files.split()
    assert where.startswith(str(programs.parent)) and str(REPO) not in path
    hint = run("python", "-c", "from titan_like.config import synonyms; print(synonyms.hint_for('learning_rate'))")
    assert hint == "did you mean optimizer.lr?\n"
    told = run("python", "-c", ALL_HELP).splitlines()
    assert sorted(told) == sorted(f"{name} True False" for name in COMMANDS)


def test_trains_a_shipped_configuration(run, tmp_path):
    run("python", "-m", "titan_like.commands.train", "--job.config_file=debug_gpt", *SMALL)
    lines = (tmp_path / "outputs" / "debug_gpt" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 3 and losses[-1] < losses[0] < 6  # an untrained model of bytes has ln 257 = 5.55
    settings = ["--job.config_file=debug_gpt", *SMALL, "--training.steps=6"]
    torchrun = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    resumed = run(*torchrun, "--no-python", "titan-train", *settings)
    assert resumed.count("step 6/6 |") == 1
    assert run("titan-generate", *settings, "--prompt=def ").startswith("def ")


def test_plans_a_shipped_configuration(run, tmp_path):
    options = ["--job.config_file=debug_gpt", "--cluster.gpu=A100", "--gpus=2"]
    run("titan-plan", "search", *options, "--json=found.json", "--out=best.toml")
    assert json.loads((tmp_path / "found.json").read_text())["search"]
    run("titan-plan", "predict", "--job.config_file=best.toml")


@pytest.mark.exhaustive
def test_verifies_a_shipped_configuration(run):
    fewer = ["--steps=2", "--model.overrides.dropout=0", "--parallelism.data_parallel_shard_degree=1"]
    told = run("titan-verify", "--job.config_file=debug_gpt", *fewer)
    assert "\nsame: this layout computes the training of one process" in told
