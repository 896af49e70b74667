"""The mapping between decoders and Hugging Face's classes, of which `classes` has the data.

A shape may be a model of several classes. It is exported as the class of the folder that the weights came from, or else
as the first whose config.json describes the same shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from titan_like.config.entry_points import MIXERS
from titan_like.models.decoder.class_row import NAMES, Class
from titan_like.models.decoder.classes import CLASSES
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.decoder.tensors import stored_parameters
from titan_like.models.fields import read_fields, write_fields
from titan_like.models.hugging_face import Fields, RefusedError, Stored, validated

__all__ = ["ARCHITECTURES", "class_of", "from_fields", "stored_parameters"]

_OF_IMAGES = re.compile(r"vision_|image_|video_|.*_token_id$")  # fields of config.json
_ELSEWHERE = ("llama", "mixtral", "qwen3_moe", "olmoe")  # families of these names have them
ARCHITECTURES = {kind: row.name for row in CLASSES for kind in row.model_types if kind not in _ELSEWHERE}
# Fields without meaning for the shape.
_MEANINGLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention architectures auto_map
    aux_loss_alpha bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout cross_attention_hidden_size decoder_start_token_id dtype eod_token_id eos_token_id ep_size
    id2label is_decoder is_encoder_decoder is_llama_config label2id max_length min_length model_type output_attentions
    output_hidden_states output_router_logits pad_token_id prefix pretraining_tp problem_type pruned_heads
    quantization_config return_dict sep_token_id seq_aux suppress_tokens task_specific_params tie_encoder_decoder
    tokenizer_class torch_dtype torchscript transformers.js_config transformers_version unsloth_fixed unsloth_version
    use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)
# What transformers reads in every class, where the class's row has no such field.
_EVERYWHERE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "layer_types", "per_layer_config"), (None,)),
    "is_causal": (True, None),
}
_NOT_COMPARED = {"vocab_multiple", "balance_coefficient", "bias_update_rate", "z_loss_coefficient", "kinds"}
_NOT_COMPARED |= {"round_embedding_scale", "num_shared_experts", "shared_ffn_hidden_size"}


def from_fields(fields: Fields, kind: type[DecoderConfig] = DecoderConfig) -> DecoderConfig:
    """The shape that config.json describes. A `RefusedError` names a feature that this family lacks, or a bad field."""
    rows = [row for row in CLASSES if fields.get("model_type") in row.model_types]
    row = rows[0]
    text = fields.table("text_config")
    if text is None and row.outer and fields.get("vision_config") is not None:  # as older versions saved both
        text = Fields({name: value for name, value in fields.values.items() if not _OF_IMAGES.match(name)})
    if text is not None:
        row = next((one for one in rows if one.model_types[0] == text.get("model_type")), row)
        text.must_be("quantization_config", None)
        tied, notes = fields.get("tie_word_embeddings"), fields.notes  # of the outer model
        values = {**row.outer_defaults, **text.values} | ({} if tied is None else {"tie_word_embeddings": tied})
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(table := values.get(name), dict):  # all axes of a text's positions are equal
                table = {key: "default" if value == "mrope" else value for key, value in table.items()}
                values[name] = {key: value for key, value in table.items() if not key.startswith("mrope_")}
        if values.pop("final_logit_softcapping", None) is not None:
            notes.append(f"{text.shown('final_logit_softcapping')} (the class with images does not read it)")
        fields = Fields(values, "text_config.")
        fields.notes = notes
    names = sorted(name for name in fields.values.keys() - _MEANINGLESS if re.search("dropout|pdrop", name))
    if dropouts := [name for name in names if fields.number(name, 0.0)]:
        fields.notes.append(f"{', '.join(map(fields.shown, dropouts))} (decoders here have no dropout)")
    values = read_fields(kind, row.all_fields, fields, row.always)
    for field, allowed in _EVERYWHERE.items():
        if field not in fields.names_read | row.ignored:
            fields.must_be(field, *allowed)
    if unread := fields.unread(_MEANINGLESS | row.ignored):
        fields.notes.append(f"{', '.join(unread)} (transformers' {row.name} does not read it)")
    return validated(kind, values)


def class_of(config: DecoderConfig, model_type: Any = None) -> ClassOf:
    """The class to map a shape to, of the classes that have it: ``model_type``'s first.

    Raises a `RefusedError` if there is none. The message names what the nearest one lacks.
    """
    for kind in config.kinds.values():
        if kind.mixer not in ("", *MIXERS):
            raise RefusedError(
                f"no class of transformers has the mixer {kind.mixer}; write the family's hugging_face.py"
            )
    lacking: dict[str, list[str]] = {}
    for row in sorted(CLASSES, key=lambda row: model_type not in row.model_types):
        lacking[row.name] = _lacks(config, row)
        if not lacking[row.name]:
            return ClassOf(row)
    nearest, (field, *_) = min(lacking.items(), key=lambda item: len(item[1]))
    raise RefusedError(f"the model has {field} = {getattr(config, field)}, which {nearest} cannot represent")


def _lacks(config: DecoderConfig, row: Class) -> list[str]:
    """The names of the fields that models of a class have with other values."""
    has = {field.ours for field in row.all_fields}
    for name in ("kv_lora_rank", "num_experts"):
        is_there = getattr(config, name) > 0
        if is_there != (name in has) and (is_there or not row.may_be_dense):
            return [name] * 9
    try:
        read_back = from_fields(Fields(ClassOf(row).to_fields(config)))
    except RefusedError:
        return ["layer_pattern"] * 9
    has_kinds = bool(config.kinds or read_back.kinds)
    ours, theirs = _compared(config, has_kinds), _compared(read_back, has_kinds)
    return [name for name in ours if ours[name] != theirs[name]]


def _compared(config: DecoderConfig, has_kinds: bool) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in DecoderConfig.model_fields if name not in _NOT_COMPARED}
    if has_kinds:
        values |= {"rope_theta": 0, "rope_scaling": None, "num_dense_layers": 0}
    layers = [_compared_kind(config, i) for i in range(config.num_layers)]
    values |= {"layer_pattern": layers if has_kinds else layers[:1] * config.num_layers}
    return values | {
        "balance": config.balance == "bias" and config.num_experts > 0,
        "attention_scale": config.score_scale,
        "num_shared_experts": config.shared_width,
        "router_group_score": config.router_group_score if config.router_groups > 1 else "",
    }


def _compared_kind(config: DecoderConfig, layer: int) -> tuple[Any, ...]:
    """What a layer's kind and its mixer are. Options of a mixer may be left out where they are the defaults."""
    name = config.kind_of(layer)
    kind, mixer = config.kind(name).model_dump(exclude={"mixer", "options", "dense"}), config.mixer_of(name)
    return kind, layer in config.dense_layers, type(mixer), mixer.model_dump(exclude={*mixer.not_in_weights})


class ClassOf:
    """One of the classes: what `titan_like.models.hugging_face.family_of` returns, with the names of such a module."""

    def __init__(self, row: Class) -> None:
        self.row = row
        first, *rest = row.model_types
        names = NAMES | dict(row.names)
        self.ARCHITECTURES = {first: row.name} | dict.fromkeys(rest, row.outer or row.name)
        self.PREFIX = names["layers"].partition(".")[0] + "."
        self.HEAD = names["output"] + "."
        self.RENAMED = row.renamed
        parts = ("vision_tower", "vision_model", "visual", "multi_modal_projector") if row.outer else ()
        self.IGNORED = (*(f"model.{part}." for part in parts), *row.others)

    def to_fields(self, config: DecoderConfig) -> dict[str, Any]:
        """The shape as fields of config.json, under names that every version of transformers knows."""
        return {"model_type": self.row.model_types[0]} | write_fields(config, self.row.all_fields)

    def stored_parameters(self, config: DecoderConfig) -> Iterator[Stored]:
        """Where each parameter of the model is stored."""
        return stored_parameters(config, self.row)
