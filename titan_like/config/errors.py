"""The exceptions that end a command with one sentence instead of a traceback."""

import difflib
import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from titan_like.config.synonyms import key_of

_MOST_SHOWN = 200  # characters of a value
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a disk without room
NEXT_LINE = "\n       "  # aligned with what follows "error: "


class ConfigError(ValueError):
    """A setting, file or environment that the user has to change (exit code 2): key, value, reason and hint."""

    def __init__(self, key: str, value: object, reason: str) -> None:
        super().__init__(f"{shortened(printable(key))} = {_show(value)}: {reason}")
        self.key = key
        self.of_this_process = key.startswith("environment variable ")  # no other process sees it

    def __reduce__(self) -> tuple:
        return _with_message, (self.key, str(self))  # data loader processes send their errors


def require(condition: object, key: str, value: object, hint: str) -> None:
    """Raise a `ConfigError` about setting ``key`` unless ``condition``. ``hint``: the reason and what to change."""
    if not condition:
        raise ConfigError(key, value, hint)


@contextmanager
def blamed_on(
    key: str, value: object, kind: type[Exception] = ValueError, before: str = "", after: str = ""
) -> Iterator[None]:
    """Turn an error of this ``kind``, whose message is a reason, into a `ConfigError` about setting ``key``."""
    try:
        yield
    except ConfigError:
        raise
    except kind as error:
        raise ConfigError(key, value, f"{before}{error}{after}") from None


def refuse(config: BaseModel, *rules: tuple[object, str, str]) -> None:
    """Raise a `ConfigError` for the first broken rule of (whether it is broken, key, reason and what to change)."""
    for is_broken, key, hint in rules:
        section, _, name = key.partition(".")
        require(not is_broken, key, getattr(getattr(config, section), name), hint)


class RunError(RuntimeError):
    """A run that cannot continue, with the reason in one sentence (exit code 1)."""

    def __init__(self, sentence: str, of_this_process: bool = False) -> None:
        """``of_this_process``: no other process of the job raises it as well."""
        super().__init__(sentence)
        self.of_this_process = of_this_process


def record_error(message: str) -> None:
    """Make torchrun, if it has started this process, show ``message`` at the end of its report, below its traceback.

    torchrun shows the rank whose error has the earliest second. This error is dated a second back, so that it precedes
    the errors of ranks that torchrun ends because of it.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"message": message, "extraInfo": {"timestamp": str(int(time.time()) - 1)}}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": details}), encoding="utf-8")


def all_of(errors: Sequence[ConfigError]) -> ConfigError:
    """Several errors as one, with a line for each and the key of the first error."""
    return _with_message(errors[0].key, NEXT_LINE.join(dict.fromkeys(map(str, errors))))


def _with_message(key: str, message: str) -> ConfigError:
    error = ConfigError(key, None, "")
    error.args = (message,)
    return error


def first_line(error: BaseException) -> str:
    """The first line of a message, or the exception's type if it is empty; of a pydantic error, its first detail."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {reason_of(first)}".removeprefix(": ")
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(error).strip().partition("; use sys.set_int_max_str_digits")[0]
    return text.splitlines()[0] if text else type(error).__name__


def unknown(kind: str, word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The reason for refusing a word that names nothing, with the nearest name, else ``otherwise`` or all names."""
    lower = {name.lower(): name for name in known}
    nearest = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    hint = f"did you mean {lower[nearest[0]]}?" if nearest else otherwise or f"there are {', '.join(lower.values())}"
    return f"unknown {kind}; {hint}"


def reason_of(detail: Any) -> str:
    """What would be valid instead of a wrong value, from one of pydantic's ``errors()``, as a part of a sentence."""
    if detail["type"] == "bool_type":
        return f"should be a valid boolean; write {boolean_of(str(detail['input'])) or 'true or false'}"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return message[0].lower() + message[1:]


def field_errors(
    details: Iterable[Any], name: Callable[[str], str], model: type[BaseModel], table: object = None, listed: str = ""
) -> list[ConfigError]:
    """An error for each wrong field of ``model`` in pydantic's ``errors()``. ``name`` turns its path into a key.

    ``table`` is the value that errors about the whole table show. ``listed`` says where to find the fields' names.
    """
    errors: dict[str, ConfigError] = {}
    for detail in details:
        path, kind = [str(part) for part in detail["loc"] if not isinstance(part, int)], detail["type"]
        reason = reason_of(detail)
        if kind == "extra_forbidden":
            known = _model_at(model, path[:-1]).model_fields
            synonym = (key_of(path[-1]) or "").rpartition(".")[2]  # a model's field
            reason = unknown("field", synonym if synonym in known else path[-1], known, listed)
        key = name(".".join(path))
        value = table if not path else None if kind == "missing" else detail["input"]
        errors.setdefault(key, ConfigError(key, value, reason))
    return list(errors.values())


def _model_at(model: type[BaseModel], path: list[str]) -> type[BaseModel]:
    """The class of the table at a path of fields, and of keys of tables of such tables."""
    for name in path:
        if name in model.model_fields:
            annotation = model.model_fields[name].annotation
            model = next(kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields"))
    return model


def boolean_of(text: str) -> str | None:
    """The TOML boolean that a word of YAML, Python or a shell means; None for any other word."""
    return _BOOLEANS.get(text.lower())


_BOOLEANS = dict.fromkeys(("true", "yes", "y", "on", "1"), "true")
_BOOLEANS |= dict.fromkeys(("false", "no", "n", "off", "0"), "false")


def shortened(text: str, limit: int = _MOST_SHOWN) -> str:
    """The text, cut off if it is too long to print."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


def printable(text: str) -> str:
    """The text on one line, with escapes for control characters, which could forge output or drive a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _show(value: object) -> str:
    """A value as it is written in TOML, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + shortened(printable(value)) + '"'
    if value is None:
        return "(not set)"
    return shortened(printable(str(value)))
