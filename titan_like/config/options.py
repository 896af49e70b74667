"""Command-line options of scripts, in addition to the run's settings."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from titan_like.config.errors import ConfigError, printable, shortened
from titan_like.config.paths import expanded
from titan_like.config.section import expanded_tokenizer

_MOST_SHOWN = 80  # characters of a path
_OUTPUTS = ("json", "out", "output", "picture")  # options that name files to write
_OF_RUNS = ("run.json", "metrics.runs.json")
_FILE_OF_COMMAND = re.compile(r"(?<![\w/.-])(?:python (?:scripts/)?|scripts/)(\w+)\.py\b")


def as_installed(text: str) -> str:
    """A text that names commands by their files (python scripts/plan.py), by their own names (titan-plan) instead if
    this process runs one of those, as after pip install.
    """
    if not os.path.basename(sys.argv[0]).startswith("titan-"):
        return text
    return _FILE_OF_COMMAND.sub(lambda file: f"titan-{file[1].removesuffix('_data').replace('_', '-')}", text)


class OptionParser(argparse.ArgumentParser):
    """Reports a wrong option as a ConfigError, in one sentence like every other error. Options are not abbreviated.

    Args:
        takes_settings: whether settings of the run may stand among the options.
        parts: as for `argparse.ArgumentParser`.
    """

    def __init__(self, *, takes_settings: bool = False, **parts: Any) -> None:
        if takes_settings:
            parts["epilog"] = "Any --section.key of the run can be given too; python train.py --help lists them."
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **parts)

    def format_help(self) -> str:
        """The help, with the names of commands as they are installed here."""
        return as_installed(super().format_help())

    def error(self, message: str) -> NoReturn:
        """Turn argparse's message into a `ConfigError`, which is raised."""
        option, colon, problem = message.removeprefix("argument ").partition(": ")
        if not colon:  # about no option in particular
            option, problem = "", message
        raise ConfigError(
            "command line", option or None, f"{shortened(printable(problem))}; {self.prog} --help says more"
        )


def _option(expand: Callable[[str], str], text: str) -> str:
    try:
        return expand(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'"{shortened(text, _MOST_SHOWN)}" {error}') from None


# Types of options that name a path or a tokenizer: ``~`` and environment variables are replaced, as in settings.
path_option, tokenizer_option = partial(_option, expanded), partial(_option, expanded_tokenizer)


def check_output_file(option: str, path: str | None, *sources: object) -> None:
    """Refuse a file that cannot be written, or that must not be overwritten, before any work is done.

    ``sources`` are settings and options. Every text in them that names a file stands for one that is read.

    Raises:
        ConfigError: the path is a folder, or in a folder that does not exist or is not writable; or the file is there
            and is read, belongs to a run, or is of another type.
    """
    if path is None:
        return
    parent = Path(path).parent
    if Path(path).is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(option, path, "not a file in a folder that you may write to; name one")
    if not os.path.isfile(path):
        return  # a new file, a pipe or a device
    for text in _texts(sources):
        for piece in (text, *re.split("[=:,]", text)):  # NAME=PATH, gpt2:PATH,PATH
            file = os.path.expandvars(os.path.expanduser(piece))
            if os.path.isfile(file) and os.path.samefile(file, path):
                raise ConfigError(option, path, "is a file that this command reads; name another one")
    _check_replaceable(option, path)


def _check_replaceable(option: str, path: str) -> None:
    """Only a result may replace a file that is there: not a text, a dataset, or a file of a run."""
    is_result = path.endswith(".json") and os.path.basename(path) not in _OF_RUNS
    if option == "--json" and os.path.isfile(path) and not is_result:
        raise ConfigError(option, path, "is there already and is no result; name another file")


def _texts(source: object) -> Iterator[str]:
    if isinstance(source, str):
        yield source
    elif isinstance(source, BaseModel):
        yield from _texts(source.model_dump())
    elif isinstance(source, argparse.Namespace):
        yield from _texts({name: value for name, value in vars(source).items() if name not in _OUTPUTS})
    elif isinstance(source, dict | list | tuple):
        for value in source.values() if isinstance(source, dict) else source:
            yield from _texts(value)


def write_output_file(option: str, path: str | Path, text: str) -> None:
    """Write a file that a command line names. An earlier one stays as it is until the new one is complete.

    Raises:
        ConfigError: it cannot be written, or there is a file that is no result.
    """
    target = os.path.realpath(path)
    _check_replaceable(option, target)
    try:
        if os.path.exists(target) and not os.path.isfile(target):  # a pipe or a device
            Path(target).write_text(text, encoding="utf-8")
            return
        unfinished = f"{target}.unfinished"
        try:
            Path(unfinished).write_text(text, encoding="utf-8")
            os.replace(unfinished, target)
        finally:
            with suppress(OSError):
                os.unlink(unfinished)
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
