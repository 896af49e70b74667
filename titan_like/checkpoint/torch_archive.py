"""One tensor as torch.save wrote it, a zip archive, somewhere in a file. torch.load does not look at its checksums."""

from __future__ import annotations

import io
import os
import struct
from typing import IO, cast
from zipfile import ZIP_STORED, ZipFile
from zlib import crc32

_BUFFER = 8 << 20  # bytes of one read


class FilePart(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        """Bytes can be read."""
        return True

    def seekable(self) -> bool:
        """Any position can be read next."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place of the part."""
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if position < 0:
            raise ValueError(f"there is no place {position} in a file")
        self._position = position
        return position

    def tell(self) -> int:
        """Bytes from the part's beginning."""
        return self._position

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]  # as the base class, any buffer
        """Read as much as there is, at most until the part's end."""
        self._file.seek(self._offset + self._position)
        left = max(0, self._length - self._position)
        count = int(self._file.readinto(memoryview(buffer)[:left]))  # type: ignore[attr-defined]
        self._position += count
        return count


def is_as_written(archive: io.RawIOBase) -> bool:
    """Whether every record of an archive has its checksum."""
    try:
        with ZipFile(cast(IO[bytes], archive)) as directory:
            records = directory.infolist()
        return bool(records) and all(
            record.compress_type == ZIP_STORED and _crc32(archive, record.header_offset, record.file_size) == record.CRC
            for record in records
        )
    except OSError:  # of the disk
        raise
    except Exception:  # whatever zipfile raises where bytes are not what they were
        return False


def _crc32(archive: io.RawIOBase, header: int, size: int) -> int:
    """Of the bytes behind a record's header (APPNOTE 4.3.7: 30 bytes, and two texts whose lengths end it)."""
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
