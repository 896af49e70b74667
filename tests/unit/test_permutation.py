"""The order of samples: a permutation that is computed, not stored."""

from collections import Counter
from itertools import pairwise

import pytest

from titan_like.data.loading.permutation import Permutation


def chi_squared_limit(freedom: int) -> float:
    """Exceeded by chance once in a million (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 4.753 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize("size", [1, 2, 3, 5, 31, 32, 33, 63, 64, 65, 1000, 4096, 4097])
def test_every_element_comes_once(size: int) -> None:
    for key in range(3):
        assert sorted(map(Permutation(size, key), range(size))) == list(range(size))


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 10, 33])
def test_small_permutations_have_every_pair_of_first_elements_equally_often(size: int) -> None:
    keys, pairs = 20_000, size * (size - 1)
    found = Counter((order(0), order(1)) for order in (Permutation(size, key) for key in range(keys)))
    expected = keys / pairs
    statistic = sum((found[a, b] - expected) ** 2 / expected for a in range(size) for b in range(size) if a != b)
    assert statistic < chi_squared_limit(pairs - 1)


def test_positions_are_uniform_and_neighbours_apart() -> None:
    """Of 10^12 samples, 20,000 neighbours in the order: where each lies, and how far from the one before it."""
    size, count, cells = 10**12, 20_000, 64
    elements = [Permutation(size, "seed", 0)(index) for index in range(count)]
    expected = count / cells
    for values in (elements, [(b - a) % size for a, b in pairwise([*elements, elements[0]])]):
        found = Counter(value * cells // size for value in values)
        assert sum((found[cell] - expected) ** 2 / expected for cell in range(cells)) < chi_squared_limit(cells - 1)
    # Of uniform gaps, the share below size / 1000 is 1 / 1000: 20 of them, and never twice as many by chance.
    gaps = [(b - a) % size for a, b in pairwise(elements)]
    assert sum(gap < size // 1000 for gap in gaps) < 45


def test_epochs_differ() -> None:
    """Two random orders of n have one element in the same place on average, and Poisson says how many more."""
    size = 10_000
    orders = [list(map(Permutation(size, 7, epoch), range(size))) for epoch in range(4)]
    for number, first in enumerate(orders):
        for second in orders[number + 1 :]:
            assert sum(a == b for a, b in zip(first, second, strict=True)) < 10
            shifts = Counter((b - a) % size for a, b in zip(first, second, strict=True))
            assert max(shifts.values()) < 15  # nor is one the other, shifted


def test_the_order_stays_the_same_in_every_version() -> None:
    """A change breaks the resuming of runs, and definitions take the permutation from the product."""
    assert [Permutation(1000, "samples", 3)(index) for index in range(6)] == [986, 378, 115, 915, 743, 117]
