"""Rotary positions in config.json: `rope_theta` and `rope_scaling`, or as in transformers 5 `rope_parameters`."""

from __future__ import annotations

from typing import Any, NamedTuple

from titan_like.models.decoder.classes import Class
from titan_like.models.decoder.config import LayerKind
from titan_like.models.hugging_face import Fields

_ORIGINAL = "original_max_position_embeddings"
_TABLES = ("rope_scaling", "rope_parameters")
_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
Rope = dict[str, Any]  # rope_theta and rope_scaling


class RopeOf(NamedTuple):
    """The rotary positions of a model."""

    full: Rope
    sliding: Rope  # of layers with a window
    fraction: float  # part of a head that is rotated


def read_rope(row: Class, fields: Fields, max_seq_len: int) -> RopeOf:
    """Read the rotary positions of a class."""
    # As in transformers, an empty rope_scaling is none, and another stands before rope_parameters. Without either there
    # is the class's default, and an empty rope_parameters is no scaling.
    name = _TABLES[0] if fields.get(_TABLES[0]) else _TABLES[1]
    table = fields.table(name) or Fields(dict(row.default_scaling or {}))
    of_full, of_sliding = table, Fields({})
    is_nested = name == _TABLES[1] and not {"full_attention", "sliding_attention"}.isdisjoint(table.values)
    if row.local_theta is not None and name == _TABLES[0] and fields.get(_TABLES[1]):
        fields.refuse(name, "beside rope_parameters; leave one of them out")  # transformers mixes them
    if row.local_theta is not None and is_nested:
        of_full = table.table("full_attention") or Fields({})
        of_sliding = table.table("sliding_attention") or Fields({})
    elif row.local_theta is not None and table.values and (name == _TABLES[1] or "rope_type" not in table.values):
        fields.refuse(
            name, "of which transformers reads no rope_type; give each type of layer a table in rope_parameters"
        )
    theta = of_full.number("rope_theta", fields.number(*row.theta))
    if row.theta[0] != "rope_theta" and "rope_theta" in fields.values:
        fields.must_be("rope_theta", theta, int(theta))
    scaling = _scaling(row, fields, of_full, max_seq_len)
    full = sliding = {"rope_theta": theta, "rope_scaling": scaling}
    if row.local_theta is not None:
        local = of_sliding.number("rope_theta", fields.number(*row.local_theta))
        sliding = {"rope_theta": local, "rope_scaling": _scaling(row, fields, of_sliding, max_seq_len)}
    fraction, part = 1.0, "partial_rotary_factor"
    if row.fraction is not None:
        fraction = of_full.positive(part, fields.positive(*row.fraction))
        if row.fraction[0] in fields.values and fields.values[row.fraction[0]] is None:
            fields.refuse(row.fraction[0], "which must be a number")
        if row.fraction[0] != part and part in fields.values:  # older versions save both names
            fields.must_be(part, fields.number(*row.fraction))
    elif full["rope_scaling"] or sliding["rope_scaling"]:  # else transformers does not read it
        of_full.must_be(part, None, 1.0, 1)
        fields.must_be(part, None, 1.0, 1)
    return RopeOf(full, sliding, fraction)


def _scaling(row: Class, fields: Fields, table: Fields, max_seq_len: int) -> dict[str, Any] | None:
    kind = "rope_type" if "rope_type" in table.values else "type"
    is_phi = row.model_types == ("phi3",)
    table.must_be(kind, *(("default", "longrope", "su", "yarn") if is_phi else _TYPES))
    table.get("type")
    name = table.get(kind, "default")
    if name == "default":
        return None
    name = "longrope" if is_phi and name in ("su", "yarn") else name
    if name == "linear":
        return {"type": name, "factor": table.number("factor")}
    original = table.integer(_ORIGINAL, max_seq_len)
    if is_phi or (row.local_theta is None and _ORIGINAL in fields.values):  # transformers prefers it to the table's
        original = fields.integer(_ORIGINAL, 4096)
    values: dict[str, Any] = {"type": name, "original_max_seq_len": original}
    values["factor"] = table.number("factor", None if name == "llama3" else max_seq_len / original)
    if name == "llama3":
        return values | {field: table.number(field) for field in ("low_freq_factor", "high_freq_factor")}
    is_given = table.get("attention_factor") is not None
    values["attention_factor"] = table.positive("attention_factor") if is_given else 0.0
    if name == "longrope":
        return values | {f"{part}_factors": _numbers(table, f"{part}_factor") for part in ("short", "long")}
    values |= {"beta_fast": table.number("beta_fast", 32.0), "beta_slow": table.number("beta_slow", 1.0)}
    values |= {field: table.number(field, 0.0) for field in ("mscale", "mscale_all_dim")}
    return values | {"truncate": table.flag("truncate", True)}


def _numbers(table: Fields, field: str) -> list[float]:
    values = table.get(field)
    if not isinstance(values, list) or not all(type(value) in (int, float) and value > 0 for value in values):
        table.refuse(field, "which must be a list of positive numbers")
    return [float(value) for value in values]


def written_rope(row: Class, fraction: float, full: LayerKind, sliding: LayerKind) -> dict[str, Any]:
    """θ and scaling of layers without and with a window as fields of config.json."""
    fields: dict[str, Any] = {row.theta[0]: full.rope_theta, "rope_scaling": _written_scaling(full)}
    if row.local_theta is not None:
        fields[row.local_theta[0]] = sliding.rope_theta
        if sliding.rope_scaling is not None:  # which only tables for each type of layer can say
            kinds = {"full_attention": full, "sliding_attention": sliding}
            tables = {name: {"rope_theta": kind.rope_theta} for name, kind in kinds.items()}
            scalings = {name: _written_scaling(kind) or {"rope_type": "default"} for name, kind in kinds.items()}
            fields |= {"rope_scaling": None, "rope_parameters": {name: tables[name] | scalings[name] for name in kinds}}
    if row.fraction is not None:
        fields[row.fraction[0]] = fraction
    if row.default_scaling and full.rope_scaling is None:
        fields["rope_scaling"] = {"rope_type": "default"}
    if row.model_types == ("phi3",) and full.rope_scaling is not None:
        fields[_ORIGINAL] = full.rope_scaling.original_max_seq_len
    return fields


def _written_scaling(kind: LayerKind) -> dict[str, Any] | None:
    scaling = kind.rope_scaling
    if scaling is None:
        return None
    table = scaling.model_dump(exclude_defaults=True) | {"truncate": scaling.truncate}
    table = {name.replace("_factors", "_factor"): value for name, value in table.items()}
    table |= {"rope_type": scaling.type, _ORIGINAL: table.pop("original_max_seq_len", None)}
    table.pop("type", None)
    unused = {_ORIGINAL} if scaling.type == "linear" else set()
    unused |= {"truncate"} if scaling.type != "yarn" else set()
    return {name: value for name, value in table.items() if name not in unused}
