"""Removal of files and folders that are unfinished when a signal ends the process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_being_written: list[Path] = []


@contextmanager
def removed_unless_renamed(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which the caller renames when it is complete. If it was not renamed, it is removed."""
    remove(path)  # may be left over from a crash
    _being_written.append(path)
    try:
        yield path
    finally:
        remove(path)
        _being_written.remove(path)


def remove_unfinished() -> None:
    """Remove everything that is being written. Another thread than the writer calls this just before the process ends.

    Each path is renamed first, so the writer's own rename has either happened before or fails. It can never publish a
    folder that is half removed.
    """
    for path in list(_being_written):
        doomed = path.with_name(path.name + ".removed")
        with suppress(OSError):
            os.rename(path, doomed)
        remove(doomed)


def remove(path: Path) -> None:
    """Remove a folder or file, ignoring errors: leftovers must not fail a run."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
