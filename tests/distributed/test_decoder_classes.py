"""Folders of every decoder class, trained in layouts with AdamW, against a plain loop over transformers.

    python -m pytest -m exhaustive tests/distributed/test_decoder_classes.py -k qwen3_next

A class takes about 20 seconds of a processor.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.launch import all_stages, by_name, collect
from tests.distributed.layouts import pipeline, sizes, tensor, zero
from tests.float64 import bound, exact_rope, in_float64
from tests.unit.plain_loop import plain_adamw, prepared, run_settings
from tests.unit.test_decoder_hugging_face import RARE, exact_model, random_folder
from tests.unit.transformers_cases import CASES
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.config.errors import ConfigError
from titan_like.hugging_face.convert import from_hugging_face
from titan_like.hugging_face.folder import open_hugging_face
from titan_like.train.trainer import Trainer
from titan_like.verify.watch import steps_alone

STEPS, BATCH, SEQ, VOCAB = 30, 4, 24, 300
EVEN = {"n_groups": 2, "num_local_experts": 6, "num_experts": 6}  # for two processes
RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "granitemoehybrid", "nemotron_h")
CONTEXT = "ZeRO 3, context 2"
LAYOUTS: dict[str, dict[str, Any]] = {  # of 4 processes
    "tensor 2, pipeline 2": tensor(2, True) | pipeline(2),
    CONTEXT: zero(3) | {"parallelism.context_parallel_degree": 2},
    "tensor 2, experts 2": tensor(2, True) | zero(3) | {"parallelism.expert_parallel_degree": 2},
}


def train(rank: int, layouts: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Losses and weights at the end of each layout's run, or why it is refused."""
    found: dict[str, Any] = {}
    for name, layout in layouts.items():
        try:
            trainer = Trainer(
                prepared(
                    {
                        key: value if isinstance(value, str) else json.dumps(value)
                        for key, value in (settings | layout).items()
                    }
                )
            )
        except ConfigError as error:
            found[name] = str(error)
            continue
        with exact_rope():
            losses = [record.loss for record in steps_alone(trainer, STEPS)]
        found[name] = {"losses": losses, "weights": all_stages(trainer, by_name(trainer.model.named_parameters()))}
    return found if rank == 0 else {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES | RARE)
def test_training_in_layouts_equals_transformers(name: str, tmp_path: Path) -> None:
    model_type, fields = (CASES | RARE)[name]
    fields = fields | {key: EVEN[key] for key in fields.keys() & EVEN}
    random_folder(model_type, fields | {"vocab_size": VOCAB}, tmp_path / "hf")
    source = open_hugging_face(tmp_path / "hf", "--input")
    has_experts = getattr(source.model, "num_experts", 0) > 0
    settings = {key: value for key, value in run_settings(tmp_path).items() if not key.startswith("model")}
    settings |= (
        {"data.paths": [str(tmp_path / "words.txt")], "job.dump_folder": str(tmp_path / "out")}
        | sizes(SEQ, 1, BATCH, STEPS)
        | {"model.from": str(tmp_path / "hf"), "optimizer.weight_decay": 0.0}
    )
    settings |= {"data.split": "1,0,0", "data.tokenizer": "byte"}
    if has_experts:  # no losses and no updates besides the tokens'
        settings |= {f"model.overrides.{key}": 0.0 for key in ("balance_coefficient", "z_loss_coefficient")}
        settings |= {"model.overrides.bias_update_rate": 0.0} if source.model.balance == "bias" else {}
    layouts = {key: layout for key, layout in LAYOUTS.items() if has_experts or "experts" not in key}
    found = collect(train, 4, layouts, settings)[0]

    run = prepared(settings)
    samples = run.datasets["train"]
    theirs = exact_model(tmp_path / "hf")  # without dropout and noise, which some classes have by default
    optimizer = plain_adamw(theirs, run.config.optimizer)
    losses = []
    for step in range(STEPS):
        batch = [samples[index] for index in range(BATCH * step, BATCH * (step + 1))]
        with in_float64():
            logits = theirs(torch.stack([sample.tokens for sample in batch])).logits
        loss = F.cross_entropy(logits.flatten(0, 1), torch.stack([sample.labels for sample in batch]).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    theirs.float().save_pretrained(tmp_path / "trained")  # folders hold no float64
    trained = open_hugging_face(tmp_path / "trained", "--input")
    expected = CheckpointWeights(from_hugging_face(trained, tmp_path / "run"))
    for layout, result in found.items():
        if isinstance(result, str):
            print(f"{name}: {layout}: refused: {result}")
            assert layout == CONTEXT and model_type in RECURRENT
            continue
        off = max(abs(ours / other - 1) for ours, other in zip(result["losses"], losses, strict=True))
        worst = max(
            ((weight - expected.read(key)).norm() / expected.read(key).norm()).item()
            for key, weight in result["weights"].items()
        )
        print(f"{name}: {layout}: losses {losses[0]:.3f} to {losses[-1]:.3f}, {off:.1e}; weights {worst:.1e}")
        # Recurrences amplify: of weights changed by 1e-15, transformers itself is 2e-7 away after these steps.
        allowed = 5e-6 if model_type in RECURRENT else bound(4096 * STEPS)
        assert off <= allowed and worst <= allowed + 2**-24, layout
