"""The exceptions that end a command with one sentence instead of a traceback."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

_MOST_SHOWN = 200  # characters of a value
_NEXT_LINE = "\n       "  # aligned with what follows "error: "


class ConfigError(ValueError):
    """A setting, file or environment that the user has to change (exit code 2).

    The message is one sentence: the key, its value, what is wrong and what would be valid.
    """

    def __init__(self, key: str, value: object, problem: str) -> None:
        super().__init__(f"{shortened(printable(key))} = {_show(value)}: {problem}")
        self.key = key
        self.of_this_process = key.startswith("environment variable ")  # no other process sees it

    def __reduce__(self) -> tuple:
        return _with_message, (self.key, str(self))  # data loader processes send their errors


def require(condition: object, key: str, value: object, cure: str) -> None:
    """Refuse the setting ``key``, which is to raise a `ConfigError`, unless a rule of the configuration holds.

    ``cure`` says what is wrong and what to change.
    """
    if not condition:
        raise ConfigError(key, value, cure)


class RunError(RuntimeError):
    """A run that cannot continue, with the reason in one sentence (exit code 1)."""

    def __init__(self, sentence: str, of_this_process: bool = False) -> None:
        """``of_this_process``: no other process of the job raises it as well."""
        super().__init__(sentence)
        self.of_this_process = of_this_process


def all_of(errors: Sequence[ConfigError]) -> ConfigError:
    """Several errors as one, with a line for each; its key is that of the first error."""
    return _with_message(errors[0].key, _NEXT_LINE.join(dict.fromkeys(map(str, errors))))


def _with_message(key: str, message: str) -> ConfigError:
    told = ConfigError(key, None, "")
    told.args = (message,)
    return told


def cure_of_writing(error: OSError, then: str = "or name another folder") -> str:
    """What to do about a file that could not be written; ``then`` follows the advice to make room."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return f"make room, {then}" if is_full else "name a place that you may write to"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if the message is empty."""
    if isinstance(error, ValidationError):
        return f"{'.'.join(map(str, error.errors()[0]['loc']))}: {first_problem(error)}"
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def first_problem(error: ValidationError) -> str:
    """What would be valid instead of the first wrong value, as a part of a sentence."""
    return problem_of(error.errors(include_url=False)[0])


def problem_of(detail: Any) -> str:
    """What would be valid instead of a wrong value, from one of pydantic's ``errors()``, as a part of a sentence."""
    if detail["type"] == "bool_type":
        near = _BOOLEANS.get(str(detail["input"]).lower()) if isinstance(detail["input"], str | int) else None
        return f"should be a valid boolean; write {near or 'true or false'}"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return message[0].lower() + message[1:]


def field_error(prefix: str, error: ValidationError, known: Iterable[str]) -> ConfigError:
    """The first wrong value of a table, whose keys are named with ``prefix``; ``known`` are those that there are."""
    detail = error.errors(include_url=False)[0]
    key, kind = prefix + ".".join(map(str, detail["loc"])), detail["type"]
    problem = f"unknown; there are {', '.join(known)}" if kind == "extra_forbidden" else problem_of(detail)
    return ConfigError(key, None if kind == "missing" else detail["input"], problem)


# Booleans as YAML, Python and shells write them.
_BOOLEANS = dict.fromkeys(("true", "yes", "y", "on", "1"), "true")
_BOOLEANS |= dict.fromkeys(("false", "no", "n", "off", "0"), "false")


def shortened(text: str, most: int = _MOST_SHOWN) -> str:
    """The text, cut off if it is too long to print."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


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
