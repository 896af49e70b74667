"""The content of files in chunks: uncompressed, or the lines of a stretch of a plain file."""

import bz2
import lzma
import zlib
from collections.abc import Iterator
from functools import partial
from typing import IO, Any

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def content(file: IO[bytes], compression: str, start: int, chunk_size: int) -> Iterator[bytes]:
    """The uncompressed content from byte ``start`` on, in chunks. ``compression`` is the ending of the file's name."""
    if compression not in COMPRESSED:
        file.seek(start)
        yield from iter(partial(file.read, chunk_size), b"")
        return
    for chunk in _decompressed(file, compression, chunk_size >> 5):  # small, because it may grow a thousandfold
        yield chunk[start:]
        start = max(0, start - len(chunk))


def next_line(file: IO[bytes], at: int) -> int:
    """The first byte from ``at`` on with which a line begins, or the end of the file."""
    if at > 0:
        file.seek(at - 1)
        file.readline()
        at = file.tell()
    return at


def lines_before(file: IO[bytes], start: int, end: int, chunk_size: int) -> Iterator[bytes]:
    """The lines that begin from byte ``start``, where one begins, to ``end - 1``, in chunks."""
    file.seek(start)
    chunk = b"\n"
    while start < end and (chunk := file.read(min(chunk_size, end - start))):
        yield chunk
        start += len(chunk)
    if not chunk.endswith(b"\n"):
        yield file.readline()


def _decompressed(file: IO[bytes], compression: str, chunk_size: int) -> Iterator[bytes]:
    """All members of a file. Python's own readers stop at a member with a damaged beginning, without an error."""
    new: Any = {".gz": partial(zlib.decompressobj, 31), ".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}
    if compression == ".zst":
        from zstandard import ZstdDecompressor

        new[".zst"] = lambda: ZstdDecompressor(max_window_size=2**31).decompressobj()
    member = None
    for chunk in iter(partial(file.read, chunk_size), b""):
        while chunk := chunk if member else chunk.lstrip(b"\0"):  # zeros may fill up the space after a member
            member = member or new[compression]()
            yield member.decompress(chunk)
            chunk = member.unused_data if member.eof else b""
            member = None if member.eof else member
    if member is not None:
        raise EOFError
