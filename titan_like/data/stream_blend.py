"""Several streams in fixed proportions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titan_like.data.blended import BlendedSource
from titan_like.data.reader_blend import ReaderBlend
from titan_like.data.source import UNKNOWN_LENGTH, DataRequest, Source
from titan_like.data.stream import described_readers


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
