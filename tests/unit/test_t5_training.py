"""What T5's parts see, and 30 steps of training against a plain loop over transformers' model."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests.unit.hugging_face_cases import random_model, reference_of, t5_config
from titan_like.config import load_config
from titan_like.data.masks import MaskedSamples
from titan_like.models.registry import build_model, flavors
from titan_like.models.t5.config import T5Config
from titan_like.train.job import run_job
from titan_like.train.rules import CHECKS
from titan_like.train.setup import prepare_run

STEPS, BATCH, ENCODER = 30, 4, 14


def test_decoders_see_all_of_the_encoder_and_their_own_past() -> None:
    model = random_model(t5_config()).eval()
    tokens = torch.arange(24)[None]

    def changes(position: int) -> torch.Tensor:
        """Which of the decoder's ten logits change with the token at a position."""
        other = tokens.clone()
        other[0, position] = 77
        found = (model(tokens, encoder_len=ENCODER) - model(other, encoder_len=ENCODER))[..., :101]
        return found.abs().amax(-1)[0] > 1e-9

    assert changes(0).all() and changes(ENCODER - 1).all()
    for position in range(10):
        assert changes(ENCODER + position).tolist() == [later >= position for later in range(10)]


def test_logits_do_not_depend_on_the_length_of_what_is_not_seen() -> None:
    model = random_model(t5_config()).eval()
    tokens = torch.arange(40)[None] % 101
    whole, part = (model(tokens[:, :length], encoder_len=ENCODER) for length in (40, 20))
    torch.testing.assert_close(whole[:, :6, :101], part[..., :101])


@pytest.mark.parametrize("mlp", ["gated_gelu", "relu"])
def test_initial_activations_keep_their_size(mlp: str) -> None:
    model = build_model(t5_config(mlp=mlp, hidden_size=256, head_size=64, ffn_hidden_size=512), "t5").eval()
    model.init_weights(3)
    assert model.layers["0"].attention.qkv.weight.view(4, 3, 64, 256)[:, 0].std().item() == pytest.approx(
        (256 * 64) ** -0.5, rel=0.03
    )
    for name, inputs in (("layers.0.mlp.down", 512), ("layers.4.cross_attention.proj", 256), ("output", 256)):
        assert model.get_submodule(name).weight.std().item() == pytest.approx(inputs**-0.5, rel=0.03)
    logits = model(torch.arange(40)[None], encoder_len=30)[..., :101]
    assert 0.8 < logits.std() < 1.2  # so that the first loss is about that of a uniform guess


ORIGINAL = {"60m": 60.5, "220m": 222.9, "770m": 737.7, "3b": 2851.6, "11b": 11307.3}
V1_1 = {"v1.1_77m": 77.0, "v1.1_250m": 247.6, "v1.1_780m": 783.2, "v1.1_3b": 2849.8, "v1.1_11b": 11135.3}


@pytest.mark.parametrize(("name", "millions"), [*ORIGINAL.items(), *V1_1.items()])
def test_flavors_have_the_sizes_of_the_released_models(name: str, millions: float) -> None:
    config = T5Config.model_validate(flavors("t5")[name])
    assert config.num_parameters() / 1e6 == pytest.approx(millions, abs=0.05)
    assert config.num_decoder_layers == config.num_encoder_layers


def test_30_steps_equal_a_plain_loop_over_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "words.txt"
    text.write_text("".join(f"the {number} hidden words of line {number % 7}\n" for number in range(3000)))
    settings = {
        "model.family": "t5",
        "model.overrides.num_layers": 5,
        "model.overrides.num_decoder_layers": 3,
        "model.overrides.hidden_size": 64,
        "model.overrides.head_size": 24,
        "data.dataset": "text",
        "data.paths": f'["{text}"]',
        "training.seq_len": 64,
        "training.micro_batch_size": BATCH // 2,
        "training.global_batch_size": BATCH,
        "training.steps": STEPS,
        "training.max_norm": 0,
        "training.dtype": "float64",  # the comparison is then of the algorithm alone
        "optimizer.lr": 1e-3,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay": "constant",
        "evaluation.interval": 0,
        "job.dump_folder": tmp_path / "out",
    }
    run = prepare_run(load_config([f"--{key}={value}" for key, value in settings.items()], CHECKS))
    run_job(run)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]

    ours = build_model(run.model, "t5").double()
    ours.init_weights(run.config.job.seed)
    theirs = reference_of(ours).train()  # the rate of dropout is 0
    # transformers' own norm rounds to float32.
    in_float64 = lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)  # noqa: E731
    monkeypatch.setattr(T5LayerNorm, "forward", in_float64)
    section = run.config.optimizer
    matrices, vectors = ([p for p in theirs.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [
        {"params": matrices, "weight_decay": section.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps)
    samples = MaskedSamples(run.datasets["train"], run.masks)
    expected, stream = [], (samples[index] for index in range(STEPS * BATCH))
    for _ in range(STEPS):
        inputs, labels = torch.stack(list(islice(stream, BATCH))).unbind(1)
        logits = theirs(input_ids=inputs[:, :64], decoder_input_ids=inputs[:, 64:]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 64:].flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert expected[0] > 5 and expected[-1] < expected[0] - 1
    assert losses == pytest.approx(expected, rel=1e-7)  # which is how metrics.jsonl may round
