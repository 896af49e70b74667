"""A configuration as arguments of train.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from titan_like.config.load import parse_overrides
from titan_like.config.schema import JobConfig


def arguments(config: JobConfig) -> list[str]:
    """Everything that a run's file and command line set, as ``--section.key=value``, so that no file is needed."""
    tree = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    tree.get("job", {}).pop("config_file", None)
    return [argument(key, value) for key, value in _flat(tree)]


def argument(key: str, value: Any) -> str:
    """One setting. Text that would be read as something else, such as "true" in a free table, is quoted."""
    plain = f"--{key}={value}"
    if isinstance(value, str) and parse_overrides([plain])[key] == value:
        return plain
    return f"--{key}={json.dumps(value, ensure_ascii=False)}"


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
