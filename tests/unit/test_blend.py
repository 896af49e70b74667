"""Blends: which source a sample is from is computed, not stored."""

from itertools import accumulate, pairwise

import pytest

from titan_like.data.blend import BLOCK, Blend, count_reversed, reversed_digits

PERIOD = 4096 * BLOCK
WEIGHTS = {
    "halves": [1, 1],
    "thirds": [1, 1, 1],
    "uneven": [0.5, 0.3, 0.2],
    "tiny": [1.0, 1e-5, 3e-7],
    "many": [1 / number for number in range(1, 30)],
    "one": [2.5],
}


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


def test_counts_within_a_block_are_those_of_its_samples() -> None:
    blend = Blend([0.7, 0.2, 0.1], seed=5)
    taken = [0, 0, 0]
    for index in range(2 * BLOCK):
        if index % 777 == 0:
            assert blend.counts(index) == taken
            assert Blend([0.7, 0.2, 0.1], seed=5).counts(index) == taken
        taken[blend.locate(index)[0]] += 1


def test_in_order_each_source_s_samples_ascend() -> None:
    blend, taken = Blend([0.7, 0.2, 0.1], seed=5), [0, 0, 0]
    for index in range(BLOCK + 100):
        source, number = blend.locate_in_order(index)
        assert (source, number) == (blend.locate(index)[0], taken[source])
        taken[source] += 1


def test_sources_alternate_in_a_random_order() -> None:
    """Of two equal sources, runs of one source are as long as those of a fair coin: two samples on average."""
    sources = [Blend([1, 1], seed=0).locate(index)[0] for index in range(BLOCK)]
    changes = sum(a != b for a, b in pairwise(sources))
    assert abs(changes - BLOCK / 2) < 5 * (BLOCK / 4) ** 0.5
    assert sources != [Blend([1, 1], seed=1).locate(index)[0] for index in range(BLOCK)]


def test_a_weight_that_would_never_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="below one sample in 16,777,216"):
        Blend([1, 1e-9], seed=0)


def test_reversed_digits_are_counted() -> None:
    digits = [reversed_digits(k) for k in range(4096)]
    assert sorted(digits) == list(range(4096))
    for least in (1, 2, 15, 16, 17, 255, 256, 257, 1000, 2048, 4080, 4095, 4096):
        counts = [0, *accumulate(value >= least for value in digits)]
        assert [count_reversed(k, least) for k in range(4096)] == counts[:-1]


def test_huge_weights_are_as_good_as_small_ones() -> None:
    assert Blend([1e308, 1e308, 2e307], seed=0).shares == Blend([5, 5, 1], seed=0).shares
