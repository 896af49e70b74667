"""Standard streams whose failure does not end training."""

from __future__ import annotations

import io
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO


def outlive_output() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that never raise.

    A stream may be closed, end in a broken pipe or a full disk, or have an ASCII locale. Text that cannot be written is
    dropped. The first time that happens to stdout, one line on stderr says so.
    """
    sys.stderr = _lenient(sys.stderr, 2, lambda _: None)
    sys.stdout = _lenient(sys.stdout, 1, _tell)


def _tell(problem: str) -> None:
    print(f"stdout cannot be written ({problem}); training goes on without it", file=sys.stderr, flush=True)


def _lenient(stream: TextIO | None, descriptor: int, tell: Callable[[str], None]) -> TextIO:
    if stream is None:  # Python found the descriptor closed
        tell("it is closed")
        return open(os.devnull, "w")
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LenientFile(descriptor, tell)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.isatty() or descriptor == 2,
    )


class _LenientFile(io.FileIO):
    """A file whose writes always succeed."""

    def __init__(self, descriptor: int, tell: Callable[[str], None]) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._tell: Callable[[str], None] | None = tell

    def write(self, data: Any) -> int:
        """Write, or drop the data; the first time, report it."""
        try:
            while (written := super().write(data)) is None:  # another process made the pipe or terminal non-blocking
                select.select([], [self.fileno()], [])
            return written
        except OSError as error:
            tell, self._tell = self._tell, None
            if tell is not None:
                tell(error.strerror or str(error))
            return len(memoryview(data).cast("B"))
