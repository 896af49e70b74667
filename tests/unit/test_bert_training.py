"""BERT sees both sides of a token, and 30 steps of training are those of a plain loop over transformers' model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.unit.hugging_face_cases import bert_config
from tests.unit.plain_loop import logged, plain_losses, prepared, run_settings, untrained_reference
from titan_like.data.batch import Batch
from titan_like.models.registry import build_model
from titan_like.train.job import run_job


def test_initial_weights_are_scaled_by_depth_only_where_norms_come_first() -> None:
    stds = {}
    for placement in ("pre", "post"):
        model = build_model(bert_config(norm_placement=placement, num_layers=8, hidden_size=128), "bert")
        model.init_weights(0)
        stds[placement] = model.layers["0"].mlp.fc2.weight.std().item()
    assert stds["post"] == pytest.approx(0.02, rel=0.05) and stds["pre"] == pytest.approx(0.02 / 4, rel=0.05)


@pytest.mark.parametrize("head", ["none", "pair"])
def test_30_steps_equal_a_plain_loop_over_transformers(tmp_path: Path, head: str) -> None:
    settings = run_settings(tmp_path) | {
        "model.family": "bert",
        "model.overrides.norm_placement": "post",
        "data.mlm_whole_words": "true",
        "data.mlm_max_ngram": 3,
    }
    if head == "pair":
        settings |= {"model.overrides.sentence_head": "pair", "data.sentence_objective": "sentence_order"}
        settings["model.overrides.vocab_size"] = 261
    run = prepared(settings)
    run_job(run)
    lines = logged(run.config)
    losses = [[line["loss"]] if head == "none" else [line["lm_loss"], line["sentence_loss"]] for line in lines]
    assert [sum(each) for each in losses] == pytest.approx([line["loss"] for line in lines], rel=1e-12)

    theirs = untrained_reference(run)
    theirs.bert.embeddings.word_embeddings.padding_idx = None  # else the token 0, which is a byte, gets no gradient
    for module in theirs.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    def terms_of(batch: Batch) -> list[torch.Tensor]:
        inputs, labels = batch.tokens, batch.labels
        if head == "none":
            logits = theirs(input_ids=inputs).logits
            return [F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)]
        end = inputs == 259
        attention = end.flip(1).cumsum(1).flip(1) > 0
        types = (end.cumsum(1) - end.int() > 0) & attention
        found = theirs(input_ids=inputs, attention_mask=attention.long(), token_type_ids=types.long())
        of_tokens = F.cross_entropy(found.prediction_logits.flatten(0, 1), labels.flatten())
        return [of_tokens, F.cross_entropy(found.seq_relationship_logits, batch.sample_labels)]

    expected = plain_losses(run, theirs, terms_of)
    assert expected[0][0] > 5 and expected[-1][0] < expected[0][0] - 1
    for one, other in zip(losses, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-7)  # which is how metrics.jsonl may round
