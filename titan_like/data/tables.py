"""Tables of comma- or tab-separated values (RFC 4180), as `datasets` reads them."""

from __future__ import annotations

import csv
import re
from contextlib import suppress

SEPARATORS = {"csv": ",", "tsv": "\t"}
_COLUMN = re.compile(r"[A-Za-z_][\w.-]*")  # a name in the header of a table that only its content tells
csv.field_size_limit(2**31 - 1)  # characters of a document in a table


def table_in(head: bytes, is_whole: bool) -> str | None:
    """The kind of table that a text without an ending of one is: a header of names, and rows with as many fields."""
    lines = lines_of(head.decode("utf-8", "ignore"))
    for kind, separator in SEPARATORS.items():
        with suppress(csv.Error):
            header, *rows = [*filter(None, csv.reader(lines, delimiter=separator))] or [[""]]
            rows = rows if is_whole else rows[:-1]
            names = header[not header[0] :]  # pandas gives its index no name
            is_header = len({*header}) == len(header) > 1 and all(map(_COLUMN.fullmatch, names))
            if is_header and rows and all(len(row) == len(header) for row in rows):
                return kind
    return None


def lines_of(text: str) -> list[str]:
    """The lines of a table, with their ends; no characters but line feeds and carriage returns end one."""
    return re.findall(r"[^\r\n]*(?:\r?\n|\r)|[^\r\n]+", text)
