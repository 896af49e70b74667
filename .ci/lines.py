"""Check that no folder has more lines of Python than lines.toml allows; a change that needs fewer lowers its cap."""

from __future__ import annotations

import sys
from pathlib import Path

import tomli

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Print each folder above its cap, or without one; returns 1 if there is any."""
    caps = tomli.loads((ROOT / ".ci" / "lines.toml").read_text())
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "titan_like").glob("*/*.py")}
    over = []
    for folder in sorted(folders | caps.keys()):
        lines = sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))
        if lines > caps.get(folder, 0):
            over.append(f"{folder} has {lines:,} lines, but .ci/lines.toml allows {caps.get(folder, 0):,}")
    print(*over, sep="\n", end="\n" if over else "")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
