"""Standard streams that never raise, so that a closed terminal does not end training."""

import io
import os
import sys
from contextlib import suppress
from typing import Any


def outlive_output() -> None:
    """Replace `sys.stdout` and `sys.stderr` by streams that never raise.

    Text that cannot be written (broken pipe, full disk) is dropped, with one line on stderr the first time that stdout
    fails. Characters that the encoding lacks are escaped.
    """
    sys.stderr, sys.stdout = _lenient(sys.stderr, 2), _lenient(sys.stdout, 1)


def _lenient(stream: Any, descriptor: int) -> Any:
    if stream is None:  # Python found the descriptor closed
        return open(os.devnull, "w")
    with suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_LenientFile(descriptor, "wb", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.isatty() or descriptor == 2,
    )


class _LenientFile(io.FileIO):
    """A file whose writes always succeed."""

    _is_reported = False

    def write(self, data: Any) -> int:
        """Write the data or drop it."""
        try:
            return super().write(data) or len(data)  # nothing is written where a pipe does not block
        except OSError as error:
            if self.fileno() == 1 and not self._is_reported:
                message = f"stdout cannot be written ({error.strerror}); training continues without it"
                print(message, file=sys.stderr, flush=True)
            self._is_reported = True
            return len(data)
