"""Which source, and which of its samples, a number of a blend stands for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from titan_like.data.permutation import Permutation

BLOCK = 4096  # samples; in each block every source has its share, to within one sample
PERIOD = 4096  # blocks after which every source has had exactly its share


class Blend:
    """An endless mixture of sources in fixed proportions, of which any sample is computed in constant time and memory.

    Weights are rounded to multiples of 1 / (4096 · 4096). Each block of 4096 samples gives a source the floor or the
    ceiling of its share: block k rounds the sources' cumulative shares down after adding u(k), which takes each
    multiple of 1 / 4096 below 1 once in 4096 blocks, in the order of their reversed hexadecimal digits (the van der
    Corput sequence). So counts never drift from the weights, and after each 4096 blocks they are exact. Within a block
    the order is a pseudo-random permutation.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """``weights`` are positive; only their ratios count.

        Raises:
            ValueError: a weight is so small that its source would never be drawn.
        """
        self.seed = seed
        shares = apportion(weights, BLOCK * PERIOD)
        if min(shares) == 0:
            raise ValueError(f"weight {weights[shares.index(0)]} is below one sample in {BLOCK * PERIOD:,}")
        self.shares = shares
        self._ends = [0, *accumulate(shares)]  # cumulative, in samples of a period
        self._counted: tuple[int, list[int]] = 0, [0] * len(shares)
        self._enumerated: dict[int, list[tuple[int, int]]] = {}  # the last block

    def locate(self, index: int) -> tuple[int, int]:
        """Sample ``index`` of the blend as (number of the source, how many of its samples come before this one)."""
        block, slot = divmod(index, BLOCK)
        period, k = divmod(block, PERIOD)
        offset, place = reversed_digits(k), _order(self.seed, block)(slot)
        source = bisect_left(self._ends, (place + 1) * PERIOD - offset) - 1
        first = (self._ends[source] + offset) // PERIOD  # place in this block where the source begins
        before = self._taken(source + 1, k) - self._taken(source, k)
        return source, period * self.shares[source] + before + place - first

    def locate_in_order(self, index: int) -> tuple[int, int]:
        """Like `locate`, with each source's samples in ascending order; the first of a block enumerates it."""
        block, slot = divmod(index, BLOCK)
        if block not in self._enumerated:
            before, places = self.counts(block * BLOCK), []
            for number in range(block * BLOCK, (block + 1) * BLOCK):
                source, _ = self.locate(number)
                places.append((source, before[source]))
                before[source] += 1
            self._enumerated = {block: places}
        return self._enumerated[block][slot]

    def counts(self, num_samples: int) -> list[int]:
        """How many of the first ``num_samples`` samples are from each source.

        Only the last block is enumerated, from where the last call ended if that was in the same block.
        """
        block = num_samples // BLOCK
        start, counts = self._counted
        if not block * BLOCK <= start <= num_samples:
            start, (period, k) = block * BLOCK, divmod(block, PERIOD)
            counts = [
                period * share + self._taken(source + 1, k) - self._taken(source, k)
                for source, share in enumerate(self.shares)
            ]
        counts = counts.copy()
        for index in range(start, num_samples):
            counts[self.locate(index)[0]] += 1
        self._counted = num_samples, counts
        return counts.copy()

    def _taken(self, end: int, k: int) -> int:
        """Samples of the first ``end`` sources in the first ``k`` blocks of a period."""
        whole, part = divmod(self._ends[end], PERIOD)
        return k * whole + count_reversed(k, PERIOD - part)


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in the proportions of ``weights`` that sum to ``total`` (by largest remainders)."""
    largest = max(weights)  # dividing by it first keeps sums of huge weights finite
    parts = [weight / largest for weight in weights]
    quotas = [part / sum(parts) * total for part in parts]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda number: shares[number] - quotas[number])
    for number in by_remainder[: total - sum(shares)]:
        shares[number] += 1
    return shares


def reversed_digits(k: int) -> int:
    """``k``, below 4096, with its three hexadecimal digits in reverse order."""
    return (k & 15) << 8 | k & 240 | k >> 8


def count_reversed(k: int, least: int) -> int:
    """How many j < k have reversed digits of at least ``least``, from 1 to 4096.

    They agree with k in its first digits, have a smaller one next, and any digits after that.
    """
    found, free, base = 0, 256, 0  # combinations of the digits after; what the first digits are worth, reversed
    for digit, worth in ((k >> 8, 1), (k >> 4 & 15, 16), (k & 15, 256)):
        # In steps of `worth`: the next digit d and the free ones f make base + (16 · f + d) · worth.
        wanted = max(0, -((base - least) // worth))
        full, edge = divmod(wanted, 16)  # f above `full` are enough, and f = `full` with d of at least `edge`
        found += digit * max(0, free - 1 - full) + (max(0, digit - edge) if full < free else 0)
        free, base = free // 16, base + digit * worth
    return found


@lru_cache(maxsize=8)
def _order(seed: int, block: int) -> Permutation:
    return Permutation(BLOCK, "blend", seed, block)
