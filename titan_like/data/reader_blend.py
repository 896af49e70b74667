"""Which source a sample of a blend of streams is from, where several readers take turns."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from titan_like.data.blend import BLOCK, PERIOD, apportion, count_reversed, reversed_digits
from titan_like.data.permutation import Permutation


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
