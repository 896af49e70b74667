"""Verifying the checksums of a tensor that torch.save wrote as a zip archive; torch.load ignores them."""

from __future__ import annotations

import io
import os
import struct
from typing import IO, cast
from zipfile import ZIP_STORED, ZipFile
from zlib import crc32

_BUFFER = 8 << 20  # bytes per read


class FilePart(io.RawIOBase):
    """A byte range of a file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        """Always true."""
        return True

    def seekable(self) -> bool:
        """Always true."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position in the range.

        Raises:
            ValueError: the position would be negative.
        """
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if position < 0:
            raise ValueError(f"the position {position} is negative")
        self._position = position
        return position

    def tell(self) -> int:
        """Position from the beginning of the range, in bytes."""
        return self._position

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]  # as the base class, any buffer
        """Read up to the end of the range; returns the number of bytes."""
        self._file.seek(self._offset + self._position)
        left = max(0, self._length - self._position)
        count = int(self._file.readinto(memoryview(buffer)[:left]))  # type: ignore[attr-defined]
        self._position += count
        return count


def is_as_written(archive: io.RawIOBase) -> bool:
    """Whether every record of an archive matches its checksum.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with ZipFile(cast(IO[bytes], archive)) as directory:
            records = directory.infolist()
        return bool(records) and all(
            record.compress_type == ZIP_STORED and _crc32(archive, record.header_offset, record.file_size) == record.CRC
            for record in records
        )
    except OSError:  # a failing disk is not a damaged file
        raise
    except Exception:  # whatever zipfile raises for damaged bytes
        return False


def _crc32(archive: io.RawIOBase, header: int, size: int) -> int:
    """CRC-32 of a record's data, which follows its header.

    The header is 30 bytes, the last four of which are the lengths of two texts after it (APPNOTE 4.3.7).
    """
    archive.seek(header + 26)
    name, extra = struct.unpack("<HH", archive.read(4) or b"")
    archive.seek(name + extra, os.SEEK_CUR)
    buffer, total = memoryview(bytearray(min(size, _BUFFER))), 0
    while size:
        count = archive.readinto(buffer[:size])
        if not count:
            raise EOFError
        total = crc32(buffer[:count], total)
        size -= count
    return total
