"""Shapes with a given number of parameters, in the proportions of a flavor and with the depth of its family."""

from itertools import pairwise
from math import log

from titan_like.config.errors import ConfigError
from titan_like.config.schema import Model
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import flavors, model_config

_HEAD_SIZES = 64, 128
_WIDEST = 2**17
_FURTHEST = 0.2  # a result may differ by this share of the number asked for


def shape_of(section: Model, parameters: float, seq_len: int) -> Model:
    """The run's flavor scaled to a number of parameters, as overrides of that flavor.

    The number of heads is a multiple of 8, and of 64 to 128 elements each. Whatever is a hidden size grows with the
    width. The depth gives the number of parameters, and the width is the one whose depth is then nearest to the
    family's own flavors. Raises a `ConfigError` if the family has no shape of about this size.
    """
    style = model_config(section)
    head = min(max(style.head_dim, _HEAD_SIZES[0]), _HEAD_SIZES[1])
    ends = style.parts.entry + style.parts.shared + style.parts.head
    layer = (style.num_parameters() - ends) / style.num_layers
    points = _depths(section)

    def layers(width: int) -> float:
        scale = width / style.hidden_size
        return max((parameters - ends * scale) / (layer * scale**2), 0.1)

    widths = range(8 * head, _WIDEST, 8 * head)
    width = min(widths, key=lambda width: abs(log(layers(width) / _depth(width, points))))
    fewest = sum(count > 0 for count in style.layer_counts)
    count = max(round(layers(width)), fewest)
    for _ in range(2):  # what does not grow with the square of the width is counted
        scaled = section.model_copy(
            update={"overrides": section.overrides | _fields(style, width, count, head, seq_len)}
        )
        model = model_config(scaled)
        count = max(count + round((parameters - model.num_parameters()) / model.layer_parameters), fewest)
    if abs(model.num_parameters() / parameters - 1) > _FURTHEST:
        reason = f"the nearest {section.family} model has {model.num_parameters():,} parameters; ask for about as many"
        raise ConfigError("--params", parameters, reason)
    return scaled


def _fields(style: TransformerConfig, width: int, layers: int, head: int, seq_len: int) -> dict[str, int]:
    """The fields of a shape with this width and depth."""
    heads = max(8, round(width * style.attention_size / style.hidden_size / head / 8) * 8)
    fields = {"num_layers": layers, "num_attention_heads": heads, "max_seq_len": max(style.max_seq_len, seq_len)}
    is_grouped = style.num_kv_heads < style.num_attention_heads and heads % style.num_kv_heads == 0
    fields["num_kv_heads"] = style.num_kv_heads if is_grouped else heads
    for name in type(style).model_fields:
        if name.endswith("hidden_size"):
            fields[name] = round(getattr(style, name) * width / style.hidden_size / 128) * 128
        elif name.startswith("num_") and name.endswith("_layers") and name != "num_layers":
            fields[name] = round(getattr(style, name) * layers / style.num_layers)
        elif name == "head_size":
            fields[name] = head
    return fields


def _depths(section: Model) -> list[tuple[int, int]]:
    """Widths and depths of the family's flavors that are shallower than all wider ones."""
    known = (flavors(section.family) | section.flavors).values()
    points: list[tuple[int, int]] = []
    for width, depth in sorted(((row["hidden_size"], row["num_layers"]) for row in known), key=lambda p: (-p[0], p[1])):
        if not points or (width < points[-1][0] and depth <= points[-1][1]):
            points.append((width, depth))
    return points[::-1]


def _depth(width: int, points: list[tuple[int, int]]) -> float:
    """Layers of a width: between two flavors by interpolation, outside of all in proportion to the width."""
    for (narrow, shallow), (wide, deep) in pairwise(points):
        if narrow <= width <= wide:
            return shallow + (deep - shallow) * (width - narrow) / (wide - narrow)
    nearest, depth = points[-1] if width > points[-1][0] else points[0]
    return depth * width / nearest
