"""RACE: what is read, that a model learns to choose from it, and that its accuracy is that of transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.reference.sources import define
from tests.unit.hugging_face_cases import bert_config, random_model, reference_of, save_checkpoint
from tests.unit.race_cases import VOCABULARY, scores_of_transformers, write_race
from titan_like.commands import evaluate
from titan_like.config import ConfigError, load_config
from titan_like.config.schema import Data, JobConfig
from titan_like.data.loading.open_source import open_source
from titan_like.data.objectives.race import read_questions
from titan_like.data.source import DataRequest
from titan_like.data.text.tokenizer import build_tokenizer
from titan_like.train.job import run_job
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run

SEQ = 16
SHAPE = {"num_layers": 2, "hidden_size": 64, "init_std": 0.1, "vocab_size": len(VOCABULARY), "sentence_head": "choice"}
MODEL = {f"model.overrides.{key}": value for key, value in SHAPE.items()}
MODEL |= {"model.family": "bert", "training.seq_len": SEQ}


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_race(tmp_path_factory.mktemp("race"), {"train": 200, "dev": 20, "test": 20})


def arguments(race: Path, settings: dict[str, object]) -> list[str]:
    whole = MODEL | {"data.tokenizer": race / "tokenizer.json"} | settings
    return [f"--{key}={value}" for key, value in whole.items()]


def test_splits_have_fingerprints_of_their_own(race: Path, tmp_path: Path) -> None:
    section = Data(dataset="race", paths=[str(race)], tokenizer=str(race / "tokenizer.json"))
    requests = [DataRequest(section, split, SEQ, 5, len(VOCABULARY), tmp_path) for split in ("train", "validation")]
    one, other = map(open_source, requests)
    assert one.fingerprint != other.fingerprint


def test_long_questions_and_passages_are_cut_as_megatron_lm_cuts_them(tmp_path: Path) -> None:
    record = {
        "article": "  a long\n\npassage .\t" * 200,
        "questions": ["which is _ , or _ ?", "why ?"],
        "options": [["one", "two " * 60, " three", ""], ["x " * 300, "y", "z\n", "."]],
        "answers": ["B", "A"],
    }
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "one.txt").write_text(json.dumps(record))
    section = Data(dataset="race", paths=[str(tmp_path)])
    source = open_source(DataRequest(section, "train", 512, 0, 261, tmp_path))
    job = {"job": {"seed": 0}, "training": {"seq_len": 512}, "model": {"family": "bert"}, "data": section}
    defined = define(JobConfig.model_validate(job), "train")
    assert all(torch.equal(source[index].tokens, defined[index].tokens) for index in range(8))
    assert sum(int(source[index].tokens[129]) == 259 for index in range(8)) == 2  # whose questions are cut


def test_what_is_not_race_is_one_sentence(race: Path, tmp_path: Path) -> None:
    tokenizer, whole = f"--data.tokenizer={race}/tokenizer.json", json.dumps({"article": "a", "questions": ["b"]})
    for name, text in (("train", whole), ("dev", "{"), ("test", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.txt").write_text(text)
    start = [*arguments(race, {"data.dataset": "race"}), tokenizer, "--training.steps=1"]
    for paths, words_of in (
        (f'["{tmp_path}"]', r"train.*: has no article with questions, 4 options each and answers in line 1 of 1.txt"),
        (f'["{race}/dev"]', r"dev/train.*has no .txt files with questions; name a folder of RACE"),
        (f'["{race}", "{race}"]', "needs one folder, in which train, dev and test are"),
    ):
        with pytest.raises(ConfigError, match=words_of):
            config = load_config([*start, f"--data.paths={paths}", f"--job.dump_folder={tmp_path}/out"])
            prepare_run(resolve_settings(config))
    for family, task, words_of in (
        ("bert", f"text={race}/tokenizer.json", "this model chooses answers; only race is for it"),
        ("gpt", f"race={race}/test", "needs a model that chooses answers: bert, fine-tuned with"),
        ("bert", f"race={race}/tokenizer.json", "is not a folder; name one of the data set's"),
    ):
        settings = arguments(race, {}) if family == "bert" else ["--model.family=gpt"]
        with pytest.raises(ConfigError, match=words_of):
            evaluate.main([*settings, "--training.steps=1", "--task", task])


def test_accuracy_is_that_of_transformers(race: Path, tmp_path: Path, capsys) -> None:
    shape = bert_config(norm_placement="post", sentence_head="choice", vocab_size=len(VOCABULARY), dropout=0.5)
    model = random_model(shape).float()
    save_checkpoint(tmp_path / "run", model)
    questions = read_questions(race / "test", build_tokenizer(str(race / "tokenizer.json")))
    values = scores_of_transformers(reference_of(model), questions, 32)
    right = values.argmax(1).numpy() == [question.answer for question in questions]
    groups = np.array([question.group for question in questions])
    assert 0.05 < right.mean() < 0.6
    settings = [f"--model.overrides.{key}={json.dumps(value)}" for key, value in shape.model_dump().items()]
    fixed = ["--model.family=bert", "--training.seq_len=32", "--training.steps=1"]
    fixed += [f"--data.tokenizer={race}/tokenizer.json", f"--checkpoint.folder={tmp_path}/run"]
    assert evaluate.main([*fixed, *settings, "--task", f"race={race}/test", "--json", str(tmp_path / "j.json")]) == 0
    assert f"accuracy         {right.mean():.6g}" in " ".join(capsys.readouterr().out.splitlines())
    assert json.loads((tmp_path / "j.json").read_text())["results"]["race"] == {
        "questions": 120,
        "accuracy": right.mean(),
        "accuracy_high": right[groups == "high"].mean(),
        "accuracy_middle": right[groups == "middle"].mean(),
    }


@pytest.mark.exhaustive
def test_a_pretrained_model_learns_to_choose(race: Path, tmp_path: Path, capsys) -> None:
    """Initial weights have a head for tokens and one for pairs. The pooler goes on; the head that chooses is new."""
    text = tmp_path / "text.txt"
    text.write_text(" ".join(VOCABULARY[7 + n * n % 12] for n in range(3000)))
    pretraining = {
        "model.overrides.sentence_head": "pair",
        "data.dataset": "text",
        "data.paths": f'["{text}"]',
        "data.sentence_objective": "sentence_order",
    }
    both = {"training.global_batch_size": 64, "training.micro_batch_size": 32, "lr_scheduler.decay": "linear"}
    both |= {"checkpoint.enable": "true"}
    start = {"training.steps": 2, "evaluation.interval": 0, "job.dump_folder": tmp_path / "pretrained"}
    config = load_config(arguments(race, both | pretraining | start))
    run_job(prepare_run(resolve_settings(config)))
    tuning = {
        "data.dataset": "race", "data.paths": f'["{race}"]', "training.steps": 150, "optimizer.lr": 3e-3,
        "lr_scheduler.warmup_steps": 9, "evaluation.interval": 150, "evaluation.datasets": f'["race={race}/dev"]',
        "checkpoint.initial_load_path": tmp_path / "pretrained/checkpoint/step-2",
        "job.dump_folder": tmp_path / "tuned",
    }  # fmt: skip
    run_job(prepare_run(resolve_settings(load_config(arguments(race, both | tuning)))))
    lines = [json.loads(line) for line in (tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()]
    assert "weights from" in capsys.readouterr().out
    assert lines[0]["choice_loss"] == pytest.approx(1.4, abs=0.3) and lines[0]["loss"] == lines[0]["choice_loss"]
    accuracy = lines[-1]["race/accuracy"]
    print(accuracy, lines[-1]["validation_loss"])
    assert accuracy > 0.4  # of 120 questions; chance is 0.25, with a standard deviation of 0.04
