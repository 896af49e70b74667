"""Blends: samples of several sources in fixed proportions."""

import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from glob import glob
from itertools import accumulate, pairwise, zip_longest
from operator import add
from pathlib import Path
from typing import NamedTuple

import numpy as np

from titan_like.config.errors import blamed_on, require
from titan_like.config.section import weight_of
from titan_like.data.batch import Batch
from titan_like.data.loading.permutation import Permutation
from titan_like.data.source import UNKNOWN_LENGTH, DataRequest, Source, digest_of, epoch_order

BLOCK = 4096  # samples; in each block every source has its share, to within one sample
PERIOD = 4096  # blocks after which every source has had exactly its share
# By block of a period: its number with the three hexadecimal digits in reverse order.
_REVERSED = np.arange(PERIOD).reshape(16, 16, 16).transpose(2, 1, 0).flatten()


@dataclass(frozen=True)
class Share:
    """The paths of one source of a blend, or of several indexed datasets, and its weight (None: by size)."""

    weight: float | None
    paths: list[str]


class Phase(NamedTuple):
    """A blend that a run reads from sample ``first`` on. A checkpoint has all phases of its run."""

    first: int
    sources: list[str]  # fingerprints
    shares: list[int]  # as `Blend.shares`

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Identities of the sources: fingerprints, numbered if they are equal."""
        return [(source, self.sources[:number].count(source)) for number, source in enumerate(self.sources)]


def shares_of(paths: Sequence[str | float]) -> list[Share]:
    """Weights and paths in turn, as in ``[0.7, "web", 0.3, "books"]``, as a list of sources; without weights, one."""
    names = [path for path in paths if isinstance(path, str)]
    reason = 'weights and paths must come in turn, as in [0.7, "web", 0.3, "2024"], with positive weights, unquoted'
    if len(names) == len(paths):
        numbers = [name for name in names if weight_of(name) is not None and not glob(f"{name}*")]
        require(len(numbers) in (0, len(names)), "data.paths", paths, reason)
        return [Share(None, names)]
    pairs = list(zip_longest(paths[::2], paths[1::2]))
    for weight, path in pairs:
        is_pair = not isinstance(weight, str) and weight > 0 and isinstance(path, str)
        require(is_pair, "data.paths", paths, reason)
    return [Share(float(weight), [str(path)]) for weight, path in pairs]


class Blend:
    """An endless mixture of sources in fixed proportions. Any sample is computed in constant time and memory.

    Weights are rounded to multiples of 1 / (4096 · 4096). Each block of 4096 samples gives a source the floor or the
    ceiling of its share: block k rounds the sources' cumulative shares down after adding u(k). In 4096 blocks u(k) is
    each multiple of 1 / 4096 below 1 once, in the order of the reversed hexadecimal digits (van der Corput sequence).
    So counts never drift from the weights, and after each 4096 blocks they are exact. Within a block the order is a
    pseudo-random permutation.

    With R readers, sample i of the run is sample i div R of reader i mod R. A block then has at least 4096 places, a
    multiple of R. Reader r has the places r, r + R, …, so it needs only its own samples of every source.
    """

    def __init__(self, weights: Sequence[float], seed: int, num_readers: int = 1) -> None:
        """``weights`` are positive; only their ratios count. Raises a `ValueError` if one is too small to be drawn."""
        self.num_readers, self._seed = num_readers, seed
        self._slots = -(-BLOCK // self.num_readers)  # per reader and block
        total = self._slots * self.num_readers * PERIOD
        self.shares = apportion(weights, total)
        if min(self.shares) == 0:
            raise ValueError(f"weight {weights[self.shares.index(0)]} is below one sample in {total:,}")
        self._ends = [0, *accumulate(self.shares)]  # cumulative, in samples of a period
        self._enumerated: dict[int, tuple[int, list[tuple[int, int]]]] = {}  # by reader: its last block

    def locate(self, index: int) -> tuple[int, int]:
        """Sample ``index`` of a blend with one reader, as (number of the source, which of its samples it is).

        A source's samples in a block are in the order of their places before the permutation.
        """
        block, slot = divmod(index, self._slots)
        period, k = divmod(block, PERIOD)
        offset, place = int(_REVERSED[k]), self._order(block, 0)(slot)
        source = bisect_left(self._ends, (place + 1) * PERIOD - offset) - 1
        begin, end = self._ends[source : source + 2]
        before = self._places(0, end, k) - self._places(0, begin, k)
        return source, period * self.shares[source] + before + place - (begin + offset) // PERIOD

    def locate_in_order(self, number: int, reader: int = 0) -> tuple[int, int]:
        """Sample ``number`` of a reader as (number of the source, number of the reader's earlier samples of it)."""
        block, slot = divmod(number, self._slots)
        return self._block(reader, block)[slot]

    def counts(self, number: int, reader: int = 0) -> list[int]:
        """Number of samples from each source among a reader's first ``number`` samples."""
        block, slot = divmod(number, self._slots)
        counts = self._before(reader, block)
        for source, _ in self._block(reader, block)[:slot] if slot else ():
            counts[source] += 1
        return counts

    def draw(self, source: int, number: int) -> int:
        """The sample that a source gives after ``number`` others, as a position in it, in a blend with one reader."""
        period, rest = divmod(number, self.shares[source])
        k = bisect_right(range(PERIOD), rest, key=lambda k: self._before(0, k)[source]) - 1
        block = period * PERIOD + k
        return self.locate(block * self._slots + self._block(0, block).index((source, number)))[1]

    def share(self, num_samples: int, reader: int) -> int:
        """A reader's share of the run's first samples."""
        share, remainder = divmod(num_samples, self.num_readers)
        return share + 1 if reader < remainder else share

    def taken(self, first: int, last: int) -> list[tuple[int, ...]]:
        """Number of samples from each source, by reader, in a blend that covers samples ``first`` … ``last - 1``."""
        sizes = [self.share(last, reader) - self.share(first, reader) for reader in range(self.num_readers)]
        return list(zip(*(self.counts(size, reader) for reader, size in enumerate(sizes)), strict=True))

    def _block(self, reader: int, block: int) -> list[tuple[int, int]]:
        last, samples = self._enumerated.get(reader, (-1, []))
        if last != block:
            offset, order = int(_REVERSED[block % PERIOD]), self._order(block, reader)
            ends = [(end + offset) // PERIOD for end in self._ends]  # places at which the sources begin and end
            taken, samples = self._before(reader, block), []
            for slot in range(self._slots):
                source = bisect_right(ends, reader + self.num_readers * order(slot)) - 1
                samples.append((source, taken[source]))
                taken[source] += 1
            self._enumerated[reader] = block, samples
        return samples

    def _order(self, block: int, reader: int) -> Permutation:
        return epoch_order(self._slots, "blend", self._seed, block, reader)

    def _before(self, reader: int, block: int) -> list[int]:
        """Number of samples of each source that a reader has in all blocks before ``block``."""
        period, k = divmod(block, PERIOD)
        sums = [self._places(reader, end, PERIOD) * period + self._places(reader, end, k) for end in self._ends]
        return [after - before for before, after in pairwise(sums)]

    def _places(self, reader: int, end: int, k: int) -> int:
        """The reader's places before a source's end, summed over the first ``k`` blocks of a period."""
        whole, part = divmod(end, PERIOD)
        raised = int(np.count_nonzero(_REVERSED[:k] >= PERIOD - part))  # blocks in which the end is one place later
        places = -(-max(0, whole - reader) // self.num_readers)
        has_edge = whole >= reader and (whole - reader) % self.num_readers == 0
        return k * places + (raised if has_edge else 0)


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in the proportions of ``weights`` that sum to ``total`` (by largest remainders)."""
    largest = max(weights)
    parts = [weight / largest for weight in weights]
    quotas = [part / sum(parts) * total for part in parts]
    shares = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda number: shares[number] - quotas[number])
    for number in by_remainder[: total - sum(shares)]:
        shares[number] += 1
    return shares


class BlendedSource(Source):
    """A blend of one split of several sources. In training, a source that ends begins its next epoch, in another order.

    If a run changes its blend, each source that stays continues at its next sample.
    """

    is_in_order = False  # whether a source's samples are in order within a block, too
    phases: Sequence[Phase] = ()  # the run's, up to this blend; none if the run began with it

    def __init__(
        self, request: DataRequest, sources: Sequence[Source], weights: Sequence[float | None], num_readers: int = 1
    ) -> None:
        """``weights``: a weight for each source, or None for weights in proportion to the sources' samples."""
        super().__init__(request)
        # Outside training, a source without a sample leaves its share to the others.
        present = [number for number, source in enumerate(sources) if len(source) or request.split == "train"]
        self.sources = [sources[number] for number in present]
        self.paths = [source.request.section.paths[0] for source in self.sources]
        places = list(map(os.path.realpath, self.paths))
        for number, (path, source) in enumerate(zip(self.paths, self.sources, strict=True)):
            reason = "is named twice; give it once, with the sum of its weights"
            require(places[number] not in places[:number], "data.paths", path, reason)
            reason = "has no whole sample to train on; give it more text or leave it out"
            require(len(source) > 0, "data.paths", path, reason)
        names = [Path(path).name for path in self.paths]
        self.names = names if len(set(names)) == len(names) else self.paths
        # Of earlier phases, set by `continue_after`: samples of each source by reader, and the order of its samples.
        self._taken: list[list[int]] = []
        self._draw: list[Callable[[int], int]] = []
        shares = [weights[number] or float(len(sources[number])) for number in present]
        with blamed_on("data.paths", request.section.paths, after="; leave that source out"):
            self.blend = Blend(shares or [1.0], request.seed, num_readers)

    def __len__(self) -> int:
        """In training, all sources' samples together; otherwise the samples before the first that would repeat one."""
        lengths = [len(source) for source in self.sources]
        if self.request.split == "train" or not lengths:
            return sum(lengths)
        return self._length_without_repetition

    def sample(self, position: int) -> Batch:
        """A sample of one of the sources."""
        if self.request.split == "train":
            number, index = self.locate(position)
            return self.sources[number][index]
        number, index = self.blend.locate_in_order(position)
        return self.sources[number].sample(index)

    def __getitem__(self, index: int) -> Batch:
        """Sample ``index`` of the run."""
        return self.sample(index) if self.request.split == "train" else super().__getitem__(index)

    def continue_after(self, phases: Sequence[Phase]) -> None:
        """Continue after the earlier ``phases`` of a run, of which this blend is the last."""
        start = phases[0]
        seed = self.request.seed
        readers = self.blend.num_readers
        taken: dict[tuple[str, int], list[int]] = {}  # by reader
        for phase, after in pairwise(phases):
            counts = Blend(phase.shares, seed, readers).taken(phase.first, after.first)
            for key, count in zip(phase.keys, counts, strict=True):
                taken[key] = [*map(add, taken.get(key, [0] * readers), count)]
        self._taken = [taken.get(key, [0] * readers) for key in phases[-1].keys]
        # Within a block of the run's first blend, a source's samples are shuffled, and so are the ones that follow.
        shuffled = [] if self.is_in_order or len(start.sources) == 1 else start.keys
        draws = {key: partial(Blend(start.shares, seed).draw, number) for number, key in enumerate(shuffled)}
        self._draw = [draws.get(key, int) for key in phases[-1].keys]
        self.phases = phases

    def locate(self, index: int) -> tuple[int, int]:
        """Sample ``index`` of the run as (number of the source, position in it)."""
        if not (self.phases or self.is_in_order):
            return self.blend.locate(index)
        number, reader = divmod(index, self.blend.num_readers)
        number -= self.blend.share(self.phases[-1].first, reader) if self.phases else 0
        source, within = self.blend.locate_in_order(number, reader)
        if self.phases:
            within = self._draw[source](self._taken[source][reader] + within)
        return source, within * self.blend.num_readers + reader

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the sources' fingerprints and their shares; of a single source its own."""
        if len(self.sources) == 1:
            return self.sources[0].fingerprint
        return digest_of([source.fingerprint for source in self.sources], self.blend.shares)

    def drawn(self, num_samples: int) -> dict[str, float]:
        """Samples and epochs of each source after ``num_samples``, by ``samples/NAME`` and ``epochs/NAME``."""
        counts = self.blend.taken(self.phases[-1].first if self.phases else 0, num_samples)
        totals = [sum(count) + sum(before) for count, before in zip_longest(counts, self._taken, fillvalue=())]
        figures: dict[str, float] = {}
        for name, source, count in zip(self.names, self.sources, totals, strict=True):
            figures[f"samples/{name}"] = count
            if len(source) != UNKNOWN_LENGTH:
                figures[f"epochs/{name}"] = count / len(source)
        return figures

    def began(self) -> str:
        """A text with the position of each source at the beginning of this blend."""
        parts = zip(self.names, map(sum, self._taken), strict=True)
        return "; ".join(f"{name} continues after {n:,} samples" if n else f"{name} is new" for name, n in parts)

    def described(self, micro_batch_size: int, num_ranks: int) -> str | None:
        """The distinct lines of the sources."""
        lines = dict.fromkeys(source.described(micro_batch_size, num_ranks) for source in self.sources)
        return "\n ".join(filter(None, lines)) or None

    @cached_property
    def _length_without_repetition(self) -> int:
        def repeats(num_samples: int) -> bool:
            counts = self.blend.counts(num_samples)
            return any(count > len(source) for count, source in zip(counts, self.sources, strict=True))

        limit = sum(map(len, self.sources)) + 1
        # Where the block begins that first repeats one.
        start = BLOCK * (bisect_left(range(0, limit, BLOCK), True, key=repeats) - 1)
        return start + bisect_left(range(start + 1, start + BLOCK), True, key=repeats)
