"""30 steps of training T5 are those of a plain loop over transformers' model; resumed runs draw the same spans."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.t5.modeling_t5 import T5LayerNorm

from tests.unit.plain_loop import logged, plain_losses, prepared, run_settings, untrained_reference
from titan_like.config import ConfigError
from titan_like.data.batch import Batch
from titan_like.train.job import run_job
from titan_like.train.setup import Run


def run_of(folder: Path, **settings: object) -> Run:
    return prepared(run_settings(folder) | {"model.family": "t5", "training.decoder_seq_len": 20} | settings)


def losses_of(run: Run) -> list[float]:
    return [line["loss"] for line in logged(run.config)]


@pytest.mark.parametrize(("mlp", "tied"), [("gated_gelu", False), ("relu", True)])  # v1.1, the original
def test_30_steps_equal_a_plain_loop_over_transformers(
    mlp: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {"model.overrides.mlp": mlp, "model.overrides.tied_embeddings": str(tied).lower()}
    run = run_of(tmp_path, **shape)
    run_job(run)

    in_float64 = lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)  # noqa: E731
    monkeypatch.setattr(T5LayerNorm, "forward", in_float64)  # which transformers' own rounds to float32
    theirs = untrained_reference(run)

    def terms_of(batch: Batch) -> list[torch.Tensor]:
        logits = theirs(input_ids=batch.tokens[:, :64], decoder_input_ids=batch.tokens[:, 64:]).logits
        return [F.cross_entropy(logits.flatten(0, 1), batch.labels[:, 64:].flatten(), ignore_index=-100)]

    expected = [terms[0] for terms in plain_losses(run, theirs, terms_of)]
    assert expected[0] > 5 and expected[-1] < expected[0] - 1
    assert losses_of(run) == pytest.approx(expected, rel=1e-7)  # which is how metrics.jsonl may round


def test_a_resumed_run_takes_out_the_same_spans(tmp_path: Path) -> None:
    settings = {"training.steps": 6, "checkpoint.enable": "true", "checkpoint.interval": 3}
    whole = run_of(tmp_path, **settings, **{"job.dump_folder": tmp_path / "whole"})
    run_job(whole)
    for steps in (3, 6):
        part = run_of(tmp_path, **settings | {"training.steps": steps}, **{"job.dump_folder": tmp_path / "parts"})
        run_job(part)
    assert losses_of(part) == losses_of(whole)
    with pytest.raises(ConfigError, match=r"data\.noise_density = 0\.14: .* was saved with 0\.15"):
        run_of(tmp_path, **settings, **{"data.noise_density": 0.14, "job.dump_folder": tmp_path / "parts"})


@pytest.mark.parametrize(("script", "family"), [("evaluate", "t5"), ("evaluate", "bert"), ("generate", "bert")])
def test_what_needs_the_next_token_is_refused_in_one_sentence(script: str, family: str) -> None:
    main = importlib.import_module(f"titan_like.commands.{script}").main
    with pytest.raises(ConfigError, match=f'model.family = "{family}": .* not the next token; choose a causal'):
        main([f"--model.family={family}", "--training.steps=1"])
