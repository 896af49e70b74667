"""One run at a time writes to a folder of checkpoints."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from titan_like.config.paths import file_problem

_PATIENCE = 30.0  # seconds that a run which was stopped may take to end
_held: list[int] = []  # descriptors; the system gives the locks back when the process ends, however that comes


def lock_path(folder: Path) -> Path:
    """The file that is locked: beside the folder."""
    return folder.with_name(folder.name + ".lock")


def lock_problem(folder: Path) -> str | None:
    """Why the file cannot be locked, as the predicate of a sentence with what to do; None if it can, or can be made."""
    problem = file_problem(lock_path(folder))
    if problem is None or problem == "does not exist":
        return None
    return f"{problem}, and runs lock it; remove it"


def hold(folder: Path, patience: float = _PATIENCE) -> str | None:
    """Keep other runs out until `release`, or until this process ends.

    Why that is not possible, as a sentence; None where it is.
    A file system without locks keeps nobody out.
    """
    path = lock_path(folder)
    problem = lock_problem(folder)
    if problem is not None:
        return f"{path} {problem}"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
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
                return f"another run writes to {folder}; stop it, or set checkpoint.folder to another one"
        _held.append(descriptor)
        return None


def release() -> None:
    """Let other runs in."""
    while _held:
        os.close(_held.pop())
