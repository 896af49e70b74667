"""Settings as TOML text."""

from __future__ import annotations

import json
from typing import Any


def to_toml(tree: dict[str, dict[str, Any]], head: list[str], notes: dict[str, str] | None = None) -> str:
    """One table a section.

    Args:
        tree: settings by section and key; sections without keys are left out.
        head: comment lines at the top.
        notes: a comment above a section.
    """
    lines = [f"# {line}".rstrip() for line in head]
    for section, table in tree.items():
        if not table:
            continue
        lines += ["", *([f"# {notes[section]}"] if notes and section in notes else []), f"[{section}]"]
        lines += [f"{_key(key)} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    plain = key.replace("_", "").replace("-", "")
    return key if plain.isascii() and plain.isalnum() else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(one) for one in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)  # numbers
