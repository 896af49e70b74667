"""A checkout that nobody has installed: the other packages are there, but no metadata of this one."""

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SMALL = [
    "--job.config_file=train_configs/debug_gpt.toml", "--job.dump_folder=out", "--training.steps=1",
    "--training.seq_len=16", "--training.micro_batch_size=1", "--training.global_batch_size=1",
    "--lr_scheduler.warmup_steps=0", '--model.overrides={num_layers = 1, hidden_size = 32}',
    "--evaluation.interval=0", "--compile.enable=true",
]  # fmt: skip
COMMANDS = {
    "train": ["train.py", *SMALL, "--checkpoint.enable=true"],
    "convert": ["scripts/convert.py", "to-hf", "--checkpoint=out/checkpoint", "--output=exported"],
    "plan": ["scripts/plan.py", "predict", "--job.config_file=train_configs/gpt_7.5b.toml"],
    "verify": ["scripts/verify.py", *SMALL, "--compile.enable=false"],
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with every other package of the one that runs the tests."""
    home = tmp_path_factory.mktemp("python")
    venv.create(home / "venv", symlinks=True)
    others = home / "packages"
    others.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "titan_like" not in entry.name:
            (others / entry.name).symlink_to(entry)
    (folder,) = (home / "venv").glob("lib/*/site-packages")
    (folder / "others.pth").write_text(str(others))
    return home / "venv/bin/python"


def test_a_checkout_that_is_not_installed_does_what_an_installed_one_does(python, tmp_path):
    for name in ("titan_like", "train_configs", "scripts"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPO / name, tmp_path / name, symlinks=True, ignore=ignore)
    shutil.copy(REPO / "train.py", tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(*arguments):
        command = [str(python), *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    probe = run("-c", "import torch, importlib.metadata as m; m.version('torch'); m.version('titan_like')")
    assert "PackageNotFoundError: No package metadata was found for titan_like" in probe.stderr
    for name, arguments in COMMANDS.items():
        done = run(*arguments)
        assert done.returncode == 0, (name, done.stdout, done.stderr)
