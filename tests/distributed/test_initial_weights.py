"""A new run begins with the weights of a Hugging Face folder or of a checkpoint, bit for bit in every layout."""

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import all_stages, base_config, by_name, collect, launch, trainer_of
from tests.distributed.layouts import pipeline, tensor, zero
from tests.unit.hugging_face_cases import gpt_config, llama_config, moe_config, random_model, save_checkpoint
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.config.errors import RunError
from titan_like.hugging_face.convert import from_hugging_face, to_hugging_face
from titan_like.hugging_face.folder import open_hugging_face
from titan_like.models.layers.init import local_part
from titan_like.parallel.mesh import build_mesh
from titan_like.train import trainer as trainer_module
from titan_like.train.initial_weights import load_initial_weights
from titan_like.train.trainer import Trainer

SIZES = {"num_layers": 4, "vocab_size": 301, "max_seq_len": 64}  # an odd vocabulary, padded to 384
MODELS = {
    "gpt": gpt_config(**SIZES, hidden_size=30, num_attention_heads=2),  # tied; shards over 4 ranks are uneven
    "llama": llama_config(**SIZES),
    "moe": moe_config(**SIZES),
}
BFLOAT16 = {"training.dtype": "bfloat16"}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"1 rank": {}},
    2: {
        "zero 3": zero(3),
        "zero 0 in bfloat16": BFLOAT16,
        "both ends of a V": pipeline(2, "zbv_zero_bubble"),  # a tied table twice
    },
    4: {
        "2 stages of tensor 2": pipeline() | tensor(),
        "tensor 2 of zero 3": tensor(2, True) | zero(3),
        "2 replicas of zero 3": zero(3, 2),
        "experts split over tensor 2 of zero 3": tensor(2, True)
        | zero(3)
        | {"parallelism.expert_tensor_parallel_degree": 2},
    },
}
CHOSEN = {  # each layout with one of the models
    "gpt": ["zero 3", "both ends of a V", "tensor 2 of zero 3"],
    "llama": ["1 rank", "zero 0 in bfloat16", "2 stages of tensor 2", "2 replicas of zero 3"],
    "moe": ["experts split over tensor 2 of zero 3"],
}
SOURCES = {"hugging face": "hf", "imported": "run/step-0", "of a run": "run/step-5"}


def build(folder: Path, model: str, source: Path, settings: dict[str, Any]) -> Trainer:
    config = MODELS[model]
    own = {
        "model.family": model,
        "model.flavor": "x",
        "model.flavors": {"x": config.model_dump(mode="json", exclude_none=True)},
        "training.steps": 2,
        "job.dump_folder": str(folder / "run"),
        "checkpoint.initial_load_path": str(source),
    }
    return trainer_of(folder, own | settings)


def load_each(rank: int, folder: Path, ranks: int) -> dict[str, bool]:
    """Every source in every layout: whether all weights have the bits that they should have."""
    same: dict[str, bool] = {}
    trainer_module.build_mesh = cache(build_mesh)  # groups of one layout are there once
    for model in MODELS:
        expected = torch.load(folder / model / "expected.pt", weights_only=True)
        for layout, settings in LAYOUTS[ranks].items():
            if layout not in CHOSEN[model]:
                continue
            trainer = build(folder, model, folder / model / SOURCES["hugging face"], settings)
            assert (trainer.state.step, len(trainer.state.optimizer.state)) == (0, 0)
            for source, path in SOURCES.items():
                if source != "hugging face":  # that is what the run began with
                    with torch.no_grad():
                        for parameter in trainer.model.parameters():
                            local_part(parameter)[0].fill_(math.nan)
                    load_initial_weights(str(folder / model / path), trainer.model)
                weights = all_stages(trainer, by_name(trainer.model.named_parameters()))
                assert weights.keys() == expected.keys()
                same[f"{model} | {layout} | {source}"] = all(torch.equal(weights[n], expected[n]) for n in expected)
    return same


def refuse_damaged(rank: int, folder: Path, source: Path, out: Path) -> None:
    """A file that only some processes need is damaged after the checks: all of them end with the same sentence."""
    from titan_like.hugging_face import start

    checked = start.open_hugging_face(source, "x")
    if rank == 1:
        broken = {name: tensor for name, tensor in checked.tensors.items() if "layers.3" not in name}
        object.__setattr__(checked, "tensors", broken)
    start.open_hugging_face = lambda *_: checked
    with pytest.raises(RunError) as error:
        build(folder, "llama", source, {})
    out.with_name(f"{out.name}.{rank}").write_text(str(error.value))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("initial")
    base_config(folder, {})
    for name, config in MODELS.items():
        model = random_model(config).float()
        with torch.no_grad():
            for table in ("embedding", "output"):
                if hasattr(getattr(model, table), "weight"):
                    getattr(model, table).weight[config.vocab_size :] = 0
        torch.save(dict(model.named_parameters()), folder / f"{name}.pt")
        (folder / name).mkdir()
        (folder / f"{name}.pt").rename(folder / name / "expected.pt")
        weights = CheckpointWeights(save_checkpoint(folder / name / "run", model, step=5))
        to_hugging_face(weights, folder / name / "hf", None, 100_000, None)
        from_hugging_face(open_hugging_face(folder / name / "hf", "x"), folder / name / "run")
    return folder


@pytest.fixture(scope="module")
def same(folder: Path) -> dict[str, bool]:
    return {case: holds for ranks in LAYOUTS for case, holds in collect(load_each, ranks, folder, ranks)[0].items()}


@pytest.mark.parametrize(("model", "layout"), [(model, name) for model, names in CHOSEN.items() for name in names])
def test_weights_are_bit_equal_in_every_layout(same: dict[str, bool], model: str, layout: str) -> None:
    assert {source: same[f"{model} | {layout} | {source}"] for source in SOURCES} == dict.fromkeys(SOURCES, True)


def test_damage_that_one_process_finds_ends_all_of_them(folder: Path, tmp_path: Path) -> None:
    launch(refuse_damaged, 2, folder, folder / "llama" / "hf", tmp_path / "error")
    sentences = {(tmp_path / f"error.{rank}").read_text() for rank in range(2)}
    assert len(sentences) == 1
    assert f"{folder}/llama/hf cannot be loaded (rank 1: " in sentences.pop()
