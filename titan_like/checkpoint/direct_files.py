"""Files written with O_DIRECT: a checkpoint is not read again soon, and copying into the page cache slows training."""

from __future__ import annotations

import errno
import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem

_BUFFER = 8 << 20  # bytes per write
_BLOCK = 4096  # alignment that O_DIRECT requires of a write's ends
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile(io.RawIOBase):
    """A new file that is written sequentially and is on disk once it is closed.

    If the file system does not support O_DIRECT, writes go through the page cache.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
        try:
            self._descriptor, self._is_direct = os.open(path, flags | _DIRECT, 0o666), bool(_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor, self._is_direct = os.open(path, flags, 0o666), False
        self._buffer = mmap.mmap(-1, _BUFFER)  # page-aligned, as O_DIRECT requires
        self._array = np.frombuffer(self._buffer, dtype=np.uint8)
        self._position, self._filled = 0, 0

    def writable(self) -> bool:
        """Always true."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position + self._filled

    def fileno(self) -> int:
        """The file descriptor."""
        return self._descriptor

    def write(self, data) -> int:  # type: ignore[no-untyped-def]  # as the base class, any buffer
        """Append bytes; returns how many."""
        bytes_left = np.frombuffer(data, dtype=np.uint8)
        size = len(bytes_left)
        while len(bytes_left):
            part = bytes_left[: _BUFFER - self._filled]
            # numpy copies without the GIL, so other threads keep running.
            np.copyto(self._array[self._filled : self._filled + len(part)], part)
            self._filled += len(part)
            bytes_left = bytes_left[len(part) :]
            if self._filled == _BUFFER:
                self._write_out(_BUFFER)
        return size

    def close(self) -> None:
        """Write the rest and wait until everything is on disk.

        Raises:
            OSError: the disk is full, or another error of the file system.
        """
        if self.closed:
            return
        try:
            whole = self._filled - self._filled % _BLOCK
            self._write_out(whole)
            if self._filled:
                self._through_cache()
                self._write_out(self._filled)
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            super().close()

    def _write_out(self, size: int) -> None:
        """Write the first ``size`` bytes of the buffer and move the rest to its beginning."""
        done = 0
        while done < size:
            try:
                done += os.pwrite(self._descriptor, memoryview(self._buffer)[done:size], self._position + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._through_cache()  # another block size, or the last write ended inside a block
        self._position += size
        self._filled -= size
        self._array[: self._filled] = self._array[size : size + self._filled]

    def _through_cache(self) -> None:
        if self._is_direct:
            import fcntl  # exists wherever O_DIRECT does

            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~_DIRECT)
            self._is_direct = False


class DirectFiles(FileSystem):
    """The files of a checkpoint that is being written; each is on disk once it is closed.

    Tensor files begin with a mark of their checkpoint, so a file from another checkpoint is recognised. torch's own
    readers work too, because the metadata gives the offset of each tensor.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark.encode()

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A `DirectFile` for writing; torch's own stream for any other mode."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with DirectFile(path) as file:
            if str(path).endswith(DEFAULT_SUFFIX):
                file.write(self.mark)
            yield cast(io.IOBase, file)
