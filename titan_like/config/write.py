"""Settings as TOML text."""

from __future__ import annotations

from typing import Any

import tomli_w


def to_toml(tree: dict[str, dict[str, Any]], head: list[str]) -> str:
    """The settings as TOML, one table per section.

    Args:
        tree: settings by section and key; sections without keys are left out.
        head: comment lines at the top.
    """
    comments = [f"# {line}".rstrip() for line in head]
    tables = [tomli_w.dumps({section: table}) for section, table in tree.items() if table]
    return "\n".join([*comments, "", *tables])
