"""How the parameters of a model lie in Hugging Face files: descriptions and mathematics, no files.

Each family describes its own in its module `hugging_face`. Both directions follow from one description.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from pydantic import ValidationError

from titan_like.config.errors import ConfigError
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import config_class, family_names

# name of a tensor, a slice for each of its dimensions → that part of it
ReadSlice = Callable[[str, tuple[slice, ...]], torch.Tensor]


class RefusedError(ValueError):
    """Something that one of the two sides cannot hold; the message is a clause of a sentence."""


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a parameter, and the tensor that has them, from its row ``offset`` on."""

    start: int
    stop: int
    source: str
    offset: int


@dataclass(frozen=True)
class Stored:
    """One parameter as Hugging Face's files keep it. Rows that are in no tensor only pad the vocabulary."""

    name: str  # in the whole model
    shape: tuple[int, ...]
    sources: dict[str, tuple[int, ...]]  # the tensors that hold it, and their shapes in the files
    rows: Callable[[], Iterable[Rows]]  # a function, since shapes have to be checked before there is one for each head
    is_transposed: bool = False  # its rows are the columns of the tensors
    copy: str | None = None  # another tensor that files may hold, equal to the only source


class Family(Protocol):
    """What a family's module `hugging_face` has."""

    MODEL_TYPE: str  # what config.json calls the family
    ARCHITECTURE: str  # the class in transformers
    PREFIX: str  # of all names but the output matrix's; files saved from the class without an output lack it

    def stored_parameters(self, config: Any) -> Iterator[Stored]:
        """Every parameter of the model."""

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of the files is a constant that older versions of transformers saved."""

    def to_fields(self, config: Any) -> dict[str, Any]:
        """What config.json says of the shape.

        Raises:
            RefusedError: the class in transformers has no such shape.
        """

    def from_fields(self, fields: Fields) -> TransformerConfig:
        """The shape that config.json describes.

        Raises:
            RefusedError: the family has no such shape.
        """


def family_module(family: str) -> Family:
    """The module of a family."""
    return config_class(family).family_module("hugging_face")


def family_of(config: TransformerConfig) -> Family:
    """The module of a model's family."""
    return config.family_module("hugging_face")


def families_by_model_type() -> dict[str, str]:
    """What config.json calls each family → its name here, of families that can be imported and have this module."""
    found: dict[str, str] = {}
    for family in family_names():
        with suppress(ConfigError):
            found.setdefault(family_module(family).MODEL_TYPE, family)
    return found


def whole(
    name: str,
    source: str,
    shape: tuple[int, ...],
    rows: int | None = None,
    is_transposed: bool = False,
    copy: str | None = None,
) -> Stored:
    """A parameter that one tensor holds, all of it or its first ``rows``."""
    held = (shape[0] if rows is None else rows, *shape[1:])
    sources = {source: held[::-1] if is_transposed else held}
    return Stored(name, shape, sources, lambda: [Rows(0, held[0], source, 0)], is_transposed, copy)


def fused_rows(config: TransformerConfig, places: tuple[tuple[str, int], ...]) -> Iterator[Rows]:
    """The rows of the fused projection, [kv_heads, queries per kv head + 2, head_dim].

    ``places`` are the tensor and its first row of all queries, of all keys and of all values.
    """
    queries = config.num_attention_heads // config.num_kv_heads
    start = 0
    for head in range(config.num_kv_heads):
        for (source, first), heads in zip(places, (queries, 1, 1), strict=True):
            length = heads * config.head_dim
            yield Rows(start, start + length, source, first + head * length)
            start += length


def fused(config: TransformerConfig, name: str, columns: tuple[int, ...], sources: tuple[str, str, str]) -> Stored:
    """The fused projection where queries, keys and values are three tensors."""
    key_rows = config.num_kv_heads * config.head_dim
    lengths = (config.hidden_size, key_rows, key_rows)
    shapes = {source: (length, *columns) for source, length in zip(sources, lengths, strict=True)}
    places = tuple((source, 0) for source in sources)
    return Stored(name, (sum(lengths), *columns), shapes, partial(fused_rows, config, places))


def fused_in_one(config: TransformerConfig, name: str, columns: tuple[int, ...], source: str) -> Stored:
    """The fused projection where all queries, all keys and all values follow each other in one tensor, transposed."""
    key_rows = config.num_kv_heads * config.head_dim
    first_rows = (0, config.hidden_size, config.hidden_size + key_rows)
    shape = (config.hidden_size + 2 * key_rows, *columns)
    places = tuple((source, first) for first in first_rows)
    rows = partial(fused_rows, config, places)
    return Stored(name, shape, {source: shape[::-1]}, rows, is_transposed=len(shape) > 1)


@torch.no_grad()
def to_tensors(stored: Stored, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a whole parameter for the files, in the order of its sources."""
    pieces: dict[str, list[Rows]] = {source: [] for source in stored.sources}
    for rows in stored.rows():
        pieces[rows.source].append(rows)
    for source, its_rows in pieces.items():
        ordered = sorted(its_rows, key=lambda rows: rows.offset)
        parts = [parameter[rows.start : rows.stop] for rows in ordered]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
        yield source, tensor.t() if stored.is_transposed else tensor


@torch.no_grad()
def fill_part(part: torch.Tensor, offsets: tuple[int, ...], stored: Stored, read: ReadSlice) -> None:
    """Write into ``part``, which lies at ``offsets`` in the whole parameter, what the files have of it.

    Padding rows become zero: their logits are masked, so they never matter.

    Raises:
        RefusedError: the files hold the parameter twice, and not the same.
    """
    part.zero_()
    first, last = offsets[0], offsets[0] + part.shape[0]
    columns = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], part.shape[1:], strict=True))
    for rows in stored.rows() if part.numel() else ():
        start, stop = max(first, rows.start), min(last, rows.stop)
        if start >= stop:
            continue
        from_row = rows.offset + start - rows.start
        there = slice(from_row, from_row + stop - start)
        index = (*columns, there) if stored.is_transposed else (there, *columns)
        value = read(rows.source, index)
        if stored.copy is not None and not torch.equal(read(stored.copy, index), value):
            problem = f"config.json ties {rows.source} and {stored.copy}, and the files hold two different ones"
            raise RefusedError(f"{problem}; set tie_word_embeddings to false there")
        part[start - first : stop - first].copy_(value.t() if stored.is_transposed else value)


class Fields:
    """The fields of a config.json, read with types."""

    def __init__(self, values: dict[str, Any], place: str = "") -> None:
        self.values = values
        self._place = place  # of a table in the file

    def refuse(self, field: str, problem: str) -> NoReturn:
        """Refuse, naming a field and its value.

        Raises:
            RefusedError: always.
        """
        if field not in self.values:
            raise RefusedError(f"config.json has no {self._place}{field}, {problem}")
        shown = json.dumps(self.values[field])
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        raise RefusedError(f"config.json has {self._place}{field} = {shown}, {problem}")

    def integer(self, field: str, default: int | None = None) -> int:
        """A positive whole number; null is the default."""
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.refuse(field, "which must be a positive whole number")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """A finite number; null is the default."""
        value = self.values.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
            self.refuse(field, "which must be a number")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(field, default)
        if not isinstance(value, bool):
            self.refuse(field, "which must be true or false")
        return value

    def table(self, field: str) -> Fields | None:
        """A table, or None where there is none."""
        value = self.values.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(field, "which must be a table")
        return Fields(value, f"{self._place}{field}.")

    def must_be(self, field: str, *allowed: Any) -> None:
        """Refuse any value but these; the first is that of a file without the field."""
        value = self.values.get(field, allowed[0])
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            wanted = " or ".join(map(json.dumps, allowed))
            self.refuse(field, f"which the models here do not have; only {wanted} can be read")


def validated(kind: type[TransformerConfig], values: dict[str, Any]) -> TransformerConfig:
    """A shape from values that a file gave.

    Raises:
        RefusedError: they make no model of this family.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise RefusedError(f"config.json describes no model ({field + ': ' if field else ''}{message})") from None
