"""A run on a stream, from a folder of parquet files: killed, and resumed in another layout on the very same samples."""

import json
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.jobs import records, short, steps, train_on
from tests.e2e.scripts import REPO, Script
from tests.float64 import bound

SETTINGS = [
    *short(100, warmup=0), "--model.overrides.num_layers=2", "--model.overrides.hidden_size=32", "--data.dataset=hf",
    "--data.text_key=content", "--data.num_readers=4", "--data.split=9,1,0", "--training.seq_len=16",
    "--optimizer.lr=1e-4", "--training.dtype=float64",
    "--lr_scheduler.decay=constant", "--evaluation.interval=100", "--evaluation.steps=2", "--checkpoint.enable=true",
    "--checkpoint.interval=20", "--metrics.log_interval=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream")
    texts = [path.read_text(encoding="utf-8") for path in sorted((REPO / "titan_like/data").rglob("*.py"))]
    (folder / "corpus").mkdir()
    for number in range(3):
        pq.write_table(pa.table({"content": texts[number::3] * 2}), folder / "corpus" / f"{number}.parquet")
    return folder


def arguments_of(folder: Path, dump: str, *settings: str) -> list[str]:
    return [*SETTINGS, f"--job.dump_folder={folder}/{dump}", f"--data.paths={folder}/corpus", *settings]


def start(folder: Path, dump: str, *settings: str) -> Script:
    return Script("train.py", arguments_of(folder, dump, *settings))


def test_a_killed_run_goes_on_with_the_very_same_samples_in_another_layout(folder: Path) -> None:
    whole = start(folder, "whole")
    out, err = whole.communicate(timeout=240)
    assert whole.returncode == 0, err
    assert " streaming with 4 readers\n" in out

    killed = start(folder, "parts")
    while not (folder / "parts/checkpoint/step-40").exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    killed.kill()
    killed.communicate()
    step = max((folder / "parts/checkpoint").glob("step-?0"), key=lambda path: path.name)
    run = json.loads((step / "run.json").read_text())
    assert [mark[0] for mark in run["readers"].values()] == [run["consumed_samples"] // 4] * 4
    train_on(2, folder / "log.txt", arguments_of(folder, "parts", "--data.num_workers=1"))
    assert steps(folder / "parts") == list(range(1, 101))
    for key, count in {"loss": 100, "validation_loss": 1}.items():
        wanted, found = ([one[key] for one in records(folder / dump) if key in one] for dump in ("whole", "parts"))
        assert len(wanted) == count
        assert found == pytest.approx(wanted, rel=bound(4096 * 100))

    shutil.copytree(folder / "corpus", folder / "moved")
    settings = (f"--data.paths={folder}/moved", "--training.steps=101", "--data.prefix_lm=true")
    moved = start(folder, "parts", *settings)
    out, err = moved.communicate(timeout=240)
    assert moved.returncode == 0, err
    assert "\n from step 101 on: data.prefix_lm false -> true\n" in out

    other = start(folder, "parts", "--data.num_readers=8", "--training.steps=102")
    _, err = other.communicate(timeout=240)
    assert other.returncode == 1
    assert "was trained on other data than [data] now gives" in err and "(data.num_readers was 4)" in err
