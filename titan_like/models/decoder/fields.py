"""Fields of config.json that only decoders have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from titan_like.models.decoder.config import FULL, DecoderConfig, LayerKind
from titan_like.models.decoder.rope import Rope
from titan_like.models.fields import Field, Values, choice, converted
from titan_like.models.hugging_face import Fields

_ACTIVATIONS = dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu_tanh")
_ACTIVATIONS |= dict.fromkeys(("silu", "swish"), "silu") | dict.fromkeys(("gelu", "gelu_python"), "gelu")
_ACTIVATIONS |= {"relu": "relu", "relu2": "relu2", "xielu": "xielu"}
_SLIDING, _UNROTATED = "sliding", "unrotated"
_SWITCHED, _TYPED = ("switched", "alternating", "switched all"), ("switched", "alternating", "last")
_CHUNKED = "chunked_attention"
_WITHOUT_POSITIONS = {"rope_theta": 0.0, "rope_scaling": None}
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


@dataclass(frozen=True)
class Layers:
    """Which layers have a window or do not rotate, and the rotary positions.

    "types": layer_types names the layers with a window, by default all but every n-th (n = period; 0: all).
    "switched": use_sliding_window gives one to the layers of layer_types, by default those after max_window_layers.
    "alternating": by default every second one of those before. "last": there is no such switch. "switched all": the
    switch is for all layers.
    "unrotated": every n-th layer does not rotate.
    """

    pattern: Literal["none", "all", "types", "switched", "alternating", "switched all", "last", "unrotated"] = "none"
    window: int | None = None  # default of sliding_window
    first: int = 28  # default of max_window_layers
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
        return model | _kinds_of(
            layers, {FULL: full, _SLIDING: sliding | {"window": window}, _UNROTATED: _WITHOUT_POSITIONS}
        )

    def write(self, config: DecoderConfig) -> Values:
        """The fields of the pattern and of the rotary positions."""
        fields: Values = {}
        layers = [config.kind(config.kind_of(i)) for i in range(config.num_layers)]
        window = next((kind.window for kind in layers if kind.window), None)
        if self.pattern in ("all", "types", "last", *_SWITCHED):
            needed = self.window if self.pattern == "types" else None  # the class's code needs a number
            if self.rotated == "windows if any" and all(kind.rope_theta for kind in layers):
                needed = None
            fields["sliding_window"] = window or needed
        if self.pattern in _SWITCHED:
            fields["use_sliding_window"] = window is not None
        if self.pattern in _TYPED:
            fields["max_window_layers"] = config.num_layers
        if self.pattern == "types" or (self.pattern in _TYPED and window):
            fields["layer_types"] = [f"{'sliding' if kind.window else 'full'}_attention" for kind in layers]
        if self.pattern == "unrotated":
            fields["no_rope_layers"] = [int(kind.rope_theta > 0) for kind in layers]
        rotated = [kind for kind in layers if kind.rope_theta] or [LayerKind(rope_theta=config.rope_theta)]
        full = next((kind for kind in rotated if not kind.window), rotated[0])
        sliding = next((kind for kind in rotated if kind.window), rotated[0])
        return fields | self.rope.write(config, full, sliding)

    def _read_pattern(self, fields: Fields, count: int) -> tuple[list[str], int | None]:
        layers, window = [FULL] * count, None
        if self.pattern in ("all", "types", "last", *_SWITCHED):
            is_null = fields.get("sliding_window", self.window) is None
            is_off = self.pattern in _SWITCHED and not fields.flag("use_sliding_window", False)
            window = None if is_null or is_off else fields.integer("sliding_window", self.window)
        if self.pattern in _TYPED:
            first = fields.count("max_window_layers", self.first)
            windowed = range(0, min(first, count), 2) if self.pattern == "alternating" else range(first, count)
            layers = [_SLIDING if window is not None and i in windowed else FULL for i in range(count)]
        elif self.pattern in ("all", "switched all") and window is not None:
            layers = [_SLIDING] * count
        elif self.pattern == "types":
            period = self.period
            if self.period_field and fields.get("layer_types") is None:
                period = fields.integer(self.period_field, self.period)
            fields.get(self.period_field)
            has_full = window is None and (not period or self.rotated == "windows if any")
            is_full = [has_full or (period > 0 and (i - self.first_full) % period == 0) for i in range(count)]
            layers = [FULL if full else _SLIDING for full in is_full]
        if self.pattern not in ("none", "all", "switched all") and (types := fields.get("layer_types")) is not None:
            if not isinstance(types, list) or len(types) != count or any(name not in _LAYER_TYPES for name in types):
                allowed = " or ".join(_LAYER_TYPES)
                fields.refuse("layer_types", f"which must say {allowed} of each of the {count} layers")
            layers = [_LAYER_TYPES[name] for name in types]
        if _SLIDING in layers and window is None:
            fields.refuse("sliding_window", "but some layers have a window; say how many tokens they see")
        if self.pattern == "unrotated":
            layers = [FULL if is_rotated else _UNROTATED for is_rotated in _read_rotated(fields, count)]
        return layers, window


def _read_rotated(fields: Fields, count: int) -> list[int]:
    """Whether each layer rotates, 1 or 0."""
    interval = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers") or [int((i + 1) % interval > 0) for i in range(count)]
    if not isinstance(rotated, list) or len(rotated) < count or any(value not in (0, 1) for value in rotated):
        fields.refuse("no_rope_layers", f"which must be 1 or 0 for each of the {count} layers")
    return rotated[:count]


def _kinds_of(layers: list[str], every: Mapping[str, Values]) -> Values:
    """The pattern of the layers' kinds, of which ``every`` has the fields; nothing if all are full."""
    if set(layers) == {FULL}:
        return {}
    count = len(layers)
    length = next(n for n in range(1, count + 1) if all(layers[i] == layers[i % n] for i in range(count)))
    kinds = {name: every[name] for name in dict.fromkeys(layers)}
    # Kinds without scaling would inherit the model's.
    return {"rope_scaling": None, "layer_pattern": layers[:length], "kinds": kinds}


@dataclass(frozen=True)
class ChunkedLayers(Layers):
    """Llama 4's layers: every n-th does not rotate, and by default sees all keys, the others those of its chunk."""

    def read(self, fields: Fields, shape: Values) -> Values:
        """As in the base class."""
        count = shape["num_layers"]
        rotated, types = _read_rotated(fields, count), fields.get("layer_types")
        types = types or [("full_attention", _CHUNKED)[is_rotated] for is_rotated in rotated]
        if not isinstance(types, list) or len(types) != count or not {*types} <= {"full_attention", _CHUNKED}:
            fields.refuse("layer_types", f"which must say full_attention or {_CHUNKED} of each of the {count} layers")
        chunk = {"chunk": fields.integer("attention_chunk_size", 8192)}
        full, _, of_model = self.rope.read(fields, shape)
        every = {FULL: full, "chunked": full | chunk, _UNROTATED: _WITHOUT_POSITIONS}
        every |= {"unrotated_chunked": _WITHOUT_POSITIONS | chunk}
        of_layers = [(name == _CHUNKED) + 2 * (not turns) for name, turns in zip(types, rotated, strict=True)]
        return full | of_model | _kinds_of([list(every)[number] for number in of_layers], every)

    def write(self, config: DecoderConfig) -> Values:
        """As in the base class."""
        layers = [config.kind(config.kind_of(i)) for i in range(config.num_layers)]
        full = next((kind for kind in layers if kind.rope_theta), LayerKind(rope_theta=config.rope_theta))
        return {
            "no_rope_layers": [int(kind.rope_theta > 0) for kind in layers],
            "layer_types": [_CHUNKED if kind.chunk else "full_attention" for kind in layers],
            "attention_chunk_size": next((kind.chunk for kind in layers if kind.chunk), 8192),
        } | self.rope.write(config, full, full)


def _read_temperature(fields: Fields, shape: Values) -> Values:
    factor, period = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)
    if not fields.flag("attn_temperature_tuning", True) or not factor:
        return {}
    temperature = {"query_temperature": factor, "query_temperature_period": period}
    return temperature | {"query_temperature_of": "unrotated", "query_temperature_offset": 1}


def _write_temperature(config: DecoderConfig) -> Values:
    if not config.query_temperature:
        return {"attn_temperature_tuning": False}
    scales = {"attn_scale": config.query_temperature, "floor_scale": config.query_temperature_period}
    return {"attn_temperature_tuning": True} | scales


TEMPERATURE = Field(_read_temperature, _write_temperature)
"""Llama 4's query temperature."""
