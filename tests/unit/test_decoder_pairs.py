"""Every pair of a decoder's features, against the plain decoder of tests/reference, in float64.

A covering array has each pair of values of two features in at least one of its rows. Each row is a tiny model.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pydantic import ValidationError

from tests.float64 import bound, exact_rope
from tests.reference.decoder import Linear, Output, Sample, decode, lora_linear
from titan_like.config.schema import LoRA
from titan_like.models.batch import Batch
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.decoder.model import Decoder
from titan_like.models.layers.cross_entropy import IGNORED_LABEL
from titan_like.models.layers.experts import Router
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.parallel import lora

SIZES = {"hidden_size": 16, "vocab_size": 29, "vocab_multiple": 8, "max_seq_len": 64, "ffn_hidden_size": 12}
BATCH, SEQ_LEN = 2, 11

ROTARY = 4  # rotated dimensions of most heads, for which longrope has factors
SCALINGS: dict[str, Any] = {
    "none": None,
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {
        "type": "llama3", "factor": 8.0, "original_max_seq_len": 24, "low_freq_factor": 1.0, "high_freq_factor": 4.0
    },
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_seq_len": 24, "beta_fast": 4.0, "mscale": 0.7},
    "yarn of DeepSeek": {
        "type": "yarn", "factor": 4.0, "original_max_seq_len": 24, "beta_fast": 3.0, "mscale": 0.7,
        "mscale_all_dim": 1.3, "truncate": False,
    },
}  # fmt: skip
EXPERTS = {"num_experts": 6, "experts_per_token": 2, "expert_ffn_hidden_size": 8}
FEATURES: dict[str, list[dict[str, Any]]] = {
    "layers": [
        {},
        {"layer_pattern": ["local", "full"], "kinds": {"local": {"window": 3}}},
        {
            "layer_pattern": ["local", "free"],
            "kinds": {"local": {"window": 5, "rope_theta": 50.0}, "free": {"rope_theta": 0.0}},
        },
    ],
    "rope": [{"rope_scaling": scaling} for scaling in SCALINGS.values()],
    "rotary": [{}, {"rotary_fraction": 0.5}],
    "heads": [
        {"num_attention_heads": 4},
        {"num_attention_heads": 4, "num_kv_heads": 2, "head_size": 8},
        {"num_attention_heads": 3, "num_kv_heads": 1, "head_size": 4},
        {"num_attention_heads": 2, "kv_lora_rank": 10, "nope_head_size": 6, "rope_head_size": 4, "value_head_size": 5},
        {
            "num_attention_heads": 2,
            "kv_lora_rank": 10,
            "q_lora_rank": 7,
            "nope_head_size": 2,
            "rope_head_size": 4,
            "value_head_size": 6,
        },
    ],
    "attention_bias": [{"attention_bias": value} for value in ("none", "qkv", "all")],
    "qk_norm": [{"qk_norm": value} for value in ("none", "head", "all")],
    "attention_scale": [{}, {"attention_scale": 0.3}],
    "attention_softcap": [{}, {"attention_softcap": 0.8}],
    "attention_sinks": [{}, {"attention_sinks": True}],
    "norm": [{}, {"norm_offset": True}, {"norm": "layer"}, {"norm": "layer", "norm_offset": True}],
    "block": [{"block": value} for value in ("pre", "post", "sandwich", "parallel")],
    "activation": [{"activation": value} for value in ("silu", "gelu", "gelu_tanh", "clamped_swiglu")]
    + [{"activation": "relu2", "gated": False}],
    "mlp_bias": [{}, {"mlp_bias": True}],
    "experts": [
        {},
        EXPERTS | {"z_loss_coefficient": 0.01},
        EXPERTS | {"num_dense_layers": 1, "router_score": "sigmoid", "renormalize": False, "balance": "none"},
        EXPERTS | {"router_groups": 3, "router_top_groups": 2, "router_score": "sigmoid", "balance": "bias"},
        EXPERTS | {"experts_per_token": 1, "renormalize": False, "routed_scaling": 2.5},
    ],
    "of experts": [{}, {"router_bias": True}, {"expert_bias": True}, {"num_shared_experts": 2}],
    "embedding_scale": [{}, {"embedding_scale": 3.0}],
    "residual_scale": [{}, {"residual_scale": 0.7}],
    "logit_scale": [{}, {"logit_scale": 0.6}],
    "final_softcap": [{}, {"final_softcap": 1.2}],
    "tied_embeddings": [{}, {"tied_embeddings": True}],
    "mtp_layers": [{}, {"mtp_layers": 1}],
    "lora": [{}, {"rank": 2}, {"rank": 2, "dropout": 0.5}],
    "documents": [{}, {"packed": True}, {"packed": True, "resets": True}],
}
OTHERS = ("lora", "documents")  # which are not the model's


def fields_of(values: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {"num_layers": 2, **SIZES}
    for name in (name for name in FEATURES if name not in OTHERS):
        fields |= values.get(name, {})
    if not fields.get("num_experts"):
        fields = {
            name: value
            for name, value in fields.items()
            if name not in ("router_bias", "expert_bias", "num_shared_experts")
        }
    return fields


def fits(row: list[dict[str, Any]]) -> bool:
    """Whether features go together; those that are not chosen yet are the first ones."""
    values = {name: values[0] for name, values in FEATURES.items()} | dict(zip(FEATURES, row, strict=False))
    try:
        DecoderConfig(**fields_of(values))
    except ValidationError:
        return False
    return True


def cover() -> list[dict[str, dict[str, Any]]]:
    pairs = pytest.importorskip("allpairspy").AllPairs(list(FEATURES.values()), filter_func=fits)
    return [dict(zip(FEATURES, row, strict=True)) for row in pairs]


def numbered(rows: list[dict[str, dict[str, Any]]]) -> list[Any]:
    return [pytest.param(row, number, id=f"{number}") for number, row in enumerate(rows)]


def batch_of(documents: Mapping[str, Any], generator: torch.Generator) -> tuple[Batch, Sample]:
    """The same sequences for the product and for the definition."""
    tokens, nexts = (torch.randint(0, SIZES["vocab_size"], (BATCH, SEQ_LEN), generator=generator) for _ in range(2))
    labels, next_labels = (
        torch.randint(0, SIZES["vocab_size"], (BATCH, SEQ_LEN), generator=generator) for _ in range(2)
    )
    labels[0, 3], next_labels[1, -2:], next_labels[0, 3] = IGNORED_LABEL, IGNORED_LABEL, IGNORED_LABEL
    starts = torch.zeros(BATCH, SEQ_LEN, dtype=torch.int64)
    if documents.get("packed"):
        starts[0, 4:], starts[1, 1:], starts[1, 7:] = 4, 1, 7
    order = torch.arange(SEQ_LEN).expand(BATCH, -1)
    positions = order - starts if documents.get("resets") else order
    mask = KeyRanges(starts, order + 1) if documents.get("packed") else None
    batch = Batch(tokens, labels, positions, mask, next_tokens=nexts, next_labels=next_labels)
    return batch, Sample(tokens, starts, positions, labels, nexts, next_labels)


def build(config: DecoderConfig, section: LoRA, generator: torch.Generator) -> Decoder:
    """A model whose every parameter and router's state is random, the ones that begin as 0 or 1 too."""
    model = Decoder(config)
    if section.rank:
        lora.add_adapters(model, section)
    model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            offset = 1.0 if "norm" in name and name.endswith("weight") and not config.norm_offset else 0.0
            parameter.copy_(offset + 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for module in model.modules():
            if isinstance(module, Router):
                module.load.copy_(torch.rand(module.load.shape, generator=generator))
                module.load.div_(module.load.sum())
                if module.bias is not None:
                    module.bias.copy_(0.1 * torch.randn(module.bias.shape, generator=generator))
    return model


class Dropped:
    """Dropout of adapters' inputs by masks of its own, which it keeps by the name of the linear layer."""

    def __init__(self, model: Decoder, generator: torch.Generator) -> None:
        self.masks: dict[str, torch.Tensor] = {}
        self.generator, self.name = generator, ""
        for name, module in model.named_modules():
            if isinstance(module, lora.AdaptedLinear):
                module.register_forward_pre_hook(partial(self.begin, name))

    def begin(self, name: str, *_: Any) -> None:
        self.name = name

    def dropout(self, x: torch.Tensor, p: float) -> torch.Tensor:
        keeps = torch.rand(x.shape, generator=self.generator) >= p
        self.masks[self.name] = keeps.double() / (1 - p)
        return x * self.masks[self.name]


def defined(
    model: Decoder, weights: Mapping[str, torch.Tensor], sample: Sample, masks: Mapping[str, torch.Tensor]
) -> Output:
    linear: Linear | None = None
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, lora.AdaptedLinear)}
    if adapted:
        groups = {name: list(module.adapter.rows) for name, module in adapted.items() if len(module.adapter.rows) > 1}
        linear = lora_linear(weights, next(iter(adapted.values())).adapter.scale, groups, masks)
    return decode(model.config.model_dump(), weights, sample, linear)


def compare(row: Mapping[str, dict[str, Any]], seed: int) -> None:
    """Logits, losses, routers' statistics and every gradient, of one row."""
    generator = torch.Generator().manual_seed(seed)
    config, section = DecoderConfig(**fields_of(row)), LoRA(alpha=3.0, **row["lora"])
    model = build(config, section, generator)
    dropped, (batch, sample) = Dropped(model, generator), batch_of(row["documents"], generator)
    if not config.mtp_layers:
        batch = batch._replace(next_tokens=None, next_labels=None)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    trained = {name: weights[name].requires_grad_() for name, _ in model.named_parameters()}

    def check(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
        error = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-3)
        assert error < bound(), f"{what}: {error:.2e}"

    with exact_rope():
        expected = defined(model, weights, sample, {})
        logits = model.eval()(batch._replace(next_tokens=None, next_labels=None))
        check(logits[..., : config.vocab_size], expected.logits, "logits")
        counts = [(labels >= 0).sum() for labels in (sample.labels, sample.next_labels)][: 1 + config.mtp_layers]
        factors = torch.tensor(config.coefficients, dtype=torch.float64) / torch.stack(counts)
        for module in model.modules():
            if isinstance(module, Router):
                module.loss_factor = torch.tensor(1 / sample.tokens.numel(), dtype=torch.float64)
        with patch.object(lora.F, "dropout", dropped.dropout):
            losses = model.train()(batch._replace(loss_factors=factors))
            losses.sum().backward()
        expected = defined(model, weights, sample, dropped.masks)
    loss = expected.loss(config.model_dump(), sample)
    of_routers = loss - expected._replace(experts={}).loss(config.model_dump(), sample)
    check(losses.sum() + of_routers.detach(), loss, "loss")
    for name, module in model.named_modules():
        if isinstance(module, Router):
            seen = expected.experts[name.removesuffix(".router")]
            assert module.counts.tolist() == seen.sent.tolist(), name
            check(module.loss_sums, torch.stack((seen.balance, seen.z)), name)
    loss.backward()
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        theirs = trained[name].grad
        check(gradient, torch.zeros_like(gradient) if theirs is None else theirs, name)


@pytest.mark.parametrize(("row", "seed"), numbered(cover()))
def test_pairs_of_features(row: dict[str, dict[str, Any]], seed: int) -> None:
    compare(row, seed)
