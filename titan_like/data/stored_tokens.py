"""Tokens in a file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


class StoredTokens:
    """A stream of tokens in a file, of which pieces are read on demand, by any number of threads and processes.

    Not a memory map: pages of one count as this process's memory from their first use on, so that a run would seem to
    grow until it has touched the whole file.
    """

    def __init__(self, path: Path, dtype: np.dtype, start: int = 0, stop: int | None = None) -> None:
        """Tokens ``start`` to ``stop`` of the file, which is opened at once and may be deleted afterwards."""
        self.path, self.dtype, self.start = path, dtype, start
        self._file = open(path, "rb", buffering=0)
        self.stop = os.fstat(self._file.fileno()).st_size // dtype.itemsize if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, piece: slice) -> np.ndarray:
        """The tokens of a slice with a step of 1, as a new array [tokens]."""
        first, last, _ = piece.indices(len(self))
        size, offset = self.dtype.itemsize, self.start + first
        return np.frombuffer(os.pread(self._file.fileno(), (last - first) * size, offset * size), self.dtype)

    def part(self, start: int, stop: int) -> StoredTokens:
        """Tokens ``start`` to ``stop`` of these, not read yet."""
        return StoredTokens(self.path, self.dtype, self.start + start, self.start + stop)

    def __reduce__(self) -> tuple:
        return StoredTokens, (self.path, self.dtype, self.start, self.stop)  # worker processes open the file themselves
