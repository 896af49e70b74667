"""Packed samples for causal language models: windows of seq_len tokens over the concatenated documents.

Text files become an indexed dataset in the run's cache, with an end-of-document token after each document, once for
each corpus and tokenizer. The process of a node that gets the lock first builds it, and all processes read it.
"""

import hashlib
import json
import os
import re
import sysconfig
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from math import inf
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock

from titan_like.config.entry_points import format_of
from titan_like.config.errors import FULL, ConfigError, require
from titan_like.config.schema import HELD_OUT, Data
from titan_like.data.batch import Batch, arrays_of
from titan_like.data.chat.records import RECORD_KEYS, RESERVED
from titan_like.data.chat.template import read_template
from titan_like.data.readers.fetch import source_name
from titan_like.data.readers.files import find_files
from titan_like.data.readers.indexed import IndexedDataset, StoredTokens
from titan_like.data.readers.raw_text import RECORD_ENDINGS
from titan_like.data.readers.unfinished import remove
from titan_like.data.source import SPLITS, DataRequest, Source
from titan_like.data.text.preprocess import SKIP, Job, report, tokenize_files
from titan_like.data.text.tokenizer import tokenizer_of

_CHECKED = 64  # documents at the beginning of a dataset
BY_RECORD, WHOLE = 0x9E3779B97F4A7C15, 1 << 64  # multiples of the first are spread evenly, modulo the second
_PIECES, _PIECE = 64, 4096  # number of pieces that `token_fingerprint` samples, and tokens in each


def split_weights(text: str) -> tuple[float, float, float]:
    """Shares of train, validation and test, which sum to 1, from a text such as "969,30,1"."""
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    is_valid = len(weights) == 3 and all(weight >= 0 for weight in weights) and sum(weights) < inf
    is_valid = is_valid and (weights[0] > 0 or text == HELD_OUT)
    reason = 'must be three weights for train, validation and test, like "969,30,1"'
    require(is_valid, "data.split", text, reason)
    train, validation, test = (weight / sum(weights) for weight in weights)
    return train, validation, test


def split_bounds(total: int, nearest_end: Callable[[int], int], weights: tuple[float, float, float]) -> list[int]:
    """Token positions [0, a, b, total] that bound the three splits.

    Each bound is the ``nearest_end`` of a document. If that would leave a split without tokens (for example in a corpus
    of one long document), the bound is inside a document.
    """
    bounds = [0]
    for split, share in enumerate(accumulate(weights[:2])):
        exact = round(share * total)
        nearest = nearest_end(exact)
        later_needed = any(weight > 0 for weight in weights[split + 1 :])
        empty = (weights[split] > 0 and nearest <= bounds[-1]) or (later_needed and nearest >= total)
        bounds.append(max(exact if empty else nearest, bounds[-1]))
    return [*bounds, total]


def split_range(weights: tuple[float, float, float], split: str) -> range:
    """The split's part of 0 … 2^64 - 1. A record's split is the one that contains its number times `BY_RECORD`."""
    number = SPLITS.index(split)
    first, last = (round(sum(weights[:end]) * WHOLE) for end in (number, number + 1))
    return range(first, WHOLE if number == 2 else last)


def next_tokens(window: np.ndarray) -> Batch:
    """A window, integers [seq + 1], as a sample whose labels are the next tokens."""
    tokens = torch.from_numpy(window.astype(np.int64))
    return Batch(tokens[:-1], tokens[1:])


class PackedDataset(Source):
    """Windows of seq_len + 1 tokens over one long stream. The labels are the inputs shifted by one."""

    def __init__(self, request: DataRequest, tokens: np.ndarray | StoredTokens) -> None:
        """``tokens``, integers [total]: the tokens of the split only."""
        super().__init__(request)
        self.tokens = tokens

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.request.seq_len)

    def sample(self, position: int) -> Batch:
        """Window ``position``."""
        seq_len = self.request.seq_len
        return next_tokens(self.tokens[position * seq_len : (position + 1) * seq_len + 1])

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the split's tokens; see `token_fingerprint`."""
        return token_fingerprint(self.tokens)


class TextSource(PackedDataset):
    """Text that is tokenized the first time it is read: `data.dataset` "stdlib" and "text"."""

    def __init__(self, request: DataRequest) -> None:
        """Open the corpus, or tokenize it into the cache."""
        section = request.section
        weights = split_weights(section.split)  # checked before the text is tokenized, which may take hours
        tokenizer_of(section, request.vocab_size)  # likewise
        super().__init__(request, _split_of(open_corpus(section, request.cache_folder), weights, request))


class IndexedSource(PackedDataset):
    """One dataset of Megatron-LM: `data.dataset` "indexed"."""

    def __init__(self, request: DataRequest) -> None:
        """Open and check its two files, and its ends of documents if a setting depends on them."""
        weights, paths = split_weights(request.section.split), request.section.paths
        require(paths, "data.paths", None, 'dataset "indexed" needs the paths of .bin and .idx files')
        self.path = str(paths[0])
        dataset = IndexedDataset(self.path)
        if request.section.separates_documents:
            _check_ends(dataset, self.path, tokenizer_of(request.section).eod_id)
        super().__init__(request, _split_of(dataset, weights, request))

    def sample(self, position: int) -> Batch:
        """Window ``position``. Raises a `ConfigError` if the model lacks a token of it."""
        sample, size = super().sample(position), self.request.vocab_size
        tokens = np.append(*arrays_of(sample))
        wrong = tokens[(tokens < 0) | (tokens >= size)]
        if len(wrong):
            reason = f"contains the token {wrong[0]}, but the model's vocab_size is {size}"
            hint = "set model.overrides.vocab_size, or name a dataset of the model's tokenizer"
            raise ConfigError("data.paths", self.path, f"{reason}; {hint}")
        return sample


def _check_ends(dataset: IndexedDataset, path: str, eod_id: int) -> None:
    """Refuse a dataset none of whose first documents ends with the end-of-document token."""
    ends = [dataset.document_end(number) for number in range(min(dataset.num_documents, _CHECKED))]
    is_ended = any(end > 0 and dataset.tokens[end - 1 : end][0] == eod_id for end in ends)
    reason = f"its documents do not end with token {eod_id}, the end of document of data.tokenizer, so masks and "
    reason += "positions cannot follow them; set data.tokenizer to theirs, or write them with --append_eod"
    require(is_ended, "data.paths", path, reason)


def _split_of(dataset: IndexedDataset, weights: tuple[float, float, float], request: DataRequest) -> StoredTokens:
    """The tokens of one split. A training split without a whole sample is refused."""
    bounds = split_bounds(len(dataset.tokens), dataset.nearest_document_end, weights)
    number = SPLITS.index(request.split)
    part = dataset.tokens.part(bounds[number], bounds[number + 1])
    is_enough = request.split != "train" or len(part) > request.seq_len
    of_dataset = f" of {dataset.prefix}" if format_of(request.section.dataset).is_tokenized else ""
    reason = f"the training split{of_dataset} has {len(part)} tokens, fewer than seq_len + 1; add text or lower it"
    require(is_enough, "training.seq_len", request.seq_len, reason)
    return part


def token_fingerprint(tokens: np.ndarray | StoredTokens) -> str:
    """Digest of the length and of evenly spaced pieces of a token stream [total], which is fast for any length."""
    starts = np.linspace(0, max(0, len(tokens) - _PIECE), _PIECES).astype(np.int64)
    digest = hashlib.blake2b(str(len(tokens)).encode(), digest_size=16)
    for start in starts:
        digest.update(tokens[start : start + _PIECE].astype(np.int64).tobytes())
    return digest.hexdigest()


def open_corpus(section: Data, cache_folder: Path) -> IndexedDataset:
    """Open the corpus that [data] names, or tokenize it into the cache. Raises a `ConfigError` if that fails."""
    job = corpus_job(section)
    folder = corpus_folder(job, cache_folder)
    unfinished = folder.with_suffix(".unfinished")  # of an interrupted run, which this one continues
    try:
        cache_folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.exists():  # otherwise another process built it while this one waited for the lock
                began = time.monotonic()
                done = tokenize_files(job, unfinished / "tokens")
                seconds = time.monotonic() - began
                report(f"tokenized {len(job.files)} files into {done.tokens:,} tokens in {seconds:.1f} s")
                os.replace(unfinished, folder)
    except ConfigError:
        remove(unfinished)  # a corrected file makes another corpus
        raise
    except OSError as error:
        hint = "make room, or name another folder" if error.errno in FULL else "name a place that you may write to"
        reason = f"the tokens cannot be written to {cache_folder} ({error.strerror}); {hint}"
        raise ConfigError("job.dump_folder", str(cache_folder.parent), reason) from None
    return IndexedDataset(folder / "tokens")


def corpus_job(section: Data) -> Job:
    """The job that tokenizes the corpus. Raises the errors of `corpus_files`."""
    data_format = format_of(section.dataset)
    # The user cannot correct the standard library, so its files that are not UTF-8 are skipped.
    bad_lines = section.bad_lines if data_format.has_files else "skip"
    files = corpus_files(section)
    if not data_format.is_chat:
        return Job(files, section.tokenizer, section.text_key, section.token_options, bad_lines=bad_lines)
    chat = read_template(section.tokenizer)
    template = f"{chat.chat_template} {chat.special_tokens_map}" if chat else ""
    for name, value in section.chat_template_kwargs.items():
        reason = f"the chat template of {section.tokenizer} has no such variable; remove it"
        is_variable = re.search(rf"\b{re.escape(name)}\b", template) and name not in RESERVED
        require(is_variable, f"data.chat_template_kwargs.{name}", value, reason)
    tokens, hint = section.token_options, f"correct or remove it, or {SKIP}"
    job = Job(files, section.tokenizer, token_options=tokens, bad_lines=bad_lines, hint=hint, template=template)
    return replace(job, template_kwargs=json.dumps(section.chat_template_kwargs, sort_keys=True))


def corpus_folder(job: Job, cache_folder: Path) -> Path:
    """The folder of the complete tokens, which also depends on whether bad lines are skipped."""
    return cache_folder / (job.fingerprint() + ("-skip" if job.bad_lines == "skip" else ""))


def corpus_files(section: Data) -> list[Path]:
    """List the corpus's files in a fixed shuffled order, so that a split by position is a fair sample of them."""
    data_format = format_of(section.dataset)
    if not data_format.has_files:
        root = Path(sysconfig.get_paths()["stdlib"])
        left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
        files = []
        for folder, subfolders, file_names in os.walk(root):
            subfolders[:] = set(subfolders) - left_out  # os.walk descends only into this list
            files += [Path(folder, name) for name in file_names if name.endswith(".py")]
        files = [path for path in files if path.stat().st_size > 0]
        names = {path: path.relative_to(root).as_posix() for path in files}
    else:
        reason = f'dataset "{section.dataset}" needs files; give paths or glob patterns'
        require(section.paths, "data.paths", None, reason)
        no_text = f"conversations are records of {', '.join((*RECORD_ENDINGS[:3], '.csv'))} files; write it as one"
        no_text = no_text if data_format.is_chat else ""
        files = find_files(section.paths, "data.paths", no_text, section.read_split, RECORD_KEYS)
        names = {path: source_name(path) for path in files}
    return sorted(files, key=lambda path: hashlib.sha256(os.fsencode(names[path])).digest())
