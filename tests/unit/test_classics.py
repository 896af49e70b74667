"""GPT, BERT and T5 against their definitions in tests/reference: outputs and every gradient, in float64."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.float64 import bound
from tests.reference import classics
from titan_like.models.batch import Batch
from titan_like.models.bert.config import BertConfig
from titan_like.models.bert.model import Bert
from titan_like.models.gpt.config import GPTConfig
from titan_like.models.gpt.model import GPT
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.t5.config import T5Config
from titan_like.models.t5.model import T5

SIZES = {
    "num_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 12, "vocab_size": 29,
    "vocab_multiple": 8, "max_seq_len": 16,
}  # fmt: skip
BATCH, SEQ_LEN = 2, 13
HEADS = [1, 2, 4]  # of keys and values


def random_model(model: nn.Module) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, and leaves with the same values for the definition. Every parameter is random."""
    torch.manual_seed(0)
    model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(offset + 0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    return model, {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}


def tokens() -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (BATCH, SEQ_LEN))


def compare(model: nn.Module, weights: dict[str, torch.Tensor], ours: Any, theirs: list[torch.Tensor]) -> None:
    """Outputs, and gradients of a random function of them."""
    outputs = [ours] if isinstance(ours, torch.Tensor) else list(ours)
    for output, expected in zip(outputs, theirs, strict=True):
        output = output[..., : expected.shape[-1]].view_as(expected)
        assert (output - expected).abs().max() < bound() * expected.abs().max()
        factors = torch.randn_like(expected)
        (output * factors).sum().backward(retain_graph=True)
        (expected * factors).sum().backward(retain_graph=True)
    for name, parameter in model.named_parameters():
        expected = weights[name].grad
        gradient = parameter.grad
        assert (gradient is None) == (expected is None), name
        if gradient is not None and expected is not None:
            assert (gradient - expected).abs().max() <= bound() * expected.abs().max().clamp(min=1), name


@pytest.mark.parametrize(("kv_heads", "is_packed", "tied"), list(product(HEADS, (False, True), (False, True))))
def test_gpt(kv_heads: int, is_packed: bool, tied: bool) -> None:
    config = GPTConfig(**SIZES, num_kv_heads=kv_heads, tied_embeddings=tied)
    model, weights = random_model(GPT(config))
    starts = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
    if is_packed:
        starts[0, 5:], starts[1, 1:], starts[1, 9:] = 5, 1, 9
    order = torch.arange(SEQ_LEN).expand(BATCH, -1)
    batch = Batch(tokens(), positions=order - starts, document_mask=KeyRanges(starts, order + 1) if is_packed else None)
    expected = classics.gpt(config.model_dump(), weights, batch.tokens, order - starts, starts)
    compare(model, weights, model(batch), [expected])


@pytest.mark.parametrize(
    ("placement", "head", "tied", "kv_heads"),
    [
        *product(("pre", "post"), ("none", "pair"), (False, True), HEADS[1:]),
        *product(("pre", "post"), ["choice"], [False], HEADS[1:]),
    ],
)
def test_bert(placement: str, head: str, tied: bool, kv_heads: int) -> None:
    shape = {"norm_placement": placement, "sentence_head": head, "tied_embeddings": tied}
    config = BertConfig(**SIZES, **shape, num_kv_heads=kv_heads)
    model, weights = random_model(Bert(config))
    lengths, types = torch.tensor([SEQ_LEN, 7]), torch.randint(0, 2, (BATCH, SEQ_LEN))
    ends = lengths[:, None].expand(-1, SEQ_LEN)
    batch = Batch(tokens(), document_mask=KeyRanges(torch.zeros_like(ends), ends), token_types=types)
    expected = classics.bert(config.model_dump(), weights, batch.tokens, types, lengths)
    compare(model, weights, model(batch), [expected[name] for name in config.predictions])


@pytest.mark.parametrize(
    ("mlp", "tied", "kv_heads", "buckets"), list(product(("gated_gelu", "relu"), (False, True), HEADS[1:], (8, 10)))
)
def test_t5(mlp: str, tied: bool, kv_heads: int, buckets: int) -> None:
    shape = {"num_position_buckets": buckets, "max_position_distance": 11, "head_size": 6}
    config = T5Config(**SIZES, **shape, num_kv_heads=kv_heads, mlp=mlp, tied_embeddings=tied, num_decoder_layers=1)
    model, weights = random_model(T5(config))
    both, encoder_len = tokens(), 8
    expected = classics.t5(config.model_dump(), weights, both[:, :encoder_len], both[:, encoder_len:])
    compare(model, weights, model(Batch(both, encoder_len=encoder_len)), [expected])
