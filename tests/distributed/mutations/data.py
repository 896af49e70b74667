"""Bugs in the order of samples and in the reading of data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from titan_like.data import source, stream, stream_reader
from titan_like.data.blend import Blend
from titan_like.data.loader import BackgroundLoader, GlobalSampler
from titan_like.data.packed import PackedDataset
from titan_like.data.permutation import Permutation
from titan_like.data.stream_reader import Documents, Place, Reader


@contextmanager
def a_sample_is_skipped_at_each_bookmark() -> Iterator[None]:
    """A reader reads past a sample after it has written down where it is."""
    original = Reader._read

    def read(self: Reader) -> np.ndarray | None:
        if self._next and self._next % stream_reader.INTERVAL == 0:
            original(self)
            self._next -= 1
        return original(self)

    with patch.object(Reader, "_read", read):
        yield


@contextmanager
def the_last_record_of_a_piece_is_lost() -> Iterator[None]:
    """A reader leaves out the last record before it reads on."""
    original = stream_reader.texts_of

    def texts_of(*arguments: Any) -> Iterator[Any]:
        yield from list(original(*arguments))[:-1]

    with patch.object(stream_reader, "texts_of", texts_of):
        yield


@contextmanager
def bookmarks_are_a_document_late() -> Iterator[None]:
    """A reader that begins at a bookmark leaves out the document there."""
    original = Documents.from_place

    def from_place(self: Documents, place: Place) -> Iterator[Any]:
        documents = original(self, place)
        if place != Place():
            next(documents)
        return documents

    with patch.object(Documents, "from_place", from_place):
        yield


@contextmanager
def bookmarks_forget_the_tokens_before() -> Iterator[None]:
    """A reader that begins at a bookmark begins with the first token of the document there."""
    original = Reader._go_near

    def go_near(self: Reader, number: int) -> None:
        original(self, number)
        self._offset = 0

    with patch.object(Reader, "_go_near", go_near):
        yield


@contextmanager
def a_blend_restarts_its_sources_in_each_block() -> Iterator[None]:
    """Each block begins with the first sample of every source."""
    with patch.object(Blend, "_places", lambda self, reader, end, k: 0):
        yield


@contextmanager
def epochs_have_the_first_one_s_order() -> Iterator[None]:
    """The order of an epoch is not a function of its number."""

    def order(size: int, *key: Any) -> Permutation:
        return Permutation(size, *key[:-1], 0)

    with patch.object(source, "epoch_order", order), patch.object(stream, "Permutation", order):
        yield


@contextmanager
def orders_forget_the_seed() -> Iterator[None]:
    """Every seed gives the same order."""

    def order(size: int, seed: int, *key: int) -> Permutation:
        return Permutation(size, 0, *key)

    with patch.object(source, "epoch_order", order):
        yield


@contextmanager
def an_epoch_lacks_its_last_sample() -> Iterator[None]:
    """The last whole window of a split is never read."""
    original = PackedDataset.__len__
    with patch.object(PackedDataset, "__len__", lambda self: original(self) - 1):
        yield


@contextmanager
def windows_overlap_by_a_token() -> Iterator[None]:
    """Windows begin with the last label's predecessor."""

    def sample(self: PackedDataset, position: int) -> Any:
        first = position * (self.request.seq_len - 1)
        window = np.asarray(self.tokens[first : first + self.request.seq_len + 1], dtype=np.int64)
        return source.torch.from_numpy(np.stack((window[:-1], window[1:])))

    with patch.object(PackedDataset, "sample", sample):
        yield


@contextmanager
def ranks_share_a_sample() -> Iterator[None]:
    """Every rank but the first begins with the last sample of the one before it."""
    original = GlobalSampler.__iter__

    def samples(self: GlobalSampler) -> Iterator[list[int]]:
        for mine in original(self):
            yield [index - (self.rank > 0) for index in mine]

    with patch.object(GlobalSampler, "__iter__", samples):
        yield


@contextmanager
def a_resumed_run_repeats_a_sample() -> Iterator[None]:
    """A run that does not begin with sample 0 begins with the last one before."""
    original = GlobalSampler.__iter__

    def samples(self: GlobalSampler) -> Iterator[list[int]]:
        for mine in original(self):
            yield [index - (self.first_sample > 0) for index in mine]

    with patch.object(GlobalSampler, "__iter__", samples):
        yield


@contextmanager
def workers_change_the_order() -> Iterator[None]:
    """Two workers hand over their microbatches in the wrong order."""
    original = BackgroundLoader.__init__

    class Swapped(GlobalSampler):
        def __iter__(self) -> Iterator[list[int]]:
            batches = super().__iter__()
            for first, second in zip(batches, batches, strict=False):
                yield from (second, first)

    def init(self: BackgroundLoader, dataset: Any, sampler: GlobalSampler, num_workers: int, *others: Any) -> None:
        if num_workers > 1:
            sampler.__class__ = Swapped
        original(self, dataset, sampler, num_workers, *others)

    with patch.object(BackgroundLoader, "__init__", init):
        yield
