"""The mapping between a model's parameters and the tensors of Hugging Face files. This module opens no files.

Each family describes its parameters in its module `hugging_face`. Import and export follow from that one description.
docs/families.md says what the module has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from pydantic import ValidationError

from titan_like.config.entry_points import names_of
from titan_like.config.errors import ConfigError, first_line
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import config_class

# (name of a tensor, a slice for each of its dimensions) → that part of the tensor
ReadSlice = Callable[[str, tuple[slice, ...]], torch.Tensor]


class RefusedError(ValueError):
    """A model that one of the two sides cannot represent. The message is a clause of a sentence."""


@dataclass(frozen=True)
class Stored:
    """How Hugging Face's files store one parameter: in the rows of ``sources``, one tensor below the other.

    ``parts`` divide these rows, for example into queries, keys and values; each has its own source, or all are in one.
    Ours take an equal share of each part in turn, ``groups`` times. Further rows are padding of the vocabulary.
    """

    name: str  # in the full model
    shape: tuple[int, ...]
    sources: dict[str, tuple[int, ...]]  # the tensors that hold it → their shapes in the files
    parts: tuple[int, ...] = ()
    groups: int = 1
    is_transposed: bool = False  # the parameter's rows are columns in the files
    copies: tuple[str, ...] = ()  # further tensors that may be in the files, each equal to the only source

    @property
    def rows(self) -> list[int]:
        """The number of the parameter's rows in each source."""
        return [shape[-1 if self.is_transposed else 0] for shape in self.sources.values()]

    def order(self) -> torch.Tensor:
        """For each row of the parameter, padding left out, its number among the rows of all sources: int64 [rows]."""
        numbers = torch.arange(sum(self.rows))
        parts = numbers.split(list(self.parts or [len(numbers)]))
        return torch.cat([part.view(self.groups, -1) for part in parts], 1).flatten()


def family_module(family: str) -> Any:
    """The `hugging_face` module of the family with this name; a `ConfigError` if there is none."""
    return config_class(family).family_module("hugging_face")


def family_of(config: TransformerConfig) -> Any:
    """The `hugging_face` module of a model's family; a `ConfigError` if there is none."""
    return config.family_module("hugging_face")


def families_by_model_type() -> dict[str, str]:
    """The model_type of config.json → the family's name here, for every family that has a `hugging_face` module."""
    found: dict[str, str] = {}
    for family in names_of("model.family"):
        with suppress(ConfigError):
            for model_type in architectures(family_module(family)):
                found.setdefault(model_type, family)
    return found


def architectures(family: Any) -> dict[str, str]:
    """The model_type of config.json → the class in transformers, for every class that the family maps to."""
    return getattr(family, "ARCHITECTURES", None) or {family.MODEL_TYPE: family.ARCHITECTURE}


def architecture_of(config: TransformerConfig, model_type: str) -> str:
    """The class in transformers that a model of this shape is."""
    family = family_of(config)
    named = getattr(family, "architecture", None)
    return architectures(family)[model_type] if named is None else named(config)


def head_prefixes(family: Any) -> tuple[str, ...]:
    """How the names of the head's tensors begin."""
    prefix = getattr(family, "HEAD", "lm_head.")
    return prefix if isinstance(prefix, tuple) else (prefix,)


def whole(
    name: str,
    source: str,
    shape: tuple[int, ...],
    rows: int | None = None,
    is_transposed: bool = False,
    copy: str | tuple[str, ...] | None = None,
) -> Stored:
    """A parameter that is stored in one tensor, completely or only its first ``rows``, and perhaps in copies of it."""
    copies = (copy,) if isinstance(copy, str) else copy or ()
    held = (shape[0] if rows is None else rows, *shape[1:])
    return Stored(
        name, shape, {source: held[::-1] if is_transposed else held}, is_transposed=is_transposed, copies=copies
    )


def linear(ours: str, theirs: str, shape: tuple[int, int], is_transposed: bool = False) -> Iterator[Stored]:
    """The weight, [out, in], and the bias of a linear layer."""
    yield whole(f"{ours}.weight", f"{theirs}.weight", shape, is_transposed=is_transposed)
    yield whole(f"{ours}.bias", f"{theirs}.bias", shape[:1])


def norm(ours: str, theirs: str, hidden: int) -> Iterator[Stored]:
    """The weight and the bias of a LayerNorm."""
    yield from (whole(f"{ours}.{part}", f"{theirs}.{part}", (hidden,)) for part in ("weight", "bias"))


def fused(
    config: TransformerConfig, name: str, columns: tuple[int, ...], sources: tuple[str, ...], transposed: bool = False
) -> Stored:
    """A fused projection, ordered [kv_heads, queries per kv head + 2, head_dim], or [kv_heads, 2, head_dim].

    The files store queries, keys and values, or only the last two, in a tensor each, or in one, one below the other.
    """
    key_rows = config.num_kv_heads * config.head_dim
    parts = (config.attention_size, key_rows, key_rows)[1 if len(sources) == 2 else 0 :]
    rows = parts if len(sources) > 1 else (sum(parts),)
    shapes = {
        source: (length, *columns)[:: -1 if transposed else 1] for source, length in zip(sources, rows, strict=True)
    }
    return Stored(name, (sum(parts), *columns), shapes, parts, config.num_kv_heads, transposed)


@torch.no_grad()
def to_tensors(stored: Stored, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for each source of a full parameter, [rows, …], as the files store it."""
    rows = parameter[: sum(stored.rows)]
    rows = rows if stored.groups == 1 else torch.empty_like(rows).index_copy_(0, stored.order(), rows)
    for source, tensor in zip(stored.sources, rows.split(stored.rows), strict=True):
        yield source, tensor.t() if stored.is_transposed else tensor


@torch.no_grad()
def fill_part(part: torch.Tensor, offsets: tuple[int, ...], stored: Stored, read: ReadSlice) -> None:
    """Read a shard from the files into ``part``, [rows here, …], which begins at ``offsets`` in the full parameter.

    Padding rows become zero. Their logits are masked, so their values never matter.

    Raises:
        RefusedError: the files hold the parameter twice, with different values.
    """
    part.zero_()
    columns = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], part.shape[1:], strict=True))
    order, lengths = stored.order()[offsets[0] :][: len(part)], stored.parts or stored.rows
    owners = torch.bucketize(order, ends := torch.tensor(lengths).cumsum(0), right=True)
    by_part = owners.argsort(stable=True).split(owners.bincount(minlength=len(ends)).tolist())
    sources = [*stored.sources] * (len(ends) // len(stored.sources))  # each part's own, or one for all
    for source, end, length, here in zip(sources, ends, lengths, by_part, strict=True):
        if not here.numel() or not part.numel():
            continue
        theirs = order[here] - (0 if len(stored.sources) == 1 else end - length)
        first = int(theirs.min())
        there = slice(first, int(theirs.max()) + 1)
        index = (*columns, there) if stored.is_transposed else (there, *columns)
        value = read(source, index)
        for copy in stored.copies:
            if not torch.equal(read(copy, index), value):
                problem = f"config.json ties {source} and {copy}, but the files hold different values for them"
                raise RefusedError(f"{problem}; set tie_word_embeddings to false there")
        value = (value.t() if stored.is_transposed else value)[theirs - first]
        part[here] = value.to(part.device, part.dtype)


class Fields:
    """The fields of a config.json, with checks of their types.

    A method raises a `RefusedError`, which names the field and its value, if the value is not what the method reads. A
    missing field or null gives the default; without a default it is refused too.
    """

    def __init__(self, values: dict[str, Any], place: str = "") -> None:
        self.values = values
        self._place = place  # for messages: the table's path in the file, with a final dot

    def refuse(self, field: str, problem: str) -> NoReturn:
        """Raise a `RefusedError` because of one field, whose name and value the message gives."""
        if field not in self.values:
            raise RefusedError(f"config.json has no {self._place}{field}, {problem}")
        shown = json.dumps(self.values[field])
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise RefusedError(f"config.json has {self._place}{field} = {shown}, {problem}")

    def integer(self, field: str, default: int | None = None) -> int:
        """Read a positive integer."""
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.refuse(field, "which must be a positive whole number")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Read a finite number."""
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
            self.refuse(field, "which must be a number")
        return float(value)

    def equal_numbers(self, names: Sequence[str], default: float, reason: str) -> float:
        """Read a number that several fields must agree on, for a ``reason`` that the message gives."""
        value = self.number(names[0], default)
        for name in names[1:]:
            if self.number(name, default) != value:
                self.refuse(name, f"but {names[0]} = {value}; {reason}, so make them equal")
        return value

    def flag(self, field: str, default: bool) -> bool:
        """Read a boolean. Here null is refused."""
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            self.refuse(field, "which must be true or false")
        return value

    def table(self, field: str) -> Fields | None:
        """Read a table; None if the field is missing or null."""
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(field, "which must be a table")
        return Fields(value, f"{self._place}{field}.")

    def must_be(self, field: str, *allowed: Any) -> None:
        """Refuse any other value. A file without the field counts as having the first of ``allowed``."""
        value = self.values.get(field, allowed[0])
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            wanted = " or ".join(map(json.dumps, allowed))
            self.refuse(field, f"which the models here do not support; only {wanted} can be read")


FieldNames = Sequence[tuple[str, str, Any]]
"""Our field, that of config.json, and the value of a file without it; None if every file must have it."""


def read_fields(kind: type[TransformerConfig], names: FieldNames, fields: Fields) -> dict[str, Any]:
    """The fields of ``names`` that a config.json has, under our names and checked as the types that they have here."""
    read: dict[Any, Callable[..., Any]] = {int: fields.integer, float: fields.number, bool: fields.flag}
    return {ours: read[kind.model_fields[ours].annotation](theirs, default) for ours, theirs, default in names}


def written_fields(config: TransformerConfig, names: FieldNames, architecture: str) -> dict[str, Any]:
    """The fields of ``names`` for config.json.

    Raises:
        RefusedError: the model has grouped-query attention, of which ``names`` knows nothing.
    """
    if config.num_kv_heads != config.num_attention_heads and all(ours != "num_kv_heads" for ours, *_ in names):
        raise RefusedError(
            f"the model has {config.num_kv_heads} key and value heads for {config.num_attention_heads} query heads, "
            f"but {architecture} has one for each"
        )
    return {theirs: getattr(config, ours) for ours, theirs, _ in names}


def validated(kind: type[TransformerConfig], values: dict[str, Any]) -> TransformerConfig:
    """Build a shape from the values of a file; a `RefusedError` if they do not describe a valid model."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise RefusedError(f"config.json does not describe a valid model ({first_line(error)})") from None
