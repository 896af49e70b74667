"""The files of tasks: ordinary text, or records that each hold a text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path

from titan_like.data.raw_text import (
    RECORD_ENDINGS,
    BadRecord,
    Piece,
    UnreadableError,
    ending_of,
    json_problem,
    read_pieces,
    texts_of,
)
from titan_like.evaluate.task import TaskError

_KEY = "text"  # of a record
_SIGNATURES = {  # how files begin that are no text
    b"PAR1": "is a parquet file; lambada and wikitext103 read those whose names end in .parquet",
    b"ARROW1": "is an arrow file; lambada and wikitext103 read those whose names end in .arrow",
    b"\x1f\x8b": "is compressed; unpack it",
    b"\x28\xb5\x2f\xfd": "is compressed; unpack it",
    b"PK\x03\x04": "is compressed; unpack it",
    codecs.BOM_UTF16_LE: "is UTF-16; convert it to UTF-8",
    codecs.BOM_UTF16_BE: "is UTF-16; convert it to UTF-8",
}


def read_text(path: Path) -> str:
    """The text of a file, without a byte-order mark.

    Raises:
        TaskError: the file is not UTF-8, or is JSON.
        OSError: it cannot be read.
    """
    problem = json_problem(path)
    if problem is not None:
        raise TaskError(problem)
    return _decoded(path.read_bytes())


def read_records(path: Path) -> list[tuple[int, str]] | None:
    """The texts of a file of records, with their numbers in the file from 1. None if the file is ordinary text.

    Records are the rows of a parquet or arrow file, with their text in the column "text", or the lines of a file of
    JSON objects, with their text under "text".

    Raises:
        TaskError: the file is damaged, or a record has no text.
        OSError: the file cannot be read.
    """
    try:
        pieces = _pieces(path)
        return None if pieces is None else [record for piece in pieces for record in _records(piece)]
    except UnreadableError as error:
        raise TaskError(str(error)) from None


def _pieces(path: Path) -> Iterator[Piece] | None:
    if ending_of(path) in RECORD_ENDINGS:
        return (piece for piece, _ in read_pieces(path, _KEY))
    content = path.read_bytes()
    text = content.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"[") and _is_json(text):
        raise TaskError('is one JSON array; write an object such as {"text": "…"} on each line instead')
    # Files of JSON lines are published with several endings.
    return iter([Piece("jsonl", content, 1, 0, len(content))]) if text.startswith(b"{") else None


def _records(piece: Piece) -> Iterator[tuple[int, str]]:
    unit = "row" if piece.kind == "rows" else "line"
    for number, text in texts_of(piece, _KEY):
        if isinstance(text, BadRecord):
            raise TaskError(f"cannot be used because of {unit} {number} ({text}); correct it")
        yield number, text


def _decoded(content: bytes) -> str:
    for signature, problem in _SIGNATURES.items():
        if content.startswith(signature):
            raise TaskError(problem)
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise TaskError(f"is not valid UTF-8 at byte {error.start}; convert the file") from None


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
