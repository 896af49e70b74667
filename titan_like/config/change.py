"""Read and change single settings of a configuration by their dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_like.config.schema import JobConfig


def setting(config: JobConfig, key: str) -> Any:
    """The value of ``section.key``."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def edit(config: JobConfig, values: Mapping[str, Any]) -> JobConfig:
    """A copy of a configuration with other values of some keys (``section.key``), which are not validated again."""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, value in values.items():
        section, _, key = dotted.partition(".")
        sections.setdefault(section, {})[key] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    )
