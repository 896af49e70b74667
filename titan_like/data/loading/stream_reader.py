"""One of the virtual readers of a stream: its documents, tokenized, and its samples.

A reader's state is the beginning of a sample. It is a pure function of the data, so a reader that starts from a state
returns the same samples as a reader that has read everything before it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain, count
from typing import TYPE_CHECKING, NamedTuple
from weakref import proxy

import numpy as np

from titan_like.config.errors import ConfigError, RunError, require
from titan_like.data.readers.partition import Part
from titan_like.data.readers.raw_text import BadRecord, Piece, ReadFailure, UnreadableError
from titan_like.data.text.preprocess import SKIP, documents_of, report

if TYPE_CHECKING:
    from titan_like.data.loading.stream import StreamSource

_TRIES = 5
_MOST_NAMED = 8  # bad records of a reader


class Place(NamedTuple):
    """A document in a reader's stream."""

    epoch: int = 0
    part: int = 0  # number of the part of a shard among the reader's parts of the epoch
    start: int = 0  # where the document's piece of the shard begins, in bytes or rows; 0 is the beginning of the part
    first_record: int = 1  # number of that piece's first record; lines are counted from the part's first one
    record: int = 1


class ReaderState(NamedTuple):
    """The beginning of a reader's sample."""

    sample: int = 0
    offset: int = 0  # tokens of the document before it
    place: Place = Place()


class Documents:
    """The documents of one reader of a stream, tokenized, each with its first and last special tokens."""

    def __init__(self, source: StreamSource, reader: int) -> None:
        self._source = proxy(source)  # which owns the readers: else they would keep it, and their files, forever
        self._section, self._reader = source.request.section, reader
        self._counts = Counter[str]()  # records that this process has read, and bad ones

    def from_place(self, place: Place) -> Iterator[tuple[Place, np.ndarray]]:
        """Each document from ``place`` on, int64 [tokens].

        Raises a `ConfigError` if a shard is damaged, or if a record or the whole split has no text, and a `RunError` if
        a shard could not be read several times in a row.
        """
        num_empty = 0  # epochs in a row
        is_train = self._source.request.split == "train"
        for epoch in count(place.epoch) if is_train else range(place.epoch, 1):
            num_empty += 1
            for number, part in enumerate(self._source.parts(self._reader, epoch)):
                if (epoch, number) < (place.epoch, place.part):
                    continue
                begin = place if (epoch, number) == (place.epoch, place.part) else Place(epoch, number)
                for document in self._of_part(part, begin):
                    num_empty = 0
                    yield document
            if is_train and num_empty > self._section.num_readers:  # unlikely if there is any text
                num_empty = 0
                whole = (self._of_part(part, Place()) for part in self._source.parts(0, epoch, num_readers=1))
                reason = "have no text for training; give more, or raise the share of training in data.split"
                has_text = next(chain.from_iterable(whole), None) is not None
                require(has_text, "data.paths", self._section.paths, reason)

    def _of_part(self, part: Part, begin: Place) -> Iterator[tuple[Place, np.ndarray]]:
        source = self._source
        for start, piece in self._pieces(part, begin):
            wanted = {record for record in source.records_of(piece, part) if record >= begin.record}
            for record, tokens in documents_of(piece, self._section.text_key, source.tokenizer, wanted.__contains__):
                self._counts["read"] += 1
                name = f"{source.shards[part.shard].name}:{record}{self._after(part)}"
                if not isinstance(tokens, BadRecord):
                    yield begin._replace(start=start, first_record=piece.first_record, record=record), tokens
                elif self._section.bad_lines == "skip":
                    self._count_bad(f"{name}: {tokens}")
                else:
                    raise ConfigError("data.paths", name, f"{tokens}; correct it, set data.text_key, or {SKIP}")

    def _count_bad(self, reason: str) -> None:
        """Count a bad record. Prints the first ones, and later one each time that their number has doubled."""
        self._counts["bad"] += 1
        bad, read = self._counts["bad"], self._counts["read"]
        if bad <= _MOST_NAMED or bad.bit_count() == 1:
            reader = f"reader {self._reader} of {self._section.num_readers}"
            report(f"{reader} skipped {reason} ({bad:,} of {read:,} records so far)")

    def _after(self, part: Part) -> str:
        """Follows the number of a record in messages: a part inside a file of lines cannot count the lines before."""
        return f" after byte {part.begin}" if self._source.shards[part.shard].cut == "lines" and part.begin else ""

    def _pieces(self, part: Part, place: Place) -> Iterator[tuple[int, Piece]]:
        """The part's pieces from the one of ``place`` on, each with its start. Tries again when reading fails."""
        shard = self._source.shards[part.shard]
        start = place.start
        record = place.first_record
        tries = 0
        while True:
            try:
                for piece in shard.pieces(self._section.text_key, part, start, record):
                    yield start, piece
                    start = piece.end
                    record = piece.first_record + piece.num_records
                    tries = 0
                return
            except ReadFailure as failure:
                tries += 1
                description = f"reader {self._reader} of {self._section.num_readers}: {shard.name} {failure}"
                if tries == _TRIES:
                    reason = f"{description} from record {record}{self._after(part)} on, {_TRIES} times in a row"
                    reason += "; the same command resumes from the last checkpoint"
                    raise RunError(reason, of_this_process=True) from None
                wait = 2 ** (tries - 1)
                report(f"{description}; trying again in {wait} s ({tries} of {_TRIES} tries failed)")
                time.sleep(wait)
            except UnreadableError as error:
                hint = "set data.text_key, or repair or remove it"
                raise ConfigError("data.paths", shard.name, f"{error}; {hint}") from None


class Reader:
    """The samples of one reader: windows of seq_len + 1 tokens over its documents, which overlap by one token.

    Samples are read in order. For an earlier sample, the reader starts again from ``start``, or from the beginning.
    """

    def __init__(self, documents: Documents, seq_len: int, start: ReaderState) -> None:
        self._all, self._seq_len, self._start = documents, seq_len, start
        self._documents: Iterator[tuple[Place, np.ndarray]] | None = None
        self._pending: deque[tuple[Place, np.ndarray]] = deque()  # documents from the next sample's first one on
        self._offset = 0  # tokens of the first document before the sample
        self._next = 0  # number of the next sample

    @property
    def state(self) -> ReaderState:
        """Where the next sample begins."""
        return ReaderState(self._next, self._offset, self._pending[0][0]) if self._pending else self._start

    def sample(self, number: int) -> np.ndarray | None:
        """Window ``number``, int64 [seq_len + 1], or None if the data ends before. Raises errors of `Documents`."""
        if self._documents is None or number < self._next:
            start = self._start if self._start.sample <= number else ReaderState()
            self._next, self._offset = start.sample, start.offset
            self._pending.clear()
            self._documents = self._all.from_place(start.place)
        try:
            window = self._read()
            while window is not None and self._next <= number:
                window = self._read()
            return window
        except BaseException:
            self._documents = None  # it has ended with the error, not with the data
            raise

    def _read(self) -> np.ndarray | None:
        """Read the next window, int64 [seq_len + 1], and move past it. None if the data ends before."""
        assert self._documents is not None
        missing = self._offset + self._seq_len + 1 - sum(len(tokens) for _, tokens in self._pending)
        while missing > 0:
            document = next(self._documents, None)
            if document is None:
                return None
            self._pending.append(document)
            missing -= len(document[1])
        parts = []
        remaining = self._seq_len + 1
        offset = self._offset
        for _, tokens in self._pending:
            parts.append(tokens[offset : offset + remaining])
            remaining -= len(parts[-1])
            offset = 0
        self._next += 1
        self._offset += self._seq_len
        while self._offset >= len(self._pending[0][1]):
            self._offset -= len(self._pending.popleft()[1])
        return np.concatenate(parts)
