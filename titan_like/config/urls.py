"""Paths on object storage: URLs of the kinds that fsspec supports, such as s3://bucket/run, gs://, az://, hf://."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PosixPath
from typing import IO, Any

from titan_like.config.errors import first_line


class StorageError(OSError):
    """Object storage does not answer, or refuses: no connection, no credentials, no permission."""


class RemotePath(PosixPath):
    """A path on object storage, with the methods of `Path` that checkpoints need. System calls refuse it.

    A written file appears when it is complete. There are no empty folders, and a file is renamed by copying it.
    Methods raise a `FileNotFoundError`, or a `StorageError` with the server's reason.
    """

    def __str__(self) -> str:
        first, *rest = self.parts or (".",)
        return f"{first}//{'/'.join(rest)}" if first.endswith(":") else "/".join((first, *rest))

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not on this machine")

    @contextmanager
    def storage(self) -> Iterator[tuple[Any, str]]:
        """fsspec's file system and the path in it. Errors in this context become a `StorageError`."""
        from fsspec.core import url_to_fs

        try:
            yield url_to_fs(str(self), use_listings_cache=False)  # other processes write there
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, first_line(error), str(self)) from error
        except Exception as error:  # each kind of storage has its own
            raise StorageError(getattr(error, "errno", None) or errno.EIO, first_line(error), str(self)) from error

    def stat(self, **_: Any) -> os.stat_result:
        """Whether this is a file or a folder, and its size in bytes."""
        with self.storage() as (system, path):
            info = system.info(path)
        kind = stat.S_IFDIR if info["type"] == "directory" else stat.S_IFREG
        return os.stat_result((kind, 0, 0, 0, 0, 0, info["size"] or 0, 0, 0, 0))

    def exists(self, **_: Any) -> bool:
        """Whether there is a file, or a folder that is not empty."""
        return self.is_file() or self.is_dir()

    def is_file(self, **_: Any) -> bool:
        """Whether this exists and is a file."""
        return self._is(stat.S_ISREG)

    def is_dir(self, **_: Any) -> bool:
        """Whether this is a folder that is not empty."""
        return self._is(stat.S_ISDIR)

    def _is(self, kind: Any) -> bool:
        try:
            return kind(self.stat().st_mode)
        except FileNotFoundError:
            return False

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """The files and folders in a folder, none if there is no such folder."""
        names: set[str] = set()
        with suppress(FileNotFoundError), self.storage() as (system, path):
            names = {name.rstrip("/") for name in system.ls(path, detail=False)} - {path.rstrip("/")}
        return (self / name.rpartition("/")[2] for name in sorted(names))

    def open(self, mode: str = "rb", buffering: int = -1, *_: Any, **__: Any) -> IO[Any]:  # type: ignore[override]
        """Open a file of bytes. Each read is a request, except in the first 64 KiB, which are cached.

        With ``buffering``, a request reads that many bytes ahead instead.
        """
        kind = "first" if buffering < 0 else "readahead"
        cache = {"cache_type": kind, "block_size": max(buffering, 2**16)} if mode == "rb" else {}
        with self.storage() as (system, path):
            return system.open(path, mode, **cache)

    def read_bytes(self) -> bytes:
        """The content of a file."""
        with self.storage() as (system, path):
            return system.cat_file(path)

    def write_bytes(self, data: Any) -> int:
        """Write a whole file at once."""
        with self.storage() as (system, path):
            system.pipe_file(path, data)
        return len(data)

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing: a folder exists once a file is in it."""

    def rename(self, target: RemotePath) -> RemotePath:  # type: ignore[override]
        """Copy a file, then remove it."""
        with self.storage() as (system, path), target.storage() as (_, new):
            system.cp_file(path, new)  # not `mv` nor `rm`, which read a name as a pattern
            system.rm_file(path)
        return target

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file."""
        ignored = [FileNotFoundError] if missing_ok else []
        with suppress(*ignored), self.storage() as (system, path):
            system.rm_file(path)

    def rmtree(self) -> None:
        """Remove every file in a folder, in no particular order."""
        with self.storage() as (system, path):
            for name in system.find(path):
                system.rm_file(name)


def is_url(text: str) -> bool:
    """Whether a path is a URL. One whose :// follows a slash is not."""
    scheme, mark, _ = text.partition("://")
    return bool(mark) and "/" not in scheme


def path_of(text: str | os.PathLike[str]) -> Path:
    """The path that a setting names, on this machine or on object storage."""
    return RemotePath(text) if is_url(str(text)) else Path(text)


def scheme_refusal(scheme: str) -> str | None:
    """Why URLs of this kind cannot be used, as the predicate of a sentence; None if they can."""
    from fsspec.registry import get_filesystem_class, known_implementations

    try:
        if scheme not in ("file", "local"):
            get_filesystem_class(scheme)
            return None
    except ImportError:
        return f"is at {scheme}://, which needs a package: {known_implementations[scheme].get('err', scheme)}"
    except ValueError:
        pass
    return f"is at {scheme}://, which is not supported; name a path on this machine, or a URL such as s3://bucket/run"
