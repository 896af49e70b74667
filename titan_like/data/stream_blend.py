"""Several streams in fixed proportions, of which each of several readers takes its own samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from titan_like.data.blend import BLOCK, PERIOD, BlendedSource, apportion, count_reversed, reversed_digits
from titan_like.data.permutation import Permutation
from titan_like.data.source import UNKNOWN_LENGTH, DataRequest, Source
from titan_like.data.stream import described_readers


class ReaderBlend:
    """An endless mixture like `Blend`, in which each of R readers needs only its own samples of every source.

    Sample i of the run is sample i div R of reader i mod R. A block is a line of at least 4096 places, a multiple of R,
    which the sources divide in the proportions of the weights as they do in `Blend`. Reader r has the places r, r + R,
    …, and takes them in a pseudo-random order. So in every block each source has its share to within one sample.
    """

    def __init__(self, weights: Sequence[float], num_readers: int, *key: object) -> None:
        """``weights`` are positive; only their ratios count. ``key`` chooses the order."""
        self.num_readers, self._key = num_readers, key
        self._slots = -(-BLOCK // num_readers)  # of a reader in a block
        self._ends = [0, *accumulate(apportion(weights, self._slots * num_readers * PERIOD))]
        self._enumerated: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # by reader: its last block

    def locate(self, reader: int, number: int) -> tuple[int, int]:
        """Sample ``number`` of a reader as (number of the source, how many of its samples the reader took before)."""
        block, slot = divmod(number, self._slots)
        return self._block(reader, block)[slot]

    def counts(self, reader: int, number: int) -> list[int]:
        """How many of a reader's first ``number`` samples are from each source."""
        block, slot = divmod(number, self._slots)
        counts = self._before(reader, block)
        for source, _ in self._block(reader, block)[:slot]:
            counts[source] += 1
        return counts

    def _block(self, reader: int, block: int) -> list[tuple[int, int]]:
        if self._enumerated.get(reader, (-1, []))[0] != block:
            offset, order = reversed_digits(block % PERIOD), Permutation(self._slots, *self._key, block, reader)
            ends = [(end + offset) // PERIOD for end in self._ends]  # places at which the sources begin and end
            taken, found = self._before(reader, block), []
            for slot in range(self._slots):
                source = bisect_right(ends, reader + self.num_readers * order(slot)) - 1
                found.append((source, taken[source]))
                taken[source] += 1
            self._enumerated[reader] = block, found
        return self._enumerated[reader][1]

    def _before(self, reader: int, block: int) -> list[int]:
        """How many samples of each source a reader took in all blocks before ``block``."""
        period, k = divmod(block, PERIOD)
        sums = [self._places(reader, end, PERIOD) * period + self._places(reader, end, k) for end in self._ends]
        return [after - before for before, after in pairwise(sums)]

    def _places(self, reader: int, end: int, k: int) -> int:
        """The reader's places before a source's end, summed over the first ``k`` blocks of a period."""
        whole, part = divmod(end, PERIOD)
        raised = part if k == PERIOD else count_reversed(k, PERIOD - part)  # blocks in which the end is one place later
        return k * self._up_to(reader, whole) + raised * (self._up_to(reader, whole + 1) - self._up_to(reader, whole))

    def _up_to(self, reader: int, place: int) -> int:
        """The reader's places below ``place`` in a block."""
        return -(-max(0, place - reader) // self.num_readers)


class BlendedStream(BlendedSource):
    """A blend of one split of several streams. Sample i comes from reader i mod R of a source (see `ReaderBlend`).

    So a process still needs only some readers, and takes their samples in order.
    """

    def __init__(self, request: DataRequest, sources: Sequence[Source], weights: Sequence[float | None]) -> None:
        """``weights`` holds the weight of each source.

        Raises:
            ConfigError: a source has a weight so small that it is never drawn.
        """
        super().__init__(request, sources, weights)
        self._readers = ReaderBlend(self.blend.shares, request.section.num_readers, "stream", request.seed)

    def __len__(self) -> int:
        """Unknown, or 0 if no source has a whole sample."""
        return UNKNOWN_LENGTH if self.sources else 0

    def sample(self, position: int) -> torch.Tensor:
        """Sample ``position`` of the run, int64 [2, seq]."""
        return self[position]

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sample ``index`` of the run: int64 [2, seq], without labels if its source has come to the split's end."""
        number, reader = divmod(index, self._readers.num_readers)
        source, within = self._readers.locate(reader, number)
        return self.sources[source][within * self._readers.num_readers + reader]

    def described(self, micro_batch_size: int, num_ranks: int) -> str:
        """See `described_readers`."""
        return described_readers(self.request.section, micro_batch_size, num_ranks)

    def drawn(self, num_samples: int) -> dict[str, float]:
        """Samples of each source after ``num_samples``, by ``samples/NAME``. The length of an epoch is unknown."""
        num_readers = self._readers.num_readers
        each, more = divmod(num_samples, num_readers)
        counts = [self._readers.counts(reader, each + (reader < more)) for reader in range(num_readers)]
        totals = map(sum, zip(*counts, strict=True))
        return {f"samples/{name}": count for name, count in zip(self.names, totals, strict=True)}
