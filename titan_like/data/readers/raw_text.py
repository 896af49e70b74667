"""Splits files of documents into pieces of about a megabyte, each of which can be tokenized alone.

| kind | documents | recognised by |
|---|---|---|
| jsonl | one a line, under a key | a first line that is a JSON object, or an ending in `JSON_ENDINGS` |
| json | one an element of a JSON array, or an object on any lines | such an ending, or it begins as one of these |
| parquet, arrow | one a row, in a column of that name (needs pyarrow) | the magic number or the ending |
| csv, tsv | one a row, in a column of that name | the ending, or a header of names and rows that fit it |
| text | the file is one | UTF-8 that is none of these |

Tables are read as `datasets` reads them, except that values stay text. All but parquet and arrow may be compressed by
gzip, bzip2, xz or Zstandard (which needs zstandard).
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, islice, takewhile
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from titan_like.config.errors import ConfigError, first_line, printable, shortened
from titan_like.config.paths import parse_json
from titan_like.config.urls import RemotePath
from titan_like.data.readers.columnar import arrow_batches, parquet_batches
from titan_like.data.readers.content import COMPRESSED, content, lines_before, next_line
from titan_like.data.readers.partition import Part
from titan_like.data.text.long_text import FindCut, cut_text

JSON_ENDINGS = (".jsonl", ".ndjson", ".jsonlines", ".json")
TABLE_ENDINGS = (".csv", ".tsv")
RECORD_ENDINGS = (".jsonl", ".parquet", ".arrow", *JSON_ENDINGS[1:], *TABLE_ENDINGS)
KNOWN_ENDINGS = (*RECORD_ENDINGS, ".txt", ".text", ".md")
_MAGIC = {"parquet": b"PAR1", "arrow": b"ARROW1"}
_PIECE = 1 << 20  # bytes of JSON lines
_CHUNK = 1 << 18  # bytes that are read at a time
_HEAD = 1 << 16  # bytes at the beginning from which the kind is detected
_ROWS = 256  # rows of a table or an array in a piece
_OBJECT = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:')  # the beginning of a JSON object
_ARRAY = re.compile(rb"\A\[\s*(?=\{)")  # the beginning of an array of objects
_SPACE = re.compile(r"\s*")
_SEPARATORS = {"csv": ",", "tsv": "\t"}  # of tables (RFC 4180)
_WORD = re.compile(r"[A-Za-z_][\w.-]*")  # a name in the header of a table without a table's ending
csv.field_size_limit(2**31 - 1)  # characters of a document in a table
Key = str | tuple[str, ...]
Wanted = Callable[[int], bool]  # whether to read a record, given its number


class UnreadableError(ValueError):
    """A file or folder that cannot be used; the message is the predicate of a sentence about it."""


class ReadFailure(UnreadableError):  # noqa: N818
    """The operating system or the network failed; another try may succeed."""


class BadRecord(ValueError):  # noqa: N818
    """A record without usable text; the message is the reason."""


@dataclass(frozen=True)
class Piece:
    """A part of a file."""

    kind: str  # "jsonl", "rows" or "text"
    content: bytes | list[Any]  # whole lines; rows or JSON values; a text, or the `BadRecord` it is
    first_record: int  # line or row of the file with which it begins, from 1
    num_records: int
    end: int  # where the next piece begins: uncompressed bytes, or rows or JSON values; 0 in a text
    before: str = ""  # text around a piece of a text, which is tokenized with it; empty at the ends of the file
    after: str = ""


def ending_of(path: Path) -> str:
    """The file's ending in lower case, without a compression's: .jsonl for a.JSONL.gz."""
    is_compressed = path.suffix.lower() in COMPRESSED
    return (path.with_suffix("") if is_compressed else path).suffix.lower()


def kind_of(path: Path, key: Key = ()) -> str:
    """ "jsonl", "json", "csv", "tsv", "parquet", "arrow" or "text", by the file's content, ending and columns."""
    head = b""
    with _readable(path), path.open("rb") as file:
        for chunk in _content(path, file, chunk_size=_HEAD):
            head += chunk
            if len(head) >= _HEAD:
                break
    ending = ending_of(path)
    for kind, magic in _MAGIC.items():
        if head.startswith(magic) or ending == f".{kind}":
            return kind
    if head.startswith(b"%PDF") or b"\0" in head:
        raise UnreadableError("contains no text, JSON, parquet or arrow; convert it to UTF-8 text or leave it out")
    is_whole, head = len(head) < _HEAD, head.removeprefix(codecs.BOM_UTF8)
    if ending in TABLE_ENDINGS:
        return ending[1:]
    if ending in JSON_ENDINGS and head.lstrip().startswith(b"["):
        return "json"
    json_kind = _json_kind(path, head.lstrip(), is_whole)
    if ending == ".json" and json_kind is None:
        raise UnreadableError("contains neither a JSON array nor JSON objects; write it so, or repair it")
    return json_kind or ("jsonl" if ending in JSON_ENDINGS else _table_kind(head, is_whole, key) or "text")


def _json_kind(path: Path, head: bytes, is_whole: bool) -> str | None:
    """ "jsonl" or "json", or None if the file, which begins with ``head``, has no records.

    A comma after its first object is enough, even if a later one is damaged.
    """
    text = _ARRAY.sub(b"", head)
    if not (text.startswith(b"[") or _OBJECT.match(text)):
        return None
    is_array, characters = head.startswith(b"["), text.decode("utf-8", "ignore").rstrip()
    with suppress(ValueError, RecursionError):
        try:
            first, end = json.JSONDecoder().raw_decode(characters)
            rest = characters[end:].lstrip()
            if not is_array and end == len(characters.partition("\n")[0].rstrip()):
                return "jsonl"
            if rest and (isinstance(first, list) or rest[0] == ","):
                return "json" if isinstance(first, dict) else None
        except json.JSONDecodeError as error:  # perhaps because the head ends in a text, or in a word
            if not (is_array or is_whole or b"\n" in head):
                return "jsonl"
            if is_whole or not (error.msg.startswith("Unterminated") or error.pos >= len(characters) - 8):
                return None
        with path.open("rb") as file:
            records = _json_records(b"".join(_content(path, file)))
        if is_array or all(isinstance(record, dict) for record in records):
            return "json"
    return None


def _json_records(content: bytes) -> list[Any]:
    """The elements of a JSON array, or JSON values one after the other."""
    text = content.decode("utf-8-sig")
    if text.lstrip().startswith("["):
        return parse_json(text)
    at = 0
    records = []
    while (at := _SPACE.match(text, at).end()) < len(text):  # type: ignore[union-attr]
        record, at = json.JSONDecoder().raw_decode(text, at)
        records.append(record)
    return records


def _table_kind(head: bytes, is_whole: bool, key: Key) -> str | None:
    """ "csv" or "tsv" if a text is a header of names and rows with as many fields, else None.

    If the rows are single words too, the text is a list of words, unless the header has a column to read.
    """
    lines = io.StringIO(head.decode("utf-8", "ignore"), newline="").readlines()
    keys = {key} if isinstance(key, str) else {*key}
    for kind, separator in _SEPARATORS.items():
        with suppress(csv.Error):
            header, *rows = [*filter(None, csv.reader(lines, delimiter=separator))] or [[""]]
            rows = rows if is_whole else rows[:-1]
            names = header if header[0] else header[1:]  # pandas gives its index no name
            is_header = len({*header}) == len(header) > 1 and all(map(_WORD.fullmatch, names))
            is_list = keys.isdisjoint(header) and all(map(_WORD.fullmatch, chain(*rows)))
            if is_header and rows and not is_list and all(len(row) == len(header) for row in rows):
                return kind
    return None


def cut_of(path: Path, kind: str) -> str:
    """How to cut a file of a kind: "lines", "rows", or "records" if it has to be read from its beginning."""
    if kind == "parquet" or (kind == "arrow" and not isinstance(path, RemotePath)):
        return "rows"
    return "lines" if kind == "jsonl" and path.suffix.lower() not in COMPRESSED else "records"


def read_pieces(
    path: Path,
    key: Key,
    start: int = 0,
    first_record: int = 1,
    find_cut: FindCut | None = None,
    part: Part | None = None,
    kind: str | None = None,
) -> Iterator[tuple[Piece, float]]:
    """The pieces of a file from ``start`` on, each with the fraction of the file that has been read by then.

    ``start`` is 0, as always in a text, or a `Piece.end`, and ``first_record`` the number of the record there. ``key``
    names the columns of a table. Nulls are left out of its rows: Arrow fills up each struct with the fields of the
    others. ``find_cut`` finds places to cut a long text, as `long_text.find_cut` does; without it, any place will do.
    With a ``part``, only its records are read, unless the file is cut by "records" (see `cut_of`). Lines are then
    counted from the part's first one.

    Raises an `UnreadableError` if the file is damaged, lacks the column or needs a package that is missing, and a
    `ReadFailure` if the operating system failed to read it.
    """
    kind = kind or kind_of(path, key)
    is_remote = isinstance(path, RemotePath)
    with _readable(path), path.open("rb", buffering=_HEAD if is_remote else -1) as file:
        if kind in _MAGIC:
            source, columns_of = file if is_remote else str(path), partial(_columns, key=key)
            batches = arrow_batches(source, columns_of, start, part)
            if kind == "parquet":
                batches = parquet_batches(source, columns_of, start, part, _ROWS, _PIECE)
            yield from _rows(batches, start)
            return
        if kind == "json":
            yield from _rows([(0, _json_records(b"".join(_content(path, file))), 1.0)], start)
            return
        if part and cut_of(path, kind) == "lines":
            start = start or next_line(file, part.begin)
            for piece in _lines(lines_before(file, start, part.end, _PIECE), start, first_record):
                yield piece, piece.end / part.size
            if is_remote and part.end == part.size and file.read(1):
                raise UnreadableError(f"is larger than the {part.size} bytes that were listed; start the run again")
            return
        size = max(path.stat().st_size, 1)
        if kind in _SEPARATORS:
            whole_lines = (bytes(piece.content) for piece in _lines(_content(path, file), 0, 1))
            texts = codecs.iterdecode(whole_lines, "utf-8-sig")
            lines = chain.from_iterable(io.StringIO(text, newline="") for text in texts)  # no other character ends one
            rows = _table_rows(csv.reader(lines, delimiter=_SEPARATORS[kind], strict=True), key)
            parts = ((at, list(islice(rows, _ROWS)), min(1.0, file.tell() / size)) for at in count(0, _ROWS))
            yield from _rows(takewhile(itemgetter(1), parts), start)
            return
        chunks = _content(path, file, start)
        for piece in _text(chunks, find_cut) if kind == "text" else _lines(chunks, start, first_record):
            yield piece, min(1.0, file.tell() / size)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn any error of reading into one of the two errors of this module."""
    try:
        yield
    except (ConfigError, UnreadableError):
        raise
    except EOFError:
        raise UnreadableError("ends in the middle of compressed data; copy or compress it again") from None
    except ImportError as error:
        raise UnreadableError(f"needs the package {error.name}; install titan_like[data]") from None
    except UnicodeDecodeError:
        raise UnreadableError("is not valid UTF-8; convert it") from None
    except Exception as error:  # a format's library may raise anything
        has_errno = isinstance(error, OSError) and error.errno is not None  # libraries' own errors of damage have none
        if has_errno or isinstance(path, RemotePath):  # clients of storage may raise anything
            raise ReadFailure(f"cannot be read ({first_line(error)})") from None
        raise UnreadableError(f"is damaged ({first_line(error)}); copy or write it again") from None


def _content(path: Path, file: IO[bytes], start: int = 0, chunk_size: int | None = None) -> Iterator[bytes]:
    return content(file, path.suffix.lower(), start, chunk_size or _CHUNK)


def _lines(chunks: Iterable[bytes], at: int, record: int) -> Iterator[Piece]:
    pending: list[bytes] = []  # joined only when it is cut: a line may be far longer than a piece
    size = 0
    for chunk in chunks:
        pending.append(chunk)
        size += len(chunk)
        if size >= _PIECE and b"\n" in chunk:
            joined = b"".join(pending)
            cut = joined.rindex(b"\n") + 1
            num_lines = joined.count(b"\n")
            at += cut
            yield Piece("jsonl", joined[:cut], record, num_lines, at)
            pending = [joined[cut:]]
            size -= cut
            record += num_lines
    if remaining := b"".join(pending):
        yield Piece("jsonl", remaining, record, 1 + remaining.count(b"\n"), at + len(remaining))


def _text(chunks: Iterable[bytes], find_cut: FindCut | None) -> Iterator[Piece]:
    decoder, reason = codecs.getincrementaldecoder("utf-8")(), None

    def texts() -> Iterator[str]:
        nonlocal reason
        place = 0
        for chunk in chain(chunks, [b""]):
            waiting = len(decoder.getstate()[0])  # bytes of a character that is not whole yet
            try:
                yield decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                reason = f"byte {place - waiting + error.start} is not valid UTF-8; convert the file or remove it"
                return
            place += len(chunk)

    for before, text, after in cut_text(texts(), find_cut or (lambda text: len(text) // 2)):
        if reason is None or after:
            yield Piece("text", [text if before else text.removeprefix("\ufeff")], 1, int(not after), 0, before, after)
    if reason:
        yield Piece("text", [BadRecord(reason)], 1, 1, 0)


def _rows(batches: Iterable[tuple[int, Any, float]], start: int) -> Iterator[tuple[Piece, float]]:
    """Pieces of a table's batches, or of lists of records, from row ``start`` on."""
    for first, batch, share in batches:
        for at in range(max(0, start - first), len(batch), _ROWS):
            part = batch[at : at + _ROWS]
            rows = part if isinstance(part, list) else _without_nulls(part.to_pylist())
            yield Piece("rows", rows, first + at + 1, len(rows), first + at + len(rows)), share


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _table_rows(rows: Iterator[list[str]], key: Key) -> Iterator[dict[str, str] | BadRecord]:
    """The rows of a table by column, without empty fields. The first of two columns with the same name counts."""
    rows = filter(None, rows)  # empty lines are no rows
    header = next(rows, [])
    _columns(header, key)
    reason = f"the row has more fields than the header, which has {len(header)}; put text with separators in quotes"
    for row in rows:
        pairs = [*zip(header, row, strict=False)][::-1]
        yield BadRecord(reason) if len(row) > len(header) else {name: field for name, field in pairs if field}


def _columns(names: list[str], key: Key) -> list[str]:
    """The columns to read."""
    keys = (key,) if isinstance(key, str) else key
    columns = [name for name in keys if name in names]
    if not columns:
        raise UnreadableError(f'has no column "{" or ".join(keys)}"; it has {shortened(printable(", ".join(names)))}')
    return columns


def texts_of(piece: Piece, key: str | None, is_wanted: Wanted = lambda record: True) -> Iterator[tuple[int, Any]]:
    """Yield the number and text of each wanted record of a piece, or a `BadRecord`. Empty lines are skipped.

    ``key`` is the text's key in a record; with None the whole record is yielded.
    """
    if piece.kind == "text":
        yield piece.first_record, piece.content[0]
        return
    records = piece.content
    if isinstance(records, bytes):
        records = (records.removeprefix(codecs.BOM_UTF8) if piece.first_record == 1 else records).split(b"\n")
    for number, record in enumerate(records, start=piece.first_record):
        if not is_wanted(number) or (isinstance(record, bytes) and not record.strip()):
            continue
        try:
            record = parse_json(record.decode("utf-8")) if isinstance(record, bytes) else record
            yield number, record if key is None or isinstance(record, BadRecord) else _text_in(record, key)
        except UnicodeDecodeError as error:
            yield number, BadRecord(f"byte {error.start} of the line is not valid UTF-8")
        except BadRecord as error:
            yield number, error
        except ValueError as error:
            yield number, BadRecord(f"the line is not JSON ({getattr(error, 'msg', first_line(error))})")


def _text_in(record: Any, key: str) -> str:
    if not isinstance(record, dict) or not isinstance(text := record.get(key), str):
        raise BadRecord(f'the record has no text under "{key}"')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord("the text contains half a surrogate pair") from None
    return text
