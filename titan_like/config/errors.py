"""The exceptions that end a command with one sentence instead of a traceback."""

from pydantic import ValidationError


class ConfigError(ValueError):
    """A setting, file or environment that the user has to change (exit code 2).

    The message is one sentence: the key, its value, what is wrong and what would be valid.
    """

    def __init__(self, key: str, value: object, problem: str) -> None:
        super().__init__(f"{key} = {_show(value)}: {problem}")
        self.key = key


class RunError(RuntimeError):
    """A run that cannot go on, for a reason that one sentence tells (exit code 1)."""


def first_line(error: BaseException) -> str:
    """What an exception says, as a part of one sentence; its type where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def first_problem(error: ValidationError) -> str:
    """What would be valid in place of the first wrong value, as a part of one sentence."""
    message = error.errors()[0]["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return message[0].lower() + message[1:]


def _show(value: object) -> str:
    """A value as TOML would print it, on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\n", "\\n") + '"'
    if value is None:
        return "(not set)"
    return str(value)
