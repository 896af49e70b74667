"""The mapping between a model's parameters and the tensors of Hugging Face files. This module opens no files.

Each family describes its parameters in its module `hugging_face`. Import and export follow from that one description.
docs/families.md says what the module has.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from pydantic import ValidationError

from titan_like.config.entry_points import names_of
from titan_like.config.errors import ConfigError, first_line
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import config_class

Shape = TypeVar("Shape", bound=TransformerConfig)
# (name of a tensor, a slice for each of its dimensions) → that part of the tensor
ReadSlice = Callable[[str, tuple[slice, ...]], torch.Tensor]


class RefusedError(ValueError):
    """A model that one of the two sides cannot represent. The message is a clause of a sentence, or several."""

    def __init__(self, *clauses: str, field: str = "") -> None:
        super().__init__(*clauses)
        self.field = field  # of config.json that is at fault, with its tables: rope_scaling.factor

    def __str__(self) -> str:
        return "; ".join(self.args)


class Block(NamedTuple):
    """Consecutive rows of one matrix in the files."""

    source: str
    matrix: tuple[slice, ...]  # which matrix of a stacked tensor; else empty
    first: int  # the block's first row in its matrix
    rows: int


@dataclass(frozen=True)
class Stored:
    """The storage of one parameter in Hugging Face's files: rows of ``sources``, one tensor below the other.

    ``taken`` selects some of these rows. ``parts`` divide them, for example into queries, keys and values. Ours take an
    equal share of each part in turn, ``groups`` times. Further rows are padding of the vocabulary.
    """

    name: str  # in the full model
    shape: tuple[int, ...]
    sources: dict[str, tuple[int, ...]]  # the tensors that hold it → their shapes in the files
    parts: tuple[int, ...] = ()
    groups: int = 1
    is_transposed: bool = False  # the parameter's rows are columns in the files
    copies: tuple[str, ...] = ()  # further tensors that may be in the files, each equal to the only source
    matrix_dims: int = 0  # first dimensions of every source that count matrices, whose rows follow each other
    taken: tuple[int | None, ...] = ()  # arguments of a slice of each matrix, if another parameter has its other rows
    # (rows of a head, first rotated row, rotated rows) of all parts but the third, whose rotated rows the files store
    # in pairs. Here the first rows of all pairs come before the second ones.
    pairs: tuple[int, int, int] | None = None
    is_buffer: bool = False  # not trained, but part of the model's state
    otherwise: Stored | None = None  # where it is in files that do not have the sources, but those of this one

    @property
    def key(self) -> str:
        """Its name in a checkpoint."""
        return f"{'buffers' if self.is_buffer else 'model'}.{self.name}"

    def among(self, names: Collection[str]) -> Stored:
        """The same in files with tensors of these names: without absent copies, or in a copy for an absent source."""
        if self.otherwise is not None and self.otherwise.sources.keys() <= set(names):
            return self.otherwise
        copies = tuple(copy for copy in self.copies if copy in names)
        if copies and not self.sources.keys() & names:
            return replace(self, sources={copies[0]: next(iter(self.sources.values()))}, copies=copies[1:])
        return replace(self, copies=copies)

    def renamed(self, names: Mapping[str, str]) -> Stored:
        """The same in files whose tensors have other names."""
        sources = {names.get(name, name): shape for name, shape in self.sources.items()}
        return replace(self, sources=sources, copies=tuple(names.get(name, name) for name in self.copies))

    @property
    def rows(self) -> list[int]:
        """The number of rows in each source."""
        return [
            shape[-1 if self.is_transposed else self.matrix_dims] * math.prod(shape[: self.matrix_dims])
            for shape in (shape or (1,) for shape in self.sources.values())
        ]

    def order(self) -> torch.Tensor:
        """For each row of the parameter, padding left out, its number among the rows of all sources: int64 [rows]."""
        matrices = next(iter(self.sources.values()))[0] if self.taken and self.matrix_dims else 1
        numbers = torch.arange(sum(self.rows)).view(matrices, -1)[:, slice(*(self.taken or (None,)))].flatten()
        parts = list(numbers.split(list(self.parts or [len(numbers)])))
        if self.pairs is not None:
            head, first, count = self.pairs
            for part in parts[:2]:
                rotated = part.view(-1, head)[:, first : first + count]
                rotated.copy_(torch.cat((rotated[:, 0::2], rotated[:, 1::2]), 1))
        return torch.cat([part.view(self.groups, -1) for part in parts], 1).flatten()

    def blocks(self) -> list[Block]:
        """All rows of the sources, by matrix and by part."""
        starts = {0} if self.taken else {0, *accumulate(self.parts)}  # of parts
        blocks: list[Block] = []
        number = 0  # of the row
        for (source, shape), rows in zip(self.sources.items(), self.rows, strict=True):
            matrices = list(product(*([slice(i, i + 1) for i in range(size)] for size in shape[: self.matrix_dims])))
            length = rows // max(len(matrices), 1)
            for matrix in matrices:
                ends = [*sorted(start for start in starts if number < start < number + length), number + length]
                for begin, end in pairwise([number, *ends]):
                    blocks.append(Block(source, matrix, begin - number, end - begin))
                number += length
        return blocks


def family_module(family: str) -> Any:
    """The `hugging_face` module of the family with this name; a `ConfigError` if there is none."""
    return config_class(family).family_module("hugging_face")


def family_of(config: TransformerConfig, model_type: Any = None) -> Any:
    """The mapping of a model: the `hugging_face` module of its family; a `ConfigError` if there is none.

    Where such a module has `class_of`, it is what that returns: of the classes in transformers that are models of this
    shape the one with the given model_type, or else the first.
    """
    module = config.family_module("hugging_face")
    return module.class_of(config, model_type) if hasattr(module, "class_of") else module


def families_by_model_type() -> dict[str, str]:
    """The model_type of config.json → the family's name, for every family whose package has a module `hugging_face`.

    Families of other packages come before titan_like's.
    """
    families: dict[str, str] = {}
    for family in names_of("model.family"):
        with suppress(ConfigError):
            module, package = family_module(family), config_class(family).__module__.rpartition(".")[0]
            if module.__name__.rpartition(".")[0] == package:
                families |= dict.fromkeys(architectures(module), family)
    return families


def architectures(family: Any) -> dict[str, str]:
    """The model_type of config.json → the class in transformers, for every class that the family maps to."""
    return getattr(family, "ARCHITECTURES", None) or {family.MODEL_TYPE: family.ARCHITECTURE}


def architecture_of(config: TransformerConfig, model_type: str) -> str:
    """The class in transformers that a model of this shape is."""
    family = family_of(config, model_type)
    named = getattr(family, "architecture", None)
    return architectures(family)[model_type] if named is None else named(config)


def whole(
    name: str,
    source: str,
    shape: tuple[int, ...],
    rows: int | None = None,
    is_transposed: bool = False,
    copies: tuple[str, ...] = (),
) -> Stored:
    """A parameter that is stored in one tensor, completely or only its first ``rows``, and perhaps in copies of it."""
    stored_shape = (shape[0] if rows is None else rows, *shape[1:])
    sources = {source: stored_shape[::-1] if is_transposed else stored_shape}
    return Stored(name, shape, sources, is_transposed=is_transposed, copies=copies)


def linear(
    ours: str,
    theirs: str,
    shape: tuple[int, ...],
    has_bias: bool = True,
    is_transposed: bool = False,
    pairs: tuple[int, int, int] | None = None,
) -> Iterator[Stored]:
    """The weight, [out, in] or of a norm [hidden], and the bias of a layer."""
    yield replace(whole(f"{ours}.weight", f"{theirs}.weight", shape, is_transposed=is_transposed), pairs=pairs)
    if has_bias:
        yield replace(whole(f"{ours}.bias", f"{theirs}.bias", shape[:1]), pairs=pairs)


def fused(
    config: TransformerConfig,
    name: str,
    columns: tuple[int, ...],
    sources: tuple[str, ...],
    is_transposed: bool = False,
    pairs: tuple[int, int, int] | None = None,
    has_gate: bool = False,
) -> Stored:
    """A fused projection, ordered [kv_heads, queries per kv head + 2, head_dim], or [kv_heads, 2, head_dim].

    The files store queries, keys and values, or only the last two, in a tensor each, or in one, one below the other.
    With a gate, one follows each query in both.
    """
    key_rows = config.num_kv_heads * config.head_dim
    parts: tuple[int, ...] = (key_rows, key_rows)
    if len(sources) != 2:
        parts = (config.attention_size * (2 if has_gate else 1), *parts)
    rows = parts if len(sources) > 1 else (sum(parts),)
    shapes = {source: (length, *columns) for source, length in zip(sources, rows, strict=True)}
    if is_transposed:
        shapes = {source: shape[::-1] for source, shape in shapes.items()}
    return Stored(name, (sum(parts), *columns), shapes, parts, config.num_kv_heads, is_transposed, pairs=pairs)


@torch.no_grad()
def to_tensors(parameters: Iterable[Stored], read: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of every tensor of the files, once ``read`` has given all parameters in it.

    ``read`` returns the full parameter, [rows, …], given its name in the model.
    """
    unfinished: dict[str, tuple[int, torch.Tensor]] = {}  # by first source: rows that are still missing, and all rows
    for stored in parameters:
        order = stored.order()
        total = sum(stored.rows)
        key = next(iter(stored.sources))
        rows = read(stored.name)[: len(order)]
        if total > len(order) or not torch.equal(order, torch.arange(total)):
            missing, values = unfinished.pop(key, (total, rows.new_empty(total, *rows.shape[1:])))
            rows = values.index_copy_(0, order, rows)
            if missing > len(order):
                unfinished[key] = missing - len(order), rows
                continue
        for (source, shape), tensor in zip(stored.sources.items(), rows.split(stored.rows), strict=True):
            lines = tensor.unflatten(0, (*shape[: stored.matrix_dims], -1)) if stored.matrix_dims else tensor
            for name in (source, *stored.copies):
                turned = lines.transpose(-1, -2) if stored.is_transposed and lines.ndim > 1 else lines
                yield name, turned.reshape(shape)  # which may end with dimensions of size 1


@torch.no_grad()
def fill_part(part: torch.Tensor, offsets: tuple[int, ...], stored: Stored, read: ReadSlice) -> None:
    """Read a shard from the files into ``part``, [rows here, …], which begins at ``offsets`` in the full parameter.

    Padding rows become zero. Their logits are masked, so their values never matter. Raises a `RefusedError` if the
    files contain the parameter twice, with different values.
    """
    part.zero_()
    columns = tuple(slice(offset, offset + size) for offset, size in zip(offsets[1:], part.shape[1:], strict=True))
    order, blocks = stored.order()[offsets[0] :][: len(part)], stored.blocks()
    ends = torch.tensor([block.rows for block in blocks]).cumsum(0)
    owners = torch.bucketize(order, ends, right=True)
    by_block = owners.argsort(stable=True).split(owners.bincount(minlength=len(ends)).tolist())
    for block, end, rows in zip(blocks, ends.tolist(), by_block, strict=True):
        if not rows.numel() or not part.numel():
            continue
        source_rows = order[rows] - (end - block.rows) + block.first
        first = int(source_rows.min())
        read_rows = slice(first, int(source_rows.max()) + 1)
        index = (*block.matrix, *((*columns, read_rows) if stored.is_transposed else (read_rows, *columns)))
        value = read(block.source, index)
        for copy in stored.copies:
            if not torch.equal(read(copy, index), value):
                reason = f"config.json ties {block.source} and {copy}, but the files hold different values for them"
                raise RefusedError(f"{reason}; set tie_word_embeddings to false there")
        value = value.flatten(0, len(block.matrix))
        value = (value.t() if stored.is_transposed else value)[source_rows - first]
        part[rows] = value.reshape(len(rows), *part.shape[1:]).to(part.device, part.dtype)


class Fields:
    """The fields of a config.json, with checks of their types.

    A method raises a `RefusedError`, which names the field and its value, if the value is not what the method reads. A
    missing field or null gives the default; without a default it is refused too.
    """

    def __init__(self, values: dict[str, Any], place: str = "") -> None:
        self.values = values
        self.notes: list[str] = []  # messages about fields that are ignored
        self._place = place  # for messages: the table's path in the file, with a final dot
        self.names_read: set[str] = set()
        self._tables: list[Fields] = []

    def get(self, field: str, default: Any = None) -> Any:
        """A value of any type."""
        self.names_read.add(field)
        return self.values.get(field, default)

    def unread(self, meaningless: Collection[str]) -> list[str]:
        """The fields, here or in a table, that nothing has read, unless null, false or in ``meaningless``."""
        return [
            table.shown(field)
            for table in (self, *self._tables)
            for field, value in table.values.items()
            if field not in {*table.names_read, *meaningless} and value is not None and value is not False
        ]

    def shown(self, field: str) -> str:
        """A field's name and value, for messages."""
        value = json.dumps(self.values[field])
        return f"{self._place}{field} = {value if len(value) <= 80 else value[:77] + '...'}"

    def refuse(self, field: str, reason: str) -> NoReturn:
        """Raise a `RefusedError` because of one field, whose name and value the message gives."""
        path = f"{self._place}{field}"
        what = f"config.json has {self.shown(field)}" if field in self.values else f"config.json has no {path}"
        raise RefusedError(f"{what}, {reason}", field=path)

    def integer(self, field: str, default: int | None = None) -> int:
        """Read a positive integer."""
        value = self.get(field)
        if value is None and default is not None:
            return default
        if type(value) is not int or value <= 0:
            self.refuse(field, "which must be a positive whole number")
        return value

    def count(self, field: str, default: int | None = None) -> int:
        """Read a whole number. 0 and null are 0."""
        value = self.get(field, default)
        return 0 if value is None or (type(value) is int and value == 0) else self.integer(field, default)

    def number(self, field: str, default: float | None = None) -> float:
        """Read a finite number."""
        value = self.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
            self.refuse(field, "which must be a number")
        return float(value)

    def positive(self, field: str, default: float | None = None) -> float:
        """Read a number above 0."""
        value = self.number(field, default)
        if value <= 0:
            self.refuse(field, "which must be a positive number")
        return value

    def flag(self, field: str, default: bool) -> bool:
        """Read a boolean. Here null is refused."""
        value = self.get(field, default)
        if not isinstance(value, bool):
            self.refuse(field, "which must be true or false")
        return value

    def table(self, field: str) -> Fields | None:
        """Read a table; None if the field is missing or null."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(field, "which must be a table")
        self._tables.append(Fields(value, f"{self._place}{field}."))
        return self._tables[-1]

    def must_be(self, field: str, *allowed: Any) -> None:
        """Refuse any other value. A file without the field counts as having the first of ``allowed``."""
        value = self.get(field, allowed[0])
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            wanted = " or ".join(dict.fromkeys(map(json.dumps, allowed)))
            self.refuse(field, f"which the models here do not support; only {wanted} can be read")


def validated(kind: type[Shape], values: dict[str, Any]) -> Shape:
    """Build a shape from the values of a file; a `RefusedError` if they do not describe a valid model."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise RefusedError(f"config.json does not describe a valid model ({first_line(error)})") from None
