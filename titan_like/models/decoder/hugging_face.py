"""The mapping between decoders and Hugging Face's classes, of which `classes` has the data.

A shape may be a model of several classes. The one to export to is that of the folder that the weights came from, or
else the first whose config.json describes the same shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from titan_like.models.decoder.classes import CLASSES, Class
from titan_like.models.decoder.config import FULL, DecoderConfig, LayerKind
from titan_like.models.decoder.rope import read_rope, written_rope
from titan_like.models.decoder.tensors import stored_parameters
from titan_like.models.hugging_face import Fields, RefusedError, Stored, read_fields, validated

__all__ = ["ARCHITECTURES", "class_of", "from_fields", "stored_parameters"]

_ELSEWHERE = ("llama", "mixtral", "qwen3_moe", "olmoe")  # families of these names have them
ARCHITECTURES = {kind: row.name for row in CLASSES for kind in row.model_types if kind not in _ELSEWHERE}
_SLIDING, _UNROTATED = "sliding", "unrotated"
_LAYER_TYPES = {"full_attention": FULL, "sliding_attention": _SLIDING}
# Fields that say nothing about the shape.
_MEANINGLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention architectures auto_map
    aux_loss_alpha bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout cross_attention_hidden_size decoder_start_token_id dtype eos_token_id ep_size id2label is_decoder
    is_encoder_decoder is_llama_config label2id max_length min_length model_type output_attentions output_hidden_states
    output_router_logits pad_token_id prefix pretraining_tp problem_type pruned_heads quantization_config return_dict
    sep_token_id seq_aux suppress_tokens task_specific_params tie_encoder_decoder tokenizer_class torch_dtype
    torchscript transformers.js_config transformers_version unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)
# What transformers reads in every class, where the class here has no such field.
_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "layer_types", "per_layer_config"), (None,)),
    "is_causal": (True, None),
}
_NAMES = {"gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "silu": ("silu", "swish")}
_NAMES |= {"gelu": ("gelu", "gelu_python"), "relu": ("relu",), "relu2": ("relu2",)}  # the first is written
_ACTIVATIONS = {theirs: ours for ours, names in _NAMES.items() for theirs in names}
_SIZES = (
    ("vocab_size", "vocab_size"),
    ("hidden_size", "hidden_size"),
    ("ffn_hidden_size", "intermediate_size"),
    ("num_layers", "num_hidden_layers"),
    ("num_attention_heads", "num_attention_heads"),
    ("num_kv_heads", "num_key_value_heads"),
    ("max_seq_len", "max_position_embeddings"),
)
_NOT_COMPARED = {"vocab_multiple", "balance_coefficient", "bias_update_rate", "z_loss_coefficient", "kinds"}
_NOT_COMPARED |= {"round_embedding_scale"}


def from_fields(fields: Fields, kind: type[DecoderConfig] = DecoderConfig) -> DecoderConfig:
    """The shape that config.json describes. A `RefusedError` names a feature that this family lacks, or a bad field."""
    row = next(row for row in CLASSES if fields.get("model_type") in row.model_types)
    if (text := fields.table("text_config")) is not None:
        text.must_be("quantization_config", None)
        tied, notes = fields.get("tie_word_embeddings"), fields.notes  # of the outer model
        values = text.values | ({} if tied is None else {"tie_word_embeddings": tied})
        if values.pop("final_logit_softcapping", None) is not None:
            notes.append(f"{text.shown('final_logit_softcapping')} (the class with images does not read it)")
        fields = Fields(values, "text_config.")
        fields.notes = notes
    names = sorted(name for name in fields.values.keys() - _MEANINGLESS if re.search("dropout|pdrop", name))
    if dropouts := [name for name in names if fields.number(name, 0.0)]:
        fields.notes.append(f"{', '.join(map(fields.shown, dropouts))} (decoders here have no dropout)")
    values = _shape(row, fields)
    if unread := fields.unread(_MEANINGLESS | row.ignored):
        fields.notes.append(f"{', '.join(unread)} (transformers' {row.name} does not read it)")
    shape = validated(kind, values)
    assert isinstance(shape, DecoderConfig)
    return shape


def _shape(row: Class, fields: Fields) -> dict[str, Any]:
    read = set(row.ignored)
    read |= {"sliding_window"} if row.layers in ("all", "types", "switched") else set()
    read |= {"layer_types"} if row.layers in ("types", "switched", "unrotated") else set()
    for field, allowed in {**_EVERYWHERE, **row.may, **row.must}.items():
        if field not in read:
            fields.must_be(field, *allowed)
    defaults = dict(zip(_SIZES, row.sizes, strict=True))
    if fields.values.get("num_key_value_heads", 0) is None:  # as many as query heads, whatever an absent field means
        defaults["num_kv_heads", "num_key_value_heads"] = 0
    sizes = [(*names, default) for names, default in defaults.items() if names[1] not in row.ignored]
    scalars = (
        ("norm_eps", *row.eps),
        ("init_std", "initializer_range", row.init_std),
        ("tied_embeddings", "tie_word_embeddings", row.tied),
    )
    shape = {**row.fixed, **read_fields(DecoderConfig, (*sizes, *scalars, *row.fields), fields)}
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    for ours, theirs, default in row.fields:
        if isinstance(default, float):
            shape[ours] = fields.positive(theirs, default)
    shape |= {ours: 1 / fields.positive(theirs, default) for ours, theirs, default in row.reciprocal}
    for ours, theirs, default in row.nullable:
        shape[ours] = 0.0 if fields.get(theirs, default) is None else fields.positive(theirs, default)
    if row.activation is not None:
        fields.must_be(*row.activation, *_ACTIVATIONS)
        shape["activation"] = _ACTIVATIONS[fields.get(*row.activation)]
    if row.head_dim is not None:
        shape["head_size"] = fields.integer("head_dim", row.head_dim or max(1, hidden // heads))
    elif fields.get("head_dim") is not None:  # with latents, what is rotated
        fields.must_be("head_dim", shape["rope_head_size"] if row.has_latents else hidden // heads)
    if row.bias:
        shape["attention_bias"] = row.bias if fields.flag("attention_bias", row.has_bias) else "none"
    if row.query_scalar:
        shape["attention_scale"] = fields.positive("query_pre_attn_scalar", 256) ** -0.5
        shape |= {"embedding_scale": hidden**0.5, "round_embedding_scale": True}
    if row.parallel:
        shape["block"] = "parallel" if fields.flag(row.parallel, True) else "pre"
    if row.has_latents:
        shape["q_lora_rank"] = _or_zero(fields, "q_lora_rank", 1536)
        shape["mtp_layers"] = _or_zero(fields, "num_nextn_predict_layers", 0)
        if shape["num_kv_heads"] not in (0, heads):
            fields.refuse("num_key_value_heads", f"but latent attention has as many as query heads, {heads}")
    if row.experts is not None:
        shape |= _experts(row, fields, shape["num_layers"])
    return shape | _layers(row, fields, shape)


def _or_zero(fields: Fields, field: str, default: int) -> int:
    """A whole number, of which 0 and null are none."""
    value = fields.get(field, default)
    return 0 if value is None or (type(value) is int and value == 0) else fields.integer(field, default)


def _experts(row: Class, fields: Fields, num_layers: int) -> dict[str, Any]:
    names = row.experts
    assert names is not None
    default, width, per_token = names.defaults
    known = dict.fromkeys(("num_local_experts", "num_experts", names.number))
    counts = [name for name in known if name in fields.values]
    count = fields.integer(counts[0] if counts else names.number, default)
    for name in counts[1:]:
        fields.must_be(name, count)
    num_dense = 0
    if names.dense_layers == "mlp_only_layers":
        fields.must_be("decoder_sparse_step", 1)
        dense = fields.get("mlp_only_layers") or []
        if not isinstance(dense, list) or dense != list(range(len(dense))):
            fields.refuse("mlp_only_layers", "which the models here do not support; only first layers can be dense")
        num_dense = len(dense)
    elif names.dense_layers:
        num_dense = _or_zero(fields, names.dense_layers, 3)
    chosen = fields.integer("num_experts_per_tok", per_token)
    shape: dict[str, Any] = {
        "num_experts": count,
        "experts_per_token": chosen,
        "expert_ffn_hidden_size": fields.integer(names.width, width),
        "num_dense_layers": num_dense,
        "num_shared_experts": _or_zero(fields, "n_shared_experts", 1) if names.has_groups else 0,
        "renormalize": names.renormalize is None or fields.flag("norm_topk_prob", names.renormalize),
    }
    if names.balance is None:
        return shape
    # transformers' loss pools the tokens of all layers, with loads that sum to k. Ours is a sum over layers, with loads
    # that sum to 1. If layers route alike, it is layers / k times as large.
    coefficient = fields.number("router_aux_loss_coef", names.balance)
    per_layer = coefficient * chosen / max(1, num_layers - num_dense)
    is_active = coefficient and fields.flag("output_router_logits", False)  # else transformers leaves the loss out
    return shape | {"balance": "auxiliary" if is_active else "none", "balance_coefficient": per_layer}


def _layers(row: Class, fields: Fields, shape: dict[str, Any]) -> dict[str, Any]:
    """The kinds of the layers, with windows and rotary positions."""
    count, window, layers = shape["num_layers"], None, [FULL] * shape["num_layers"]
    if row.layers in ("all", "types", "switched"):
        null = fields.get("sliding_window", row.window) is None
        window = None if null else fields.integer("sliding_window", row.window)
    if row.layers == "switched":
        first = _or_zero(fields, "max_window_layers", 28)
        window = window if fields.flag("use_sliding_window", False) else None
        layers = [FULL if window is None or i < first else _SLIDING for i in range(count)]
    elif row.layers == "all" and window is not None:
        layers = [_SLIDING] * count
    elif row.layers == "types":
        period = fields.integer(row.period_field, row.period) if row.period_field else row.period
        is_full = [not (i + 1) % period if period else window is None for i in range(count)]
        layers = [FULL if full else _SLIDING for full in is_full]
    if row.layers in ("types", "switched", "unrotated") and (types := fields.get("layer_types")) is not None:
        if not isinstance(types, list) or len(types) != count or any(name not in _LAYER_TYPES for name in types):
            fields.refuse("layer_types", f"which must say {' or '.join(_LAYER_TYPES)} of each of the {count} layers")
        layers = [_LAYER_TYPES[name] for name in types]
    if _SLIDING in layers and window is None:
        fields.refuse("sliding_window", "but some layers have a window; say how many tokens they see")
    if row.layers == "unrotated":
        interval = fields.integer("no_rope_layer_interval", 4)
        rotated = fields.get("no_rope_layers") or [int((i + 1) % interval > 0) for i in range(count)]
        if not isinstance(rotated, list) or len(rotated) < count or any(value not in (0, 1) for value in rotated):
            fields.refuse("no_rope_layers", f"which must be 1 or 0 for each of the {count} layers")
        layers = [FULL if is_rotated else _UNROTATED for is_rotated in rotated[:count]]
    rope = read_rope(row, fields, shape["max_seq_len"])
    every = {
        FULL: rope.full,
        _SLIDING: rope.sliding | {"window": window},
        _UNROTATED: {"rope_theta": 0.0, "rope_scaling": None},
    }
    model = rope.full | ({} if row.has_latents else {"rotary_fraction": rope.fraction})
    if set(layers) == {FULL}:
        return model
    length = next(n for n in range(1, count + 1) if all(layers[i] == layers[i % n] for i in range(count)))
    # Kinds without scaling would take the model's.
    kinds = {"layer_pattern": layers[:length], "kinds": {name: every[name] for name in dict.fromkeys(layers)}}
    return model | {"rope_scaling": None} | kinds


def to_fields(config: DecoderConfig, row: Class) -> dict[str, Any]:
    """The shape as fields of config.json, under names that every version of transformers knows."""
    fields: dict[str, Any] = {"model_type": row.model_types[0]}
    fields |= {theirs: getattr(config, ours) for ours, theirs in _SIZES if theirs not in row.ignored}
    fields |= {field: allowed[0] for field, allowed in row.must.items()}
    if row.activation is not None:
        fields[row.activation[0]] = _NAMES.get(config.activation, row.activation[1:])[0]
    fields |= {row.eps[0]: config.norm_eps, "initializer_range": config.init_std}
    fields["tie_word_embeddings"] = config.tied_embeddings
    fields |= {theirs: getattr(config, ours) for ours, theirs, _ in row.fields}
    for ours, theirs, _ in row.reciprocal:
        value = getattr(config, ours)
        fields[theirs] = next(
            (n for n in (round(1 / value, digits) for digits in range(9)) if 1 / (n or 1) == value), 1 / value
        )
    fields |= {theirs: getattr(config, ours) or None for ours, theirs, _ in row.nullable}
    if "attention_multiplier" in fields:
        fields["attention_multiplier"] = scale_of(config)
    if row.head_dim is not None:
        fields["head_dim"] = config.head_dim
    if row.bias:
        fields["attention_bias"] = config.attention_bias == row.bias
    if row.query_scalar:
        fields["query_pre_attn_scalar"] = round(scale_of(config) ** -2)
    if row.parallel:
        fields[row.parallel] = config.block == "parallel"
    if row.has_latents:
        fields |= {"q_lora_rank": config.q_lora_rank or None, "num_nextn_predict_layers": config.mtp_layers}
    if (names := row.experts) is not None:
        fields |= {names.number: config.num_experts, "num_experts_per_tok": config.experts_per_token}
        fields |= {names.width: config.expert_ffn_hidden_size}
        if names.balance is not None:
            fields["output_router_logits"] = config.balance == "auxiliary"
        if names.balance is not None and config.balance == "auxiliary":  # otherwise the source's stays
            layers_with_experts = config.num_layers - config.num_dense_layers
            coefficient = config.balance_coefficient * layers_with_experts / max(1, config.experts_per_token)
            fields["router_aux_loss_coef"] = float(f"{coefficient:.12g}")  # without the rounding of both conversions
        if names.renormalize is not None:
            fields["norm_topk_prob"] = config.renormalize
        if names.dense_layers == "mlp_only_layers":
            fields |= {"decoder_sparse_step": 1, "mlp_only_layers": list(range(config.num_dense_layers))}
        elif names.dense_layers:
            fields[names.dense_layers] = config.num_dense_layers
        if names.has_groups:
            fields["n_shared_experts"] = config.num_shared_experts
    layers = [config.kind(config.kind_of(i)) for i in range(config.num_layers)]
    window = next((kind.window for kind in layers if kind.window), None)
    if row.layers in ("all", "types", "switched"):
        fields["sliding_window"] = window or (row.window if row.layers == "types" else None)  # its code needs a number
    if row.layers == "switched":
        fields |= {"use_sliding_window": window is not None, "max_window_layers": config.num_layers}
    if row.layers == "types" or (row.layers == "switched" and window):
        fields["layer_types"] = [f"{'sliding' if kind.window else 'full'}_attention" for kind in layers]
    if row.layers == "unrotated":
        fields["no_rope_layers"] = [int(kind.rope_theta > 0) for kind in layers]
    rotated = [kind for kind in layers if kind.rope_theta] or [LayerKind(rope_theta=config.rope_theta)]
    full = next((kind for kind in rotated if not kind.window), rotated[0])
    sliding = next((kind for kind in rotated if kind.window), rotated[0])
    return fields | written_rope(row, config.rotary_fraction, full, sliding)


def scale_of(config: DecoderConfig) -> float:
    """The factor on the scores."""
    width = config.nope_head_size + config.rope_head_size if config.kv_lora_rank else config.head_dim
    return config.attention_scale or width**-0.5


def class_of(config: DecoderConfig, model_type: Any = None) -> ClassOf:
    """The class to map a shape to, of those that have it: that of ``model_type`` first.

    Raises:
        RefusedError: there is none. The message names what the nearest one lacks.
    """
    nearest: tuple[int, str] | None = None
    for row in sorted(CLASSES, key=lambda row: model_type not in row.model_types):
        lacking = _lacks(config, row)
        if not lacking:
            return ClassOf(row)
        if nearest is None or len(lacking) < nearest[0]:
            value = getattr(config, lacking[0])
            nearest = len(lacking), f"the model has {lacking[0]} = {value}, which {row.name} cannot represent"
    assert nearest is not None
    raise RefusedError(nearest[1])


def _lacks(config: DecoderConfig, row: Class) -> list[str]:
    """The names of the fields that models of a class have with other values."""
    if (config.num_experts > 0) != (row.experts is not None) or (config.kv_lora_rank > 0) != row.has_latents:
        return ["kv_lora_rank" if (config.kv_lora_rank > 0) != row.has_latents else "num_experts"] * 9
    try:
        read_back = from_fields(Fields(to_fields(config, row)))
    except RefusedError:
        return ["layer_pattern"] * 9
    ours, theirs = _compared(config), _compared(read_back)
    return [name for name in ours if ours[name] != theirs[name]]


def _compared(config: DecoderConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in DecoderConfig.model_fields if name not in _NOT_COMPARED}
    if config.kinds:
        values |= {"rope_theta": 0, "rope_scaling": None}
    layers = [config.kind(config.kind_of(i)) for i in range(config.num_layers)]
    values |= {"layer_pattern": layers if config.kinds else layers[:1] * config.num_layers}
    return values | {
        "balance": config.balance == "bias" and config.num_experts > 0,
        "attention_scale": scale_of(config),
    }


class ClassOf:
    """One of the classes: what `titan_like.models.hugging_face.family_of` returns, with the names of such a module."""

    def __init__(self, row: Class) -> None:
        self.row, (first, *rest) = row, row.model_types
        self.ARCHITECTURES = {first: row.name} | dict.fromkeys(rest, row.outer or row.name)
        self.PREFIX = row.names.get("layers", "model.layers").partition(".")[0] + "."
        self.HEAD = row.names.get("output", "lm_head") + "."
        self.RENAMED = row.renamed
        self.IGNORED = ("model.vision_tower.", "model.multi_modal_projector.") if row.outer else ()

    def to_fields(self, config: DecoderConfig) -> dict[str, Any]:
        """The shape as fields of config.json."""
        return to_fields(config, self.row)

    def stored_parameters(self, config: DecoderConfig) -> Iterator[Stored]:
        """Where each parameter of the model is stored."""
        return stored_parameters(config, self.row)
