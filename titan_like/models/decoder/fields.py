"""Fields of config.json that only decoders have."""

from dataclasses import dataclass
from typing import Literal

from titan_like.models.decoder.config import FULL, DecoderConfig, LayerKind
from titan_like.models.decoder.rope import Rope
from titan_like.models.fields import Field, Values, choice, converted, renamed
from titan_like.models.hugging_face import Fields

_ACTIVATIONS = dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh")
_ACTIVATIONS |= dict.fromkeys(("silu", "swish"), "silu") | dict.fromkeys(("gelu", "gelu_python"), "gelu")
_ACTIVATIONS |= {"relu": "relu", "relu2": "relu2"}
_SLIDING, _UNROTATED = "sliding", "unrotated"
_LAYER_TYPES = {"full_attention": FULL, "sliding_attention": _SLIDING}


def activation(theirs: str, default: str, **others: str) -> Field:
    """The activation of MLPs. ``others`` are words that mean another one in this class: theirs → ours."""
    return choice("activation", theirs, default, _ACTIVATIONS | others)


def bias(kind: str = "all", default: bool = False, theirs: str = "attention_bias") -> Field:
    """Biases of the attention projections ``kind``."""
    return choice("attention_bias", theirs, default, {False: "none", True: kind})


def biases(theirs: str, default: bool) -> Field:
    """Biases of all linear layers, of attention and MLP."""

    def read(fields: Fields, shape: Values) -> Values:
        has_biases = fields.flag(theirs, default)
        return {"attention_bias": "all" if has_biases else "none", "mlp_bias": has_biases}

    return Field(read, lambda config: {theirs: config.mlp_bias})


def _read_output_bias(fields: Fields, shape: Values) -> Values:
    has_output_bias = fields.flag("attention_out_bias", False)
    if not fields.flag("attention_bias", True):
        if has_output_bias:
            fields.refuse("attention_out_bias", "without attention_bias, which the models here do not support")
        return {"attention_bias": "none"}
    return {"attention_bias": "all" if has_output_bias else "qkv"}


# Biases of queries, keys and values, and of the output projection, as a flag each.
OUTPUT_BIAS = Field(
    _read_output_bias,
    lambda config: {
        "attention_bias": config.attention_bias != "none", "attention_out_bias": config.attention_bias == "all"
    },
)  # fmt: skip


def kv_heads(default: int) -> Field:
    """The number of key and value heads. 0 and null mean as many as query heads."""
    return converted(
        "num_kv_heads",
        ("num_key_value_heads",),
        lambda fields, name: fields.integer(name, 0 if fields.values.get(name, 0) is None else default),
    )


def latent_kv_heads() -> Field:
    """The number of key and value heads of latent attention, which equals the number of query heads."""

    def read(fields: Fields, shape: Values) -> Values:
        heads = shape["num_attention_heads"]
        if fields.get("num_key_value_heads") not in (None, heads):
            fields.refuse("num_key_value_heads", f"but latent attention has as many as query heads, {heads}")
        return {"num_kv_heads": heads}

    return Field(read, lambda config: {"num_key_value_heads": config.num_kv_heads})


def head_size(default: int | None = 0) -> Field:
    """The width of a head: 0 is hidden size / heads, None always that, or with latents what is rotated."""

    def read(fields: Fields, shape: Values) -> Values:
        size = shape.get("rope_head_size") or shape["hidden_size"] // shape["num_attention_heads"]
        if default is not None:
            return {"head_size": fields.integer("head_dim", default or max(1, size))}
        if fields.get("head_dim") is not None:
            fields.must_be("head_dim", size)
        return {}

    return Field(read, lambda config: {} if default is None else {"head_dim": config.head_dim})


def experts(number: str, count: int, per_token: int, width: str, size: int) -> tuple[Field, ...]:
    """The number of experts, which has several names in files; how many a token goes to; the width of one."""
    aliases = [name for name in ("num_local_experts", "num_experts") if name != number]
    return (
        renamed("num_experts", number, count, *aliases),
        renamed("experts_per_token", "num_experts_per_tok", per_token),
        renamed("expert_ffn_hidden_size", width, size),
    )


def _read_dense(fields: Fields, shape: Values) -> Values:
    fields.must_be("decoder_sparse_step", 1)
    layers = fields.get("mlp_only_layers") or []
    if not isinstance(layers, list) or layers != list(range(len(layers))):
        fields.refuse("mlp_only_layers", "which the models here do not support; only first layers can be dense")
    return {"num_dense_layers": len(layers)}


# The first layers, without experts, as a list of their numbers.
DENSE_LAYERS = Field(
    _read_dense, lambda config: {"decoder_sparse_step": 1, "mlp_only_layers": list(range(config.num_dense_layers))}
)


def auxiliary_loss(default: float = 0.001, dense_layers: Field | None = None) -> Field:
    """The load balancing loss.

    transformers' pools the tokens of all layers, with loads that sum to k. Ours is a sum over layers, with loads that
    sum to 1. If layers route alike, it is layers / k times as large.
    """

    def read(fields: Fields, shape: Values) -> Values:
        coefficient = fields.number("router_aux_loss_coef", default)
        dense = dense_layers.read(fields, shape)["num_dense_layers"] if dense_layers else 0
        per_layer = coefficient * shape["experts_per_token"] / max(1, shape["num_layers"] - dense)
        is_active = coefficient and fields.flag("output_router_logits", False)  # else transformers leaves the loss out
        return {"balance": "auxiliary" if is_active else "none", "balance_coefficient": per_layer}

    def write(config: DecoderConfig) -> Values:
        if config.balance != "auxiliary":
            return {"output_router_logits": False}  # the source's coefficient stays
        layers = config.num_layers - config.num_dense_layers
        coefficient = config.balance_coefficient * layers / max(1, config.experts_per_token)
        # Without the rounding of both conversions.
        return {"output_router_logits": True, "router_aux_loss_coef": float(f"{coefficient:.12g}")}

    return Field(read, write)


@dataclass(frozen=True)
class Layers:
    """Which layers have a window or do not rotate, and the rotary positions.

    "types": layer_types names the layers with a window, by default all but every n-th (n = period; 0: all).
    "switched": use_sliding_window gives one to the layers of layer_types, by default those after max_window_layers.
    "unrotated": every n-th layer does not rotate.
    """

    pattern: Literal["none", "all", "types", "switched", "unrotated"] = "none"
    window: int | None = None  # default of sliding_window
    period: int = 0
    period_field: str = ""
    first_full: int = -1  # number of a layer without a window; all others are a multiple of the period away
    rotated: Literal["all", "windows", "windows if any"] = "all"  # "if any": all if sliding_window is null
    rope: Rope = Rope()  # noqa: RUF009

    def read(self, fields: Fields, shape: Values) -> Values:
        """The kinds of the layers, and the rotary positions of the model."""
        count = shape["num_layers"]
        layers, window = self._read_pattern(fields, count)
        if self.rotated == "windows" or (self.rotated == "windows if any" and window is not None):
            layers = [_UNROTATED if name == FULL else name for name in layers]
        full, sliding, of_model = self.rope.read(fields, shape)
        model = full | of_model
        if set(layers) == {FULL}:
            return model
        unrotated = {"rope_theta": 0.0, "rope_scaling": None}
        every = {FULL: full, _SLIDING: sliding | {"window": window}, _UNROTATED: unrotated}
        length = next(n for n in range(1, count + 1) if all(layers[i] == layers[i % n] for i in range(count)))
        kinds = {name: every[name] for name in dict.fromkeys(layers)}
        # Kinds without scaling would inherit the model's.
        return model | {"rope_scaling": None, "layer_pattern": layers[:length], "kinds": kinds}

    def write(self, config: DecoderConfig) -> Values:
        """The fields of the pattern and of the rotary positions."""
        fields: Values = {}
        layers = [config.kind(config.kind_of(i)) for i in range(config.num_layers)]
        window = next((kind.window for kind in layers if kind.window), None)
        if self.pattern in ("all", "types", "switched"):
            needed = self.window if self.pattern == "types" else None  # the class's code needs a number
            if self.rotated == "windows if any" and all(kind.rope_theta for kind in layers):
                needed = None
            fields["sliding_window"] = window or needed
        if self.pattern == "switched":
            fields |= {"use_sliding_window": window is not None, "max_window_layers": config.num_layers}
        if self.pattern == "types" or (self.pattern == "switched" and window):
            fields["layer_types"] = [f"{'sliding' if kind.window else 'full'}_attention" for kind in layers]
        if self.pattern == "unrotated":
            fields["no_rope_layers"] = [int(kind.rope_theta > 0) for kind in layers]
        rotated = [kind for kind in layers if kind.rope_theta] or [LayerKind(rope_theta=config.rope_theta)]
        full = next((kind for kind in rotated if not kind.window), rotated[0])
        sliding = next((kind for kind in rotated if kind.window), rotated[0])
        return fields | self.rope.write(config, full, sliding)

    def _read_pattern(self, fields: Fields, count: int) -> tuple[list[str], int | None]:
        layers, window = [FULL] * count, None
        if self.pattern in ("all", "types", "switched"):
            is_null = fields.get("sliding_window", self.window) is None
            window = None if is_null else fields.integer("sliding_window", self.window)
        if self.pattern == "switched":
            first = fields.count("max_window_layers", 28)
            window = window if fields.flag("use_sliding_window", False) else None
            layers = [FULL if window is None or i < first else _SLIDING for i in range(count)]
        elif self.pattern == "all" and window is not None:
            layers = [_SLIDING] * count
        elif self.pattern == "types":
            period = self.period
            if self.period_field and fields.get("layer_types") is None:
                period = fields.integer(self.period_field, self.period)
            fields.get(self.period_field)
            has_full = window is None and (not period or self.rotated == "windows if any")
            is_full = [has_full or (period > 0 and (i - self.first_full) % period == 0) for i in range(count)]
            layers = [FULL if full else _SLIDING for full in is_full]
        if self.pattern not in ("none", "all") and (types := fields.get("layer_types")) is not None:
            if not isinstance(types, list) or len(types) != count or any(name not in _LAYER_TYPES for name in types):
                allowed = " or ".join(_LAYER_TYPES)
                fields.refuse("layer_types", f"which must say {allowed} of each of the {count} layers")
            layers = [_LAYER_TYPES[name] for name in types]
        if _SLIDING in layers and window is None:
            fields.refuse("sliding_window", "but some layers have a window; say how many tokens they see")
        if self.pattern == "unrotated":
            interval = fields.integer("no_rope_layer_interval", 4)
            rotated = fields.get("no_rope_layers") or [int((i + 1) % interval > 0) for i in range(count)]
            if not isinstance(rotated, list) or len(rotated) < count or any(value not in (0, 1) for value in rotated):
                fields.refuse("no_rope_layers", f"which must be 1 or 0 for each of the {count} layers")
            layers = [FULL if is_rotated else _UNROTATED for is_rotated in rotated[:count]]
        return layers, window
