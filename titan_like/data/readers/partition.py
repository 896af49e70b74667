"""Divides the shards of a stream among its readers, by their sizes. Pure functions.

The shards of an epoch are laid end to end in the epoch's order, and the whole is cut into equal parts, one per reader.
So a reader has whole shards and at most two partial ones. However a shard is cut, the reader whose part has a record's
position reads the record, and no other does. This holds for any sizes; the true ones make the parts equal.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

SQRT_2 = 0x6A09E667F3BCC909  # multiples of this fraction of 2⁶⁴ are spread evenly, also next to the golden ratio's


class Part(NamedTuple):
    """A reader's part of a shard: from position ``begin`` to ``end - 1`` of ``size``."""

    shard: int  # its number
    begin: int
    end: int
    size: int  # of the whole shard, in bytes where they are known
    share: int  # size of a reader's part of the epoch


def parts_of(sizes: np.ndarray, order: Sequence[int], number: int, count: int) -> Iterator[Part]:
    """Part ``number`` of ``count`` of the shards, whose ``sizes`` are int64 [shards], in this order."""
    ends = np.cumsum(sizes[order])
    total = int(ends[-1])
    begin, end = number * total // count, (number + 1) * total // count
    for place in range(int(np.searchsorted(ends, begin, side="right")), len(order)):
        size = int(sizes[order[place]])
        first = int(ends[place]) - size  # where the shard begins
        if first >= end:
            return
        if size > 0 and begin < end:
            yield Part(int(order[place]), max(0, begin - first), min(size, end - first), size, -(-total // count))


def rows_of(part: Part, ends: Sequence[int]) -> range:
    """The part's rows of a table whose groups of rows end before the rows ``ends``.

    A group that is not larger than a reader's share belongs as a whole to the part with its first row.
    """
    return range(_first_row(part, part.begin, ends), _first_row(part, part.end, ends))


def _first_row(part: Part, cut: int, ends: Sequence[int]) -> int:
    """The first row from a cut on: row i of n is at position i · size / n."""
    num_rows = ends[-1] if ends else 0
    row = -(-cut * num_rows // part.size)
    group = bisect_right(ends, row)
    if group == len(ends):
        return row
    begin, end = ends[group - 1] if group else 0, ends[group]
    is_whole = (end - begin) * part.size <= part.share * num_rows
    return end if is_whole and row > begin else row


def is_in(part: Part, numbers: np.ndarray) -> np.ndarray:
    """Which of the records with these numbers, uint64 [records], the part has of a shard that is read through: bool.

    Each part has its share of any consecutive records, to within a few.
    """
    begin, end = (-(-(cut << 64) // part.size) for cut in (part.begin, part.end))
    places = numbers * np.uint64(SQRT_2)
    return (places >= np.uint64(begin)) & (places <= np.uint64(end - 1))
