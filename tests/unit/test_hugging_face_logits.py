"""Logits equal those of transformers' classes, an independent implementation."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.float64 import bound, in_float64
from tests.unit.hugging_face_cases import (
    MOE,
    SCALING,
    bert_config,
    gpt_config,
    llama_config,
    random_model,
    reference_of,
    t5_config,
)
from titan_like.data.batch import num_labels
from titan_like.data.objectives.sentence_pairs import PairTokens
from titan_like.models.batch import Batch

SEQ = 48


def tokens(vocab):
    return torch.randint(vocab, (3, SEQ), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("placement", "name"), [("post", "BertForMaskedLM"), ("pre", "MegatronBertForMaskedLM")])
def test_bert_equals_bert_and_megatron_bert(placement, name, tied):
    model = random_model(bert_config(norm_placement=placement, tied_embeddings=tied)).eval()
    tied_model, state = random_model(bert_config(norm_placement=placement)), model.state_dict()
    output = state.pop("output.weight", state["embedding.weight"])  # which we do not export where it is not tied
    tied_model.load_state_dict(state)
    reference = reference_of(tied_model)
    reference.cls.predictions.decoder.weight = torch.nn.Parameter(output[:101])
    assert type(reference).__name__ == name
    with torch.no_grad():
        ours, theirs = model(Batch(tokens(101)))[..., :101], reference(tokens(101)).logits
    assert theirs.abs().max() > 1
    assert (ours - theirs).abs().max() < bound() * theirs.abs().max()


@pytest.mark.parametrize("head", ["pair", "choice"])
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_heads_of_the_first_token_equal_those_of_transformers(placement, head):
    model = random_model(bert_config(norm_placement=placement, sentence_head=head)).eval()
    reference = reference_of(model)
    around = PairTokens(first=1, separator=2, padding=0)
    ids = [around.join(np.arange(5, 5 + one), np.arange(40, 40 + two), SEQ) for one, two in ((30, 15), (3, 20), (9, 0))]
    inputs = torch.from_numpy(np.stack([*ids, ids[0]]))
    batch = around.batch(inputs)
    types, end = batch.token_types, batch.document_mask.end
    assert types.sum(1).tolist() == [16, 21, 1, 16] and end[:, 0].tolist() == [48, 26, 12, 48]
    attention = (torch.arange(SEQ) < end[:, :1]).long()
    with torch.no_grad():
        ours = model(batch._replace(tokens=inputs))
        if head == "choice":
            theirs = reference(
                input_ids=inputs[None], attention_mask=attention[None], token_type_ids=types[None]
            ).logits
            assert ours.shape == (4, 1, 1) and (ours.flatten() - theirs[0]).abs().max() < bound()
            return
        theirs = reference(input_ids=inputs, attention_mask=attention, token_type_ids=types)
        labels = torch.where(torch.arange(SEQ) % 5 == 3, inputs, -100) * attention - 100 * (1 - attention)
        labels[:, 0], classes = -100, torch.tensor([0, 1, -100, 1])
        batch = batch._replace(labels=labels, sample_labels=classes, loss_factors=torch.ones(2, dtype=torch.float64))
        sums = model(batch._replace(tokens=inputs))
    assert (ours[1][:, 0] - theirs.seq_relationship_logits).abs().max() < bound()
    seen = attention.bool()
    largest = theirs.prediction_logits.abs().max()
    assert (ours[0][..., :101][seen] - theirs.prediction_logits[seen]).abs().max() < bound() * largest
    of_tokens = F.cross_entropy(theirs.prediction_logits.flatten(0, 1), labels.flatten(), reduction="sum")
    of_pairs = F.cross_entropy(theirs.seq_relationship_logits, classes, reduction="sum")
    assert sums.tolist() == pytest.approx([of_tokens.item(), of_pairs.item()], rel=bound())
    assert num_labels(batch, model.config.predictions).tolist() == [int((labels != -100).sum()), 3]


CAUSAL = {
    f"llama, {kv_heads} kv heads, {scaling}, {tied}": llama_config(
        num_kv_heads=kv_heads, rope_scaling=SCALING if scaling else None, tied_embeddings=tied
    )
    for kv_heads, scaling, tied in ((1, True, False), (2, False, True), (4, True, True))
} | {f"gpt2, {tied}": gpt_config(tied_embeddings=tied) for tied in (False, True)}


@pytest.mark.parametrize("name", [*CAUSAL, *MOE])
@in_float64()
def test_causal_models_equal_hugging_face(name):
    model = random_model((CAUSAL | MOE)[name])
    reference = reference_of(model)
    with torch.no_grad():
        ours, theirs = model.eval()(Batch(tokens(101)))[..., :101], reference(tokens(101)).logits
    assert type(reference).__name__.lower().startswith(name.partition(",")[0].replace("_", ""))
    assert theirs.abs().max() > 1 and (ours - theirs).abs().max() < bound() * theirs.abs().max()


@pytest.mark.parametrize(("mlp", "tied"), [("gated_gelu", False), ("relu", True)])  # v1.1, the original
@in_float64()
def test_t5_equals_hugging_face(mlp, tied):
    model = random_model(t5_config(mlp=mlp, tied_embeddings=tied)).eval()
    reference, inputs = reference_of(model), tokens(101)
    with torch.no_grad():
        theirs = reference(input_ids=inputs[:, :30], decoder_input_ids=inputs[:, 30:]).logits
        ours = model(Batch(inputs, encoder_len=30))[..., :101]
    assert theirs.abs().max() > 0.5 and ours.shape == (3, 18, 101)
    assert (ours - theirs).abs().max() < bound() * theirs.abs().max()
