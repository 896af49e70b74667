"""Megatron-LM's indexed datasets: tokens in ``PREFIX.bin``, and the place of each sequence in ``PREFIX.idx``.

The index, little-endian, as Megatron-LM's ``megatron/core/datasets/indexed_dataset.py`` writes it:

| bytes | |
|---|---|
| 9 | ``MMIDIDX\\0\\0`` |
| 8 | version, uint64: 1 |
| 1 | code of the tokens' type, see `DTYPES` |
| 8 | number of sequences s, uint64 |
| 8 | number of document boundaries d, uint64 |
| 4 · s | tokens of each sequence, int32 |
| 8 · s | byte in ``PREFIX.bin`` at which each sequence begins, int64 |
| 8 · d | document boundaries, int64: document i has the sequences from boundary i up to boundary i + 1 |
| s, or none | mode of each sequence, int8 (multimodal data) |
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from titan_like.config.errors import require
from titan_like.config.paths import unreadable_reason
from titan_like.data.readers.unfinished import removed_unless_renamed

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_PIECE = 1 << 22  # entries of the index that are checked at a time

DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"), 2: np.dtype("i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8"),
    6: np.dtype("<f8"), 7: np.dtype("<f4"), 8: np.dtype("<u2"),
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def _require(condition: bool, path: Path, reason: str) -> None:
    hint = "name a dataset as scripts/preprocess_data.py or Megatron-LM writes it"
    require(condition, "data.paths", str(path), f"{reason}; {hint}")


def token_dtype(vocab_size: int) -> np.dtype:
    """The type in which Megatron-LM stores tokens below ``vocab_size``."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


def prefix_of(path: str | Path) -> Path:
    """The path without its ending, if that is .bin or .idx."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


class StoredTokens:
    """A stream of tokens in a file, from which any number of threads and processes read pieces on demand.

    It is not a memory map: touched pages count as the process's memory, so a run's memory would seem to grow until it
    has read the whole file.
    """

    def __init__(self, path: Path, dtype: np.dtype, start: int = 0, stop: int | None = None) -> None:
        """Open tokens ``start`` to ``stop`` of the file. The file may be deleted afterwards."""
        self.path, self.dtype, self.start = path, dtype, start
        self._file = open(path, "rb", buffering=0)
        self.stop = os.fstat(self._file.fileno()).st_size // dtype.itemsize if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, piece: slice) -> np.ndarray:
        """Read a slice (with a step of 1) as a new array [tokens]."""
        first, last, _ = piece.indices(len(self))
        size, offset = self.dtype.itemsize, self.start + first
        return np.frombuffer(os.pread(self._file.fileno(), (last - first) * size, offset * size), self.dtype)

    def part(self, start: int, stop: int) -> StoredTokens:
        """Tokens ``start`` to ``stop`` of this stream, not yet read."""
        return StoredTokens(self.path, self.dtype, self.start + start, self.start + stop)

    def __reduce__(self) -> tuple:
        return StoredTokens, (self.path, self.dtype, self.start, self.stop)  # worker processes reopen the file


class IndexedDataset:
    """An open dataset. Its index is memory-mapped."""

    def __init__(self, prefix: str | Path) -> None:
        """Open both files. Raises a `ConfigError` if one is missing, foreign, truncated or contradicts the other."""
        self.prefix = prefix_of(prefix)
        index, data = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        for path in (index, data):
            reason = unreadable_reason(path)
            _require(reason is None, path, "there is no such file" if reason == "does not exist" else str(reason))
        self.dtype, self.lengths, self._pointers, self._documents = _open_index(index)
        self.tokens = StoredTokens(data, self.dtype)
        size, expected = os.stat(data).st_size, int(self.lengths.sum(dtype=np.int64)) * self.dtype.itemsize
        defect = "is cut off" if size < expected else "is longer than its index says"
        _require(size == expected, data, f"{defect}: it has {size:,} bytes, and {index.name} describes {expected:,}")
        covers = len(self._documents) > 0 and self._documents[0] == 0 and self._documents[-1] == len(self)
        _require(covers, index, f"is damaged: its documents do not cover its {len(self):,} sequences")

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def __getitem__(self, number: int) -> np.ndarray:
        """The tokens of a sequence, integers [tokens]."""
        start = int(self._pointers[number]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[number])]

    @property
    def num_documents(self) -> int:
        """Number of documents, each of which is one or more sequences."""
        return len(self._documents) - 1

    def document_end(self, number: int) -> int:
        """Token at which document ``number`` ends, exclusive; 0 for number -1."""
        sequence = int(self._documents[number + 1]) - 1
        if sequence < 0:
            return 0
        return int(self._pointers[sequence]) // self.dtype.itemsize + int(self.lengths[sequence])

    def nearest_document_end(self, token: int) -> int:
        """The boundary between documents that is nearest to a token, 0 and the end included."""
        later = bisect_right(range(self.num_documents), token, key=self.document_end)  # the first that ends after it
        ends = map(self.document_end, (later - 1, min(later, self.num_documents - 1)))
        return min(ends, key=lambda end: abs(end - token))


def _open_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Type of the tokens; lengths, pointers, and document boundaries, memory-mapped."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        header = file.read(_HEADER.size)
    is_index = len(header) == _HEADER.size and header.startswith(_MAGIC)
    _require(is_index, path, "is no index of Megatron-LM, or is cut off: it lacks the header MMIDIDX")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    reason = f"has version {version} of the format and tokens of type {code}, which are unknown"
    _require(version == 1 and code in DTYPES, path, reason)
    expected = _HEADER.size + 12 * sequences + 8 * boundaries
    defect = "is cut off" if size < expected else "is damaged"
    is_whole = size in (expected, expected + sequences)
    _require(is_whole, path, f"{defect}: it has {size:,} bytes, and its header describes {expected:,}")

    def mapped(dtype: str, offset: int, count: int) -> np.ndarray:
        return np.memmap(path, dtype, "r", offset, (count,)) if count else np.empty(0, dtype)

    at = _HEADER.size
    lengths, pointers = mapped("<i4", at, sequences), mapped("<i8", at + 4 * sequences, sequences)
    documents = mapped("<i8", at + 12 * sequences, boundaries)
    return DTYPES[code], lengths, pointers, documents


class IndexedWriter:
    """Writes a dataset, sequence by sequence. Its files get their names once they are complete and on disk."""

    def __init__(self, prefix: str | Path, dtype: np.dtype) -> None:
        """``dtype``: one of `DTYPES`."""
        self.prefix, self.dtype = prefix_of(prefix), np.dtype(dtype).newbyteorder("<")
        self.num_tokens = 0
        self._lengths: list[int] = []
        self._documents = [0]
        self._files = ExitStack()

    def __enter__(self) -> IndexedWriter:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._unfinished = [
            self._files.enter_context(removed_unless_renamed(Path(f"{self.prefix}.{ending}.unfinished")))
            for ending in ("bin", "idx")
        ]
        self._data = self._files.enter_context(open(self._unfinished[0], "wb"))
        return self

    def add(self, tokens: np.ndarray) -> None:
        """Append a sequence, [tokens]."""
        self._data.write(np.asarray(tokens, dtype=self.dtype).tobytes())
        self._lengths.append(len(tokens))
        self.num_tokens += len(tokens)

    def end_document(self) -> None:
        """End the current document. Sequences added from here on belong to another one."""
        self._documents.append(len(self._lengths))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._files:
            if kind is None:
                self._data.close()
                if self._documents[-1] != len(self._lengths):
                    self.end_document()
                write_index(self._unfinished[1], self.dtype, np.array(self._lengths, "<i4"), self._documents)
                for path, ending in zip(self._unfinished, ("bin", "idx"), strict=True):
                    os.replace(path, f"{self.prefix}.{ending}")


def write_index(path: Path, dtype: np.dtype, lengths: np.ndarray, documents: Sequence[int]) -> None:
    """Write the index of consecutive sequences with ``lengths``, int32 [sequences], which may be memory-mapped.

    ``documents`` are boundaries, the first 0 and the last the number of sequences.
    """
    starts = range(0, len(lengths), _PIECE)
    with open(path, "wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype], len(lengths), len(documents)))
        for start in starts:
            file.write(lengths[start : start + _PIECE].astype("<i4").tobytes())
        at = 0
        for start in starts:
            ends = at + lengths[start : start + _PIECE].astype("<i8").cumsum() * dtype.itemsize
            file.write(np.concatenate(([at], ends[:-1])).astype("<i8").tobytes())
            at = int(ends[-1])
        for start in range(0, len(documents), _PIECE):
            file.write(np.array(documents[start : start + _PIECE], dtype="<i8").tobytes())
        file.flush()
        os.fsync(file.fileno())
