"""Tokenizes text files into an indexed dataset in the run's cache, with an end-of-document token after each document.

It is built once for each corpus and tokenizer. The first process of a node that gets the lock builds it, and all
processes read it.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
import time
from pathlib import Path

from filelock import FileLock

from titan_like.config.errors import ConfigError, cure_of_writing
from titan_like.config.schema import Data
from titan_like.data.indexed import IndexedDataset
from titan_like.data.preprocess import Job, tell, tokenize_files
from titan_like.data.raw_text import named_paths, text_problem
from titan_like.data.unfinished import removed_unless_renamed


def open_corpus(section: Data, cache_folder: Path) -> IndexedDataset:
    """Open the corpus that [data] names. Tokenize it into the cache if it is not there yet.

    Raises:
        ConfigError: no file matches, a file is empty, unreadable or not UTF-8, a JSONL line holds no text, or the cache
            cannot be written, for example on a full disk.
    """
    job = corpus_job(section)
    folder = corpus_folder(job, cache_folder)
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():  # otherwise another process built it while this one waited for the lock
                with removed_unless_renamed(folder.with_suffix(".unfinished")) as unfinished:
                    _build(job, unfinished)
                    os.replace(unfinished, folder)
    except OSError as error:
        problem = f"the tokens cannot be written to {cache_folder} ({error.strerror}); {cure_of_writing(error)}"
        raise ConfigError("job.dump_folder", str(cache_folder.parent), problem) from None
    return IndexedDataset(folder / "tokens")


def corpus_job(section: Data) -> Job:
    """What is to be tokenized.

    Raises:
        ConfigError: no file matches, or one is unfit.
    """
    # Nobody can be asked to correct the standard library, so files of it that are not UTF-8 are left out.
    is_stdlib = section.dataset == "stdlib"
    return Job(corpus_files(section), section.tokenizer, section.text_key, skips_bad_records=is_stdlib)


def corpus_folder(job: Job, cache_folder: Path) -> Path:
    """Where the tokens are once they have been made."""
    return cache_folder / job.fingerprint()


def _build(job: Job, folder: Path) -> None:
    began = time.monotonic()
    done = tokenize_files(
        job, folder / "tokens", report=lambda line: None if line.startswith("skipped") else tell(line)
    )
    seconds = time.monotonic() - began
    tell(f"tokenized {len(job.files)} files into {done.tokens:,} tokens in {seconds:.1f} s")


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
    return sorted(files, key=lambda path: hashlib.sha256(os.fsencode(names[path])).digest())


def _match_paths(patterns: list[str]) -> list[Path]:
    """The files that paths and glob patterns match, each once. Refuses files that cannot be text."""
    if not patterns:
        raise ConfigError("data.paths", None, 'dataset "text" needs files; give paths or glob patterns')
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = named_paths(pattern)
        if not matches:
            raise ConfigError("data.paths", pattern, "no such file, and no file matches it as a glob pattern")
        # A pattern passes over what is not a file, unless it matches nothing else.
        found |= dict.fromkeys([path for path in matches if os.path.isfile(path)] or matches[:1])
    for path in found:
        problem = text_problem(path)
        if problem is not None:
            raise ConfigError("data.paths", str(path), problem)
    return list(found)
