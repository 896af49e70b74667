"""A lock, so that only one run at a time writes to a checkpoint folder."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from titan_like.config.paths import writing_problem

_PATIENCE = 30.0  # seconds to wait for a run that is being stopped
_held: list[int] = []  # descriptors; the system releases the locks when the process ends, for whatever reason


def lock_path(folder: Path) -> Path:
    """The lock file, which is next to the folder."""
    return folder.with_name(folder.name + ".lock")


def lock_problem(folder: Path) -> str | None:
    """Why the lock file is unusable and what to do, as the predicate of a sentence; None if it is usable."""
    problem = writing_problem(lock_path(folder))
    return None if problem is None else f"{problem}, and runs lock it; remove it"


def hold(folder: Path, taken: str, patience: float = _PATIENCE) -> str | None:
    """Lock the folder until `release` or the end of this process, waiting at most ``patience`` seconds.

    Returns None if the lock is held; ``taken`` if another process holds it; or a sentence about the lock file if that
    cannot be used. On a file system without locks it also returns None, and nobody is kept out.
    """
    path = lock_path(folder)
    problem = lock_problem(folder)
    if problem is not None:
        return f"{path} {problem}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        return f"{path} cannot be written ({error.strerror}), and runs lock it; name another folder"
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                if time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                os.close(descriptor)
                return taken
        _held.append(descriptor)
        return None


def release() -> None:
    """Unlock every folder that this process holds."""
    while _held:
        os.close(_held.pop())
