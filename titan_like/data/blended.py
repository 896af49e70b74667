"""Several sources in fixed proportions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch

from titan_like.config.errors import ConfigError
from titan_like.data.blend import BLOCK, Blend
from titan_like.data.source import IGNORED_LABEL, DataRequest, Source


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
