"""Blends of streams, sample by sample: shares in every block, and counts that agree with what was drawn."""

from __future__ import annotations

import pytest

from titan_like.data.blend import BLOCK, PERIOD
from titan_like.data.stream_blend import ReaderBlend


@pytest.mark.parametrize(
    "readers", [1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 16, 100)), 6, 4096, 5000]
)
@pytest.mark.parametrize("weights", [[0.7, 0.3], [5, 1, 1, 0.001]])
def test_every_block_has_every_source_s_share_to_one_sample(readers: int, weights: list[float]) -> None:
    blend, length = ReaderBlend(weights, readers, 0), -(-BLOCK // readers) * readers
    assert length % readers == 0 and BLOCK <= length < BLOCK + readers
    taken: list[list[int]] = [[0] * len(weights) for _ in range(readers)]
    for block in range(2):
        counts = [0] * len(weights)
        for index in range(block * length, (block + 1) * length):
            number, reader = divmod(index, readers)
            source, within = blend.locate(reader, number)
            assert within == taken[reader][source]  # each reader takes a source's samples in order, each once
            taken[reader][source] += 1
            counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - length * weight / sum(weights)) < 1.001
    assert [blend.counts(reader, 2 * length // readers) for reader in range(readers)] == taken


@pytest.mark.parametrize("readers", [3, 64])
def test_counts_far_away_are_sums_of_what_is_near(readers: int) -> None:
    blend, slots = ReaderBlend([0.6, 0.25, 0.15], readers, 7), -(-BLOCK // readers)
    for block in (0, 1, 4094, PERIOD - 1, PERIOD, 3 * PERIOD + 17):
        for reader in (0, readers - 1):
            start = block * slots
            counts = blend.counts(reader, start)
            for number in range(start, start + slots + 3):
                source, within = blend.locate(reader, number)
                assert within == counts[source]
                counts[source] += 1
            assert blend.counts(reader, start + slots + 3) == counts
    whole = [0, 0, 0]
    for reader in range(readers):
        whole = [a + b for a, b in zip(whole, blend.counts(reader, PERIOD * slots), strict=True)]
    length = slots * readers * PERIOD
    assert all(abs(count - length * share) <= 1 for count, share in zip(whole, (0.6, 0.25, 0.15), strict=True))


def test_the_order_is_mixed_and_depends_on_the_key() -> None:
    blends = [ReaderBlend([1, 1], 8, key) for key in (0, 1)]
    first, second = ([blend.locate(index % 8, index // 8)[0] for index in range(BLOCK)] for blend in blends)
    assert first != second
    longest = max(len(run) for run in "".join(map(str, first)).replace("01", "0 1").replace("10", "1 0").split())
    assert 5 < longest < 40
