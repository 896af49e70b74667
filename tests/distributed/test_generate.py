"""A checkpoint's model over several processes says what it says in one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import base_config, collect
from tests.distributed.layouts import pipeline, tensor, zero
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data.text.tokenizer import ByteTokenizer
from titan_like.evaluate.inference import ParallelInference, find_checkpoint, load_for_inference, load_parallel_model
from titan_like.evaluate.sampling import Sampling, generate
from titan_like.parallel.mesh import build_mesh
from titan_like.train.rules import resolve_settings
from titan_like.train.setup import prepare_run
from titan_like.train.trainer import Trainer

PROMPT = list(b"abcdefghijk")
NEW_TOKENS = 8
GREEDY = Sampling(NEW_TOKENS, temperature=0)
CASES = [(GREEDY, False), (GREEDY, True), (Sampling(NEW_TOKENS, top_k=40, top_p=0.95, seed=3), False)]
"""(sampling, whether the prompt is a prefix)."""
FAMILIES = ("gpt", "llama", "t5")
LAYOUTS: dict[str, dict[str, Any]] = {
    "1f1b, tensor": pipeline() | tensor(),
    "v, sequence": tensor(2, True) | pipeline(2, "zbv_zero_bubble"),
    "interleaved, zero 3": pipeline(2, "interleaved_1f1b") | zero(3),
    "sequence, zero 1": tensor(2, True) | zero(1),
    "2 ranks for each key-value head": tensor(4),
}


# Every layout, and every family.
CHOSEN = [
    ("gpt", "v, sequence"),
    ("llama", "1f1b, tensor"),
    ("llama", "sequence, zero 1"),
    ("llama", "2 ranks for each key-value head"),
    ("t5", "interleaved, zero 3"),
]


def config_of(folder: Path, family: str, layout: dict[str, Any]) -> JobConfig:
    # The text grows past max_seq_len; large weights give a distribution that is far from uniform.
    overrides: dict[str, Any] = {"max_seq_len": 17, "init_std": 2.0 if family == "t5" else 0.3}
    if family == "llama":  # whose rotary frequencies change on the way
        longrope = {"type": "longrope", "factor": 2.0, "original_max_seq_len": 14, "short_factors": [1.0] * 16}
        overrides |= {"max_seq_len": 18, "rope_scaling": longrope | {"long_factors": [3.0] * 16}}
    few = {"training.steps": 1, "training.seq_len": 16, "checkpoint.enable": True}
    few |= {"training.decoder_seq_len": 6} if family == "t5" else {}
    return base_config(folder / family, layout | few | {"model.family": family, "model.overrides": overrides})


def write(model: Any, family: str, sampling: Sampling, prefix_lm: bool) -> list[int]:
    """What follows the prompt, or what a t5 writes that reads it."""
    if family != "t5":
        return generate(model, PROMPT, sampling, prefix_lm=prefix_lm)
    return generate(model, [ByteTokenizer.pad_id], sampling, encoder_tokens=PROMPT)


def train_and_generate(rank: int, folder: Path) -> dict[str, list[int]]:
    """Trained on all processes, asked in every layout."""
    found: dict[str, list[int]] = {}
    for family in FAMILIES:
        (folder / family).mkdir(exist_ok=True)
        Trainer(prepare_run(resolve_settings(config_of(folder, family, {})))).train()
        for name in [layout for of, layout in CHOSEN if of == family]:
            config = config_of(folder, family, LAYOUTS[name])
            run = prepare_run(resolve_settings(config))
            mesh = build_mesh(run.layout, "cpu")
            lengths = {"max_tokens": min(run.model.max_seq_len, len(PROMPT) + NEW_TOKENS)}
            if family == "t5":  # as scripts/generate.py does
                config = edit(config, {"parallelism.sequence_parallel": False})
                lengths = {"max_tokens": 1 + NEW_TOKENS, "encoder_len": len(PROMPT)}
            split = load_parallel_model(config, find_checkpoint(config), mesh, run.device)
            model = ParallelInference(config, split, mesh, run.device, **lengths)
            for number, case in enumerate(CASES):
                found[f"{family} {name} {number}"] = write(model, family, *case)
    return found


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    folder = tmp_path_factory.mktemp("generate")
    first, *others = collect(train_and_generate, 4, folder)
    assert others == [first] * 3
    return folder, first


@pytest.mark.parametrize(("family", "layout"), CHOSEN)
def test_every_layout_continues_like_one_process(
    generated: tuple[Path, dict[str, list[int]]], family: str, layout: str
) -> None:
    folder, tokens = generated
    config = config_of(folder, family, {})
    model = load_for_inference(config, find_checkpoint(config), torch.device("cpu"))
    # Under sequence parallelism gpt's window of 17 tokens has 16 of them: the longest even one.
    if family == "gpt" and LAYOUTS[layout].get("parallelism.sequence_parallel"):
        model.config = model.config.model_copy(update={"max_seq_len": 16})
    for number, case in enumerate(CASES):
        expected = write(model, family, *case)
        assert len(set(expected)) > 1
        assert tokens[f"{family} {layout} {number}"] == expected
    if family != "t5":
        assert write(model, family, *CASES[0]) != write(model, family, *CASES[1])
