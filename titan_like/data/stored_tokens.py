"""A token stream stored in a file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


class StoredTokens:
    """A stream of tokens in a file. Any number of threads and processes can read pieces of it on demand.

    It is not a memory map. A map's pages count as the process's memory once they are touched, so a run's memory would
    seem to grow until it has read the whole file.
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
