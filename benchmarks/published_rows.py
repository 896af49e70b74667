"""Training runs that papers and vendors have published; published_rows.toml names the source of each."""

from __future__ import annotations

from pathlib import Path

import tomli

from benchmarks.measured_rows import Row, row_from

_FILE = Path(__file__).with_suffix(".toml")


def published_rows() -> list[Row]:
    """All rows, in the order of the file."""
    tables = tomli.loads(_FILE.read_text(encoding="utf-8"))["row"]
    return [row_from({key: str(value) for key, value in table.items()}) for table in tables]
