"""The dataset that docs/data.md adds, from a folder on PYTHONPATH: trained by train.py, on one process and on two."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.jobs import records, short, steps, train_on
from tests.e2e.scripts import REPO, Script, install
from tests.float64 import bound

PAGE = (REPO / "docs" / "data.md").read_text(encoding="utf-8")
SHOWN_CLASS, SHOWN_PROJECT, SHOWN_RUN = re.findall(
    r"^```\w+\n(.*?)^```", PAGE.split("## Adding a dataset")[1], re.DOTALL | re.MULTILINE
)
SETTINGS = [
    *short(6, warmup=0), "--model.overrides.num_layers=2", "--model.overrides.hidden_size=32", "--optimizer.lr=1e-2",
    "--lr_scheduler.decay=constant", "--evaluation.interval=3", "--evaluation.steps=3", "--checkpoint.enable=true",
    "--checkpoint.interval=3", "--training.dtype=float64",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, the package as installed: its entry points are in a dist-info folder."""
    folder = tmp_path_factory.mktemp("sums")
    (folder / "sums.py").write_text(SHOWN_CLASS)
    install(folder, "sums", "titan_like.datasets", SHOWN_PROJECT.split('"titan_like.datasets"]\n')[1])
    (folder / "run.toml").write_text(SHOWN_RUN)
    return folder


def arguments_of(folder: Path, dump: str, *settings: str) -> list[str]:
    run = [f"--job.config_file={folder}/run.toml", f"--job.dump_folder={folder}/{dump}"]
    return [*run, *SETTINGS, *settings]


def train(folder: Path, dump: str, *settings: str) -> subprocess.CompletedProcess[str]:
    return Script("train.py", arguments_of(folder, dump, *settings), path=[folder]).wait()


def test_a_dataset_of_one_class_trains_in_any_layout_and_resumes(folder: Path) -> None:
    whole = train(folder, "whole")
    assert whole.returncode == 0, whole.stderr
    assert steps(folder / "whole") == [1, 2, 3, 4, 5, 6]
    for settings in ("--training.steps=3", "--data.num_workers=1"):
        train_on(2, folder / "log.txt", arguments_of(folder, "parts", settings), path=[folder])
    assert steps(folder / "parts") == [1, 2, 3, 4, 5, 6]
    for key, values in {"loss": 6, "validation_loss": 2}.items():
        wanted, found = ([one[key] for one in records(folder / dump) if key in one] for dump in ("whole", "parts"))
        assert len(wanted) == values
        assert found == pytest.approx(wanted, rel=bound(4096 * 6))
        assert wanted[-1] < wanted[0]

    other = train(folder, "parts", "--data.options.largest=50")
    assert other.returncode == 2
    assert other.stderr.startswith("error: data.options = {'largest': 50}: ")
    (folder / "sums.py").write_text(SHOWN_CLASS.replace("0.9", "0.8"))
    changed = train(folder, "parts", "--training.steps=7")
    (folder / "sums.py").write_text(SHOWN_CLASS)
    assert changed.returncode == 1
    assert "was trained on other data than [data] now gives" in changed.stderr


def test_its_own_refusal_is_one_sentence(folder: Path) -> None:
    done = train(folder, "refused", "--training.seq_len=8")
    assert done.returncode == 2
    assert done.stderr == "error: training.seq_len = 8: a sum takes 9 tokens; use at least that\n"
