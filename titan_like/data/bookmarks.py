"""Bookmarks of a stream's reader: where some of its samples begin.

They are a cache. Each is a pure function of the data, so a file that is lost, torn or written by several processes at
once costs time but never gives other samples.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

INTERVAL = 64  # samples of a reader from one bookmark to the next; at most as many are read again after a restart
_LONGEST_LINE = 512  # bytes


@dataclass(frozen=True)
class Place:
    """A document in a reader's stream."""

    epoch: int = 0
    shard: int = 0  # in the order of the epoch
    start: int = 0  # where its piece of the shard begins, in bytes or rows
    first_record: int = 1  # of that piece
    record: int = 1


@dataclass(frozen=True)
class Bookmark:
    """The token with which a sample begins."""

    sample: int = 0
    offset: int = 0  # tokens of the document that come before
    place: Place = Place()


class Bookmarks:
    """The bookmarks of one reader, one line each, in a file that appears with the first of them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def nearest(self, sample: int) -> Bookmark:
        """The last bookmark that is not after ``sample``; the beginning of the stream if there is none."""
        found = Bookmark()
        with suppress(OSError):
            for line in self.path.read_bytes().splitlines():
                bookmark = _parsed(line)
                if bookmark is not None and found.sample < bookmark.sample <= sample:
                    found = bookmark
        return found

    def add(self, bookmark: Bookmark) -> None:
        """Append a bookmark, unless the file already reaches that far. One that cannot be written is dropped."""
        with suppress(OSError):
            end = self._end()
            last = _parsed(end.rpartition(b"\n")[2])
            if last is not None and last.sample >= bookmark.sample:
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            numbers = [bookmark.sample, bookmark.offset, *astuple(bookmark.place)]
            # The line break comes first, so that a torn line before this one does not spoil it. A single write keeps
            # processes that append at the same time from mixing their lines.
            line = f"\n{json.dumps([*numbers, _checksum(numbers)])}".encode()
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(file, line)
            finally:
                os.close(file)

    def _end(self) -> bytes:
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE))
            return file.read()
        return b""


def _parsed(line: bytes) -> Bookmark | None:
    """The bookmark that a line holds; None if the line is torn."""
    try:
        *numbers, checksum = map(int, json.loads(line))
        if checksum != _checksum(numbers):
            return None
        sample, offset, *place = numbers
        return Bookmark(sample, offset, Place(*place))
    except (ValueError, TypeError):
        return None


def _checksum(numbers: list[int]) -> int:
    return zlib.crc32(repr(numbers).encode())
