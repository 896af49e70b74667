"""The mapping between Llama and Hugging Face's LlamaForCausalLM."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from titan_like.models.config import TransformerConfig
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.hugging_face import Fields, Stored, fused, read_fields, validated, whole, written_fields
from titan_like.models.llama.config import LlamaConfig

MODEL_TYPE = "llama"
ARCHITECTURE = "LlamaForCausalLM"
PREFIX = "model."
_FIELDS = (  # ours, theirs, default (None: config.json must have the field)
    ("num_layers", "num_hidden_layers", None),
    ("hidden_size", "hidden_size", None),
    ("num_attention_heads", "num_attention_heads", None),
    ("num_kv_heads", "num_key_value_heads", 0),  # one per query head
    ("ffn_hidden_size", "intermediate_size", None),
    ("vocab_size", "vocab_size", None),
    ("max_seq_len", "max_position_embeddings", 2048),
    ("norm_eps", "rms_norm_eps", 1e-6),
    ("init_std", "initializer_range", 0.02),
    ("tied_embeddings", "tie_word_embeddings", False),
    ("rope_theta", "rope_theta", 10_000.0),
)
_SCALING = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
_SCALING["original_max_seq_len"] = "original_max_position_embeddings"


def stored_parameters(config: LlamaConfig) -> Iterator[Stored]:
    """Where each parameter of the model is stored."""
    yield from stored_around_mlps(
        config, lambda layer, ours, theirs: stored_mlp(ours, theirs, config.hidden_size, config.ffn_hidden_size)
    )


def stored_around_mlps(config: DecoderConfig, of_mlp: Callable[[int, str, str], Iterator[Stored]]) -> Iterator[Stored]:
    """All parameters. ``of_mlp`` tells those of a layer's MLP from its number, and its names here and there."""
    hidden, width, vocab = config.hidden_size, config.attention_size, config.vocab_size
    table, head = (config.padded_vocab_size, hidden), "lm_head.weight"
    copy = head if config.tied_embeddings else None
    yield whole("embedding.weight", "model.embed_tokens.weight", table, vocab, copy=copy)
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        yield whole(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight", (hidden,))
        query, key, value = (f"{theirs}.self_attn.{part}_proj.weight" for part in "qkv")
        yield fused(config, f"{ours}.attention.qkv.weight", (hidden,), (query, key, value))
        yield whole(f"{ours}.attention.proj.weight", f"{theirs}.self_attn.o_proj.weight", (hidden, width))
        yield whole(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", (hidden,))
        yield from of_mlp(layer, f"{ours}.mlp", f"{theirs}.mlp")
    yield whole("norm.weight", "model.norm.weight", (hidden,))
    if not config.tied_embeddings:
        yield whole("output.weight", head, table, vocab)


def stored_mlp(ours: str, theirs: str, hidden: int, ffn: int) -> Iterator[Stored]:
    """The parameters of a gated MLP."""
    for name, shape in (("gate", (ffn, hidden)), ("up", (ffn, hidden)), ("down", (hidden, ffn))):
        yield whole(f"{ours}.{name}.weight", f"{theirs}.{name}_proj.weight", shape)


def is_ignored(name: str) -> bool:
    """Whether it is a buffer of rotary frequencies, which older versions of transformers saved."""
    return re.fullmatch(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", name) is not None


def to_fields(config: LlamaConfig) -> dict[str, Any]:
    """The shape as fields of config.json, under names that every version of transformers knows."""
    scaling = config.rope_scaling
    return {
        "model_type": MODEL_TYPE,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        **written_fields(config, _FIELDS, ARCHITECTURE),
        "rope_scaling": None
        if scaling is None
        else {"rope_type": "llama3"} | {theirs: getattr(scaling, ours) for ours, theirs in _SCALING.items()},
    }


def from_fields(fields: Fields) -> TransformerConfig:
    """The shape that config.json describes. A `RefusedError` names a feature that this family lacks, or a bad field."""
    fields.must_be("hidden_act", "silu", "swish")
    fields.must_be("attention_bias", False)
    fields.must_be("attention_dropout", 0.0, 0)
    fields.must_be("mlp_bias", False)
    fields.must_be("sliding_window", None)
    fields.must_be("partial_rotary_factor", None, 1.0, 1)
    found = read_fields(LlamaConfig, _FIELDS, fields)
    if fields.values.get("head_dim") is not None:
        fields.must_be("head_dim", found["hidden_size"] // found["num_attention_heads"])
    # transformers 5 keeps rope_theta and the scaling together in rope_parameters.
    rope = fields.table("rope_parameters") or fields.table("rope_scaling")
    if rope is not None:
        found["rope_theta"] = rope.number("rope_theta", found["rope_theta"])
        found["rope_scaling"] = _rope_scaling(rope)
    return validated(LlamaConfig, found)


def _rope_scaling(rope: Fields) -> dict[str, Any] | None:
    kind = "rope_type" if "rope_type" in rope.values else "type"
    rope.must_be(kind, "default", "llama3")
    rope.must_be("partial_rotary_factor", None, 1.0, 1)
    if rope.values.get(kind, "default") == "default":
        return None
    return {
        ours: rope.integer(theirs) if ours == "original_max_seq_len" else rope.number(theirs)
        for ours, theirs in _SCALING.items()
    }
