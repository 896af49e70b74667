"""Other projects' names for the settings, for messages about unknown keys: the table is synonyms.toml."""

from functools import cache
from pathlib import Path

import tomli


def hint_for(name: str) -> str | None:
    """The hint for a setting of another project, as a part of a sentence; None for any other name.

    ``name`` may have a section, and may be written as on a command line: tensor-model-parallel-size.
    """
    key = key_of(name)
    return f"did you mean {key}?" if key else _find(name, _tables()[1])


def key_of(name: str) -> str | None:
    """The key that another project calls ``name``; None if there is no single one."""
    return _find(name, _tables()[0])


def _find(name: str, table: dict[str, str]) -> str | None:
    name = name.lower().replace("-", "_")
    return table.get(name) or table.get(name.rpartition(".")[2])


@cache
def _tables() -> tuple[dict[str, str], dict[str, str]]:
    """Other name → key, and other name → advice."""
    table = tomli.loads(Path(__file__).with_name("synonyms.toml").read_text(encoding="utf-8"))
    return {name: key for key, names in table["keys"].items() for name in names}, table["advice"]
