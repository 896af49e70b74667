"""Records that are read and tokenized during the run: `data.dataset` "hf".

A fixed number R of virtual readers, whatever the layout, shares the shards. Sample i of the run is sample i div R of
reader i mod R, so it is a function of i alone.

In each epoch, the shards are laid end to end in another order and cut into R equal parts (see `partition`). Reader r
reads part (r + epoch) mod R, and nothing else. So every record is read once an epoch.
"""

import math
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any
from weakref import finalize

import numpy as np
from torch.utils.data import get_worker_info

from titan_like.config.schema import Data
from titan_like.data.batch import Batch, without_labels
from titan_like.data.loading.blend import BlendedSource
from titan_like.data.loading.permutation import Permutation
from titan_like.data.loading.stream_reader import Documents, Place, Reader, ReaderState
from titan_like.data.readers.partition import SQRT_2, Part, is_in, parts_of
from titan_like.data.readers.raw_text import Piece
from titan_like.data.readers.shards import find_shards, numbers_of, sizes_of
from titan_like.data.source import SPLITS, UNKNOWN_LENGTH, DataRequest, Source, digest_of
from titan_like.data.text.packed import BY_RECORD, WHOLE, next_tokens, split_range, split_weights
from titan_like.data.text.tokenizer import tokenizer_of

_DIVISION = "parts of equal size"  # in the fingerprint: another way of dividing records is another stream


def tokenized_times(section: Data, micro_batch_size: int, num_ranks: int) -> int:
    """Number of processes that tokenize each sample because they share its reader, although only one trains on it.

    Process (rank, worker) reads the samples rank · micro_batch_size + j of every num_workers-th microbatch. So it needs
    the readers with the same remainders modulo ``period``.
    """
    processes = num_ranks * max(1, section.num_workers)
    period = math.gcd(processes * micro_batch_size, section.num_readers)
    return processes * min(micro_batch_size, period) // period


class StreamSource(Source):
    """One split of a stream. A training split never ends; the length of another is unknown until it has been read."""

    def __init__(self, request: DataRequest) -> None:
        """Find the shards. Raises a `ConfigError` if there are none, or the model lacks tokens of the tokenizer."""
        super().__init__(request)
        section = request.section
        self._weights = split_weights(section.split)
        self.tokenizer = tokenizer_of(section, request.vocab_size)
        self.shards, self._content = find_shards(section.paths, section.read_split, section.text_key)
        self._sizes = sizes_of(self.shards)
        self._order = -1, list[int]()  # of the last epoch that was asked for
        self._states: dict[str, list[int]] = {}  # where each reader of this process continues
        # By process and number: a copy in a worker of the loader must not move its parent's open files.
        self._readers: dict[tuple[int, int], Reader] = {}
        finalize(self, self._readers.clear)  # closes their files before Python unloads its modules

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_readers": {}}

    def __len__(self) -> int:
        """Unknown, or 0 if the split has no whole sample."""
        return 0 if self._is_empty else UNKNOWN_LENGTH

    @cached_property
    def _is_empty(self) -> bool:
        if self._weights[SPLITS.index(self.request.split)] == 0:
            return True
        readers = range(self.request.section.num_readers)
        return self.request.split != "train" and all(self._window(index) is None for index in readers)

    def described(self, micro_batch_size: int, num_ranks: int) -> str:
        """A line with the number of readers and a hint if several processes tokenize the same samples."""
        section = self.request.section
        text = f"streaming with {section.num_readers} readers"
        times = tokenized_times(section, micro_batch_size, num_ranks)
        enough = micro_batch_size * num_ranks * max(1, section.num_workers)
        hint = f"each sample is tokenized {times} times; data.num_readers = {enough} would avoid it"
        return text if times == 1 else f"{text}: {hint}"

    def __getitem__(self, index: int) -> Batch:
        """Sample ``index`` of the run, without labels past the end of its reader's data."""
        window = self._window(index)
        if window is None:
            return without_labels(next_tokens(np.full(self.request.seq_len + 1, self.tokenizer.eod_id)))
        return next_tokens(window)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the shards' names, sizes and samples of their content, and of the settings of their order."""
        section = self.request.section
        order = section.num_readers, self._weights, self.request.split, section.text_key
        tokens = section.token_options, self.tokenizer.first_ids, self.tokenizer.eod_id, self.tokenizer.digest
        return digest_of(_DIVISION, self._content, *order, tokens)

    def _window(self, index: int) -> np.ndarray | None:
        sample, number = divmod(index, self.request.section.num_readers)
        reader = self._readers.get((os.getpid(), number)) or self._open(number)
        window = reader.sample(sample)
        *before, place = reader.state
        self._states[f"{self._state_key}/{number}"] = [*before, *place]
        return window

    def _open(self, number: int) -> Reader:
        if get_worker_info() is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads do not survive a fork
        sample, offset, *place = self._states.get(f"{self._state_key}/{number}", [0, 0])
        start = ReaderState(sample, offset, Place(*place))
        reader = self._readers[os.getpid(), number] = Reader(Documents(self, number), self.request.seq_len, start)
        return reader

    def state_dict(self) -> dict[str, list[int]]:
        """Where each reader of this process continues."""
        return dict(self._states)

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Let readers continue where any layout's readers stopped. State of other data or another order is ignored."""
        self._states = {key: mark for key, mark in state.items() if key.startswith(f"{self._state_key}/")}
        self._readers.clear()

    @cached_property
    def _state_key(self) -> str:
        request = self.request
        return digest_of(self.fingerprint, request.seed, request.part, request.seq_len, request.section.bad_lines)

    def parts(self, reader: int, epoch: int, num_readers: int | None = None) -> Iterator[Part]:
        """The parts of shards that a reader reads in an epoch, in order."""
        request, num_readers = self.request, num_readers or self.request.section.num_readers
        last_epoch, order = self._order
        if last_epoch != epoch:
            order = list(range(len(self.shards)))
            if request.split == "train":
                order = list(map(Permutation(len(order), "stream", request.seed, request.part, epoch), order))
            self._order = epoch, order
        return parts_of(self._sizes, order, (reader + epoch) % num_readers, num_readers)

    def records_of(self, piece: Piece, part: Part) -> list[int]:
        """The records of a piece, counted as the piece does, that are in a part of its shard and in the split."""
        cut, split = self.shards[part.shard].cut, split_range(self._weights, self.request.split)
        if not split:
            return []
        numbers = numbers_of(piece, cut)
        # Multiples of the golden ratio (`BY_RECORD`) divide any stretch of records fairly, those of √2 short shards.
        among_splits = numbers * np.uint64(BY_RECORD) + np.uint64(part.shard * SQRT_2 % WHOLE)
        chosen = (among_splits >= split[0]) & (among_splits <= split[-1])
        if cut == "records":
            chosen &= is_in(part, numbers)
        return (piece.first_record + np.flatnonzero(chosen)).tolist()


class BlendedStream(BlendedSource):
    """A blend of one split of several streams. Sample i comes from reader i mod R of a source, so that a process needs
    only some readers, and reads their samples in order (see `Blend`).
    """

    is_in_order = True

    def __len__(self) -> int:
        """Unknown, or 0 if no source has a whole sample."""
        return UNKNOWN_LENGTH if self.sources else 0

    def __getitem__(self, index: int) -> Batch:
        """Sample ``index`` of the run, without labels past the end of its source."""
        source, within = self.locate(index)
        return self.sources[source][within]

    def state_dict(self) -> dict[str, list[int]]:
        """Where the readers of all sources continue."""
        return {key: mark for source in self.sources for key, mark in (source.state_dict() or {}).items()}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Pass the state to every source, which ignores the parts of others."""
        for source in self.sources:
            source.load_state_dict(state)
