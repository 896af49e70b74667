"""A checkpoint of any layout holds the same bits when it is loaded in another; keep_latest and load_step."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import crash_worker
from tests.distributed.launch import base_config, collect, launch
from tests.distributed.layouts import pipeline, tensor, with_rule, zero
from titan_like.checkpoint.step_folders import complete_steps

Digests = tuple[dict[str, str], dict[Any, str]]  # by layout, and by layouts before and after
FOUR_LAYERS = {"model.overrides": crash_worker.SETTINGS["model.overrides"] | {"num_layers": 4}}
INTERLEAVED = pipeline(2, "interleaved_1f1b")
BFLOAT16 = {"training.dtype": "bfloat16"}
NARROW = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
FLOAT8 = BFLOAT16 | {"float8.enable": True}
EXPERTS = {
    "model.family": "moe",
    "model.overrides": {"hidden_size": 32, "expert_ffn_hidden_size": 16, "balance": "bias"},
}


ONE_KEY_HEAD = {
    "model.family": "llama",
    "model.overrides": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_kv_heads": 1},
}
SHARED_EXPERTS = {"parallelism.expert_parallel_degree": 2}


def experts(degree: int, layout: dict[str, Any]) -> dict[str, Any]:
    return EXPERTS | layout | {"parallelism.expert_parallel_degree": degree}


SPLIT_EXPERTS = experts(1, tensor(2, True) | {"parallelism.expert_tensor_parallel_degree": 2})
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    4: {
        "zero3 of 4": zero(3),
        "2 replicas of zero3": zero(3, 2),
        "2 stages of tensor 2": pipeline() | tensor(),
        "tensor 4 for a key-value head": ONE_KEY_HEAD | tensor(4),
        "experts 4 of zero1": experts(4, zero(1)),
        "experts 2 of tensor 2 of zero2": experts(2, tensor(2, True) | zero(2)),
        "experts split over tensor 2 of zero1": SPLIT_EXPERTS | zero(1),
        "adafactor, tensor 2 of zero3": with_rule("adafactor", "llama") | zero(3) | tensor(),
        "adafactor, 2 replicas of zero2": with_rule("adafactor", "llama") | zero(2, 2),
        "muon, experts 2 of zero1": with_rule("muon", "moe") | SHARED_EXPERTS | zero(1),
        "muon, zero3 of experts": with_rule("muon", "moe") | zero(3),
    },
    2: {
        "zero0 of 2": zero(0),
        "bfloat16 zero0 of 2": BFLOAT16 | zero(0),
        "interleaved": INTERLEAVED,
        "float8 zero3 of 2": {"model.overrides": NARROW} | FLOAT8 | zero(3),
    },
    1: {
        "1 rank": {},
        "1 rank in bfloat16": BFLOAT16,
        "1 rank with a key-value head": ONE_KEY_HEAD,
        "1 rank with experts": EXPERTS,
        "1 rank without float8": {"model.overrides": NARROW},
    },
}
# One process reads every checkpoint. Other layouts read other parts, whose borders may not be those of what was saved.
LOADED = {
    "2 stages of tensor 2": ["zero3 of 4", "interleaved"],
    "interleaved": ["2 stages of tensor 2", "2 replicas of zero3", "1 rank"],
    "1 rank": [
        name for layouts in LAYOUTS.values() for name, settings in layouts.items() if "model" not in str(settings)
    ],
    "tensor 4 for a key-value head": ["1 rank with a key-value head"],
    "1 rank with a key-value head": ["tensor 4 for a key-value head"],
    "experts 2 of tensor 2 of zero2": ["experts 4 of zero1", "1 rank with experts"],
    "experts split over tensor 2 of zero1": ["experts 4 of zero1"],
    "experts 4 of zero1": ["experts split over tensor 2 of zero1"],
    "1 rank with experts": [
        *("experts 4 of zero1", "experts 2 of tensor 2 of zero2", "experts split over tensor 2 of zero1")
    ],
    "adafactor, 2 replicas of zero2": ["adafactor, tensor 2 of zero3"],
    "muon, experts 2 of zero1": ["muon, zero3 of experts"],
    "muon, zero3 of experts": ["muon, experts 2 of zero1"],
    "1 rank without float8": ["float8 zero3 of 2"],
}


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """Of everything that is saved, and of what is loaded where."""
    folder = tmp_path_factory.mktemp("layouts")
    base_config(folder, {})
    saved: dict[str, str] = {}
    loaded: dict[Any, str] = {}
    for ranks, layouts in LAYOUTS.items():
        settings = {name: FOUR_LAYERS | layout for name, layout in layouts.items()}
        saved |= collect(crash_worker.save_each, ranks, folder, settings)[0]
    for ranks, layouts in LAYOUTS.items():
        settings = {name: FOUR_LAYERS | layout for name, layout in layouts.items() if name in LOADED}
        loaded |= collect(crash_worker.load_each, ranks, folder, LOADED, settings)[0]
    return saved, loaded


@pytest.mark.parametrize(("saved", "layout"), [(name, layout) for layout, names in LOADED.items() for name in names])
def test_weights_and_optimizer_state_are_bit_equal_in_every_layout(digests: Digests, saved: str, layout: str) -> None:
    """Experts' loads and biases, and what Adafactor and Muon keep, among them; float8 training saves master weights."""
    assert digests[1][saved, layout] == digests[0][saved]


def test_keep_latest_keeps_exactly_that_many(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    launch(train_three_times, 1, tmp_path)


def train_three_times(rank: int, folder: Path) -> None:
    checkpoints = folder / "run" / "checkpoint"

    def train(**settings: int) -> list[int]:
        changes = {key.replace("_", ".", 1): value for key, value in settings.items()}
        crash_worker.train(rank, folder, folder / "run", changes)
        return complete_steps(checkpoints)

    assert train(training_steps=4) == [1, 2, 3, 4]
    assert train(training_steps=6, checkpoint_keep_latest=3) == [4, 5, 6]
    # Back at step 4, what is kept are the newest of the branch that the run is on.
    (checkpoints / "step-5" / "mark").touch()
    assert train(training_steps=5, checkpoint_keep_latest=2, checkpoint_load_step=4) == [4, 5]
    assert not (checkpoints / "step-5" / "mark").exists()


def test_run_saved_before_its_first_update_resumes(tmp_path: Path) -> None:
    base_config(tmp_path, {})
    dump = tmp_path / "run"
    outcomes = launch(crash_worker.save_without_update, 2, tmp_path, dump, {"parallelism.zero_stage": 1})
    outcomes += launch(crash_worker.train, 1, tmp_path, dump, {})
    assert json.loads((dump / "resumed.jsonl").read_text())["step"] == 1
    assert all("is not used" not in outcome.printed for outcome in outcomes)
    assert complete_steps(dump / "checkpoint") == [1, 2, 3]
