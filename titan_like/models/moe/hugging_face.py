"""The mapping between this family and Hugging Face's MixtralForCausalLM, Qwen3MoeForCausalLM and OlmoeForCausalLM.

The norm of queries and keys decides which: Mixtral has none, Qwen3 one over each head, OLMoE one over all heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from titan_like.models.config import TransformerConfig
from titan_like.models.hugging_face import (
    Fields,
    RefusedError,
    Stored,
    read_fields,
    validated,
    whole,
    written_fields,
)
from titan_like.models.llama.hugging_face import is_ignored, stored_around_mlps, stored_mlp
from titan_like.models.moe.config import MoEConfig

__all__ = ["is_ignored"]


class _Class(NamedTuple):
    """One class of transformers."""

    name: str
    qk_norm: str
    experts: str  # the field of config.json with their number
    width: str  # that with an expert's width
    block: str  # the module in a layer with router and experts
    matrices: tuple[str, str, str]  # names of an expert's gate, up and down
    eps: float  # of the norms, in a file that does not say


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_CLASSES = {
    "mixtral": _Class(
        "MixtralForCausalLM",
        "none",
        "num_local_experts",
        "intermediate_size",
        "block_sparse_moe",
        ("w1", "w3", "w2"),
        1e-5,
    ),
    "qwen3_moe": _Class(
        "Qwen3MoeForCausalLM", "head", "num_experts", "moe_intermediate_size", "mlp", _PROJECTIONS, 1e-6
    ),
    "olmoe": _Class("OlmoeForCausalLM", "all", "num_experts", "intermediate_size", "mlp", _PROJECTIONS, 1e-5),
}
ARCHITECTURES = {model_type: one.name for model_type, one in _CLASSES.items()}
PREFIX = "model."
_FIELDS = (  # ours, theirs, default (None: config.json must have the field)
    ("num_layers", "num_hidden_layers", None),
    ("hidden_size", "hidden_size", None),
    ("num_attention_heads", "num_attention_heads", None),
    ("num_kv_heads", "num_key_value_heads", 0),
    ("ffn_hidden_size", "intermediate_size", None),
    ("vocab_size", "vocab_size", None),
    ("max_seq_len", "max_position_embeddings", 2048),
    ("init_std", "initializer_range", 0.02),
    ("tied_embeddings", "tie_word_embeddings", False),
    ("experts_per_token", "num_experts_per_tok", None),
)


def _model_type(config: MoEConfig) -> str:
    return next(model_type for model_type, one in _CLASSES.items() if one.qk_norm == config.qk_norm)


def architecture(config: MoEConfig) -> str:
    """The class in transformers."""
    return ARCHITECTURES[_model_type(config)]


def stored_parameters(config: MoEConfig) -> Iterator[Stored]:
    """Where each parameter of the model is stored."""
    one, hidden, experts = _CLASSES[_model_type(config)], config.hidden_size, config.num_experts
    norms = {"head": (config.head_dim,) * 2, "all": (config.attention_size, config.num_kv_heads * config.head_dim)}

    def of_mlp(layer: int, ours: str, theirs: str) -> Iterator[Stored]:
        above, layer_there, ffn = ours.removesuffix(".mlp"), theirs.removesuffix(".mlp"), config.expert_ffn_hidden_size
        for part, size in zip("qk", norms.get(config.qk_norm, ()), strict=False):
            yield whole(f"{above}.attention.{part}_norm.weight", f"{layer_there}.self_attn.{part}_norm.weight", (size,))
        if layer < config.num_dense_layers:
            yield from stored_mlp(ours, theirs, hidden, config.ffn_hidden_size)
            return
        block = f"{layer_there}.{one.block}"
        yield whole(f"{ours}.router.weight", f"{block}.gate.weight", (experts, hidden))
        for name, matrix in zip(("gate", "up", "down"), one.matrices, strict=True):
            shape = (hidden, ffn) if name == "down" else (ffn, hidden)
            sources = [f"{block}.experts.{expert}.{matrix}.weight" for expert in range(experts)]
            stacked = (experts * shape[0], shape[1])
            yield Stored(f"{ours}.experts.{name}.weight", stacked, dict.fromkeys(sources, shape))
        if config.num_shared_experts:
            yield from stored_mlp(f"{ours}.shared", f"{theirs}.shared_experts", hidden, config.num_shared_experts * ffn)

    yield from stored_around_mlps(config, of_mlp)


def to_fields(config: MoEConfig) -> dict[str, Any]:
    """The shape as fields of config.json. A `RefusedError` names what none of the classes has, or this one lacks."""
    model_type = _model_type(config)
    one, num_dense = _CLASSES[model_type], config.num_dense_layers
    heads = config.hidden_size // config.num_attention_heads
    coefficient = config.balance_coefficient if config.balance == "auxiliary" else 0.0
    coefficient *= (config.num_layers - num_dense) / config.experts_per_token  # as in `from_fields`
    lacks = {
        "num_shared_experts": bool(config.num_shared_experts),
        "num_dense_layers": num_dense > 0 and model_type != "qwen3_moe",
        "router_score": config.router_score != "softmax",
        "renormalize": not config.renormalize and model_type == "mixtral",
        "routed_scaling": config.routed_scaling != 1.0,
        "balance": config.balance == "bias",
        "head_size": config.head_dim != heads and model_type == "olmoe",
        "rope_scaling": config.rope_scaling is not None,
    }
    for name, is_lacking in lacks.items():
        if is_lacking:
            raise RefusedError(f"the model has {name} = {getattr(config, name)}, which {one.name} cannot represent")
    fields = {
        "model_type": model_type,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "output_router_logits": False,
        **written_fields(config, _FIELDS, one.name),
        "router_aux_loss_coef": float(f"{coefficient:.12g}"),  # without the rounding of both conversions
        one.experts: config.num_experts,
        one.width: config.expert_ffn_hidden_size,
    }
    if model_type != "olmoe":
        fields["head_dim"] = config.head_dim
    if model_type != "mixtral":
        fields["norm_topk_prob"] = config.renormalize
    if model_type == "qwen3_moe":
        fields |= {"decoder_sparse_step": 1, "mlp_only_layers": list(range(num_dense))}
    return fields


def from_fields(fields: Fields) -> TransformerConfig:
    """The shape that config.json describes. A `RefusedError` names a feature that this family lacks, or a bad field."""
    model_type = fields.values["model_type"]
    one = _CLASSES[model_type]
    fields.must_be("hidden_act", "silu", "swish")
    fields.must_be("attention_bias", False)
    fields.must_be("attention_dropout", 0.0, 0)
    fields.must_be("router_jitter_noise", 0.0, 0)
    fields.must_be("sliding_window", None)
    fields.must_be("clip_qkv", None)
    found = read_fields(MoEConfig, _FIELDS, fields)
    coefficient = fields.number("router_aux_loss_coef", {"olmoe": 0.01}.get(model_type, 0.001))
    experts = "num_local_experts"  # for all three classes in transformers 5
    found |= {
        "qk_norm": one.qk_norm,
        "num_experts": fields.integer(experts if experts in fields.values else one.experts),
        "expert_ffn_hidden_size": fields.integer(one.width),
        "head_size": fields.integer("head_dim", found["hidden_size"] // found["num_attention_heads"]),
        "norm_eps": fields.number("rms_norm_eps", one.eps),
        "renormalize": model_type == "mixtral" or fields.flag("norm_topk_prob", False),
        "balance": "auxiliary" if coefficient else "none",
    }
    if model_type == "qwen3_moe":
        fields.must_be("decoder_sparse_step", 1)
        dense = fields.values.get("mlp_only_layers") or []
        if dense != list(range(len(dense))):
            fields.refuse("mlp_only_layers", "which the models here do not support; only first layers can be dense")
        found["num_dense_layers"] = len(dense)
    rope = fields.table("rope_parameters") or fields.table("rope_scaling") or Fields({})
    rope.must_be("rope_type" if "rope_type" in rope.values else "type", "default")
    theta = {"mixtral": 1_000_000.0}.get(model_type, 10_000.0)
    found["rope_theta"] = rope.number("rope_theta", fields.number("rope_theta", theta))
    # transformers' loss pools the tokens of all layers, with loads that sum to k. Ours is a sum over layers, with loads
    # that sum to 1. If layers route alike, it is layers / k times as large.
    num_sparse = max(1, found["num_layers"] - found.get("num_dense_layers", 0))
    found["balance_coefficient"] = coefficient * found["experts_per_token"] / num_sparse
    return validated(MoEConfig, found)
