"""Files written past the system's cache: nothing of a checkpoint is read again soon, and copying costs the training."""

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

_BUFFER = 8 << 20  # bytes of one write
_BLOCK = 4096  # where writes past the cache may begin and end
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile(io.RawIOBase):
    """A new file, written from its beginning to its end; on disk when it is closed.

    Where the file system has no writing past the cache, it goes through it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
        try:
            self._descriptor, self._is_direct = os.open(path, flags | _DIRECT, 0o666), bool(_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._descriptor, self._is_direct = os.open(path, flags, 0o666), False
        self._buffer = mmap.mmap(-1, _BUFFER)  # begins at a page, as such writes have to
        self._array = np.frombuffer(self._buffer, dtype=np.uint8)
        self._position, self._filled = 0, 0

    def writable(self) -> bool:
        """Bytes can be written."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._position + self._filled

    def fileno(self) -> int:
        """The system's number of the file."""
        return self._descriptor

    def write(self, data) -> int:  # type: ignore[no-untyped-def]  # as the base class, any buffer
        """Append."""
        bytes_left = np.frombuffer(data, dtype=np.uint8)
        size = len(bytes_left)
        while len(bytes_left):
            part = bytes_left[: _BUFFER - self._filled]
            # numpy copies without holding up Python's other threads.
            np.copyto(self._array[self._filled : self._filled + len(part)], part)
            self._filled += len(part)
            bytes_left = bytes_left[len(part) :]
            if self._filled == _BUFFER:
                self._write_out(_BUFFER)
        return size

    def close(self) -> None:
        """Write the rest, and wait until all is on disk."""
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
        """Write that many of the buffer's bytes; those behind them move to its beginning."""
        done = 0
        while done < size:
            try:
                done += os.pwrite(self._descriptor, memoryview(self._buffer)[done:size], self._position + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct:
                    raise
                self._through_cache()  # other blocks than ours, or a write was cut short in the middle of one
        self._position += size
        self._filled -= size
        self._array[: self._filled] = self._array[size : size + self._filled]

    def _through_cache(self) -> None:
        if self._is_direct:
            import fcntl  # not on every system, but where there is _DIRECT

            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~_DIRECT)
            self._is_direct = False


class DirectFiles(FileSystem):
    """The files of a checkpoint being written, each on disk when it is closed.

    Files of tensors begin with the checkpoint's own mark, so that one of another checkpoint is told from them; the
    metadata says where in a file each tensor is, so torch's own readers find them too.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark.encode()

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A file to write to, if mode says so; else torch's own."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with DirectFile(path) as file:
            if str(path).endswith(DEFAULT_SUFFIX):
                file.write(self.mark)
            yield cast(io.IOBase, file)
