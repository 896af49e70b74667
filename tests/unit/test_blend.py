"""Blends: which source a sample is from is computed, not stored."""

from itertools import pairwise

import pytest

from titan_like.data.blend import BLOCK, Blend

PERIOD = 4096 * BLOCK
WEIGHTS = {"halves": [1, 1], "thirds": [1, 1, 1], "uneven": [0.5, 0.3, 0.2], "tiny": [1.0, 1e-5, 3e-7], "one": [2.5]}
WEIGHTS |= {"many": [1 / number for number in range(1, 30)]}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_every_block_has_each_source_s_share_to_within_one_sample(weights: list[float]) -> None:
    blend, shares = Blend(weights, seed=3), [weight / sum(weights) for weight in weights]
    before = blend.counts(0)
    for block in [*range(1, 200), 4096, 4097, 8192, 10_001]:
        before = blend.counts((block - 1) * BLOCK)
        after = blend.counts(block * BLOCK)
        assert sum(after) == block * BLOCK
        for taken, share, total in zip((b - a for a, b in zip(before, after, strict=True)), shares, after, strict=True):
            assert abs(taken - share * BLOCK) < 1 + 1e-3  # weights are multiples of 2^-24
            # A van der Corput sequence of base 16 with three digits is never further from the weights than this.
            assert abs(total - share * block * BLOCK) < 3 * 16 / 4 + block * BLOCK / PERIOD


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("first", [0, 4095, 4096 * 3 + 17, 10**9])
def test_each_source_s_samples_come_once_each(weights: list[float], first: int) -> None:
    """In three blocks: the samples of a source are those from its count before them to its count after them."""
    blend, begin, end = Blend(weights, seed=1), first * BLOCK, (first + 3) * BLOCK
    found: list[list[int]] = [[] for _ in weights]
    for index in range(begin, end):
        source, number = blend.locate(index)
        found[source].append(number)
    for numbers, before, after in zip(found, blend.counts(begin), blend.counts(end), strict=True):
        assert sorted(numbers) == list(range(before, after))


@pytest.mark.parametrize(
    "readers", [1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 16, 100, 4096)), 6, 5000]
)
@pytest.mark.parametrize("weights", [[0.7, 0.3], [5, 1, 1, 0.001]])
def test_readers_take_each_source_s_samples_in_order(readers: int, weights: list[float]) -> None:
    blend, num = Blend(weights, 0, readers), readers
    length = -(-BLOCK // num) * num
    taken: list[list[int]] = [[0] * len(weights) for _ in range(num)]
    for block in range(2):
        counts = [0] * len(weights)
        for index in range(block * length, (block + 1) * length):
            number, reader = divmod(index, num)
            source, within = blend.locate_in_order(number, reader)
            assert within == taken[reader][source]
            assert readers > 1 or source == blend.locate(index)[0]
            taken[reader][source] += 1
            counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - length * weight / sum(weights)) < 1.001
    assert [blend.counts(2 * length // num, reader) for reader in range(num)] == taken


@pytest.mark.parametrize("readers", [1, 3, 64, 4097])
def test_counts_far_away_are_sums_of_what_is_near(readers: int) -> None:
    blend, num = Blend([0.6, 0.25, 0.15], 7, readers), readers
    slots = -(-BLOCK // num)
    for block in (0, 1, 4094, 4095, 4096, 3 * 4096 + 17):
        for reader in (0, num - 1, int(0.6 * num)):  # the last may have the place at which a source ends
            start = block * slots
            counts = blend.counts(start, reader)
            for number in range(start, start + slots + 3):
                source, within = blend.locate_in_order(number, reader)
                assert within == counts[source]
                counts[source] += 1
            assert blend.counts(start + slots + 3, reader) == counts
    whole = [0, 0, 0]
    for reader in range(num):
        whole = [a + b for a, b in zip(whole, blend.counts(4096 * slots, reader), strict=True)]
    length = slots * num * 4096
    assert all(abs(count - length * share) <= 1 for count, share in zip(whole, (0.6, 0.25, 0.15), strict=True))


@pytest.mark.parametrize("readers", [1, 8])
def test_sources_alternate_in_a_random_order(readers: int) -> None:
    """Of two equal sources, runs of one source are as long as those of a fair coin: two samples on average."""
    blends, num = [Blend([1, 1], seed, readers) for seed in (0, 1)], readers
    one, two = ([blend.locate_in_order(i // num, i % num)[0] for i in range(BLOCK)] for blend in blends)
    changes = sum(a != b for a, b in pairwise(one))
    assert abs(changes - BLOCK / 2) < 5 * (BLOCK / 4) ** 0.5
    assert one != two


def test_a_weight_that_would_never_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="below one sample in 16,777,216"):
        Blend([1, 1e-9], seed=0)
