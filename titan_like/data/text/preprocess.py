"""Turns text into an indexed dataset, on several processes and in constant memory. An interrupted job can be continued.

This process reads the files and writes the tokens, in order; others tokenize. Until the job is complete,
``PREFIX.unfinished`` has its tokens, the length of each document, and the progress of reading.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice, repeat
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import IO, Any

import numpy as np
from filelock import FileLock, Timeout

from titan_like.config.errors import ConfigError, RunError, blamed_on
from titan_like.config.paths import parse_json
from titan_like.config.schema import DEFAULT_TOKENS, TokenOptions
from titan_like.data.chat.records import RECORD_KEYS
from titan_like.data.chat.template import CHAT_FORMAT, Chat, build_chat
from titan_like.data.readers.indexed import DTYPES, token_dtype, write_index
from titan_like.data.readers.raw_text import BadRecord, Piece, UnreadableError, Wanted, read_pieces, texts_of
from titan_like.data.text.long_text import encode_documents, find_cut
from titan_like.data.text.tokenizer import Tokenizer, build_tokenizer

_SECONDS_BETWEEN_REPORTS = 5.0
_MOST_NAMED = 100  # bad lines
_BATCH = 16  # records that are tokenized together
_NO_CUT = "repeats itself so far that it cannot be cut; divide it, or write it as .jsonl"
SKIP = 'set data.bad_lines to "skip"'
_FORMAT = 5  # version of the stored files; another one tokenizes everything again


@dataclass(frozen=True)
class Job:
    """Files to tokenize, with the settings that determine their tokens."""

    files: list[Path]
    tokenizer: str  # a value of `data.tokenizer`
    text_key: str = "text"
    token_options: TokenOptions = DEFAULT_TOKENS
    ends_documents: bool = True  # whether an end-of-document token follows each document
    bad_lines: str = "stop"  # or "skip", as `data.bad_lines`
    key: str = "data.paths"  # setting that errors about a file name
    tokenizer_key: str = "data.tokenizer"
    hint: str = f"correct it, set data.text_key, or {SKIP}"  # for a bad line
    template: str | None = None  # of records that are conversations: the chat template, or "" for none
    template_kwargs: str = "{}"  # variables for it, as JSON text

    @property
    def num_sequences(self) -> int:
        """Sequences per document. A conversation has two: its tokens, and the bounds of its answers."""
        return 1 if self.template is None else 2

    def fingerprint(self) -> str:
        """A digest of the files' paths, sizes and times of change, of the tokenizer, and of the settings."""
        tokenizer = build_tokenizer(self.tokenizer, self.tokenizer_key, self.token_options)
        parts: list[object] = [_FORMAT, self.tokenizer, self.text_key, self.ends_documents]
        parts += [*self.token_options, tokenizer.first_ids, tokenizer.eod_id, tokenizer.digest]
        if self.template is not None:
            ends = sorted(tokenizer.stop_ids)  # learned where they follow an answer
            parts += [self.template, self.template_kwargs, self.num_sequences, CHAT_FORMAT, ends]
        stats = ((path.resolve(), path.stat()) for path in self.files)
        parts += [f"{path}:{stat.st_size}:{stat.st_mtime_ns}" for path, stat in stats]
        return hashlib.sha256(os.fsencode("\n".join(map(str, parts)))).hexdigest()[:16]


@dataclass(frozen=True)
class Progress:
    """The progress of a job."""

    fingerprint: str
    file: int = 0  # index of the current file
    end: int = 0  # end of its last written piece; a text is written whole
    record: int = 1  # number of its next record
    documents: int = 0  # for conversations, sequences
    tokens: int = 0
    bad_lines: int = 0
    unread: dict[str, int] = field(default_factory=dict)  # as `Chat.unread`


def tokenize_files(job: Job, prefix: Path, num_workers: int = 0) -> Progress:
    """Write ``prefix``.bin and .idx, which appear when they are complete. ``num_workers`` 0: this process tokenizes.

    Bad lines are counted, and the first ones printed. After an error, a later call continues the written dataset.

    Raises a `ConfigError` about a file, a bad line, another job in the same place or no document at all, a `RunError`
    if a process died, and an `OSError` if the dataset cannot be written.
    """
    folder = prefix.with_name(f"{prefix.name}.unfinished")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            return _complete(job, prefix, folder, num_workers)
    except Timeout:
        reason = "another job is writing it; wait until that has ended, or name another place"
        raise ConfigError("--output", str(prefix), reason) from None


def _complete(job: Job, prefix: Path, folder: Path, num_workers: int) -> Progress:
    """Complete a dataset, which may have been interrupted at any moment."""
    tokens, index = folder / "tokens.bin", folder / "index"
    vocab_size = build_tokenizer(job.tokenizer, job.tokenizer_key, job.token_options).vocab_size
    dtype = token_dtype(vocab_size) if job.template is None else DTYPES[4]  # borders may be large
    output = _Output(folder, dtype, _read_progress(folder, job))
    if tokens.exists() or not index.exists():
        try:
            with output:
                _write_tokens(job, output, num_workers)
            if output.progress.documents == 0:
                reason = "there is no document in it, nor in another file; give some with text"
                raise ConfigError(job.key, str(job.files[0]), reason)
        except ConfigError:
            # If the folder stayed, the corrected job would be refused.
            if output.progress.documents == 0:
                shutil.rmtree(folder)
            raise
        sizes = np.memmap(folder / "lengths.bin", "<i4", "r")
        write_index(index, dtype, sizes, range(0, len(sizes) + 1, job.num_sequences))
        os.replace(tokens, f"{prefix}.bin")
    os.replace(index, f"{prefix}.idx")
    shutil.rmtree(folder)
    return output.progress


def report(line: str) -> None:
    """Print a line of progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def _read_progress(folder: Path, job: Job) -> Progress:
    try:
        progress = Progress(**parse_json((folder / "progress.json").read_text()))
    except (OSError, ValueError, TypeError):
        return Progress(job.fingerprint())
    if not (folder / "tokens.bin").exists() and not (folder / "index").exists():  # both have their final names
        return Progress(job.fingerprint())
    if progress.fingerprint != job.fingerprint() or (progress.bad_lines and job.bad_lines == "stop"):
        reason = "an interrupted job with other input or settings is there; repeat that one, or delete the folder"
        raise ConfigError("--output", str(folder), reason)
    return progress


class _Output:
    """The unfinished dataset."""

    def __init__(self, folder: Path, dtype: np.dtype, progress: Progress) -> None:
        self.folder, self.dtype, self.progress = folder, dtype, progress
        self._files: dict[str, IO[bytes]] = {}
        self._open = 0  # tokens written of a text that is not complete

    def __enter__(self) -> _Output:
        sizes = {"tokens": self.progress.tokens * self.dtype.itemsize, "lengths": self.progress.documents * 4}
        for name, size in sizes.items():
            self._files[name] = open(self.folder / f"{name}.bin", "ab")
            self._files[name].truncate(size)  # tokens after the last progress are written again
        return self

    def add(self, tokens: np.ndarray, lengths: list[int], is_whole: bool, read: Progress) -> None:
        """Append a part of a document or, if it ``is_whole``, documents, with the progress of reading by then."""
        self._files["tokens"].write(tokens.tobytes())
        if not is_whole:
            self._open += len(tokens)
            return
        if lengths:
            lengths[0] += self._open
        self._files["lengths"].write(np.array(lengths, "<i4").tobytes())
        # Last, and in one assignment: after an interruption, or with a full disk, the progress matches the files.
        self.progress = replace(read, documents=read.documents + len(lengths), tokens=read.tokens + sum(lengths))
        self._open = 0

    def drop_open_document(self, read: Progress) -> None:
        """Remove the written part of a text that turned out to be bad."""
        self._files["tokens"].truncate(self.progress.tokens * self.dtype.itemsize)
        self.progress, self._open = read, 0

    def save(self) -> None:
        """Flush everything so far to disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        (self.folder / "progress.new").write_text(json.dumps(asdict(self.progress)))
        os.replace(self.folder / "progress.new", self.folder / "progress.json")

    def __exit__(self, *_: object) -> None:
        try:
            self.save()
        finally:
            for file in self._files.values():
                file.close()


def _write_tokens(job: Job, output: _Output, num_workers: int) -> None:
    sizes = [max(1, path.stat().st_size) for path in job.files]
    began = reported = time.monotonic()
    tokens_before, done_before = output.progress.tokens, None
    for number, piece, share, result in _tokenized(job, output.progress, num_workers, output.dtype):
        tokens, lengths, bad, unread = result
        path, is_text = job.files[number], piece.kind == "text"
        progress = output.progress
        if number < progress.file:  # the rest of a text that is skipped
            continue
        for before, (record, reason) in enumerate(bad, progress.bad_lines):
            place = str(path) if is_text else f"{path}:{record}"
            if job.bad_lines == "stop":
                raise ConfigError(job.key, place, reason if is_text else f"{reason}; {job.hint}")
            if before < _MOST_NAMED:
                report(f"skipped {place}: {reason}")
        if is_text:
            progress = replace(progress, file=number + 1, end=0, record=1)
        else:
            record = piece.first_record + piece.num_records
            progress = replace(progress, file=number, end=piece.end, record=record)
        unread = dict(Counter(progress.unread) + Counter(unread))
        progress = replace(progress, bad_lines=progress.bad_lines + len(bad), unread=unread)
        if bad and is_text:
            output.drop_open_document(progress)
        else:
            output.add(tokens, lengths, not piece.after, progress)
        done = (sum(sizes[:number]) + share * sizes[number]) / sum(sizes)
        done_before = done if done_before is None else done_before
        now = time.monotonic()
        if now - reported >= _SECONDS_BETWEEN_REPORTS:
            reported = now
            seconds = now - began
            gained = done - done_before
            rate = (output.progress.tokens - tokens_before) / seconds
            eta = f", {seconds * (1 - done) / gained:.0f} s left" if gained > 0 else ""
            output.save()
            counts = f"file {number + 1} of {len(sizes)}, {output.progress.tokens:,} tokens, {rate:,.0f} tokens/s{eta}"
            report(f"tokenizing: {done:.1%}, {counts}")
    if bad_lines := output.progress.bad_lines:
        records = bad_lines + output.progress.documents // job.num_sequences
        report(f"skipped {bad_lines:,} of {records:,} records")
    if output.progress.unread:
        ignored = (f"{name} ({count:,} times)" for name, count in sorted(output.progress.unread.items()))
        report(f"the chat template does not write, and training ignores: {', '.join(ignored)}")


# Tokens; documents' lengths; bad lines with the reasons; fields of conversations that are ignored, as `Chat.unread`.
Result = tuple[np.ndarray, list[int], list[tuple[int, str]], dict[str, int]]


def _tokenized(
    job: Job, progress: Progress, num_workers: int, dtype: np.dtype
) -> Iterator[tuple[int, Piece, float, Result]]:
    """Yield the number of a file, a piece of it, the fraction read so far, and the piece's tokens, in file order."""
    if num_workers == 0:
        pieces = _pieces(job, progress)
        yield from ((number, piece, share, _tokenize(piece, job, dtype.str)) for number, piece, share in pieces)
        return
    work = replace(job, files=[])  # workers need none, and there may be many
    with ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker) as pool:
        waiting: deque[tuple[int, Piece, float, Future[Result]]] = deque()
        pieces = _pieces(job, progress)
        try:
            while True:
                for number, piece, share in islice(pieces, 1 + 2 * num_workers - len(waiting)):
                    waiting.append((number, piece, share, pool.submit(_tokenize, piece, work, dtype.str)))
                if not waiting:
                    return
                number, piece, share, future = waiting.popleft()
                yield number, piece, share, future.result()
        except BrokenProcessPool:
            reason = "a worker died, perhaps for lack of memory; run the same command with fewer workers"
            raise RunError(reason) from None
        finally:
            for *_, future in waiting:
                future.cancel()


def _pieces(job: Job, progress: Progress) -> Iterator[tuple[int, Piece, float]]:
    start, record = progress.end, progress.record
    cut = partial(find_cut, build_tokenizer(job.tokenizer, job.tokenizer_key, job.token_options))
    for number in range(progress.file, len(job.files)):
        key = job.text_key if job.template is None else RECORD_KEYS
        with blamed_on(job.key, str(job.files[number]), UnreadableError):
            for piece, share in read_pieces(job.files[number], key, start, record, cut):
                yield number, piece, share
        start, record = 0, 1


def documents_of(
    piece: Piece, key: str, tokenizer: Tokenizer, is_wanted: Wanted = lambda record: True, ends: bool = True
) -> Iterator[tuple[int, np.ndarray | BadRecord]]:
    """The number of each wanted record of a piece, with its tokens, int64 [tokens], or a `BadRecord`.

    A part of a long text has context around it; see `encode_documents`.
    """
    records = texts_of(piece, key, is_wanted)
    while batch := list(islice(records, _BATCH)):
        texts = [text for _, text in batch if isinstance(text, str)]
        documents = encode_documents(tokenizer, texts, ends, piece.before, piece.after) if texts else []
        results: Iterator[Any] = repeat(BadRecord(_NO_CUT)) if documents is None else iter(documents)
        for number, text in batch:
            yield number, next(results) if isinstance(text, str) else text


def _tokenize(piece: Piece, job: Job, dtype: str) -> Result:
    """Tokenize a piece, in this process or in a worker."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes share the work already
    unread: Counter[str] = Counter()
    if job.template is None:
        tokenizer = build_tokenizer(job.tokenizer, job.tokenizer_key, job.token_options)  # each process keeps it
        documents = documents_of(piece, job.text_key, tokenizer, ends=job.ends_documents)
    else:
        chat = build_chat(job.tokenizer, job.token_options, job.template, job.template_kwargs)
        chat.unread = unread
        documents = _conversations(piece, chat)
    parts, bad = [np.empty(0, np.int64)], []
    for number, part in documents:
        if isinstance(part, BadRecord):
            bad.append((number, str(part)))
        else:
            parts.append(part)
    return np.concatenate(parts).astype(dtype), list(map(len, parts[1:])), bad, unread


def _conversations(piece: Piece, chat: Chat) -> Iterator[tuple[int, np.ndarray | BadRecord]]:
    """Each record's tokens and then the bounds of its answers, or a `BadRecord`."""
    for number, record in texts_of(piece, None):
        try:
            tokens, is_answer = chat.encode(record)
            yield number, tokens
            yield number, np.flatnonzero(np.diff(is_answer, prepend=False, append=False))
        except BadRecord as error:
            yield number, error


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that writes handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when the process that writes has died, or the pool's queue would wait forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
