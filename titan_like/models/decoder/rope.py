"""Rotary positions in config.json: `rope_theta` and `rope_scaling`, or as in transformers 5 `rope_parameters`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_like.models.decoder.config import DecoderConfig, LayerKind
from titan_like.models.fields import Field, converted, nullable, read_fields, renamed, write_fields
from titan_like.models.hugging_face import Fields
from titan_like.models.rope_scaling import RopeScaling

_ORIGINAL, _FRACTION = "original_max_position_embeddings", "partial_rotary_factor"
_TEMPERATURE = "llama_4_scaling_beta"
_TABLES = ("rope_scaling", "rope_parameters")


def _numbers(table: Fields, field: str) -> list[float]:
    values = table.get(field)
    if not isinstance(values, list) or not all(type(value) in (int, float) and value > 0 for value in values):
        table.refuse(field, "which must be a list of positive numbers")
    return [float(value) for value in values]


_ATTENTION_FACTOR = nullable("attention_factor", "attention_factor", None)
_SCALINGS: dict[str, tuple[Field, ...]] = {  # what each type has besides factor and original length
    "linear": (),
    "dynamic": (),
    "llama3": tuple(renamed(name, name, float) for name in ("low_freq_factor", "high_freq_factor")),
    "yarn": (
        renamed("beta_fast", "beta_fast", 32.0),
        renamed("beta_slow", "beta_slow", 1.0),
        _ATTENTION_FACTOR,
        renamed("mscale", "mscale", 0.0),
        renamed("mscale_all_dim", "mscale_all_dim", 0.0),
        renamed("truncate", "truncate", True),
    ),
    "longrope": (
        _ATTENTION_FACTOR,
        *(converted(f"{part}_factors", (f"{part}_factor",), _numbers) for part in ("short", "long")),
    ),
}
_MSCALES = tuple(renamed(f"{part}_magnitude", f"{part}_mscale", float) for part in ("short", "long"))


@dataclass(frozen=True)
class Rope:
    """The fields with the rotary positions of a class."""

    theta: tuple[str, float] = ("rope_theta", 10_000.0)  # field and default
    local_theta: tuple[str, float] | None = None  # of layers with a window, with their own scaling; "": only in tables
    fraction: tuple[str, float] | None = None  # of a head that is rotated
    # A field with that part's width, whose absence is the default above, and the width of a head if that is absent.
    rotated: tuple[str, int] | None = None
    default_scaling: Mapping[str, Any] | None = None
    has_mscales: bool = False  # scaling is longrope, with a factor on cos and sin for short and one for long sequences
    has_temperature: bool = False  # the table has the factor of query_temperature; its period is the original length
    has_alpha: bool = False  # dynamic scaling with a fixed factor alpha of the base
    is_longrope: bool = False  # scaling is longrope under any name, and its original length is outside of the table

    def read(self, fields: Fields, shape: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """rope_theta and rope_scaling of layers without and with a window, and further fields of the model."""
        max_seq_len = shape["max_seq_len"]
        # As in transformers, an empty rope_scaling is none, and another stands before rope_parameters. Without either
        # there is the class's default, and an empty rope_parameters is no scaling.
        name = _TABLES[0] if fields.get(_TABLES[0]) else _TABLES[1]
        table = fields.table(name) or Fields(dict(self.default_scaling or {}))
        of_full, of_sliding = table, Fields({})
        is_nested = name == _TABLES[1] and not {"full_attention", "sliding_attention"}.isdisjoint(table.values)
        if self.local_theta is not None and name == _TABLES[0] and fields.get(_TABLES[1]):
            fields.refuse(name, "beside rope_parameters; leave one of them out")  # transformers mixes them
        if self.local_theta is not None and is_nested:
            of_full = table.table("full_attention") or Fields({})
            of_sliding = table.table("sliding_attention") or Fields({})
        elif self.local_theta is not None and table.values and (name == _TABLES[1] or "rope_type" not in table.values):
            fields.refuse(
                name, "of which transformers reads no rope_type; give each type of layer a table in rope_parameters"
            )
        theta = of_full.number("rope_theta", fields.number(*self.theta))
        if self.theta[0] != "rope_theta" and fields.number("rope_theta", theta) != theta:
            fields.refuse("rope_theta", f"but its other name {self.theta[0]} is {theta:g}; leave one of them out")
        if self.has_alpha and "dynamic" in (of_full.get("rope_type"), of_full.get("type")):
            size = shape["head_size"]  # NTK-aware: the longest wave becomes alpha times as long
            theta *= of_full.positive("alpha") ** (size / (size - 2))
            return {"rope_theta": theta, "rope_scaling": None}, {}, {}
        full = {"rope_theta": theta, "rope_scaling": self._read_scaling(fields, of_full, max_seq_len)}
        sliding = full
        if self.local_theta is not None:
            name, default = self.local_theta
            theta = of_sliding.number("rope_theta", fields.number(name, default) if name else default)
            sliding = {"rope_theta": theta, "rope_scaling": self._read_scaling(fields, of_sliding, max_seq_len)}
        if self.fraction is not None:
            name, default = self.fraction
            if self.rotated is not None and fields.get(self.rotated[0]) is not None:
                default = fields.integer(self.rotated[0]) / fields.integer("head_dim", self.rotated[1])
            return full, sliding, {"rotary_fraction": self._read_fraction(fields, of_full, name, default)}
        if full["rope_scaling"] or sliding["rope_scaling"]:  # else transformers does not read it
            of_full.must_be(_FRACTION, None, 1.0, 1)
            fields.must_be(_FRACTION, None, 1.0, 1)
        return full, sliding, self._read_temperature(of_full) if self.has_temperature else {}

    def write(self, config: DecoderConfig, full: LayerKind, sliding: LayerKind) -> dict[str, Any]:
        """The fields of config.json, given the kinds of layers without and with a window."""
        none = {"rope_type": "default"}
        scaling = _written(full.rope_scaling) or (none if self.default_scaling else None)
        fields: dict[str, Any] = {self.theta[0]: full.rope_theta, "rope_scaling": scaling}
        if self.local_theta is not None:
            name, default = self.local_theta
            if name:
                fields[name] = sliding.rope_theta
            # What else differs needs a table for each type of layer.
            if sliding.rope_scaling is not None or (not name and sliding.rope_theta != default):
                kinds = {"full_attention": full, "sliding_attention": sliding}
                tables = {
                    name: {"rope_theta": kind.rope_theta} | (_written(kind.rope_scaling) or none)
                    for name, kind in kinds.items()
                }
                fields |= {"rope_scaling": None, "rope_parameters": tables}
        if self.fraction is not None:
            fields[self.fraction[0]] = config.rotary_fraction
        if self.has_temperature:  # which the class's code needs in any case
            table = fields["rope_scaling"] or none
            period = config.query_temperature_period or table.get(_ORIGINAL, config.max_seq_len)
            fields["rope_scaling"] = table | {_TEMPERATURE: config.query_temperature, _ORIGINAL: period}
        if self.is_longrope and full.rope_scaling is not None:
            fields[_ORIGINAL] = full.rope_scaling.original_max_seq_len
        return fields

    def _read_temperature(self, table: Fields) -> dict[str, Any]:
        table.get("max_position_embeddings")  # which nothing reads
        if factor := table.number(_TEMPERATURE):
            return {"query_temperature": factor, "query_temperature_period": table.integer(_ORIGINAL)}
        return {}

    def _read_fraction(self, fields: Fields, table: Fields, name: str, default: float) -> float:
        named = fields.positive(name, default)
        if name in fields.values and fields.values[name] is None:
            fields.refuse(name, "which must be a number")
        if name != _FRACTION and fields.number(_FRACTION, named) != named:  # older versions save both names
            fields.refuse(_FRACTION, f"but its other name {name} is {named:g}; leave one of them out")
        return table.positive(_FRACTION, named)

    def _read_scaling(self, fields: Fields, table: Fields, max_seq_len: int) -> dict[str, Any] | None:
        kind = "rope_type" if "rope_type" in table.values else "type"
        scalings = ("longrope", "su", "yarn") if self.is_longrope else tuple(_SCALINGS)
        table.must_be(kind, "default", *(scalings[-1:] if self.has_mscales else scalings))
        table.get("type")
        name = table.get(kind, "default")
        if name == "default":
            return None
        name = "longrope" if self.is_longrope else name
        if name == "linear":
            return {"type": name, "factor": table.number("factor")}
        if name == "dynamic":
            return {"type": name, "factor": table.number("factor"), "original_max_seq_len": max_seq_len}
        original = table.integer(_ORIGINAL, max_seq_len)
        # transformers prefers a length outside to the table's.
        if self.is_longrope or (self.local_theta is None and _ORIGINAL in fields.values):
            original = fields.integer(_ORIGINAL, 4096)
        values: dict[str, Any] = {"type": name, "original_max_seq_len": original}
        values["factor"] = table.number("factor", None if name == "llama3" else max_seq_len / original)
        items = (*_SCALINGS[name], *(_MSCALES if self.has_mscales else ()))
        return read_fields(RopeScaling, items, table, values)


def _written(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    # Defaults are left out, except truncate's.
    defaults = {name: field.default for name, field in RopeScaling.model_fields.items() if name != "truncate"}
    items = [*_SCALINGS[scaling.type], *_MSCALES]
    items = [item for item in items if getattr(scaling, item.ours) != defaults.get(item.ours)]
    table = {"factor": scaling.factor} | write_fields(scaling, items) | {"rope_type": scaling.type}
    return table | ({} if scaling.type in ("linear", "dynamic") else {_ORIGINAL: scaling.original_max_seq_len})
