"""Local copies of files on object storage."""

import glob
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from titan_like.config.errors import ConfigError, require
from titan_like.config.urls import RemotePath, is_url
from titan_like.data.readers.unfinished import remove

_ENDING, _PART = ".fetched", ".part"
_NAMES = ("name", "Key", "url")  # metadata of a remote file that depends on its name
_TOGETHER = 16  # files that are copied at the same time
_SMALL = ("*.json", "*.txt", "*.jinja", "additional_chat_templates/*.jinja")


def local_paths(paths: Sequence[str], cache: Path) -> list[str]:
    """The paths of `data.paths`, with local copies in ``cache`` in place of URLs and their patterns."""
    local: list[str] = []
    for name in paths:
        prefix = name.removesuffix(".idx").removesuffix(".bin")  # either file of an indexed dataset means both
        pair = [f"{prefix}.idx", f"{prefix}.bin"] if prefix != name or glob.escape(name) == name else []
        local += map(str, fetch([name, *pair], "data.paths", cache)) if is_url(name) else [name]
    return local


def with_small_files(folder: Path) -> Path:
    """A folder on this machine with a checkpoint's files, except tensors; ``folder`` itself if that is here."""
    if not isinstance(folder, RemotePath):
        return folder
    return fetch([f"{glob.escape(str(folder))}/{name}" for name in _SMALL], "checkpoint.folder")[0].parent


def fetch(patterns: Sequence[str], key: str, cache: Path | None = None) -> list[Path]:
    """Copy files and whole folders from URLs, or patterns of URLs, to ``cache``. Returns the paths of the copies.

    The default cache is the user's. The processes of a node share it. The folder's name is a digest of the files'
    versions, so a changed file is copied again, and an interrupted copy continues. Errors name the setting ``key``.
    """
    url = RemotePath(patterns[0])
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan_like" / "data_cache"
    try:
        with url.storage() as (system, _):
            named, files = _listed(system, patterns)
            version = hashlib.sha256(repr(files).encode()).hexdigest()[:16]
            folder = (cache or user_cache) / f"{version}{_ENDING}" / url.parts[0][:-1]
            folder.mkdir(parents=True, exist_ok=True)
            copies = {name: folder / name.lstrip("/") for name in files}
            with FileLock(f"{folder}.lock"):
                missing = [name for name, path in copies.items() if not path.is_file()]
                for start in range(0, len(missing), _TOGETHER):
                    size = sum(files[name][0] or 0 for name in missing[start:])
                    message = f"fetching {url}: {len(missing) - start:,} files are left, {size / 1e6:,.0f} MB"
                    if size > 1e7:
                        print(message, file=sys.stderr, flush=True)
                    batch = missing[start : start + _TOGETHER]
                    system.get(batch, [f"{copies[name]}{_PART}" for name in batch])
                    for name in batch:
                        os.replace(f"{copies[name]}{_PART}", copies[name])
                is_same = not missing or _listed(system, patterns)[1] == files
                if not is_same:
                    remove(folder)
    except OSError as error:
        hint = "correct the URL, the credentials or the network"
        raise ConfigError(key, str(url), f"cannot be fetched ({error.strerror}); {hint}") from None
    require(files, key, str(url), "no such file or folder, and no file matches it as a glob pattern")
    require(is_same, key, str(url), "changed while it was copied; start again when nothing writes there")
    return [folder / name.lstrip("/") for name in named]


def list_files(url: str) -> tuple[list[str], dict[str, tuple[int | None, str]]]:
    """The matches of a URL or of a pattern of URLs, and all their files, with the size and version of each."""
    with RemotePath(url).storage() as (system, _):
        names, files = _listed(system, [url])
        urls = {name: str(RemotePath(system.unstrip_protocol(name))) for name in {*names, *files}}
    return [urls[name] for name in names], {urls[name]: file for name, file in files.items()}


def source_name(path: Path) -> str:
    """A copy's name without the cache's folder, which differs between machines; any other path unchanged."""
    return path.as_posix().rpartition(f"{_ENDING}/")[2]


def _listed(system: Any, patterns: Sequence[str]) -> tuple[list[str], dict[str, tuple[int | None, str]]]:
    """The matches of the patterns, and all their files with the size in bytes and the version of each."""
    matches: dict[str, Any] = {}
    for pattern in patterns:  # a name that exists comes first
        try:
            info = system.info(pattern)
            matches[info["name"]] = info
        except FileNotFoundError:
            matches |= system.glob(pattern, detail=True) if glob.escape(pattern) != pattern else {}
    files: dict[str, Any] = {}
    for name, info in matches.items():
        files |= system.find(name, detail=True) if info["type"] == "directory" else {name: info}
    versions = {
        name: str(sorted((key, str(value)) for key, value in info.items() if key not in _NAMES))
        for name, info in files.items()
    }
    # Leave out objects that only mark a folder, and names whose copy would lie outside it.
    names = [name for name in sorted(files) if not name.endswith("/") and ".." not in name.split("/")]
    return [name.rstrip("/") for name in matches], {name: (files[name]["size"], versions[name]) for name in names}
