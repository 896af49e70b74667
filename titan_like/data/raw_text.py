"""Files of documents as pieces of about a megabyte, each of which can be tokenized alone.

| kind | documents | told by |
|---|---|---|
| jsonl | one a line, under a key | a first line that is a JSON object, or an ending in `JSON_ENDINGS` |
| array | one an element of a JSON array, under a key | ``[`` and a JSON object first, or ``[`` and such an ending |
| parquet, arrow | one a row, in a column of that name (needs pyarrow) | the magic number or the ending |
| text | the file is one | UTF-8 that is none of these |

All but parquet and arrow may be compressed by gzip, bzip2, xz or Zstandard (which needs zstandard).
"""

from __future__ import annotations

import bz2
import codecs
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from titan_like.config.errors import first_line

JSON_ENDINGS = (".jsonl", ".ndjson", ".jsonlines", ".json")
RECORD_ENDINGS = (".jsonl", ".parquet", ".arrow", *JSON_ENDINGS[1:])
KNOWN_ENDINGS = (*RECORD_ENDINGS, ".txt", ".text", ".md")
_TABLES = (".csv", ".tsv")
_PIECE = 1 << 20  # bytes
_CHUNK = 1 << 18  # bytes that are read at a time
_LONG_DOCUMENT = 1 << 19  # bytes of one text file above which it is cut; a tokenizer takes 200 bytes of memory a byte
_HEAD = 1 << 16  # bytes at the beginning that tell a file's kind
_WINDOW, _CONTEXT = 1 << 13, 1 << 12  # bytes in the middle of which a long text is cut, and on either side of a piece
_COMPRESSED = {
    ".gz": rb"\x1f\x8b",
    ".bz2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    ".xz": rb"\xfd7zXZ\x00",
    ".zst": rb"\x28\xb5\x2f\xfd",
}  # and patterns of magic numbers
_OBJECT = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:')  # the beginning of a JSON object
_SPACE, _END_OF_ARRAY = re.compile(r"\s*"), re.compile(r"\s*(\[\s*)?\]\s*")
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes inside a character
_ROWS = 256  # of a parquet or arrow file in a piece
Key = str | tuple[str, ...]

FindCut = Callable[[str], int | None]  # a place in the text, or None


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
    content: bytes | list[Any]  # whole lines, or elements of an array; rows: texts, dicts or None; text
    first_record: int  # line or row of the file with which it begins, from 1
    num_records: int
    end: int  # where to go on: bytes, uncompressed, or rows or elements of an array
    before: bytes = b""  # text around the piece, which is tokenized with it; empty at the ends of a document
    after: bytes = b""

    @property
    def is_whole(self) -> bool:
        """Whether the document ends with the piece."""
        return not self.after

    @property
    def begins_document(self) -> bool:
        """Whether a document, and not the rest of one, begins with the piece."""
        return not self.before


def ending_of(path: Path) -> str:
    """The file's ending in lower case, without that of its compression: .jsonl for a.JSONL.gz."""
    is_compressed = path.suffix.lower() in _COMPRESSED
    return (path.with_suffix("") if is_compressed else path).suffix.lower()


def kind_of(path: Path) -> str:
    """ "jsonl", "array", "parquet", "arrow" or "text", by the file's content and its ending.

    Raises:
        UnreadableError: it is of no such kind, or cannot be read.
    """
    with _readable(), open(path, "rb") as file:
        compression, head = _compression(path, file), b""
        for chunk in _content(path, file, 0):
            head += chunk
            if len(head) >= _HEAD:
                break
    ending, text = ending_of(path), head.removeprefix(codecs.BOM_UTF8).lstrip()
    for kind, magic in (("parquet", b"PAR1"), ("arrow", b"ARROW1")):
        if head.startswith(magic) or (ending == f".{kind}" and not head.startswith((b"PAR1", b"ARROW1"))):
            if compression:
                raise UnreadableError(f"is a compressed {kind} file; decompress it")
            return kind
    if text.startswith(b"%PDF") or b"\0" in (text[:4] if ending in JSON_ENDINGS else head):
        raise UnreadableError("holds no text, JSON, parquet or arrow; convert it to UTF-8 text or leave it out")
    first, newline, rest = text.partition(b"\n")
    if ending in JSON_ENDINGS or _begins_with_objects(text.decode("utf-8", "replace"), len(head) >= _HEAD):
        if text.startswith(b"["):
            return "jsonl" if rest.strip() and _is_json(first) else "array"
        if ending in JSON_ENDINGS[:3] or (_OBJECT.match(text) and (not newline or _is_json(first))):
            return "jsonl"
        raise UnreadableError("holds neither a JSON array nor a JSON object on each line; write it so (jq -c .)")
    if ending in _TABLES:
        raise UnreadableError(
            f"is a table ({ending}); write it as .jsonl or .parquet, or name it .txt to take it as text"
        )
    return "text"


def _begins_with_objects(text: str, is_cut: bool) -> bool:
    """Whether the beginning of a file is a JSON object, or an array's first, and not code that only looks like one."""
    start = re.match(r'(\[\s*)?(?=\{\s*")', text)
    if start is None:
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(text, start.end())
    except ValueError as error:
        return is_cut and _may_go_on(text, error)
    return text[end:].lstrip()[:1] in (("", ",", "]") if start[1] else ("", "{"))


def _may_go_on(text: str, error: Exception) -> bool:
    """Whether JSON is wrong only because its text is cut off."""
    place = getattr(error, "pos", 0)
    return place > len(text) - 16 or text[place] in '"]'


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def read_pieces(
    path: Path, key: Key, start: int = 0, first_record: int = 1, find_cut: FindCut | None = None
) -> Iterator[tuple[Piece, float]]:
    """The pieces of a file from ``start`` on, each with the share of the file that has been read by then.

    ``start`` is 0 or a `Piece.end`, and ``first_record`` the number of the record there. ``key`` is of a row's text.
    With several keys a row becomes a dict, without nulls: Arrow fills up each struct with the fields of the others.
    ``find_cut`` says where a long text may be cut, as `long_text.find_cut` does; without it, anywhere.

    Raises:
        UnreadableError: the file is of no kind that can be read, is damaged, ends early, or lacks the column, or a
            package to read it is missing.
        ReadFailure: the operating system failed to read it.
    """
    kind = kind_of(path)
    with _readable():
        if kind in ("parquet", "arrow"):
            yield from _read_rows(path, kind, key, start)
            return
        size, before = max(path.stat().st_size, 1), min(start, _CONTEXT) if kind == "text" else 0
        with open(path, "rb") as file:
            if kind == "array":  # places in it are those in its elements, one a line
                chunks = _from(start, _elements(_content(path, file, 0)))
            else:
                chunks = _content(path, file, start - before)
            for piece in _cut(chunks, "text" if kind == "text" else "jsonl", start, first_record, before, find_cut):
                yield piece, min(1.0, file.tell() / size)


@contextmanager
def _readable() -> Iterator[None]:
    """Turn what reading raises into the two errors of this module."""
    try:
        yield
    except EOFError:
        raise UnreadableError("ends in the middle of compressed data; copy or compress it again") from None
    except (OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise ReadFailure(f"cannot be read ({first_line(error)})") from None
        # The errors of gzip and bz2 have no errno.
        raise UnreadableError(f"cannot be read ({first_line(error)}); copy or compress it again") from None


def _compression(path: Path, file: IO[bytes]) -> str | None:
    """The ending that stands for a file's compression; None if it has none."""
    ending, head = path.suffix.lower(), file.read(10)
    file.seek(0)
    return (
        ending
        if ending in _COMPRESSED
        else next((e for e, magic in _COMPRESSED.items() if re.match(magic, head)), None)
    )


def _content(path: Path, file: IO[bytes], start: int) -> Iterator[bytes]:
    """The uncompressed content from byte ``start`` on, in chunks."""
    compression = _compression(path, file)
    if compression is None:
        file.seek(start)
        yield from iter(partial(file.read, _CHUNK), b"")
        return
    yield from _from(start, _decompressed(file, compression))


def _from(start: int, chunks: Iterable[bytes]) -> Iterator[bytes]:
    for chunk in chunks:
        yield chunk[start:]
        start = max(0, start - len(chunk))


def _decompressed(file: IO[bytes], compression: str) -> Iterator[bytes]:
    """All members of a file. Python's own readers take one that is damaged at its beginning for the file's end."""
    new: Any = {".gz": partial(zlib.decompressobj, 31), ".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}
    if compression == ".zst":
        try:
            import zstandard
        except ImportError:
            raise UnreadableError("needs the package zstandard; install titan_like[data]") from None
        new[".zst"] = lambda: zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
    member = None
    for chunk in iter(partial(file.read, _CHUNK >> 5), b""):  # small, because it may grow a thousandfold
        while chunk := chunk if member else chunk.lstrip(b"\0"):  # which may fill up the space after a member
            member = member or new[compression]()
            try:
                content = member.decompress(chunk)
            except Exception as error:  # zstandard's is a class of its own
                raise UnreadableError(f"is damaged ({first_line(error)}); copy or compress it again") from None
            yield content
            chunk = member.unused_data if member.eof else b""
            member = None if member.eof else member
    if member is not None:
        raise EOFError


def _elements(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The elements of a JSON array, each as a line of JSON."""
    decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode  # bytes that are no UTF-8 stay
    decoder, text, at, before = json.JSONDecoder(), "", 0, "["
    while True:
        try:
            begin = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if text[begin : begin + 1] != before:
                raise json.JSONDecodeError(f"Expecting '{before}'", text, begin)
            begin = _SPACE.match(text, begin + 1).end()  # type: ignore[union-attr]
            _, end = decoder.raw_decode(text, begin)
        except ValueError as error:
            chunk = next(chunks, None)
            if chunk is None and _END_OF_ARRAY.fullmatch(text, at):
                return
            if chunk is None or not _may_go_on(text, error):
                raise UnreadableError(f"is damaged JSON ({first_line(error)}); correct it") from None
            text, at = text[at:] + decode(chunk), 0
        else:
            yield text[begin:end].replace("\n", " ").encode("utf-8", "surrogateescape") + b"\n"
            at, before = end, ","


def _cut(
    chunks: Iterable[bytes], kind: str, at: int, record: int, before: int = 0, find_cut: FindCut | None = None
) -> Iterator[Piece]:
    """``before`` bytes come before the first piece."""
    held: list[bytes] = []  # joined only when it is cut: a line may be far longer than a piece
    size = lines_end = 0  # of what is held, in bytes
    is_text = kind == "text"
    searched, limit = 0, _LONG_DOCUMENT if is_text else _PIECE
    for chunk in chunks:
        newline = chunk.rfind(b"\n")
        if newline >= 0:
            lines_end = size + newline + 1
        held.append(chunk)
        size += len(chunk)
        if size - before < limit or not (is_text or lines_end):
            continue
        content = b"".join(held)
        cut = _cut_in_text(content, before + max(searched, limit - _WINDOW), find_cut) if is_text else lines_end
        if cut is None:
            held, searched, limit = [content], size - before - _WINDOW, limit * 5 // 4
            continue
        lines, around, kept = content.count(b"\n", 0, cut), tuple[bytes, ...](), cut
        if is_text:
            lines, around, kept = 0, (content[:before], content[cut : cut + _CONTEXT]), max(0, cut - _CONTEXT)
        at += cut - before
        yield Piece(kind, content[before:cut], record, lines, at, *around)
        record += lines
        held, size, before, lines_end = [content[kept:]], size - kept, cut - kept, 0
        searched, limit = 0, _LONG_DOCUMENT if is_text else _PIECE
    content = b"".join(held)
    if size > before or (is_text and at == 0):  # an empty file is a document, the end of one is not
        lines = 1 if is_text else 1 + content.count(b"\n")
        yield Piece(kind, content[before:], record, lines, at + size - before, content[:before])


def _cut_in_text(content: bytes, start: int, find_cut: FindCut | None) -> int | None:
    """Bytes of a long text after which it is cut, more than ``start`` and never all, since only what remains can end
    the document; None if it cannot be cut there.
    """
    start = max(0, start)
    for begin in range(start, max(start + 1, len(content) - _WINDOW + 1), _WINDOW // 2):
        end = min(begin + _WINDOW, len(content))
        window = content[begin:end].lstrip(_CONTINUATION)
        try:
            text, _ = codecs.utf_8_decode(window, "strict", False)
        except UnicodeDecodeError:  # the piece is refused anyway
            return (begin + end) // 2
        cut = find_cut(text) if find_cut else len(text) // 2
        if cut:
            return end - len(window) + len(text[:cut].encode())
    return None


def _read_rows(path: Path, kind: str, key: Key, start: int) -> Iterator[tuple[Piece, float]]:
    try:
        import pyarrow
    except ImportError:
        raise UnreadableError("needs the package pyarrow; install titan_like[data]") from None
    try:
        batches = _parquet_batches(path, key, start) if kind == "parquet" else _arrow_batches(path, key)
        for first, batch, share in batches:
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
            place = piece.end - len(piece.content) + error.start
            yield piece.first_record, BadRecord(f"byte {place} is not valid UTF-8; convert the file or remove it")
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
    if key is None:
        return record
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        raise BadRecord(f'the record has no text under "{key}"')
    try:
        record[key].encode("utf-8")
    except UnicodeEncodeError:
        raise BadRecord("the text holds half a surrogate pair") from None
    return record[key]
