"""Features of decoders and of their training, from which rows of a covering array are made."""

import random
from collections.abc import Mapping
from functools import cache
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from titan_like.models.decoder.config import DecoderConfig

Row = Mapping[str, dict[str, Any]]  # feature → its value: fields of the model, or settings

SIZES = {"hidden_size": 16, "vocab_size": 257, "max_seq_len": 64, "ffn_hidden_size": 12}
YARN = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 24, "mscale": 0.7}
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_max_seq_len": 24, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Factors for the two pairs of dimensions that most heads rotate.
LONGROPE = {"type": "longrope", "factor": 4.0, "short_factors": [1.0, 1.5], "long_factors": [3.0, 5.0]}
EXPERTS = {"num_experts": 6, "experts_per_token": 2, "expert_ffn_hidden_size": 8}
LATENT = {"num_attention_heads": 2, "kv_lora_rank": 10, "rope_head_size": 4}
FREE = {"rope_theta": 0.0}
SCALED = {"window": 5, "rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 3.0}}
FEATURES: dict[str, list[dict[str, Any]]] = {
    "rope": [
        {},
        {"rope_theta": 20.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": YARN | {"beta_fast": 4.0}},
        {"rope_scaling": YARN | {"beta_fast": 3.0, "beta_slow": 0.5, "mscale_all_dim": 1.3, "truncate": False}},
        {"rope_scaling": YARN | {"attention_factor": 1.1}},
        {"rope_scaling": LONGROPE | {"original_max_seq_len": 8}},
        {"rope_scaling": LONGROPE | {"original_max_seq_len": 24, "attention_factor": 0.9}},
        {"rope_scaling": LONGROPE | {"original_max_seq_len": 8, "short_magnitude": 0.7, "long_magnitude": 1.3}},
        {"rope_scaling": {"type": "dynamic", "factor": 3.0, "original_max_seq_len": 8}},
    ],
    "rotary": [{}, {"rotary_fraction": 0.5}],
    "heads": [
        {"num_attention_heads": 4},
        {"num_attention_heads": 4, "num_kv_heads": 2, "head_size": 8},
        {"num_attention_heads": 3, "num_kv_heads": 1, "head_size": 4},
        LATENT | {"nope_head_size": 6, "value_head_size": 5},
        LATENT | {"nope_head_size": 2, "value_head_size": 8, "q_lora_rank": 7},
    ],
    "layers": [
        {"num_layers": 2},
        {"num_layers": 1},
        {"num_layers": 2, "layer_pattern": ["local", "full"], "kinds": {"local": {"window": 3}}},
        {"num_layers": 3, "layer_pattern": ["local", "free"], "kinds": {"local": SCALED, "free": FREE}},
        {"num_layers": 3, "layer_pattern": ["chunked", "free"], "kinds": {"chunked": {"chunk": 4}, "free": FREE}},
        {"num_layers": 3, "layer_pattern": ["full", "dense"], "kinds": {"dense": {"window": 4, "dense": True}}},
    ],
    "attention_bias": [{"attention_bias": value} for value in ("none", "qkv", "all")],
    "qk_norm": [{"qk_norm": value} for value in ("none", "head", "heads", "all", "l2")],
    "clip_qkv": [{}, {"clip_qkv": 0.5}],
    "norm_after_rope": [{}, {"norm_after_rope": True}],
    "attention_scale": [{}, {"attention_scale": 0.3}],
    "query_temperature": [
        {},
        {"query_temperature": 0.7, "query_temperature_period": 3},
        {"query_temperature": 0.6, "query_temperature_period": 3, "query_temperature_offset": 1}
        | {"query_temperature_of": "unrotated"},
    ],
    "attention_softcap": [{}, {"attention_softcap": 0.8}],
    "attention_sinks": [{}, {"attention_sinks": True}],
    "norm": [
        {},
        {"norm_offset": True, "norm_eps": 0.02},
        {"norm": "layer", "norm_eps": 0.05},
        {"norm": "layer", "norm_offset": True, "norm_eps": 0.1},
        {"norm": "layer_no_bias", "norm_eps": 0.03},
        {"norm": "layer_no_weight", "norm_eps": 0.04},
    ],
    "block": [{"block": value} for value in ("pre", "post", "sandwich", "parallel", "parallel_one_norm")],
    "activation": [{"activation": value} for value in ("silu", "gelu", "gelu_tanh", "clamped_swiglu")]
    + [{"activation": value, "gated": False} for value in ("relu2", "xielu")],
    "mlp_bias": [{}, {"mlp_bias": True}],
    "experts": [
        {},
        EXPERTS | {"z_loss_coefficient": 0.3, "balance_coefficient": 0.5},
        EXPERTS | {"num_dense_layers": 1, "router_score": "sigmoid", "renormalize": False, "balance": "none"},
        EXPERTS | {"router_groups": 3, "router_top_groups": 2, "router_score": "sigmoid", "balance": "bias"},
        EXPERTS | {"router_groups": 2, "router_top_groups": 1, "router_group_score": "max", "balance_coefficient": 0.4},
        EXPERTS | {"router_score": "sparsemixer", "renormalize": False, "router_margin": 2.1},
        EXPERTS | {"experts_per_token": 1, "renormalize": False, "routed_scaling": 2.5, "balance_coefficient": 0.2},
        EXPERTS | {"experts_per_token": 3, "balance": "bias", "bias_update_rate": 0.02, "z_loss_coefficient": 0.1},
    ],
    "of experts": [
        {},
        {"router_bias": True},
        {"scale_expert_inputs": True},
        {"expert_bias": True},
        {"num_shared_experts": 2},
        {"num_shared_experts": 1, "shared_expert_gate": True, "shared_ffn_hidden_size": 10},
    ],
    "embedding": [
        {"vocab_multiple": 8},
        {"vocab_multiple": 1, "embedding_scale": 3.0},
        {"vocab_multiple": 8, "tied_embeddings": True},
        {"vocab_multiple": 8, "tied_embeddings": True, "embedding_scale": 3.3, "round_embedding_scale": True},
    ],
    "residual_scale": [{}, {"residual_scale": 0.7}],
    "logit_scale": [{}, {"logit_scale": 0.6}],
    "output_bias": [{}, {"output_bias": True}],
    "final_softcap": [{}, {"final_softcap": 1.2}],
    "mtp_layers": [{}, {"mtp_layers": 1}, {"mtp_layers": 1, "mtp_coefficient": 1.7}],
}
# Fields that change nothing here, with what compares them.
LEFT_OUT = {
    "max_seq_len": "no table depends on it",
    "stores_rope_in_halves": "files alone, which tests/unit/test_decoder_hugging_face.py compares",
    "init_std": "initial weights, which tests/unit/test_models.py compares",
}


def rule(name: str, **settings: Any) -> dict[str, Any]:
    return {"optimizer.name": name} | {f"optimizer.{key}": value for key, value in settings.items()}


TRAINING: dict[str, list[dict[str, Any]]] = {
    "optimizer": [
        rule("adamw", weight_decay=0.3),
        rule("adamw", implementation="foreach", betas=[0.7, 0.8], eps=1e-3),
        rule("adamw", implementation="for-loop", eps=1e-2),
        rule("sgd", weight_decay=0.3),
        rule("adafactor", relative_step=True, decay_rate=0.6),
        rule("adafactor", scale_parameter=True, beta1=0.9, clip_threshold=0.5, weight_decay=0.3),
        rule("muon", matrix_lr=0.02, weight_decay=0.3),
        rule("muon", adjust_lr="original", momentum=0.8, newton_schulz_steps=3),
    ],
    "schedule": [
        {"lr_scheduler.decay": "constant", "lr_scheduler.warmup_steps": 2},
        {"lr_scheduler.decay": "cosine", "lr_scheduler.decay_steps": 3, "lr_scheduler.min_lr_ratio": 0.2},
        {"lr_scheduler.decay": "linear", "lr_scheduler.warmup_steps": 1},
        {"lr_scheduler.decay": "inverse_sqrt", "lr_scheduler.min_lr_ratio": 0.8},
        {"lr_scheduler.decay": "wsd", "lr_scheduler.decay_steps": 4},
    ],
    "max_norm": [{"training.max_norm": value} for value in (0.0, 0.1, 1e4)],
    "microbatches": [{"training.micro_batch_size": value} for value in (2, 1)],
    "lora": [
        {},
        {"lora.rank": 2, "lora.alpha": 3.0},
        {"lora.rank": 3, "lora.alpha": 3.0, "lora.dropout": 0.5},
        {"lora.rank": 1, "lora.alpha": 2.0, "lora.dropout": 0.2, "lora.modules": ["proj"]},
    ],
    # Read here: packed documents, whose positions may begin anew, and which positions carry a loss.
    "documents": [{}, {"packed": True}, {"packed": True, "resets": True}],
    "labels": [{"labels": value} for value in ("some", "all", "answers", "none at first", "none ahead at first")],
}
ALL = FEATURES | TRAINING


def fields_of(row: Row) -> dict[str, Any]:
    """The fields of the model."""
    fields: dict[str, Any] = dict(SIZES)
    for name in FEATURES:
        fields |= row.get(name, {})
    if not fields.get("num_experts"):
        of_experts = ("router_bias", "expert_bias", "scale_expert_inputs")
        fields = {name: value for name, value in fields.items() if name not in of_experts}
        fields.pop("num_shared_experts", None)
        fields = {name: value for name, value in fields.items() if not name.startswith("shared_")}
    return fields


def settings_of(row: Row) -> dict[str, Any]:
    """The settings of the run, without the model's and the adapters'."""
    names = (name for name in TRAINING if name != "lora")
    return {key: value for name in names for key, value in row[name].items() if "." in key}


def cover() -> list[Row]:
    """Few rows in which every pair of values of two features occurs, if they go together."""
    sizes, draw = [len(options) for options in ALL.values()], random.Random(0)
    values = [(feature, number) for feature, size in enumerate(sizes) for number in range(size)]
    missing = {pair: None for pair in combinations(values, 2) if pair[0][0] != pair[1][0]}
    rows: list[Row] = []
    while missing:
        chosen = dict(pair := next(iter(missing)))
        if not _go_together(chosen):  # they may with another value of a third feature
            thirds = ({**chosen, feature: number} for feature, number in values if feature not in chosen)
            chosen = next(filter(_go_together, thirds), {})
            if not chosen:
                del missing[pair]
                continue
        for feature in draw.sample(range(len(sizes)), len(sizes)):
            if feature not in chosen:
                pairs = [[_pair((feature, n), other) for other in chosen.items()] for n in range(sizes[feature])]
                new = [sum(pair in missing for pair in of_value) for of_value in pairs]
                best = sorted(range(sizes[feature]), key=lambda number: (-new[number], draw.random()))
                chosen[feature] = next(number for number in best if _go_together({**chosen, feature: number}))
        for pair in combinations(sorted(chosen.items()), 2):
            missing.pop(pair, None)
        rows.append({name: options[chosen[feature]] for feature, (name, options) in enumerate(ALL.items())})
    return rows


def _pair(one: tuple[int, int], other: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (one, other) if one < other else (other, one)


def _go_together(chosen: Mapping[int, int]) -> bool:
    """Whether the model's values fit; those of features that are not chosen yet are the first ones."""
    return _is_valid(tuple(chosen.get(feature, 0) for feature in range(len(FEATURES))))


def fits(row: Row) -> bool:
    """Whether the model's values go together."""
    return _is_valid(tuple(options.index(row[name]) for name, options in FEATURES.items()))


@cache
def _is_valid(numbers: tuple[int, ...]) -> bool:
    try:
        row = {name: options[number] for number, (name, options) in zip(numbers, FEATURES.items(), strict=True)}
        DecoderConfig(**fields_of(row))
    except ValidationError:
        return False
    return True


def random_row(seed: int) -> Row:
    """Values chosen at random, of the model's features until they go together."""
    draw = random.Random(seed)
    while True:
        row = {name: draw.choice(options) for name, options in ALL.items()}
        if fits(row):
            return row
