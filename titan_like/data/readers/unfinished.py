"""Files and folders that appear under their names when they are complete."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_like.config.urls import RemotePath


@contextmanager
def removed_unless_renamed(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which the caller renames when it is complete. If it was not renamed, it is removed."""
    remove(path)  # may be left over from a crash
    try:
        yield path
    finally:
        remove(path)


def remove(path: Path) -> None:
    """Remove a folder or file, ignoring errors: leftovers must not fail a run."""
    if isinstance(path, RemotePath):
        with suppress(OSError):
            path.rmtree()
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
