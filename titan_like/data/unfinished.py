"""Files and folders that go away if the process is told to end while it writes them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_being_written: list[Path] = []


@contextmanager
def removed_unless_renamed(path: Path) -> Iterator[Path]:
    """A path to write at and to rename when it is complete. Whatever is still at ``path`` at the end is removed."""
    _remove(path)  # a crash may have left it
    _being_written.append(path)
    try:
        yield path
    finally:
        _remove(path)
        _being_written.remove(path)


def remove_unfinished() -> None:
    """Remove whatever is being written now. For another thread than the one that writes, just before the process ends.

    Renamed first: the writer's own rename then either came before or fails, and never completes half a folder.
    """
    for path in list(_being_written):
        doomed = path.with_name(path.name + ".removed")
        with suppress(OSError):
            os.rename(path, doomed)
        _remove(doomed)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
