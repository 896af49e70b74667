"""Decoders with each field, by transformers' models of the architectures that have it: logits and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from tests.float64 import bound, in_float64
from titan_like.models.batch import Batch
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.decoder.model import Decoder

SEQ_LEN, VOCAB, HIDDEN, FFN = 40, 61, 32, 48
SIZES = {"num_hidden_layers": 4, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_attention_heads": 4}
SIZES |= {"vocab_size": VOCAB, "max_position_embeddings": 64, "initializer_range": 0.1, "tie_word_embeddings": False}
GROUPED = SIZES | {"num_key_value_heads": 2, "pad_token_id": VOCAB - 1}
OURS = {"num_layers": 4, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": 4, "num_kv_heads": 2}
OURS |= {"vocab_size": VOCAB, "vocab_multiple": 1, "max_seq_len": 64, "norm_eps": 1e-6}
YARN = {"factor": 4.0, "original_max_seq_len": 16, "type": "yarn"}
PAIR_FACTORS = {"short_factors": [1.0, 1.5, 2.0, 2.5], "long_factors": [1.0, 3.0, 5.0, 7.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE |= {"short_factor": PAIR_FACTORS["short_factors"], "long_factor": PAIR_FACTORS["long_factors"]}


def scaled(kind: str, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **others}}


HF_YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=16)
# transformers' name → (its fields, ours)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2": (GROUPED, {"attention_bias": "qkv"}),
    "Qwen3": (GROUPED | {"head_dim": 12}, {"head_size": 12, "qk_norm": "head"}),
    "Olmo2": (GROUPED, {"qk_norm": "all", "block": "post", "norm_eps": 1e-5}),
    "Granite": (
        GROUPED | {"attention_bias": True, "mlp_bias": True, "embedding_multiplier": 3.0, "attention_multiplier": 0.3}
        | {"residual_multiplier": 0.7, "logits_scaling": 4.0},
        {"attention_bias": "all", "mlp_bias": True, "embedding_scale": 3.0, "attention_scale": 0.3}
        | {"residual_scale": 0.7, "logit_scale": 0.25},
    ),
    "Gemma2": (
        GROUPED | {"head_dim": 8, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0}
        | {"query_pre_attn_scalar": 5, "sliding_window": 7},
        {"norm_offset": True, "block": "sandwich", "activation": "gelu_tanh", "final_softcap": 2.0}
        | {"attention_scale": 5**-0.5, "embedding_scale": HIDDEN**0.5, "attention_softcap": 1.5}
        | {"layer_pattern": ["sliding", "full"], "kinds": {"sliding": {"window": 7}}},
    ),
    "Gemma3Text": (
        GROUPED | {"head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": 7}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
           | {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}},
        {"norm_offset": True, "block": "sandwich", "activation": "gelu_tanh", "qk_norm": "head"}
        | {"attention_scale": 5**-0.5, "embedding_scale": HIDDEN**0.5, "layer_pattern": ["sliding", "full"]}
        | {"kinds": {"sliding": {"window": 7},
                     "full": {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8.0}}}},
    ),
    "Olmo3": (
        GROUPED | {"sliding_window": 7, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
        | {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 5e5}} | {"full_attention":
           {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 16}}},
        {"qk_norm": "all", "block": "post", "norm_eps": 1e-5, "rope_theta": 5e5, "layer_pattern": ["sliding"] * 3
         + ["full"], "kinds": {"sliding": {"window": 7}, "full": {"rope_scaling": YARN}}},
    ),
    "GPTNeoX": (
        SIZES | {"rotary_pct": 0.5, "use_parallel_residual": True},
        {"num_kv_heads": 4, "norm": "layer", "block": "parallel", "attention_bias": "all", "mlp_bias": True}
        | {"gated": False, "activation": "gelu", "rotary_fraction": 0.5, "norm_eps": 1e-5},
    ),
    "Nemotron": (
        GROUPED | {"head_dim": 8, "partial_rotary_factor": 0.5, "attention_bias": True, "mlp_bias": True},
        {"norm": "layer", "norm_offset": True, "gated": False, "activation": "relu2", "rotary_fraction": 0.5}
        | {"attention_bias": "all", "mlp_bias": True, "norm_eps": 1e-5},
    ),
    "SmolLM3": (
        GROUPED | {"no_rope_layers": [1, 0, 1, 0], "use_sliding_window": False} | scaled("default"),
        {"layer_pattern": ["full", "none"], "kinds": {"none": {"rope_theta": 0.0}}},
    ),
    "Llama linear": (GROUPED | scaled("linear", factor=4.0), {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "Llama yarn": (GROUPED | HF_YARN, {"rope_scaling": YARN}),
    "Llama yarn of DeepSeek": (
        GROUPED | scaled("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.8, mscale_all_dim=0.5),
        {"rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}},
    ),
    "Llama yarn of GPT-OSS": (
        GROUPED | scaled("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False, beta_fast=4.0),
        {"rope_scaling": YARN | {"truncate": False, "beta_fast": 4.0}},
    ),
    "Phi3": (
        GROUPED | {"sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
        {"rope_scaling": PAIR_FACTORS | {"type": "longrope", "factor": 4.0, "original_max_seq_len": 16}}
        | {"norm_eps": 1e-5},
    ),
}  # fmt: skip
NORMS = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "post": {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    "sandwich": {"attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm"}
    | {"mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
}
NORMS["parallel"] = NORMS["pre"]


def rows_of(heads: int, kv_heads: int) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Queries, keys and values by row → the fused projection's rows."""

    def fuse(parts: list[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1 and heads == kv_heads:
            return parts[0]  # in our order, as GPT-NeoX's are
        if len(parts) == 1:
            width = parts[0].shape[0] // (heads + 2 * kv_heads)
            parts = list(parts[0].split([heads * width, kv_heads * width, kv_heads * width]))
        return torch.cat([part.unflatten(0, (kv_heads, -1)) for part in parts], 1).flatten(0, 1)

    return fuse


def mapped(config: DecoderConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by transformers' names, weights or gradients, by our names."""
    fuse = rows_of(config.num_attention_heads, config.num_kv_heads)
    found = {"embedding.weight": tensors["model.embed_tokens.weight"]}
    found["output.weight"] = tensors["lm_head.weight"]
    for layer in range(config.num_layers):
        names = {"attention.proj": ["self_attn.o_proj"], "mlp.down": ["mlp.down_proj"], "mlp.up": ["mlp.up_proj"]}
        names |= {"mlp.gate": ["mlp.gate_proj"]} | {ours: [name] for ours, name in NORMS[config.block].items()}
        names |= {f"attention.{part}_norm": [f"self_attn.{part}_norm"] for part in "qk"}
        names["attention.qkv"] = [f"self_attn.{part}_proj" for part in "qkv"]
        for ours, sources in names.items():
            for kind in ("weight", "bias"):
                there = [f"model.layers.{layer}.{source}.{kind}" for source in sources]
                if parts := [tensors[source] for source in there if source in tensors]:
                    found[f"layers.{layer}.{ours}.{kind}"] = fuse(parts) if ours == "attention.qkv" else parts[0]
    for kind in ("weight", "bias"):
        if f"model.norm.{kind}" in tensors:
            found[f"norm.{kind}"] = tensors[f"model.norm.{kind}"]
    return found


RENAMED = {
    "gpt_neox.embed_in": "model.embed_tokens", "embed_out": "lm_head", "gpt_neox.final_layer_norm": "model.norm",
    "gpt_neox.": "model.", "attention.query_key_value": "self_attn.qkv_proj", "attention.dense": "self_attn.o_proj",
    "dense_h_to_4h": "up_proj", "dense_4h_to_h": "down_proj",
}  # fmt: skip


def plain_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """GPT-NeoX's and Phi-3's names and rows as those of the others."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        if "gate_up_proj" in name:
            found[name.replace("gate_up", "gate")], found[name.replace("gate_up", "up")] = tensor.chunk(2)
        else:
            found[name.replace("qkv_proj", "q_proj")] = tensor
    return found


@pytest.mark.parametrize("name", CASES)
@in_float64()
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    fields, own = CASES[name]
    kind = name.split()[0]
    torch.manual_seed(1)
    shape = getattr(transformers, f"{kind}Config")(**fields, attn_implementation="eager")
    theirs = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(shape).train()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.05 * torch.randn_like(parameter)  # norms and biases too
    config = DecoderConfig.model_validate(OURS | own)
    model = Decoder(config)
    model.load_state_dict(mapped(config, plain_names(dict(theirs.state_dict()))))
    tokens = torch.randint(VOCAB - 1, (2, SEQ_LEN))  # without padding, which transformers gives no gradient
    labels = torch.randint(VOCAB, (2, SEQ_LEN))
    wanted = theirs(tokens).logits
    compare(model(Batch(tokens)), wanted)
    loss = nn.functional.cross_entropy(wanted.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    found = model(Batch(tokens, labels, loss_factors=torch.ones(1)))
    compare(found[0], loss)
    found.sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    wanted_gradients = mapped(config, plain_names(gradients))
    assert wanted_gradients.keys() == dict(model.named_parameters()).keys()
    for parameter, value in model.named_parameters():
        compare(value.grad, wanted_gradients[parameter], parameter)
    found_gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    compare(found_gradients, torch.cat([wanted_gradients[name].flatten() for name, _ in model.named_parameters()]))


def compare(found: torch.Tensor, wanted: torch.Tensor, name: str = "") -> None:
    assert (found - wanted).norm() <= bound() * wanted.norm(), (name, ((found - wanted).norm() / wanted.norm()).item())


@pytest.mark.parametrize("name", CASES)
def test_a_small_copy_of_any_shape_is_valid(name: str) -> None:
    config = DecoderConfig.model_validate(OURS | CASES[name][1])
    assert DecoderConfig.model_validate(config.model_dump() | config.shrunk(16)).hidden_size == HIDDEN
    assert DecoderConfig.model_validate(OURS | {"rope_scaling": "none"}).rope_scaling is None
