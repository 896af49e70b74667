"""Command-line options of scripts, in addition to the run's settings."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from titan_like.config.errors import ConfigError, printable, shortened
from titan_like.config.paths import expanded
from titan_like.config.section import expanded_tokenizer

_MOST_SHOWN = 80  # characters of a path


class OptionParser(argparse.ArgumentParser):
    """Reports a wrong option as a ConfigError, in one sentence like every other error."""

    def error(self, message: str) -> NoReturn:
        """Turn argparse's message into a ConfigError.

        Raises:
            ConfigError: always.
        """
        option, colon, problem = message.removeprefix("argument ").partition(": ")
        if not colon:  # about no option in particular
            option, problem = "", message
        raise ConfigError(
            "command line", option or None, f"{shortened(printable(problem))}; {self.prog} --help says more"
        )


def path_option(text: str) -> str:
    """The type of an option that names a path: ``~`` and environment variables are replaced, as in settings.

    Raises:
        argparse.ArgumentTypeError: the path is empty, too long, or names an environment variable that is not set.
    """
    return _option(expanded, text)


def tokenizer_option(text: str) -> str:
    """The type of an option that takes what `data.tokenizer` takes.

    Raises:
        argparse.ArgumentTypeError: as `path_option`.
    """
    return _option(expanded_tokenizer, text)


def _option(expand: Callable[[str], str], text: str) -> str:
    try:
        return expand(text)
    except ValueError as error:
        shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
        raise argparse.ArgumentTypeError(f'"{shown}" {error}') from None


def check_output_file(option: str, path: str | None) -> None:
    """Refuse a file that cannot be written, before any work is done. None is no file.

    Raises:
        ConfigError: the path is a folder, or is in a folder that does not exist or is not writable.
    """
    if path is None:
        return
    parent = Path(path).parent
    if Path(path).is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(option, path, "not a file in a folder that you may write to; name one")


def write_output_file(option: str, path: str | Path, text: str) -> None:
    """Write a file that a command line names.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(option, str(path), f"cannot be written ({error.strerror}); name another file") from None


def json_text(value: Any) -> str:
    """A result as JSON. Numbers that are not finite become null, because JSON has none."""
    return json.dumps(_finite(value), indent=2)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
