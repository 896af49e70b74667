"""Validation sets of JSONL and Parquet, each with a loss of its own, the same in every layout."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.e2e.jobs import records, train_on
from tests.float64 import bound
from titan_like.config import load_config
from titan_like.data.text.tokenizer import ByteTokenizer
from titan_like.evaluate.inference import find_checkpoint, load_for_inference
from titan_like.models.batch import Batch

SEQ_LEN = 32
TEXTS = {
    "books": [f"the {number} hidden words of chapter {number % 7}" for number in range(60)],
    "the-code.v2": [f"print({number}) # {number * number}" for number in range(77)],
}
SETTINGS = [
    f"--training.seq_len={SEQ_LEN}", "--training.steps=4", "--training.micro_batch_size=2", "--optimizer.lr=0.01",
    "--training.global_batch_size=8", "--training.dtype=float64", "--evaluation.steps=9", "--checkpoint.enable=true",
    "--metrics.log_interval=2", "--model.overrides={num_layers = 2, hidden_size = 64}", "--data.dataset=text",
    "--evaluation.interval=2",
]  # fmt: skip
LAYOUTS = {
    1: [],
    2: ["--parallelism.pipeline_parallel_degree=2", "--data.num_workers=1"],
    4: ["--parallelism.context_parallel_degree=2", "--parallelism.zero_stage=1"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    rows = {name: [{"text": text} for text in texts] for name, texts in TEXTS.items()}
    (folder / "books.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows["books"]))
    (folder / "code").mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows["the-code.v2"]), folder / "code" / "test.parquet")
    (folder / "words.txt").write_text("".join(f"line {number} of {number % 13}\n" for number in range(3000)))
    (folder / "run.toml").write_text(
        f'[data]\npaths = ["{folder}/words.txt"]\n[[evaluation.sets]]\nname = "books"\npaths = ["{folder}/*.jsonl"]\n'
        f'[[evaluation.sets]]\nname = "the-code.v2"\npaths = ["{folder}/code"]\n'
    )
    return folder


def train(folder: Path, processes: int, *settings: str) -> tuple[str, list[dict[str, Any]]]:
    dump = folder / f"out{processes}{len(settings)}"
    words = [f"--job.config_file={folder}/run.toml", f"--job.dump_folder={dump}", *SETTINGS, *LAYOUTS[processes]]
    printed = train_on(processes, folder / "log.txt", [*words, *settings])
    return printed, [line for line in records(dump) if any("validation" in key for key in line)]


def loss_of(folder: Path, texts: list[str]) -> float:
    """The mean loss of a set's whole samples under the weights that the run on one process has saved."""
    config = load_config([f"--job.config_file={folder}/run.toml", f"--job.dump_folder={folder}/out10", *SETTINGS])
    model, tokenizer = load_for_inference(config, find_checkpoint(config), torch.device("cpu")), ByteTokenizer()
    tokens = torch.tensor([token for text in texts for token in [*tokenizer.encode(text), tokenizer.eod_id]])
    number = (len(tokens) - 1) // SEQ_LEN
    inputs, labels = (tokens[at : at + number * SEQ_LEN].view(number, SEQ_LEN) for at in (0, 1))
    with torch.no_grad():
        logits = model.double()(Batch(inputs))
    return cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


def test_each_set_has_its_loss_in_every_layout(folder: Path) -> None:
    printed, alone = train(folder, 1)
    names = ["validation_loss", *(f"validation_loss/{name}" for name in TEXTS)]
    assert [line["step"] for line in alone] == [2, 4]
    assert [[key for key in line if key.startswith("validation")] for line in alone] == [names, names]
    for name, texts in TEXTS.items():
        rounded = bound(16, torch.float32)  # weights that are loaded for inference
        assert alone[-1][f"validation_loss/{name}"] == pytest.approx(loss_of(folder, texts), rel=rounded)
        assert len(re.findall(rf"^ step \d \| validation loss/{name} \S+$", printed, re.M)) == 2
    for processes in (2, 4):
        _, lines = train(folder, processes)
        for line, expected in zip(lines, alone, strict=True):
            wanted = [expected[name] for name in names]
            assert [line[name] for name in names] == pytest.approx(wanted, rel=bound(4096 * 4))


def test_the_split_of_the_training_data_can_be_left_out(folder: Path) -> None:
    """Then no line lacks its validation when the run is started again."""
    for _ in range(2):
        printed, lines = train(folder, 1, "--data.split=1,0,0")
        assert [[key for key in line if key.startswith("validation")] for line in lines] == [
            [f"validation_loss/{name}" for name in TEXTS]
        ] * 2
    assert "nothing to train" in printed and "validation loss" not in printed
