"""Fields of config.json. One object reads and writes each, so that import and export cannot disagree."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from annotated_types import Gt, Le
from pydantic import BaseModel

from titan_like.models.hugging_face import Fields, RefusedError

Values = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """A field of config.json, or several with one meaning."""

    read: Callable[[Fields, Values], Values] = lambda fields, shape: {}  # our fields; the shape has those read before
    write: Callable[[Any], Values] = lambda config: {}  # the fields of config.json
    ours: str = ""  # our field, if the limits of its value hold in config.json too
    names: tuple[str, ...] = ()  # of that field there: the first is read that a file has, the last one written


def converted(
    ours: str, names: tuple[str, ...], parse: Callable[[Fields, str], Any], written: Callable[[Any], Any] = lambda x: x
) -> Field:
    """A field whose value ``parse`` reads, given one of its names, and ``written`` writes, given ours."""

    def read(fields: Fields, shape: Values) -> Values:
        first, *aliases = [name for name in names if name in fields.values] or names[-1:]
        value = parse(fields, first)
        for alias in aliases:
            if parse(fields, alias) != value:
                fields.refuse(alias, f"but its other name {first} is {fields.values[first]}; leave one of them out")
        return {ours: value}

    return Field(read, lambda config: {names[-1]: written(getattr(config, ours))}, ours, names)


def renamed(ours: str, theirs: str, default: Any, *aliases: str) -> Field:
    """A number or flag under another name. The default holds for files without it; a type: it must be there.

    transformers prefers the ``aliases``.
    """
    kind, default = (default, None) if isinstance(default, type) else (type(default), default)
    parse: Any = {int: Fields.integer, float: Fields.number, bool: Fields.flag}[kind]
    return converted(ours, (*aliases, theirs), lambda fields, name: parse(fields, name, default))


def reciprocal(ours: str, theirs: str, default: float) -> Field:
    """A positive number; ours is one over it."""

    def write(config: Any) -> Values:
        value = getattr(config, ours)
        short = (round(1 / value, digits) for digits in range(9))
        return {theirs: next((number for number in short if 1 / (number or 1) == value), 1 / value)}

    return Field(lambda fields, shape: {ours: 1 / fields.positive(theirs, default)}, write)


def count(ours: str, theirs: str, default: int) -> Field:
    """A whole number; null means 0."""
    return converted(ours, (theirs,), lambda fields, name: fields.count(name, default))


def nullable(ours: str, theirs: str, default: float | None) -> Field:
    """A number that is null where ours is 0. A number of type int may be 0 as well."""
    read: Any = Fields.count if isinstance(default, int) else Fields.positive
    return converted(
        ours,
        (theirs,),
        lambda fields, name: 0 if fields.get(name, default) is None else read(fields, name, default),
        lambda value: value or None,
    )


def choice(ours: str, theirs: str, default: Any, values: Mapping[Any, Any]) -> Field:
    """A word or flag for each value of ours, of several the first. The default is written for any other value."""

    def parse(fields: Fields, name: str) -> Any:
        fields.must_be(name, default, *values)
        return values[fields.get(name, default)]

    words = {value: word for word, value in reversed(list(values.items()))}
    return converted(ours, (theirs,), parse, lambda value: words.get(value, default))


def fixed(theirs: str, *allowed: Any, is_written: bool = True) -> Field:
    """A field with the only values that can be read. A file without it has the first, which is written."""

    def read(fields: Fields, shape: Values) -> Values:
        fields.must_be(theirs, *allowed)
        return {}

    return Field(read, lambda config: {theirs: allowed[0]} if is_written else {})


def dropouts(default: float, *names: str) -> Field:
    """Dropout rates. The models here have one, the first. If the others differ from it, a note is added."""

    def read(fields: Fields, shape: Values) -> Values:
        rates = {name: fields.number(name, default) for name in names}
        if unequal := [f"{name} = {rate}" for name, rate in rates.items() if rate != rates[names[0]]]:
            fields.notes.append(f"{', '.join(unequal)} (the models here have one dropout rate, {names[0]})")
        return {"dropout": rates[names[0]]}

    return Field(read, lambda config: dict.fromkeys(names, config.dropout))


def read_fields(
    kind: type[BaseModel], items: Iterable[Field], fields: Fields, shape: Mapping[str, Any] | None = None
) -> Values:
    """Our fields of a config.json, added to ``shape``'s. A `RefusedError` names a field that is at fault."""
    values = dict(shape or {})
    for item in items:
        values |= item.read(fields, values)
        # Limits are checked here because lists may be as long as the number of layers.
        for rule in kind.model_fields[item.ours].metadata if item.ours else ():
            name = next((name for name in item.names if name in fields.values), item.names[-1])
            if isinstance(rule, Le) and values[item.ours] > rule.le:
                fields.refuse(name, f"which must be at most {rule.le}")
            if rule == Gt(0) and values[item.ours] <= 0:
                fields.refuse(name, "which must be a positive number")
    return values


def write_fields(config: Any, items: Iterable[Field], equal_heads: str = "") -> Values:
    """The fields of config.json.

    Raises a `RefusedError` if the class ``equal_heads`` cannot have grouped-query attention, but the model has.
    """
    if equal_heads and config.num_kv_heads != config.num_attention_heads:
        raise RefusedError(
            f"the model has {config.num_kv_heads} key and value heads for {config.num_attention_heads} query heads, "
            f"but {equal_heads} has one for each"
        )
    return {name: value for item in items for name, value in item.write(config).items()}
