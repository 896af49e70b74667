"""Named objects that a setting selects: this package's own, and entry points of installed packages.

Nothing, torch included, is imported before it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

from titan_like.config.errors import ConfigError, first_line, require, unknown


def find_entry(key: str, name: str, group: str, built_in: Mapping[str, str]) -> EntryPoint:
    """Find the object that setting ``key`` names: one of ``built_in``, or an entry point of ``group``.

    Raises:
        ConfigError: nothing has this name, or several packages define it, this one included.
    """
    added = _installed(group, tuple(sys.path))
    own = [EntryPoint(name, built_in[name], group)] if name in built_in else []
    found = [*own, *added.select(name=name)]
    if len(found) == 1:
        return found[0]
    places = " and ".join(sorted(entry.value for entry in found))
    problem = f"is defined by {places}; rename it in the entry points of all packages but one, or uninstall them"
    require(not found, key, name, problem)
    raise ConfigError(key, name, unknown("name", name, sorted({*built_in, *added.names})))


def load_entry(key: str, entry: EntryPoint) -> Any:
    """Import the object; a `ConfigError` if that fails."""
    try:
        return entry.load()
    except Exception as error:  # whatever the package raises on import
        problem = f"its entry point, {entry.value}, cannot be imported ({first_line(error)}); correct the package"
        raise ConfigError(key, entry.name, problem) from error


@lru_cache(maxsize=16)
def _installed(group: str, _path: tuple[str, ...]) -> EntryPoints:
    """The entry points of all packages on the path, of which each has a file to read."""
    return entry_points(group=group)
