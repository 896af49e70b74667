"""One of the virtual readers of a stream: its documents, tokenized, its samples, and where some of them begin.

Bookmarks are a cache. Each is a pure function of the data, so a file that is lost, torn or written by several processes
at once costs time but never gives other samples.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import count
from pathlib import Path

import numpy as np

from titan_like.config.errors import ConfigError, RunError
from titan_like.data.long_text import encode_texts
from titan_like.data.raw_text import BadRecord, Piece, ReadFailure, UnreadableError, texts_of
from titan_like.data.shards import Shard
from titan_like.data.tokenizer import Tokenizer

INTERVAL = 64  # samples of a reader from one bookmark to the next; at most as many are read again after a restart
_LONGEST_LINE = 512  # bytes
_TRIES = 5
_BATCH = 1 << 16  # characters that are tokenized together


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


@dataclass(frozen=True)
class Part:
    """The records of a shard that a reader reads."""

    shard: Shard
    is_wanted: Callable[[int], bool]  # given the number of a record, from 1


@dataclass(frozen=True)
class Documents:
    """The documents of a reader, each with the end-of-document token."""

    reader: int
    num_readers: int
    order: Callable[[int], list[Part]]  # of an epoch
    num_epochs: int | None  # None never ends
    text_key: str
    tokenizer: Tokenizer

    def from_place(self, place: Place) -> Iterator[tuple[Place, np.ndarray]]:
        """Each document from ``place`` on, int64 [tokens].

        Raises:
            ConfigError: a shard is damaged, or a record has no text; or there is no document in a whole epoch.
            RunError: a shard could not be read, several times in a row.
        """
        for epoch in count(place.epoch) if self.num_epochs is None else range(place.epoch, self.num_epochs):
            is_empty = epoch > place.epoch or place == Place()
            for number, part in enumerate(self.order(epoch)):
                if epoch > place.epoch or number > place.shard:
                    begin = Place(epoch, number)
                elif number == place.shard:
                    begin = place
                else:
                    continue
                for document in self._of_part(part, begin):
                    is_empty = False
                    yield document
            if is_empty and self.num_epochs is None:
                problem = (
                    f"reader {self.reader} finds no text in its part of the data; lower this, give more data, raise"
                )
                problem += " the share of training in data.split, or remove empty lines of .jsonl files, which count"
                raise ConfigError("data.num_readers", self.num_readers, problem)

    def _of_part(self, part: Part, begin: Place) -> Iterator[tuple[Place, np.ndarray]]:
        for start, piece in self._pieces(part.shard, begin):
            place = replace(begin, start=start, first_record=piece.first_record)
            batch: list[tuple[int, str]] = []
            size = 0
            for record, text in texts_of(piece, self.text_key, lambda n: n >= begin.record and part.is_wanted(n)):
                if isinstance(text, BadRecord):
                    yield from self._tokenized(batch, place)
                    problem = f"{text}; correct it or set data.text_key"
                    raise ConfigError("data.paths", f"{part.shard.name}:{record}", problem)
                batch.append((record, text))
                size += len(text)
                if size >= _BATCH:
                    yield from self._tokenized(batch, place)
                    batch, size = [], 0
            yield from self._tokenized(batch, place)

    def _tokenized(self, batch: list[tuple[int, str]], place: Place) -> Iterator[tuple[Place, np.ndarray]]:
        end = [self.tokenizer.eod_id]
        encoded = encode_texts(self.tokenizer, [text for _, text in batch])
        for (record, _), tokens in zip(batch, encoded, strict=True):
            yield replace(place, record=record), np.append(tokens, end)

    def _pieces(self, shard: Shard, place: Place) -> Iterator[tuple[int, Piece]]:
        """The shard's pieces from that of ``place`` on, each with its start. Tries again when reading fails."""
        start, record, tries = place.start, place.first_record, 0
        while True:
            try:
                for piece in shard.pieces(self.text_key, start, record):
                    yield start, piece
                    start, record, tries = piece.end, piece.first_record + piece.num_records, 0
                return
            except ReadFailure as failure:
                tries += 1
                where = f"reader {self.reader} of {self.num_readers}: {shard.name} {failure}"
                if tries == _TRIES:
                    problem = f"{where} from record {record} on, {_TRIES} times in a row"
                    problem += "; the same command resumes from the last checkpoint"
                    raise RunError(problem, of_this_process=True) from None
                wait = 2 ** (tries - 1)
                print(
                    f"{where}; trying again in {wait} s ({tries} of {_TRIES} tries failed)", file=sys.stderr, flush=True
                )
                time.sleep(wait)
            except UnreadableError as error:
                raise ConfigError(
                    "data.paths", shard.name, f"{error}; set data.text_key, or repair or remove it"
                ) from None


class Reader:
    """The samples of one reader: windows of seq_len + 1 tokens over its documents, each beginning with the last token
    of the one before. Reading them in order costs nothing extra; any other goes on from the nearest bookmark.
    """

    def __init__(self, documents: Documents, seq_len: int, bookmarks: Bookmarks) -> None:
        self._all, self._seq_len, self._bookmarks = documents, seq_len, bookmarks
        self._documents: Iterator[tuple[Place, np.ndarray]] | None = None
        self._held: deque[tuple[Place, np.ndarray]] = deque()  # documents from that with which the next sample begins
        self._offset = 0  # tokens of the first that come before it
        self._next = 0  # number of the next sample

    def sample(self, number: int) -> np.ndarray | None:
        """Window ``number``, int64 [seq_len + 1], or None if the data ends before.

        Raises:
            ConfigError: the data is damaged.
            RunError: it could not be read, several times in a row.
        """
        try:
            if self._documents is None or not 0 <= number - self._next < INTERVAL:
                self._go_near(number)
            window = self._read()
            while window is not None and self._next <= number:
                window = self._read()
            return window
        except BaseException:
            self._documents = None  # it has ended with the error, not with the data
            raise

    def _go_near(self, number: int) -> None:
        bookmark = self._bookmarks.nearest(number)
        if self._documents is None or number < self._next or bookmark.sample > self._next:
            self._next, self._offset = bookmark.sample, bookmark.offset
            self._held.clear()
            self._documents = self._all.from_place(bookmark.place)

    def _read(self) -> np.ndarray | None:
        """Read the next window, int64 [seq_len + 1], and move past it. None if the data ends before."""
        assert self._documents is not None
        missing = self._offset + self._seq_len + 1 - sum(len(tokens) for _, tokens in self._held)
        while missing > 0:
            document = next(self._documents, None)
            if document is None:
                return None
            self._held.append(document)
            missing -= len(document[1])
        if self._next and self._next % INTERVAL == 0:
            self._bookmarks.add(Bookmark(self._next, self._offset, self._held[0][0]))
        parts, wanted, offset = [], self._seq_len + 1, self._offset
        for _, tokens in self._held:
            parts.append(tokens[offset : offset + wanted])
            wanted, offset = wanted - len(parts[-1]), 0
        self._next, self._offset = self._next + 1, self._offset + self._seq_len
        while self._offset >= len(self._held[0][1]):
            self._offset -= len(self._held.popleft()[1])
        return np.concatenate(parts)
