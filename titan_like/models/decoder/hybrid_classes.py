"""Decoder classes of transformers with linear attention; see `titan_like.models.decoder.classes`."""

from dataclasses import dataclass

from titan_like.models.decoder.class_row import BIAS, QK_HEAD, Class
from titan_like.models.decoder.config import FULL, DecoderConfig, LayerKind
from titan_like.models.decoder.expert_fields import BY_STEP, auxiliary_loss, experts, shared_width
from titan_like.models.decoder.fields import Layers, head_size
from titan_like.models.decoder.rope import Rope
from titan_like.models.fields import Values, choice, renamed
from titan_like.models.hugging_face import Fields

_LINEAR = "linear"
_TYPES = {"full_attention": FULL, "linear_attention": _LINEAR}
_OPTIONS = {  # of the mixer → field and default
    "key_heads": ("linear_num_key_heads", 16), "value_heads": ("linear_num_value_heads", 32),
    "key_head_size": ("linear_key_head_dim", 128), "value_head_size": ("linear_value_head_dim", 128),
    "conv_size": ("linear_conv_kernel_dim", 4),
}  # fmt: skip


@dataclass(frozen=True)
class HybridLayers(Layers):
    """Gated delta nets, and attention with a gate in every n-th layer or those that layer_types names."""

    def read(self, fields: Fields, shape: Values) -> Values:
        """As in the base class."""
        count, period = shape["num_layers"], fields.integer("full_attention_interval", 4)
        types = fields.get("layer_types") or [list(_TYPES)[(i + 1) % period > 0] for i in range(count)]
        if not isinstance(types, list) or len(types) != count or any(name not in _TYPES for name in types):
            fields.refuse("layer_types", f"which must say {' or '.join(_TYPES)} of each of the {count} layers")
        full, _, of_model = self.rope.read(fields, shape)
        options = {ours: fields.integer(*theirs) for ours, theirs in _OPTIONS.items()}
        if options["value_heads"] % options["key_heads"]:
            fields.refuse("linear_num_value_heads", f"not a multiple of the key heads, {options['key_heads']}")
        every = {
            FULL: full | {"options": {"gate": True}},
            _LINEAR: {"mixer": "gated_delta_net", "rope_theta": 0.0, "rope_scaling": None, "options": options},
        }
        layers = [_TYPES[name] for name in types]
        kinds = {name: every[name] for name in dict.fromkeys(layers)}
        return full | of_model | {"rope_scaling": None, "layer_pattern": layers, "kinds": kinds}

    def write(self, config: DecoderConfig) -> Values:
        """As in the base class."""
        layers = [config.kind(config.kind_of(i)) for i in range(config.num_layers)]
        names = {True: "linear_attention", False: "full_attention"}
        fields: Values = {"layer_types": [names[kind.mixer == "gated_delta_net"] for kind in layers]}
        for options in (kind.options for kind in layers if kind.mixer == "gated_delta_net"):
            fields |= {theirs: options.get(ours, default) for ours, (theirs, default) in _OPTIONS.items()}
        full = next((kind for kind in layers if kind.rope_theta), LayerKind(rope_theta=config.rope_theta))
        return fields | self.rope.write(config, full, full)


# fmt: off
HYBRID_CLASSES = (
    Class(
        "Qwen3NextForCausalLM", ("qwen3_next",), (151936, 2048, 5632, 48, 16, 2, 32768),
        QK_HEAD | {"norm_offset": True, "shared_expert_gate": True},
        (
            head_size(256), BIAS, *experts("num_experts", 512, 10, "moe_intermediate_size", 512),
            shared_width("shared_expert_intermediate_size", 512), auxiliary_loss(dense=BY_STEP),
            renamed("renormalize", "norm_topk_prob", True),
        ),
        activation=choice("activation", "hidden_act", "silu", {"silu": "silu", "swish": "silu"}),
        layers=HybridLayers(rope=Rope(fraction=("partial_rotary_factor", 0.25))), dense=BY_STEP, others=("model.mtp.",),
        names={f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    ),
)
# fmt: on
