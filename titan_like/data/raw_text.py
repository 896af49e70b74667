"""Files of text as pieces of about a megabyte, each of which can be tokenized alone.

| ending | documents |
|---|---|
| ``.jsonl`` | one a line, under a key |
| ``.parquet``, ``.arrow`` | one a row, in a column of that name (needs pyarrow) |
| anything else | the file is one |

The first and the last may also end in ``.gz`` or ``.zst`` (the latter needs zstandard).
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from titan_like.config.errors import ConfigError, first_line
from titan_like.config.paths import file_problem

RECORD_ENDINGS = (".jsonl", ".parquet", ".arrow")
KNOWN_ENDINGS = (*RECORD_ENDINGS, ".txt", ".text", ".md")
_PIECE = 1 << 20  # bytes
_CHUNK = 1 << 18  # bytes that are read at a time
_LONG_DOCUMENT = 1 << 20  # bytes of one text file above which it is cut; a tokenizer takes 140 bytes of memory a byte
# Where a long document is cut: before a space between two letters. Tokenizers that split at spaces look no further.
_CUT = re.compile(rb"[A-Za-z](?= [A-Za-z])")
_COMPRESSED = (".gz", ".zst")
_ROWS = 256  # of a parquet or arrow file in a piece
Key = str | tuple[str, ...]


class UnreadableError(ValueError):
    """A file that cannot be read to its end; the message is the predicate of a sentence."""


class ReadFailure(UnreadableError):  # noqa: N818
    """The operating system or the network failed; another try may succeed."""


class BadRecord(ValueError):  # noqa: N818
    """A record without text; the message says why."""


@dataclass(frozen=True)
class Piece:
    """A part of a file."""

    kind: str  # "jsonl", "rows" or "text"
    content: bytes | list[Any]  # whole lines; rows of a parquet or arrow file: texts, dicts or None; text
    first_record: int  # line or row of the file with which it begins, from 1
    num_records: int
    end: int  # where to go on: bytes, uncompressed, or rows
    is_whole: bool = True  # whether the document ends with the piece; text only

    @property
    def begins_document(self) -> bool:
        """Whether a document, and not the rest of one, begins with the piece."""
        return self.kind != "text" or self.end == len(self.content)


def ending_of(path: Path) -> str:
    """The file's ending without that of its compression: .jsonl for a.jsonl.gz."""
    return path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix


def kind_of(path: Path) -> str:
    """ "jsonl", "rows" or "text", by the file's ending."""
    return {".jsonl": "jsonl", ".parquet": "rows", ".arrow": "rows"}.get(ending_of(path), "text")


def files_below(folder: str | Path, endings: tuple[str, ...], key: str) -> list[Path]:
    """The files with one of these endings in a folder and its subfolders, sorted. Links are followed, but each folder
    is entered once. The endings are without that of the compression.

    Raises:
        ConfigError: a link is broken, or a folder cannot be read; ``key`` is the setting to blame.
    """

    def refuse(error: OSError) -> None:
        raise ConfigError(key, error.filename, f"cannot be read ({error.strerror}); make the folder readable")

    files, entered = [], {os.path.realpath(folder)}
    for parent, subfolders, names in os.walk(folder, onerror=refuse, followlinks=True):
        subfolders.sort()
        for name in list(subfolders):
            real = os.path.realpath(Path(parent, name))
            if real in entered:
                subfolders.remove(name)
            entered.add(real)
        for path in (Path(parent, name) for name in names):
            if not path.exists():
                raise ConfigError(key, str(path), f"is a link to {os.readlink(path)}, which does not exist; remove it")
            if ending_of(path) in endings and path.is_file():
                files.append(path)
    return sorted(files)


def named_paths(text: str) -> list[Path]:
    """What a path or a glob pattern names, sorted. A path that cannot be looked at is taken to be there."""
    if os.path.lexists(text) or file_problem(Path(text)) != "does not exist":
        return [Path(text)]
    return sorted(map(Path, glob.glob(text, recursive=True)))


def text_problem(path: Path) -> str | None:
    """Why a file cannot be tokenized, and what to do; None if it may hold text."""
    problem = file_problem(path)
    if problem is not None:
        cure = "name the files in it, such as *.txt" if problem.startswith("is a folder") else "name files of text"
        return f"{problem}; {cure}"
    if path.stat().st_size == 0:
        return "the file is empty; remove it or give one with text"
    return json_problem(path)


def json_problem(path: Path) -> str | None:
    """What to do about a .json file that begins as JSON, as the predicate of a sentence; None for any other file."""
    if path.suffix != ".json":
        return None
    with open(path, "rb") as file:
        if file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] not in (b"[", b"{"):
            return None
    cure = "write one document per line as .jsonl (for an array: jq -c '.[]')"
    return f"holds JSON, not text; {cure}, or name the file .txt to take it as it is"


def read_pieces(path: Path, key: Key, start: int = 0, first_record: int = 1) -> Iterator[tuple[Piece, float]]:
    """The pieces of a file from ``start`` on, each with the share of the file that has been read by then.

    ``start`` is 0 or a `Piece.end`, and ``first_record`` the number of the record there. ``key`` is of a row's text.
    With several keys a row becomes a dict, without nulls: Arrow fills up each struct with the fields of the others.

    Raises:
        UnreadableError: the file is damaged, ends early, or lacks the column, or a package to read it is missing.
        ReadFailure: the operating system failed to read it.
    """
    try:
        if kind_of(path) == "rows":
            yield from _read_rows(path, key, start)
            return
        size = max(path.stat().st_size, 1)
        with open(path, "rb") as file:
            for piece in _cut(_content(path, file, start), kind_of(path), start, first_record):
                yield piece, min(1.0, file.tell() / size)
    except EOFError:
        raise UnreadableError("ends in the middle of compressed data; copy or compress it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise UnreadableError(f"cannot be read ({first_line(error)}); copy or compress it again") from None
    except OSError as error:
        raise ReadFailure(f"cannot be read ({first_line(error)})") from None


def _content(path: Path, file: IO[bytes], start: int) -> Iterator[bytes]:
    """The uncompressed content from byte ``start`` on, in chunks."""
    if path.suffix not in _COMPRESSED:
        file.seek(start)
        yield from iter(partial(file.read, _CHUNK), b"")
        return
    chunks = _zstandard(file) if path.suffix == ".zst" else iter(partial(gzip.GzipFile(fileobj=file).read, _CHUNK), b"")
    for chunk in chunks:
        yield chunk[start:]
        start = max(0, start - len(chunk))


def _zstandard(file: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError:
        raise UnreadableError("needs the package zstandard; install titan_like[data]") from None
    frame = None
    try:
        for chunk in iter(partial(file.read, _CHUNK >> 3), b""):  # small, because it may grow a hundredfold
            while chunk:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(chunk)
                chunk = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise UnreadableError(f"is damaged ({first_line(error)}); copy or compress it again") from None
    if frame is not None:
        raise EOFError


def _cut(chunks: Iterable[bytes], kind: str, at: int, record: int) -> Iterator[Piece]:
    held: list[bytes] = []  # joined only when it is cut: a line may be far longer than a piece
    size = lines_end = 0  # of what is held, in bytes
    for chunk in chunks:
        newline = chunk.rfind(b"\n")
        if newline >= 0:
            lines_end = size + newline + 1
        held.append(chunk)
        size += len(chunk)
        if size < (_PIECE if kind == "jsonl" else _LONG_DOCUMENT) or (kind == "jsonl" and not lines_end):
            continue
        content = b"".join(held)
        cut = lines_end if kind == "jsonl" else _cut_in_text(content)
        content, held, at, size, lines_end = content[:cut], [content[cut:]], at + cut, size - cut, 0
        lines = content.count(b"\n") if kind == "jsonl" else 0
        yield Piece(kind, content, record, lines, at, is_whole=kind == "jsonl")
        record += lines
    content = b"".join(held)
    if content or (kind == "text" and at == 0):  # an empty file is a document, the end of one is not
        yield Piece(kind, content, record, 1 + content.count(b"\n") if kind == "jsonl" else 1, at + size)


def _cut_in_text(text: bytes) -> int:
    """Bytes of a long text after which it is cut: near its end, between words or else lines or else characters. Never
    all of it, as only what remains can end the document.
    """
    start = len(text) - (1 << 16)
    between_words = [found.end() for found in _CUT.finditer(text, start, len(text) - 8)]
    if between_words:
        return between_words[-1]
    line = text.rfind(b"\n", max(0, start), len(text) - 1) + 1
    return line or next((at for at in range(len(text) - 1, 0, -1) if text[at] & 0xC0 != 0x80), len(text) - 1)


def _read_rows(path: Path, key: Key, start: int) -> Iterator[tuple[Piece, float]]:
    try:
        import pyarrow
    except ImportError:
        raise UnreadableError("needs the package pyarrow; install titan_like[data]") from None
    is_parquet = ending_of(path) == ".parquet"
    try:
        for first, batch, share in _parquet_batches(path, key, start) if is_parquet else _arrow_batches(path, key):
            values = batch.column(0) if isinstance(key, str) else batch
            for at in range(max(0, start - first), len(batch), _ROWS):
                rows = list(map(_without_nulls, values.slice(at, _ROWS).to_pylist()))
                end = first + at + len(rows)
                yield Piece("rows", rows, end - len(rows) + 1, len(rows), end), share
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        # pyarrow's own OSErrors have no errno.
        raise UnreadableError(f"is damaged ({first_line(error)}); copy or write it again") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _parquet_batches(path: Path, key: Key, start: int) -> Iterator[tuple[int, Any, float]]:
    """First row, columns and share of the file read, for each batch from that of row ``start`` on."""
    from pyarrow import OSFile
    from pyarrow.parquet import ParquetFile

    # Encoded, since pyarrow refuses a name that is not UTF-8; buffered, since a row group may be a gigabyte.
    with OSFile(os.fsencode(path)) as content, ParquetFile(content, buffer_size=_PIECE) as file:
        columns = _columns(file.schema_arrow, key)
        groups, at = list(range(file.num_row_groups)), 0
        while groups and at + file.metadata.row_group(groups[0]).num_rows <= start:
            at += file.metadata.row_group(groups.pop(0)).num_rows
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=columns):
            yield at, batch, (at + len(batch)) / file.metadata.num_rows
            at += len(batch)


def _arrow_batches(path: Path, key: Key) -> Iterator[tuple[int, Any, float]]:
    """The same from the beginning of a file in either of Arrow's IPC formats. Hugging Face datasets are saved as its
    stream format, in which the place of a row is not known.
    """
    from pyarrow import ArrowInvalid, OSFile, ipc

    with OSFile(os.fsencode(path)) as file:
        size, at = max(1, file.size()), 0
        try:
            reader = ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except ArrowInvalid:
            file.seek(0)
            reader = ipc.open_stream(file)
            batches = iter(reader)
        columns = _columns(reader.schema, key)
        for batch in batches:
            yield at, batch.select(columns), file.tell() / size
            at += len(batch)


def _columns(schema: Any, key: Key) -> list[str]:
    """The columns to read."""
    from pyarrow import types

    columns = [name for name in ([key] if isinstance(key, str) else key) if name in schema.names]
    if not columns:
        missing = f'no column "{key}"' if isinstance(key, str) else f"none of the columns {', '.join(key)}"
        raise UnreadableError(f"has {missing}; it has {', '.join(schema.names)}")
    if not isinstance(key, str):
        return columns
    kind = schema.field(key).type
    values = kind.value_type if types.is_dictionary(kind) else kind
    if str(values) not in ("string", "large_string", "string_view"):
        raise UnreadableError(f'has no text in the column "{key}", but {kind}')
    return columns


def texts_of(
    piece: Piece, key: str | None, is_wanted: Callable[[int], bool] = lambda record: True
) -> Iterator[tuple[int, Any]]:
    """Yield the number and text of each record of a piece, or why a record has no text. Empty lines are skipped.

    ``key`` is that of the text in a JSON record; with None the whole record is yielded. ``is_wanted`` tells by its
    number whether to look at a record.
    """
    begins_file = piece.end == len(piece.content)
    if isinstance(piece.content, list):
        for number, row in enumerate(piece.content, start=piece.first_record):
            if is_wanted(number):
                yield number, BadRecord("the row has no text") if row is None else row
    elif piece.kind == "text":
        try:
            text = piece.content.decode("utf-8")
            yield piece.first_record, text.removeprefix("\ufeff") if begins_file else text
        except UnicodeDecodeError as error:
            yield piece.first_record, BadRecord(f"byte {error.start} is not valid UTF-8; convert the file or remove it")
    else:
        content = piece.content.removeprefix(codecs.BOM_UTF8) if begins_file else piece.content
        for number, line in enumerate(content.split(b"\n"), start=piece.first_record):
            if is_wanted(number) and line.strip():
                try:
                    yield number, _text_of_json(line.decode("utf-8"), key)
                except UnicodeDecodeError as error:
                    yield number, BadRecord(f"byte {error.start} of the line is not valid UTF-8")
                except BadRecord as error:
                    yield number, error


def _text_of_json(line: str, key: str | None) -> Any:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRecord(f"the line is not JSON ({error.msg})") from None
    except RecursionError:
        raise BadRecord("its brackets are nested too deeply: at most some hundred levels can be read") from None
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise BadRecord("the line has a number with too many digits for Python") from None
    if key is None:
        return record
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        raise BadRecord(f'the line has no text under "{key}"')
    try:
        record[key].encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord("the text holds half a surrogate pair") from None
    return record[key]
