"""A model that chooses gives transformers' scores and the same training in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.launch import Case, base_config, collect, train_case
from tests.distributed.layouts import pipeline, sizes, tensor, zero
from tests.float64 import bound
from tests.unit.hugging_face_cases import bert_config, random_model, reference_of, save_checkpoint
from tests.unit.race_cases import VOCABULARY, scores_of_transformers, write_race
from titan_like.data.objectives.race import read_questions
from titan_like.data.text.tokenizer import build_tokenizer
from titan_like.evaluate.inference import find_checkpoint, load_parallel_model
from titan_like.evaluate.scoring import Scorer
from titan_like.evaluate.task import TextSettings
from titan_like.evaluate.tasks import race_task
from titan_like.parallel.mesh import build_mesh
from titan_like.train.rules import resolve_settings

SEQ = 20
SHAPE = bert_config(num_layers=4, sentence_head="choice", vocab_size=len(VOCABULARY))
LAYOUTS = {"pipeline, tensor": pipeline() | tensor(), "data, sequence, zero 3": tensor(2, True) | zero(3)}


def settings_of(race: Path) -> dict[str, Any]:
    flavor, files = {"own": SHAPE.model_dump(mode="json")}, {"data.paths": [str(race)], "data.dataset": "race"}
    files |= {"training.dtype": "float64"}
    model = {"model.family": "bert", "model.flavor": "own", "model.flavors": flavor}
    return sizes(SEQ, 4, 16, 6) | model | files | {"data.tokenizer": str(race / "tokenizer.json")}


def score_and_train(rank: int, race: Path) -> dict[str, list[float]]:
    tokenizer = build_tokenizer(str(race / "tokenizer.json"))
    task = race_task("race", race / "test", tokenizer, TextSettings.of(SEQ))
    found = {}
    for name, layout in LAYOUTS.items():
        config = base_config(race, settings_of(race) | layout)
        degrees = resolve_settings(config, dist.get_world_size()).layout
        mesh, device = build_mesh(degrees, "cpu"), torch.device("cpu")
        scores = Scorer(config, load_parallel_model(config, find_checkpoint(config), mesh, device), mesh, device)
        found[name] = [score.log_probability for score in scores(task.windows)]
        found[f"{name}, losses"] = losses_of(race, layout)
    return found


def losses_of(race: Path, layout: dict[str, Any]) -> list[float]:
    return train_case(Case("", settings_of(race) | layout | {"job.dump_folder": str(race / "out")}), race).losses


def train_alone(rank: int, race: Path) -> list[float]:
    return losses_of(race, {})


def test_scores_and_losses_in_every_layout(tmp_path: Path) -> None:
    race = write_race(tmp_path / "race", {"train": 9, "dev": 2, "test": 3})
    model = random_model(SHAPE)
    save_checkpoint(race / "checkpoint", model)
    found, (alone,) = collect(score_and_train, 4, race)[0], collect(train_alone, 1, race)
    questions = read_questions(race / "test", build_tokenizer(str(race / "tokenizer.json")))
    wanted = scores_of_transformers(reference_of(model), questions, SEQ).flatten()
    assert wanted.numel() == 72 and wanted.std() > 0.05
    for name in LAYOUTS:
        assert found[name] == pytest.approx(wanted.tolist(), rel=bound(), abs=bound())
        assert found[f"{name}, losses"] == pytest.approx(alone, rel=bound(4096 * 6))
    assert len(set(alone)) == 6
