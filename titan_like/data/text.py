"""Tokenizes text files into one token file on disk, with an end-of-document token after each document.

The token file is built once for each corpus and tokenizer. The first process of a node that gets the lock builds it,
and all processes read it.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from titan_like.config.errors import ConfigError
from titan_like.config.paths import file_problem
from titan_like.config.schema import Data
from titan_like.data.stored_tokens import StoredTokens
from titan_like.data.tokenizer import Tokenizer, tokenizer_files
from titan_like.data.unfinished import removed_unless_renamed

_FORMAT = 2  # increment this when the same input would give a different token file


@dataclass(frozen=True)
class TokenFile:
    """A tokenized corpus: all its tokens, and the position at which each document ends."""

    tokens: StoredTokens  # uint16 or uint32
    document_ends: np.ndarray  # [documents], int64, exclusive, end-of-document token included


def open_corpus(section: Data, tokenizer: Tokenizer, cache_folder: Path) -> TokenFile:
    """Open the corpus that [data] names. Tokenize it into the cache if it is not there yet.

    Raises:
        ConfigError: no file matches, a file is empty, unreadable or not UTF-8, a JSONL line holds no text, or the cache
            cannot be written, for example on a full disk.
    """
    files = corpus_files(section)
    folder = cache_folder / cache_name(section, files)
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():  # otherwise another process built it while this one waited for the lock
                with removed_unless_renamed(folder.with_suffix(".unfinished")) as unfinished:
                    _build(section, files, tokenizer, unfinished)
                    os.replace(unfinished, folder)
    except OSError as error:
        problem = (
            f"the tokens cannot be written to {cache_folder} ({error.strerror}); make room, or name another folder"
        )
        raise ConfigError("job.dump_folder", str(cache_folder.parent), problem) from None
    dtype = np.dtype(json.loads((folder / "info.json").read_text())["dtype"])
    tokens = StoredTokens(folder / "tokens.bin", dtype)
    return TokenFile(tokens, np.load(folder / "document_ends.npy"))


def corpus_files(section: Data) -> list[Path]:
    """List the corpus's files in a fixed shuffled order, so that a split by position is a fair sample of them.

    Raises:
        ConfigError: no file matches, or a file is empty, unreadable or not text.
    """
    if section.dataset == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        files = []
        for folder, subfolders, names_here in os.walk(root):
            subfolders[:] = set(subfolders) - left_out  # os.walk descends only into what is left in this list
            files += [Path(folder, name) for name in names_here if name.endswith(".py")]
        files = [path for path in files if path.stat().st_size > 0]
        names = {path: path.relative_to(root).as_posix() for path in files}
    else:
        files = _match_paths(section.paths)
        names = {path: path.as_posix() for path in files}
    return sorted(files, key=lambda path: hashlib.sha256(names[path].encode()).digest())


def _match_paths(patterns: list[str]) -> list[Path]:
    """The files that paths and glob patterns match, each once. Refuses files that cannot be text."""
    if not patterns:
        raise ConfigError("data.paths", None, 'dataset "text" needs files; give paths or glob patterns')
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = [Path(pattern)] if os.path.lexists(pattern) else _matches(pattern)
        found |= dict.fromkeys(matches)
    for path in found:
        problem = file_problem(path)
        if problem is not None:
            cure = "; name the files in it, such as *.txt" if problem.startswith("is a folder") else ""
            raise ConfigError("data.paths", str(path), f"{problem}{cure or '; name files of text'}")
        if path.stat().st_size == 0:
            raise ConfigError("data.paths", str(path), "the file is empty; remove it or give one with text")
        if path.suffix == ".json" and _begins_as_json(path):
            problem = (
                "holds JSON, not text; write one document per line as .jsonl (for an array: jq -c '.[]'), or name the "
                "file .txt to train on it as it is"
            )
            raise ConfigError("data.paths", str(path), problem)
    return list(found)


def _matches(pattern: str) -> list[Path]:
    """The regular files that a glob pattern matches, or the first other match if there are none.

    Raises:
        ConfigError: nothing matches.
    """
    everything = [Path(match) for match in glob.glob(pattern, recursive=True)]
    if not everything:
        raise ConfigError("data.paths", pattern, "no such file, and no file matches it as a glob pattern")
    return [path for path in everything if path.is_file()] or everything[:1]


def _begins_as_json(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"[", b"{")


def cache_name(section: Data, files: list[Path]) -> str:
    """Name of a corpus's folder in the cache. It changes with the files, the tokenizer and the way they are read."""
    parts = [str(_FORMAT), section.dataset, section.tokenizer, section.text_key]
    for path in (*files, *tokenizer_files(section.tokenizer)):
        stat = path.stat()
        parts.append(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build(section: Data, files: list[Path], tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenize all files into ``folder``, which must not exist yet.

    Raises:
        ConfigError: the files are not valid text, or hold no document.
    """
    folder.mkdir()
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    ends: list[int] = []
    total, started, last_shown = 0, time.monotonic(), time.monotonic()
    with open(folder / "tokens.bin", "wb") as output:
        for number, path in enumerate(files, start=1):
            for document in _documents(path, section):
                tokens = np.append(tokenizer.encode(document), tokenizer.eod_id).astype(dtype)
                output.write(tokens.tobytes())
                total += len(tokens)
                ends.append(total)
            if time.monotonic() - last_shown > 5:
                last_shown = time.monotonic()
                print(f"tokenizing: {number} of {len(files)} files, {total:,} tokens", file=sys.stderr, flush=True)
    if total == 0:
        raise ConfigError("data.paths", section.paths, "the files hold no documents; give some with text")
    np.save(folder / "document_ends.npy", np.asarray(ends, dtype=np.int64))
    (folder / "info.json").write_text(json.dumps({"dtype": np.dtype(dtype).name}))
    seconds = time.monotonic() - started
    print(f"tokenized {len(files)} files into {total:,} tokens in {seconds:.1f} s", file=sys.stderr, flush=True)


def _documents(path: Path, section: Data) -> Iterator[str]:
    """Yield a file's documents: one for each line of a .jsonl file, otherwise the whole file as one."""
    try:
        text = path.read_text(encoding="utf-8").removeprefix("\ufeff")  # a byte-order mark is not text
    except UnicodeDecodeError as error:
        if section.dataset == "stdlib":  # it has a few files with test data for other encodings
            return
        problem = f"byte {error.start} is not valid UTF-8; convert the file or remove it"
        raise ConfigError("data.paths", str(path), problem) from None
    except OSError as error:
        raise ConfigError("data.paths", str(path), f"cannot be read ({error.strerror})") from None
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON strings may hold other separators
        if line.strip():
            yield _text_of_json(line, f"{path}:{number}", section.text_key)


def _text_of_json(line: str, place: str, key: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError("data.paths", place, f"the line is not JSON ({error.msg}); correct it") from None
    except RecursionError:
        problem = "brackets are nested too deeply; at most a few hundred levels can be read"
        raise ConfigError("data.paths", place, problem) from None
    except ValueError:  # Python does not parse integers of more than 4,300 digits
        raise ConfigError("data.paths", place, "the line has a number with too many digits; write it as text") from None
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        raise ConfigError("data.paths", place, f'the line has no text under "{key}"; set data.text_key')
    try:
        record[key].encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError("data.paths", place, "the text holds half a surrogate pair; correct the escape") from None
    return record[key]
