"""Which samples of several sources a run takes, in fixed proportions."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

import torch

from titan_like.config.errors import ConfigError
from titan_like.data.permutation import Permutation
from titan_like.data.source import IGNORED_LABEL, DataRequest, Source

_LARGEST = 1e100  # weight; sums of weights stay finite
BLOCK = 4096  # samples; in each block every source has its share, to within one sample
PERIOD = 4096  # blocks after which every source has had exactly its share


@dataclass(frozen=True)
class Share:
    """The paths of one source of a blend, and its weight. None lets the sources' sizes decide."""

    weight: float | None
    paths: list[str]


def shares_of(paths: list[str], one_source_each: bool) -> list[Share]:
    """Weights and paths in turn, as in ``["0.7", "web", "0.3", "books"]``, as a list of sources.

    Args:
        paths: `data.paths`.
        one_source_each: without weights, whether each path is a source of its own; else all are one.

    Raises:
        ConfigError: some weights are missing, or not positive numbers.
    """
    found = [_number(text) for text in paths[::2]]
    if len(paths) < 2 or found[0] is None:
        return [Share(None, [path]) for path in paths] if one_source_each and len(paths) > 1 else [Share(None, paths)]
    if len(paths) % 2:
        raise ConfigError("data.paths", paths, "weights and paths must come in turn, and the last weight has no path")
    weights = []
    for text, weight in zip(paths[::2], found, strict=True):
        if weight is None or not 0 < weight <= _LARGEST:
            problem = "weights and paths must come in turn, and this stands for a weight; give a positive number"
            raise ConfigError("data.paths", text, f"{problem} of at most {_LARGEST:g}")
        weights.append(weight)
    return [Share(weight, [path]) for weight, path in zip(weights, paths[1::2], strict=True)]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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


class BlendedSource(Source):
    """A blend of one split of several sources. In training each goes through its own epochs; a source that ends begins
    its next one, in another order.
    """

    def __init__(self, request: DataRequest, sources: Sequence[Source], weights: Sequence[float | None]) -> None:
        """``weights`` holds a weight for each source, or None for weights in proportion to the sources' samples.

        Raises:
            ConfigError: a source is named twice, has no sample to train on, or has a weight so small that it would
                never be drawn.
        """
        super().__init__(request)
        # Outside training, a source without a sample leaves its share to the others.
        present = [number for number, source in enumerate(sources) if len(source) or request.split == "train"]
        self.sources = [sources[number] for number in present]
        self.paths = [source.request.section.paths[0] for source in self.sources]
        for number, path in enumerate(self.paths):
            if path in self.paths[:number]:
                raise ConfigError("data.paths", path, "is named twice; give it once, with the sum of its weights")
        names = [Path(path).name for path in self.paths]
        self.names = names if len(set(names)) == len(names) else self.paths
        for path, source in zip(self.paths, self.sources, strict=True):
            if len(source) == 0:
                raise ConfigError(
                    "data.paths", path, "has no whole sample to train on; give it more text or leave it out"
                )
        shares = [weights[number] or float(len(sources[number])) for number in present]
        try:
            self.blend = Blend(shares or [1.0], request.seed)
        except ValueError as error:
            raise ConfigError("data.paths", request.section.paths, f"{error}; leave that source out") from None

    def __len__(self) -> int:
        """In training, all sources' samples together; otherwise the samples before the first that would repeat one."""
        lengths = [len(source) for source in self.sources]
        if self.request.split == "train" or not lengths:
            return sum(lengths)
        return self._length_without_repetition

    def sample(self, position: int) -> torch.Tensor:
        """int64 [2, seq]."""
        if self.request.split == "train":
            number, index = self.blend.locate(position)
            return self.sources[number][index]
        number, index = self.blend.locate_in_order(position)
        return self.sources[number].sample(index)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sample ``index`` of the run: int64 [2, seq]."""
        if self.request.split == "train" or index < len(self):
            return self.sample(index)
        inputs = self.sample(0)[0]
        return torch.stack((inputs, torch.full_like(inputs, IGNORED_LABEL)))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the sources' fingerprints and their shares."""
        parts = [source.fingerprint for source in self.sources]
        return hashlib.blake2b(repr((parts, self.blend.shares)).encode(), digest_size=16).hexdigest()

    def drawn(self, num_samples: int) -> dict[str, float]:
        """Samples and epochs of each source after ``num_samples``, by ``samples/NAME`` and ``epochs/NAME``."""
        found: dict[str, float] = {}
        for name, source, count in zip(self.names, self.sources, self.blend.counts(num_samples), strict=True):
            found |= {f"samples/{name}": count, f"epochs/{name}": count / len(source)}
        return found

    @cached_property
    def _length_without_repetition(self) -> int:
        def fits(samples: int) -> bool:
            counts = self.blend.counts(samples)
            return all(count <= len(source) for count, source in zip(counts, self.sources, strict=True))

        blocks, too_many = 0, sum(map(len, self.sources)) // BLOCK + 1
        while too_many - blocks > 1:
            middle = (blocks + too_many) // 2
            blocks, too_many = (middle, too_many) if fits(middle * BLOCK) else (blocks, middle)
        left = [
            len(source) - count for source, count in zip(self.sources, self.blend.counts(blocks * BLOCK), strict=True)
        ]
        for index in range(blocks * BLOCK, (blocks + 1) * BLOCK):
            number = self.blend.locate(index)[0]
            if left[number] == 0:
                return index
            left[number] -= 1
        return (blocks + 1) * BLOCK
