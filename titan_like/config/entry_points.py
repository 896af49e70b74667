"""Named objects that a setting selects: this package's own, and entry points of installed packages.

Nothing, torch included, is imported before it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from titan_like.config.errors import ConfigError, first_line, require, unknown


def find_entry(key: str, name: str, group: str, built_in: Mapping[str, str]) -> EntryPoint:
    """Find the object that setting ``key`` names: one of ``built_in``, else an entry point of ``group``.

    Raises:
        ConfigError: nothing has this name, or several packages define it.
    """
    if name in built_in:
        return EntryPoint(name, built_in[name], group)
    added = entry_points(group=group)
    found = added.select(name=name)
    if len(found) == 1:
        return found[name]
    places = " and ".join(sorted(entry.value for entry in found))
    require(not found, key, name, f"is defined by {places}; uninstall all of these packages but one")
    raise ConfigError(key, name, unknown("name", name, sorted({*built_in, *added.names})))


def load_entry(key: str, entry: EntryPoint) -> Any:
    """Import the object; a `ConfigError` if that fails."""
    try:
        return entry.load()
    except Exception as error:  # whatever the package raises on import
        problem = f"its entry point, {entry.value}, cannot be imported ({first_line(error)}); correct the package"
        raise ConfigError(key, entry.name, problem) from error
