"""Records that are read and tokenized while the run goes on: `data.dataset` "hf".

A fixed number R of virtual readers, whatever the layout, shares the shards. Sample i of the run is sample i div R of
reader i mod R, so it is a function of i alone.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import torch

from titan_like.config.schema import Data
from titan_like.data.blend import Blend, BlendedSource
from titan_like.data.packed import BY_RECORD, WHOLE, split_range, split_weights
from titan_like.data.permutation import Permutation
from titan_like.data.shards import find_shards
from titan_like.data.source import IGNORED_LABEL, SPLITS, UNKNOWN_LENGTH, DataRequest, Source
from titan_like.data.stream_reader import Bookmarks, Documents, Part, Reader
from titan_like.data.tokenizer import check_vocabulary, tokenizer_files, tokenizer_of

# Fractions of 2⁶⁴ by which a record's place among the splits advances with its number and with its shard's. They are
# those of the golden ratio and of √2, so that any stretch of records, and any set of short shards, is divided fairly.
_BY_SHARD = 0x6A09E667F3BCC909


def tokenized_times(section: Data, micro_batch_size: int, num_ranks: int) -> int:
    """How many processes tokenize each sample because they share its reader, although only one trains on it.

    Process (rank, worker) reads the samples rank · micro_batch_size + j of every num_workers-th microbatch. So it needs
    the readers with the same remainders modulo ``period``.
    """
    processes = num_ranks * max(1, section.num_workers)
    period = math.gcd(processes * micro_batch_size, section.num_readers)
    return processes * min(micro_batch_size, period) // period


class StreamSource(Source):
    """One split of a stream. A training split never ends; the length of another is unknown until it has been read."""

    def __init__(self, request: DataRequest) -> None:
        """Find the shards; nothing is read yet.

        Raises:
            ConfigError: there are none, or the tokenizer does not fit the model.
        """
        super().__init__(request)
        section = request.section
        self._weights = split_weights(section.split)
        self.tokenizer = tokenizer_of(section)
        check_vocabulary(section.tokenizer, self.tokenizer, request.vocab_size)
        self.shards, self._content = find_shards(section.paths)
        self._begin()

    def _begin(self) -> None:
        self._process, self._lock = os.getpid(), threading.Lock()
        self._readers: dict[int, Reader] = {}
        finalize(self, self._readers.clear)  # closes their files before Python takes its modules apart

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_readers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def __len__(self) -> int:
        """Unknown, or 0 if the split has no whole sample."""
        return 0 if self._is_empty else UNKNOWN_LENGTH

    @cached_property
    def _is_empty(self) -> bool:
        if self._weights[SPLITS.index(self.request.split)] == 0:
            return True
        readers = range(self.request.section.num_readers)
        return self.request.split != "train" and all(self._window(index) is None for index in readers)

    def sample(self, position: int) -> torch.Tensor:
        """Sample ``position`` of the run, int64 [2, seq]."""
        return self[position]

    def described(self, micro_batch_size: int, num_ranks: int) -> str:
        """How many readers there are, whether several processes tokenize the same samples, and what would avoid it."""
        section = self.request.section
        text = f"streaming with {section.num_readers} readers"
        times = tokenized_times(section, micro_batch_size, num_ranks)
        wanted = micro_batch_size * num_ranks * max(1, section.num_workers)
        cure = f"each sample is tokenized {times} times; data.num_readers = {wanted} would avoid it"
        return text if times == 1 else f"{text}: {cure}"

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sample ``index`` of the run: int64 [2, seq], without labels if its reader has come to the split's end."""
        window = self._window(index)
        if window is None:
            inputs = torch.full((self.request.seq_len,), self.tokenizer.eod_id)
            return torch.stack((inputs, torch.full_like(inputs, IGNORED_LABEL)))
        tokens = torch.from_numpy(window)
        return torch.stack((tokens[:-1], tokens[1:]))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the shards' names, sizes and samples of their content, and of all that decides their order."""
        section = self.request.section
        tokens = section.token_options, self.tokenizer.first_ids, self.tokenizer.eod_id
        settings = (self._content, section.num_readers, self._weights, self.request.split, section.text_key, tokens)
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
        for path in tokenizer_files(section.tokenizer):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def _window(self, index: int) -> np.ndarray | None:
        if self._process != os.getpid():  # a copy in a worker of the loader must not move its parent's open files
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # whose threads do not survive a fork
            self._begin()
        sample, number = divmod(index, self.request.section.num_readers)
        with self._lock:
            if number not in self._readers:
                self._readers[number] = self._open(number)
            return self._readers[number].sample(sample)

    def _open(self, number: int) -> Reader:
        request, parts = self.request, self._parts(number)
        is_train = request.split == "train"

        def order(epoch: int) -> list[Part]:
            if not is_train:
                return parts
            shuffled = Permutation(len(parts), "stream", request.seed, request.part, number, epoch)
            return [parts[shuffled(place)] for place in range(len(parts))]

        section, epochs = request.section, None if is_train else 1
        settings = section.text_key, section.bad_lines, self.tokenizer
        documents = Documents(number, section.num_readers, order, epochs, *settings)
        return Reader(documents, request.seq_len, Bookmarks(self._bookmark_folder / f"reader-{number}.jsonl"))

    @cached_property
    def _bookmark_folder(self) -> Path:
        # A file that was changed in place may have the same fingerprint. Its notes would give other samples.
        changed = [shard.changed_at for shard in self.shards]
        request, bad_lines = self.request, self.request.section.bad_lines
        key = repr((self.fingerprint, changed, request.seed, request.part, request.seq_len, bad_lines)).encode()
        return request.cache_folder / f"stream-{hashlib.blake2b(key, digest_size=8).hexdigest()}"

    def _parts(self, reader: int) -> list[Part]:
        """What a reader reads. As many shards as possible are dealt out whole.

        Groups of readers share the rest: each reader takes every k-th record. So all have the same share of the data.
        """
        num_shards, num_readers = len(self.shards), self.request.section.num_readers
        rest = num_shards % num_readers
        dealt = num_shards - rest
        parts = [self._part(shard, 1, 0) for shard in range(reader, dealt, num_readers)]
        groups = math.gcd(rest, num_readers)
        shared = range(dealt + reader % groups, num_shards, groups) if rest else ()
        return parts + [self._part(shard, num_readers // groups, reader // groups) for shard in shared]

    def _part(self, shard: int, modulus: int, remainder: int) -> Part:
        wanted = split_range(self._weights, self.request.split)

        def is_wanted(record: int) -> bool:
            number = record - 1
            return number % modulus == remainder and (number * BY_RECORD + shard * _BY_SHARD) % WHOLE in wanted

        return Part(self.shards[shard], is_wanted)


class BlendedStream(BlendedSource):
    """A blend of one split of several streams. Sample i comes from reader i mod R of a source (see `Blend`).

    So a process still needs only some readers, and takes their samples in order.
    """

    def __init__(self, request: DataRequest, sources: Sequence[Source], weights: Sequence[float | None]) -> None:
        """``weights`` holds the weight of each source.

        Raises:
            ConfigError: a source has a weight so small that it is never drawn.
        """
        super().__init__(request, sources, weights)
        self._readers = Blend(self.blend.shares, request.seed, request.section.num_readers)

    def __len__(self) -> int:
        """Unknown, or 0 if no source has a whole sample."""
        return UNKNOWN_LENGTH if self.sources else 0

    def sample(self, position: int) -> torch.Tensor:
        """Sample ``position`` of the run, int64 [2, seq]."""
        return self[position]

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sample ``index`` of the run: int64 [2, seq], without labels if its source has come to the split's end."""
        number, reader = divmod(index, self._readers.num_readers)
        source, within = self._readers.locate_in_order(number, reader)
        return self.sources[source][within * self._readers.num_readers + reader]

    def described(self, micro_batch_size: int, num_ranks: int) -> str | None:
        """As of a single stream, since all have the same readers."""
        return self.sources[0].described(micro_batch_size, num_ranks)

    def drawn(self, num_samples: int) -> dict[str, float]:
        """Samples of each source after ``num_samples``, by ``samples/NAME``. The length of an epoch is unknown."""
        num_readers = self._readers.num_readers
        each, more = divmod(num_samples, num_readers)
        counts = [self._readers.counts(each + (reader < more), reader) for reader in range(num_readers)]
        totals = map(sum, zip(*counts, strict=True))
        return {f"samples/{name}": count for name, count in zip(self.names, totals, strict=True)}
