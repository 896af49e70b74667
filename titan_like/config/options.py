"""Command-line options of scripts, in addition to the run's settings."""

import argparse
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pydantic_core import to_json

from titan_like.config.errors import ConfigError, printable, require, shortened
from titan_like.config.paths import expanded
from titan_like.config.section import expanded_tokenizer

_MOST_SHOWN = 80  # characters of a path
_OUTPUTS = ("json", "out", "picture")  # options that name files to write
_FILE_OF_COMMAND = re.compile(r"(?<![\w/.-])(?:python (?:scripts/)?|scripts/)(\w+)\.py\b")


def as_installed(text: str) -> str:
    """Replace script files (python scripts/plan.py) by installed commands (titan-plan) if this process runs one."""
    if not os.path.basename(sys.argv[0]).startswith("titan-"):
        return text
    return _FILE_OF_COMMAND.sub(
        lambda file: f"titan-{file[1].removesuffix('_data').removesuffix('_config').replace('_', '-')}", text
    )


class OptionParser(argparse.ArgumentParser):
    """Reports a wrong option as a ConfigError, in one sentence like every other error. Options are not abbreviated.

    With ``takes_settings``, settings of the run may follow among the options, and there is --json.
    """

    def __init__(self, *, takes_settings: bool = False, **parts: Any) -> None:
        if takes_settings:
            parts["epilog"] = "Any --section.key of the run can be given too; python train.py --help lists them."
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **parts)
        self.register("type", None, text_option)  # of options without a type
        meaning = "print the versions of titan_like and torch"  # `run_command` does it
        self.add_argument("--version", action="store_true", default=argparse.SUPPRESS, help=meaning)
        self._limits: dict[str, tuple[float, float]] = {}
        if takes_settings:
            self.add_path("--json", "also write the result to this file")

    def add_path(self, name: str, meaning: str, metavar: str = "PATH", **parts: Any) -> None:
        """Add an option that names a path, in which ``~`` and environment variables are replaced, as in settings."""
        self.add_argument(name, type=parts.pop("type", path_option), metavar=metavar, help=meaning, **parts)

    def add_number(
        self, name: str, kind: type[int] | type[float], *, least: float, most: float = 2**63 - 1, **parts: Any
    ) -> None:
        """Add an option whose value, if it has one, is from ``least`` to ``most``."""
        self.add_argument(name, type=kind, **parts)
        self._limits[name.removeprefix("--")] = least, most

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, then check numbers and the files to write."""
        options, remaining = super().parse_known_args(args, namespace)
        for name, (least, most) in self._limits.items():
            value = getattr(options, name)
            require(value is None or value >= least, f"--{name}", value, f"must be at least {least:,.12g}")
            require(value is None or value <= most, f"--{name}", value, f"must be at most {most:,.12g}")
        for name in _OUTPUTS:
            check_output_file(f"--{name}", getattr(options, name, None))
        return options, remaining

    def format_help(self) -> str:
        """The help, with the names of commands as they are installed here."""
        return as_installed(super().format_help())

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as a `ConfigError`."""
        option, colon, reason = message.removeprefix("argument ").partition(": ")
        if not colon:  # about no option in particular
            option, reason = "", message
        reason = f"{shortened(printable(reason))}; see {self.prog} --help"
        raise ConfigError("command line", option or None, reason)


def _option(expand: Callable[[str], str], text: str) -> str:
    try:
        return expand(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'"{shortened(text, _MOST_SHOWN)}" {error}') from None


def text_option(text: str) -> str:
    """A text that is valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # Python keeps bytes that are not UTF-8 as halves of surrogate pairs
        raise argparse.ArgumentTypeError(f"character {error.start} is not valid UTF-8; convert the text") from None
    return text


# Types of options that name a path or a tokenizer: ``~`` and environment variables are replaced, as in settings.
path_option, tokenizer_option = partial(_option, expanded), partial(_option, expanded_tokenizer)
url_option = partial(_option, partial(expanded, takes_urls=True))  # a path or a URL


def check_output_file(option: str, path: str | None) -> None:
    """Before any work, refuse a file that cannot be written and, for --json, an existing file of another type."""
    if path is None:
        return
    parent = Path(path).parent
    is_writable = path != "-" and not Path(path).is_dir() and parent.is_dir() and os.access(parent, os.W_OK)
    require(is_writable, option, path, "not a file in a folder that you may write to; name one")
    may_replace = option != "--json" or path.endswith(".json") or not os.path.isfile(path)
    require(may_replace, option, path, "exists and is not a .json file; choose another path")


def write_output_file(path: str | Path, text: str) -> None:
    """Write a file that a command line names. An existing file is replaced once the new one is complete."""
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):  # a pipe or a device
        Path(target).write_text(text, encoding="utf-8")
        return
    unfinished = f"{target}.{os.getpid()}.unfinished"
    try:
        Path(unfinished).write_text(text, encoding="utf-8")
        os.replace(unfinished, target)
    finally:
        with suppress(OSError):
            os.unlink(unfinished)


def write_json(path: str | None, result: Any) -> None:
    """Write a result to the file of --json, if there is one."""
    if path is not None:
        write_output_file(path, json_text(result) + "\n")


def json_text(value: Any) -> str:
    """A result as JSON. Numbers that are not finite become null, because JSON has none."""
    return to_json(value, indent=2, inf_nan_mode="null").decode()
