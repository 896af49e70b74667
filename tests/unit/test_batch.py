"""Fields of a batch reach the model, whatever they are."""

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.plain_loop import prepared, run_settings
from titan_like.config.errors import RunError
from titan_like.data.batch import Batch, collate, map_tensors, num_labels, without_labels
from titan_like.data.text.packed import PackedDataset
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.transformer import Transformer
from titan_like.parallel.context import CPShard
from titan_like.train.job import run_job

# As a package of one's own would add fields: one number a token, and one a sample.
Wider = namedtuple("Wider", [*Batch._fields, "hints", "weights"], defaults=[None] * (len(Batch._fields) + 1))


def sample_of(position: int) -> Wider:
    tokens = torch.arange(8) + position
    return Wider(tokens, tokens + 1, document_mask=KeyRanges(tokens, tokens), hints=tokens * 10, weights=tokens[0])


def test_fields_of_any_name_are_stacked_copied_and_sharded_by_their_dimensions() -> None:
    batch = collate([sample_of(0), sample_of(100)])
    assert isinstance(batch, Wider) and batch.tokens.shape == (2, 8) and batch.weights.tolist() == [0, 100]
    assert batch.document_mask.first.shape == (2, 8) and batch.document_mask.blocks is None
    assert map_tensors(lambda x: x.double(), batch).hints.dtype == torch.float64
    cut = CPShard(2, 1, "all_gather").shard(batch)
    assert cut.hints.tolist() == [[20, 30, 40, 50], [1020, 1030, 1040, 1050]] and cut.weights is batch.weights


def test_a_field_that_some_samples_lack_is_named_in_one_sentence() -> None:
    whole = sample_of(0)
    with pytest.raises(RunError, match="different fields; set a field of Batch in every sample or in none"):
        collate([whole, whole._replace(hints=None)])


def test_values_that_are_no_tensors_may_not_differ() -> None:
    one, other = (sample_of(0)._replace(hints=name) for name in ("a", "b"))
    assert collate([one, one]).hints == "a"
    with pytest.raises(RunError, match="'a' is not in all"):
        collate([one, other])


def test_a_sample_without_labels_has_none_for_any_head() -> None:
    tokens = torch.arange(8)
    sample = without_labels(Batch(tokens, tokens, next_labels=tokens, sample_labels=tokens[1]))
    assert num_labels(sample, ("tokens", "mtp", "pair")).tolist() == [0, 0, 0]
    assert num_labels(sample, ("choice",)).tolist() == [0] and torch.equal(sample.tokens, tokens)
    assert without_labels(Batch(tokens, tokens)).next_labels is None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_field_of_a_dataset_reaches_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    seen: list[bool] = []
    sample, forward = PackedDataset.sample, Transformer.forward

    def with_hints(self: PackedDataset, position: int) -> Any:
        made = sample(self, position)
        return Wider(*made, hints=made.tokens * 10, weights=torch.ones(1, dtype=torch.bfloat16))

    def taking_hints(self: Transformer, batch: Any, *hidden: Any) -> Any:
        seen.append(torch.equal(batch.hints, batch.tokens * 10) and batch.weights.dtype == torch.bfloat16)
        return forward(self, batch, *hidden)

    monkeypatch.setattr(PackedDataset, "sample", with_hints)
    monkeypatch.setattr(Transformer, "forward", taking_hints)
    changes = {"training.steps": 2, "data.num_workers": workers, "data.reset_attention_mask": "true"}
    run_job(prepared(run_settings(tmp_path) | changes))
    assert seen and all(seen)
