"""Parsing TOML, with an error message for anything that a file may contain."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from titan_like.config.errors import ConfigError
from titan_like.config.paths import read_settings

_MOST_DIGITS = 4300  # Python refuses longer integers
_WORDS = {"True": "true", "False": "false", "yes": "true", "no": "false", "on": "true", "off": "false"}


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        ValueError: the text is not valid; the message says where, and what would be valid.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not valid TOML ({error}); {_cure(text, str(error))}") from None
    except RecursionError:
        raise ValueError("brackets are nested too deeply; at most some hundred levels can be read") from None
    except ValueError as error:
        digits = re.search(rf"[0-9][0-9_]{{{_MOST_DIGITS - 1},}}", text)
        if digits is None:  # such as a date that does not exist
            raise ValueError(f"not valid TOML ({error}); correct that value") from None
        line = text.count("\n", 0, digits.start()) + 1
        name = re.match(r"[^=\n]*", text[text.rfind("\n", 0, digits.start()) + 1 :])
        key = name[0].strip()[:100] if name else ""
        problem = f"{key} in line {line} is a number of {len(digits[0]):,} digits"
        raise ValueError(f"{problem}; write one of at most 18") from None


def read_toml(path: str, key: str = "job.config_file") -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: the file is missing, unreadable, not UTF-8 or not TOML; ``key`` is the setting that names it.
    """
    text = read_settings(path, key)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(key, path, str(error)) from None


def _cure(text: str, message: str) -> str:
    """What to do about the line that the parser stopped at."""
    place = re.search(r"at line (\d+)", message)
    lines = text.splitlines()
    if place and int(place[1]) <= len(lines):
        word = re.search(r"=\s*(\w+)\s*(?:#.*)?$", lines[int(place[1]) - 1])
        if word and word[1] in _WORDS:
            return f"write {_WORDS[word[1]]} instead of {word[1]}"
    return "correct that line"
