"""The folders for transformers that a run writes are exports of the checkpoints of their steps, in every layout."""

from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.distributed.launch import base_config, collect, trainer_of
from tests.distributed.layouts import pipeline, sizes, tensor, zero
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.config.errors import RunError
from titan_like.hugging_face.convert import to_hugging_face, write_folder
from titan_like.train import training_state

MOST_BYTES = 40_000  # of a file, so that each process has some
SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 2}
LLAMA = {"model.family": "llama", "model.overrides": SMALL}
ONE_KEY_HEAD = {"model.family": "llama", "model.overrides": SMALL | {"num_kv_heads": 1}}
EXPERTS = {"model.family": "moe", "model.overrides": SMALL | {"num_experts": 4, "expert_ffn_hidden_size": 24}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {"model.overrides": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}}),
    "zero 3": (2, LLAMA | zero(3) | {"training.dtype": "bfloat16", "parallelism.data_parallel_shard_degree": 2}),
    "expert 2": (2, EXPERTS | {"parallelism.expert_parallel_degree": 2}),
    "tensor 2 of 2 stages": (4, ONE_KEY_HEAD | tensor() | pipeline()),
}
SAVES = {"checkpoint.enable": True, "checkpoint.interval": 1, "checkpoint.keep_latest": 2}
ALONE = {"checkpoint.enable": False, "checkpoint.async": True}


def train(rank: int, root: Path, ranks: int) -> dict[str, Any]:
    """Train in each layout with both checkpoints and folders, and with folders alone."""
    training_state.write_folder = partial(write_folder, most_bytes=MOST_BYTES)
    short = sizes(32, 1, 4, 3) | {"checkpoint.hugging_face_interval": 1}
    for name, (size, settings) in LAYOUTS.items():
        for kind, of_kind in {"both": SAVES, "alone": ALONE}.items() if size == ranks else ():
            dump = {"job.dump_folder": str(root / name / kind)}
            trainer_of(root, short | settings | of_kind | dump).train()
    return {}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exports")
    base_config(root, {})  # writes the text
    for ranks in (1, 2, 4):
        collect(train, ranks, root, ranks)
    return root


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_folder_is_the_export_of_its_step(root: Path, name: str) -> None:
    run, dtype = root / name / "both", LAYOUTS[name][1].get("training.dtype", "float32")
    for step in (2, 3):
        weights = CheckpointWeights(run / "checkpoint" / f"step-{step}")
        exported = root / name / f"exported {step}"
        to_hugging_face(weights, exported, getattr(torch, dtype), MOST_BYTES, None)
        wanted = files(exported)
        assert len([file for file in wanted if file.endswith(".safetensors")]) > 2
        for kind in ("both", "alone"):
            assert files(root / name / kind / "hugging_face" / f"step-{step}") == wanted, (kind, step)
    assert sorted(path.name for path in (run / "hugging_face").iterdir()) == ["step-2", "step-3"]
    assert len(list((root / name / "alone" / "hugging_face").iterdir())) == 3
    assert not (root / name / "alone" / "checkpoint").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "hugging_face" / "step-3")
    assert str(model.dtype) == f"torch.{dtype}"


def train_where_a_folder_fails(rank: int, root: Path, on_failure: str) -> dict[str, Any]:
    """Train where the last rank cannot write its share of step 2's folder."""

    def fail(weights: CheckpointWeights, folder: Path, *args: Any, **options: Any) -> list[str]:
        if rank == 1 and weights.run.step == 2:
            raise OSError(28, "No space left on device")
        return write_folder(weights, folder, *args, **options)

    training_state.write_folder = fail
    settings = sizes(32, 1, 4, 3) | LLAMA | {"checkpoint.hugging_face_interval": 1, "checkpoint.async": True}
    settings |= {"checkpoint.on_failure": on_failure, "job.dump_folder": str(root / on_failure)}
    with redirect_stdout(StringIO()) as printed:
        trainer = trainer_of(root, settings | {"checkpoint.enable": True, "checkpoint.interval": 1})
        try:
            trainer.train()
        except RunError as error:
            print(error)
    return {"printed": printed.getvalue(), "saved": sorted(trainer.state.saved_steps)}


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_folder_that_fails_leaves_the_others_and_the_checkpoint(root: Path, on_failure: str) -> None:
    outcomes = collect(train_where_a_folder_fails, 2, root, on_failure)
    run, last = root / on_failure, 3 if on_failure == "continue" else 2
    problem = f"{run}/hugging_face/step-2 is not saved (rank 1: [Errno 28] No space left on device); earlier"
    assert problem in outcomes[0]["printed"]
    done = list(range(1, last + 1)) if on_failure == "continue" else [1]
    assert outcomes[0]["saved"] == outcomes[1]["saved"] == done
    folders = {path.name for path in (run / "hugging_face").iterdir()}
    assert folders == {f"step-{step}" for step in (1, last) if step != 2}
    assert (run / "checkpoint" / "step-2" / "run.json").is_file()
