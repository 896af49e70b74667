"""Decoder classes of transformers with layers that are no attention; see `titan_like.models.decoder.classes`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_like.models.decoder.class_row import (
    BIAS,
    GRANITE_SCALES,
    HEAD_SIZE,
    IN_LANGUAGE_MODEL,
    MLP_BIAS,
    NAMES,
    QK_HEAD,
    Class,
)
from titan_like.models.decoder.config import FULL, DecoderConfig, LayerKind
from titan_like.models.decoder.expert_fields import BY_STEP, BY_TYPE_OR_FIRST, auxiliary_loss, experts, shared_width
from titan_like.models.decoder.fields import Layers, activation, head_size, latent_kv_heads
from titan_like.models.decoder.moe_classes import MIXTRAL_NAMES, MOE_CLASSES, SIGMOID
from titan_like.models.decoder.rope import Rope
from titan_like.models.fields import Field, Values, choice, converted, fixed, read_fields, renamed, write_fields
from titan_like.models.hugging_face import Fields, RefusedError

_LINEAR, _MAMBA, _MLP = "linear", "mamba", "mlp"
_UNROTATED = {"rope_theta": 0.0, "rope_scaling": None}
_INFINITY = (math.inf, {"__float__": "Infinity"})  # of which transformers 5 writes the second
_Options = Mapping[str, tuple[str, Any]]  # of a mixer → field and default
_DELTA: _Options = {
    "key_heads": ("linear_num_key_heads", 16), "value_heads": ("linear_num_value_heads", 32),
    "key_head_size": ("linear_key_head_dim", 128), "value_head_size": ("linear_value_head_dim", 128),
    "conv_size": ("linear_conv_kernel_dim", 4),
}  # fmt: skip
_KIMI: _Options = {
    "heads": ("linear_num_heads", 32), "head_size": ("linear_head_dim", 128),
    "conv_size": ("linear_conv_kernel_dim", 4),
}  # fmt: skip
_KIMI_TABLE = {"heads": "num_heads", "head_size": "head_dim", "conv_size": "short_conv_kernel_size"}
_GRANITE: _Options = {
    "heads": ("mamba_n_heads", 128), "groups": ("mamba_n_groups", 1), "state_size": ("mamba_d_state", 256),
    "conv_size": ("mamba_d_conv", 4), "conv_bias": ("mamba_conv_bias", True), "bias": ("mamba_proj_bias", False),
}  # fmt: skip
_NEMOTRON: _Options = {
    "heads": ("mamba_num_heads", 128), "groups": ("n_groups", 8), "state_size": ("ssm_state_size", 128),
    "head_size": ("mamba_head_dim", 64), "conv_size": ("conv_kernel", 4), "conv_bias": ("use_conv_bias", True),
    "bias": ("use_bias", False), "min_step": ("time_step_min", 1e-3),
}  # fmt: skip


def _read_options(fields: Fields, options: _Options) -> Values:
    parse: Any = {int: fields.integer, float: fields.number, bool: fields.flag}
    return {ours: parse[type(default)](theirs, default) for ours, (theirs, default) in options.items()}


def _write_options(config: DecoderConfig, mixer: str, options: _Options) -> Values:
    """The fields of the first kind with this mixer; none if there is no such kind."""
    names = [name for name in config.kind_names if config.kind(name).mixer == mixer][:1]
    mixers = [config.mixer_of(name) for name in names]
    return {theirs: getattr(one, ours) for one in mixers for ours, (theirs, _) in options.items()}


def _read_types(fields: Fields, count: int | None, kinds: Mapping[str, str], *names: str, default: Any = None) -> Any:
    """The kind of each layer, by the first of the fields ``names`` that there is."""
    values = {name: fields.get(name) for name in names}
    field = next((name for name in names if values[name]), names[0])
    types = values[field] or default
    types = list(types) if field == "hybrid_override_pattern" and isinstance(types, str) else types
    if not isinstance(types, list) or len(types) != (count or len(types)) or any(name not in kinds for name in types):
        layers = "each layer" if count is None else f"each of the {count} layers"
        fields.refuse(field, f"which must say {' or '.join(kinds)} of {layers}")
    return [kinds[name] for name in types]


def _of_kinds(layers: list[str], every: Values) -> Values:
    return {"layer_pattern": layers, "kinds": {name: every[name] for name in dict.fromkeys(layers)}}


def _write_types(config: DecoderConfig, words: Mapping[str, str]) -> list[str]:
    """The word of each layer: of its mixer, or of a layer that is an MLP."""
    kinds = [config.kind(config.kind_of(i)) for i in range(config.num_layers)]
    names = [_MLP if kind.parts == "mlp" else kind.mixer.replace("attention", "") for kind in kinds]
    if unknown := {*names} - {*words}:
        raise RefusedError(f"the class has no mixer {min(unknown)}")
    return [words[name] for name in names]


def _full_kind(config: DecoderConfig) -> LayerKind:
    """The first kind of layers that rotates, or one like the model."""
    kinds = (config.kind(name) for name in config.kind_names)
    return next((kind for kind in kinds if kind.rope_theta), LayerKind(rope_theta=config.rope_theta))


@dataclass(frozen=True)
class DeltaLayers(Layers):
    """Gated delta nets, and attention with a gate in every n-th layer or those that layer_types names."""

    def read(self, fields: Fields, shape: Values) -> Values:
        """As in the base class."""
        count, period = shape["num_layers"], fields.integer("full_attention_interval", 4)
        kinds = {"full_attention": FULL, "linear_attention": _LINEAR}
        default = [list(kinds)[(i + 1) % period > 0] for i in range(count)]
        layers = _read_types(fields, count, kinds, "layer_types", default=default)
        full, _, of_model = self.rope.read(fields, shape)
        options = _read_options(fields, _DELTA)
        if options["value_heads"] % options["key_heads"]:
            fields.refuse("linear_num_value_heads", f"not a multiple of the key heads, {options['key_heads']}")
        linear = _UNROTATED | {"mixer": "gated_delta_net", "options": options}
        every = {FULL: full | {"options": {"gate": True}}, _LINEAR: linear}
        return full | of_model | {"rope_scaling": None} | _of_kinds(layers, every)

    def write(self, config: DecoderConfig) -> Values:
        """As in the base class."""
        types = _write_types(config, {"": "full_attention", "gated_delta_net": "linear_attention"})
        full = _full_kind(config)
        fields = {"layer_types": types} | _write_options(config, "gated_delta_net", _DELTA)
        return fields | self.rope.write(config, full, full)


@dataclass(frozen=True)
class KimiLayers(Layers):
    """Kimi's delta attention, and latent attention without rotation; the files count layers from 1."""

    def read(self, fields: Fields, shape: Values) -> Values:
        """As in the base class."""
        count, table = shape["num_layers"], fields.table("linear_attn_config")
        options = _read_options(fields, _KIMI)
        default = [("full", "linear")[i % 4 > 0 or not i] + "_attention" for i in range(count)]
        if table is not None:
            options = {ours: table.integer(name, options[ours]) for ours, name in _KIMI_TABLE.items()}
            numbers = {kind: table.get(f"{kind}_layers") for kind in ("full_attn", "kda")}
            if None not in numbers.values():
                words = {"full_attn": "full_attention", "kda": "linear_attention"}
                of_layers = {number: words[kind] for kind, listed in numbers.items() for number in listed}
                if sorted(of_layers) != list(range(1, count + 1)) or sum(map(len, numbers.values())) != count:
                    table.refuse(
                        "kda_layers", f"which with full_attn_layers must name each of layers 1 to {count} once"
                    )
                default = [of_layers[number] for number in sorted(of_layers)]
        kinds = {"full_attention": FULL, "linear_attention": _LINEAR}
        layers = _read_types(fields, count, kinds, "layer_types", default=default)
        every = {FULL: _UNROTATED, _LINEAR: _UNROTATED | {"mixer": "kimi_delta", "options": options}}
        return _of_kinds(layers, every)

    def write(self, config: DecoderConfig) -> Values:
        """As in the base class."""
        types = _write_types(
            config, {"latent": "full_attention", "": "full_attention", "kimi_delta": "linear_attention"}
        )
        numbers = {
            "full_attn_layers": [i for i, name in enumerate(types, 1) if name == "full_attention"],
            "kda_layers": [i for i, name in enumerate(types, 1) if name == "linear_attention"],
        }
        options = {ours: (name, 0) for ours, name in _KIMI_TABLE.items()}
        return {"layer_types": types, "linear_attn_config": numbers | _write_options(config, "kimi_delta", options)}


@dataclass(frozen=True)
class GraniteLayers(Layers):
    """Mamba-2, and attention with or without rotation."""

    def read(self, fields: Fields, shape: Values) -> Values:
        """As in the base class."""
        count = shape["num_layers"]
        kinds = {"mamba": _MAMBA, "attention": FULL, "linear_attention": _MAMBA, "full_attention": FULL}
        layers = _read_types(fields, count, kinds, "layer_types", "layers_block_type", default=["mamba"] * count)
        fields.must_be("position_embedding_type", None, "nope", "rope")
        full, _, of_model = self.rope.read(fields, shape)
        attention = full if fields.get("position_embedding_type") == "rope" else _UNROTATED
        options, expand = _read_options(fields, _GRANITE), fields.integer("mamba_expand", 2)
        width, is_auto = expand * shape["hidden_size"], fields.get("mamba_d_head", "auto") == "auto"
        options["head_size"] = width // options["heads"] if is_auto else fields.integer("mamba_d_head")
        if options["head_size"] * options["heads"] != width or options["heads"] % options["groups"]:
            fields.refuse("mamba_n_heads", f"which must divide mamba_expand · hidden_size, {width}, in whole groups")
        fields.must_be("time_step_limit", None, *([0.0, end] for end in _INFINITY), (0.0, math.inf))
        every = {FULL: attention, _MAMBA: _UNROTATED | {"mixer": "mamba2", "options": options}}
        return full | of_model | {"rope_scaling": None} | _of_kinds(layers, every)

    def write(self, config: DecoderConfig) -> Values:
        """As in the base class."""
        fields: Values = {"layer_types": _write_types(config, {"": "attention", "mamba2": "mamba"})}
        full = _full_kind(config)
        is_rotated = any(kind.rope_theta for kind in config.kinds.values())
        fields["position_embedding_type"] = "rope" if is_rotated else "nope"
        fields |= _write_options(config, "mamba2", {**_GRANITE, "head_size": ("mamba_d_head", 0)})
        if "mamba_d_head" in fields:
            fields["mamba_expand"] = fields["mamba_d_head"] * fields["mamba_n_heads"] // config.hidden_size
        return fields | self.rope.write(config, full, full)


@dataclass(frozen=True)
class NemotronLayers(Layers):
    """Layers that are Mamba-2, attention without rotation, or an MLP."""

    def read(self, fields: Fields, shape: Values) -> Values:
        """As in the base class."""
        kinds = {"M": _MAMBA, "*": FULL, "-": _MLP, "mamba": _MAMBA, "attention": FULL, "mlp": _MLP}
        kinds |= {"linear_attention": _MAMBA, "full_attention": FULL}
        layers = _read_types(fields, None, kinds, "layers_block_type", "layer_types", "hybrid_override_pattern")
        options = _read_options(fields, _NEMOTRON)
        if options["heads"] % options["groups"]:
            fields.refuse("mamba_num_heads", f"not a multiple of n_groups, {options['groups']}")
        mixer = _UNROTATED | {"parts": "mixer"}
        every = {
            FULL: mixer, _MAMBA: mixer | {"mixer": "mamba2", "options": options}, _MLP: _UNROTATED | {"parts": "mlp"}
        }  # fmt: skip
        return {"num_layers": len(layers)} | _of_kinds(layers, every)

    def write(self, config: DecoderConfig) -> Values:
        """As in the base class."""
        pattern = "".join(_write_types(config, {"": "*", "mamba2": "M", _MLP: "-"}))
        return {"hybrid_override_pattern": pattern} | _write_options(config, "mamba2", _NEMOTRON)


_QUERY_LATENT = converted(
    "q_lora_rank", ("q_lora_rank",), lambda fields, name: fields.count(name, 0), lambda size: size or None
)
_GRANITE_EXPERTS = (
    *experts("num_local_experts", 8, 2, "intermediate_size", 11008), shared_width("shared_intermediate_size", 1024),
    auxiliary_loss(),
)  # fmt: skip


def _read_mlps(fields: Fields, shape: Values) -> Values:
    if fields.count("num_local_experts", 8):
        return read_fields(DecoderConfig, _GRANITE_EXPERTS, fields, shape)
    return {"num_experts": 0, "ffn_hidden_size": fields.integer("shared_intermediate_size", 1024)}


def _write_mlps(config: DecoderConfig) -> Values:
    if config.num_experts:
        return write_fields(config, _GRANITE_EXPERTS)
    return {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": config.ffn_hidden_size}


# What Nemotron-H's files have for initial weights, for kernels and for layers with experts.
_OF_OTHER_LAYERS = frozenset(
    """
    attention_bias chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype moe_intermediate_size moe_latent_size
    moe_shared_expert_intermediate_size moe_shared_expert_overlap mtp_layers_block_type n_group n_routed_experts
    n_shared_experts norm_topk_prob num_experts_per_tok num_logits_to_keep num_nextn_predict_layers
    rescale_prenorm_residual routed_scaling_factor time_step_floor time_step_limit time_step_max topk_group
    use_mamba_kernels
    """.split()  # noqa: SIM905
)
_MATRICES = ("gate", "up", "down")
_IN_FOUR = ("qkv", "z", "b", "a")
_QUARTER = DeltaLayers(rope=Rope(fraction=("partial_rotary_factor", 0.25)))
# fmt: off
_GRANITE_MOE = next(row for row in MOE_CLASSES if row.name == "GraniteMoeSharedForCausalLM")
_SILU = choice("activation", "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
_SHARED_EXPERT = {f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in _MATRICES}
_PARTS = {name: theirs.partition(".") for name, theirs in NAMES.items()}
HYBRID_CLASSES = (
    Class(
        "Qwen3NextForCausalLM", ("qwen3_next",), (151936, 2048, 5632, 48, 16, 2, 32768),
        QK_HEAD | {"norm_offset": True, "shared_expert_gate": True},
        (
            head_size(256), BIAS, *experts("num_experts", 512, 10, "moe_intermediate_size", 512),
            shared_width("shared_expert_intermediate_size", 512), auxiliary_loss(dense=BY_STEP),
            renamed("renormalize", "norm_topk_prob", True),
        ),
        activation=_SILU,
        layers=_QUARTER, dense=BY_STEP, others=("model.mtp.",), names=_SHARED_EXPERT,
    ),
    Class(
        "Qwen3_5ForCausalLM", ("qwen3_5_text", "qwen3_5"), (248320, 4096, 12288, 32, 16, 4, 32768),
        QK_HEAD | {"norm_offset": True}, (head_size(256), BIAS),
        fixed=(fixed("attn_output_gate", True, is_written=False),), activation=_SILU, layers=_QUARTER,
        delta_matrices=_IN_FOUR, others=("model.mtp.",), outer="Qwen3_5ForConditionalGeneration",
        renamed=IN_LANGUAGE_MODEL,
    ),
    Class(
        "Qwen3_5MoeForCausalLM", ("qwen3_5_moe_text", "qwen3_5_moe"), (248320, 2048, 512, 40, 16, 2, 32768),
        QK_HEAD | {"norm_offset": True, "shared_expert_gate": True},
        (
            head_size(256), BIAS, *experts("num_experts", 256, 8, "moe_intermediate_size", 512),
            shared_width("shared_expert_intermediate_size", 512), auxiliary_loss(),
        ),
        fixed=(fixed("attn_output_gate", True, is_written=False),), activation=_SILU, layers=_QUARTER,
        delta_matrices=_IN_FOUR, others=("model.mtp.",),
        outer="Qwen3_5MoeForConditionalGeneration",
        renamed=IN_LANGUAGE_MODEL,
        names={
            **_SHARED_EXPERT, "mlp.experts.down, or": "mlp.experts.down_proj",  # the last as they are published
            "mlp.experts.gate, or": "mlp.experts.gate_up_proj", "mlp.experts.up, or": "mlp.experts.gate_up_proj",
        },
    ),
    Class(
        "KimiLinearForCausalLM", ("kimi_linear",), (163840, 2304, 9216, 27, 32, None, 1048576), SIGMOID,
        (
            renamed("max_seq_len", "model_max_length", 1048576, "max_position_embeddings"),
            renamed("kv_lora_rank", "kv_lora_rank", 512), renamed("rope_head_size", "qk_rope_head_dim", 64),
            latent_kv_heads(), BIAS, _QUERY_LATENT,
            renamed("nope_head_size", "qk_nope_head_dim", 128), renamed("value_head_size", "v_head_dim", 128),
            renamed("routed_scaling", "routed_scaling_factor", 2.446),
            renamed("router_groups", "num_expert_group", 1, "n_group"), renamed("router_top_groups", "topk_group", 1),
            *experts("num_experts", 256, 8, "moe_intermediate_size", 1024, "num_experts_per_token"),
            renamed("renormalize", "moe_renormalize", True, "norm_topk_prob"),
            renamed("num_shared_experts", "num_shared_experts", 1, "n_shared_experts"),
        ),
        fixed=(  # which Kimi's own code reads
            fixed("moe_router_activation_func", "sigmoid"), fixed("moe_layer_freq", 1), fixed("mla_use_nope", True),
            fixed("num_nextn_predict_layers", 0),
        ),
        activation=_SILU, eps=("rms_norm_eps", 1e-5), layers=KimiLayers(), dense=BY_TYPE_OR_FIRST,
        ignored=frozenset(
            {"head_dim", "qk_head_dim", "rope_parameters", "rope_scaling", "rope_theta", "use_grouped_topk"}
        ),
        names=MIXTRAL_NAMES | {
            **{f"mlp.shared.{part}": f"block_sparse_moe.shared_experts.{part}_proj" for part in _MATRICES},
            **{f"mlp.{part}, or": f"block_sparse_moe.{part}_proj" for part in _MATRICES},  # as transformers writes it
            "mlp.router.bias": "block_sparse_moe.gate.e_score_correction_bias",
        },
    ),
    Class(
        "GraniteMoeHybridForCausalLM", ("granitemoehybrid",), (32000, 4096, 11008, 32, 32, 0, 2048),
        fields=(
            *GRANITE_SCALES, HEAD_SIZE, BIAS,
            Field(_read_mlps, _write_mlps, "num_experts", ("num_local_experts",)),
        ),
        activation=_SILU,
        layers=GraniteLayers(), may_be_dense=True, ignored=frozenset({"mamba_chunk_size"}),
        names={**_GRANITE_MOE.names, **{f"mlp.{part}": _GRANITE_MOE.names[f"mlp.shared.{part}"] for part in _MATRICES}},
    ),
    Class(
        "NemotronHForCausalLM", ("nemotron_h",), (131072, 4096, 21504, 52, 32, 8, 4096), {"gated": False},
        (MLP_BIAS, head_size(128)),
        fixed=(fixed("mamba_hidden_act", "silu"), fixed("residual_in_fp32", False, is_written=False)),
        activation=activation("mlp_hidden_act", "relu2"), eps=("layer_norm_epsilon", 1e-5), layers=NemotronLayers(),
        ignored=_OF_OTHER_LAYERS,
        others=("mtp.",), renamed={"model.": "backbone."},
        names={
            "embedding": "backbone.embeddings", "layers": "backbone.layers", "norm": "backbone.norm_f",
            "attention_norm": "norm", "mlp_norm": "norm",
            "attention.qkv": "mixer.{}_proj", "attention.proj": "mixer.o_proj", "mlp.gate": "mixer.gate_proj",
            "mlp.up": "mixer.up_proj", "mlp.down": "mixer.down_proj",
            **{name: f"mixer.{theirs}" for name, (part, _, theirs) in _PARTS.items() if part == "mamba"},
        },
    ),
)
# fmt: on
