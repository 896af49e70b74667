"""A length in epochs: the run takes as many steps as hold that many passes over the data."""

import math
import shutil
from pathlib import Path

import pytest

from tests.unit.test_resumed_length import config_of, cosine, go_back, lines_of_changes, train
from titan_like.checkpoint.step_folders import is_resumable
from titan_like.config import ConfigError, load_config
from titan_like.config.schema import Training
from titan_like.data.loading import open_source
from titan_like.data.loading.batch_size import in_samples
from titan_like.models.registry import model_config
from titan_like.planner.dry_run import dry_run
from titan_like.planner.dry_run_page import format_dry_run

EPOCH = 100  # samples of 8 bytes
SETTINGS = {"lr_scheduler.warmup_steps": 4, "lr_scheduler.min_lr_ratio": 0.1, "data.split": "1,0,0"}


@pytest.mark.slow
def test_a_run_of_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1.6 epochs of 100 samples are 20 batches of 8; then it goes on with other batches, and to another length."""
    assert in_samples(Training(steps=None, epochs=1.15), 100).samples == 115  # the product is a little less
    text, dump = tmp_path / "epoch.txt", tmp_path / "out"
    text.write_text("All work" * EPOCH)  # with the end-of-document token there is a label for each byte
    settings: dict[str, object] = SETTINGS | {"data.paths": f'["{text}"]', "training.epochs": 1.6}
    records = train(dump, settings)
    assert " 1.6 epochs of 100 samples: 20 steps\n" in capsys.readouterr().out
    assert [record["lr"] for record in records] == pytest.approx([cosine(samples) for samples in range(8, 161, 8)])
    finished = f"finished: a checkpoint of step 20 of 20 is in {dump / 'checkpoint'}"
    assert is_resumable(config_of(dump, settings)) == (False, finished)
    shutil.copytree(dump, tmp_path / "other")
    go_back(dump, 10)
    records = train(dump, settings | {"training.global_batch_size": 12})  # 80 samples and 7 batches
    assert [record["step"] for record in records] == [*range(1, 18)] and records[-1]["consumed_samples"] == 164
    dump = tmp_path / "other"
    go_back(dump, 10)
    twice = settings | {"training.epochs": 2}
    told = f"resumable: step 10 of 25 is in {dump / 'checkpoint'}"
    assert is_resumable(config_of(dump, twice)) == (True, told)
    capsys.readouterr()
    records = train(dump, twice)
    (line,) = lines_of_changes(capsys)
    lengths = "training.samples 160 -> 200, training.epochs 1.6 -> 2.0"
    assert line.startswith(f" from step 11 on: {lengths}, so lr at step 11 is {records[10]['lr']:.3g} instead of ")
    assert len(records) == math.ceil(2 * EPOCH / 8)


def test_a_decay_longer_than_the_epochs_is_refused_once_they_are_counted(tmp_path: Path) -> None:
    wsd = {"training.epochs": 0.01, "lr_scheduler.decay": "wsd", "lr_scheduler.decay_steps": 12_000}
    for enable in ("true", "false"):
        with pytest.raises(ConfigError, match=r"longer than the run of \d+ steps"):
            train(tmp_path / "out", wsd | {"checkpoint.enable": enable})


def test_a_stream_of_another_package_is_refused_once_it_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless:
        def __len__(self) -> int:
            return open_source.UNKNOWN_LENGTH

    monkeypatch.setattr(open_source, "open_source", lambda request: Endless())
    config = load_config(["--training.epochs=2"])
    with pytest.raises(ConfigError, match=r"training.epochs = 2.0: the length of a stream is not known; set training"):
        open_source.open_data(config, model_config(config.model))


def test_a_dry_run_counts_the_steps_where_the_data_is_known(tmp_path: Path) -> None:
    text = tmp_path / "epoch.txt"
    text.write_text("All work" * EPOCH)
    words = ["--training.epochs=1.5", "--training.seq_len=8", f"--data.paths={text}", "--data.split=1,0,0"]
    config = load_config([*words, "--data.dataset=text", "--evaluation.interval=0", f"--job.dump_folder={tmp_path}"])
    page = format_dry_run(dry_run(config))
    assert ", steps of 16 samples × 8 tokens" in page and "follows from training.epochs" in page
    open_source.open_data(config, model_config(config.model))  # which tokenizes it
    page = format_dry_run(dry_run(config))
    assert ", 10 steps of 16 samples × 8 tokens" in page and "; 160 samples, 1,280 tokens\n" in page
    assert "data: 100 training samples, 1.6 passes over them" in page
