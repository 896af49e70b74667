"""Batches of rows of Parquet and Arrow files, or of a part of a file."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from sys import maxsize
from typing import IO, Any

from titan_like.data.readers.partition import Part, rows_of

Source = str | IO[bytes]  # a path on this machine, or an open file
Columns = Callable[[list[str]], list[str]]  # the columns to read, of all
Batch = tuple[int, Any, float]  # the number of its first row, its columns, and the fraction of the file read by its end


def parquet_batches(
    source: Source, columns_of: Columns, start: int, part: Part | None, batch_size: int, buffer_size: int
) -> Iterator[Batch]:
    """The batches of a part, from the one with row ``start`` on; without a part, of all rows."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(source, buffer_size=buffer_size) as file:  # buffered, since a row group may be a gigabyte
        columns, metadata = columns_of(file.schema_arrow.names), file.metadata
        ends = [0, *accumulate(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))]
        rows = rows_of(part, ends[1:]) if part else range(metadata.num_rows)
        first = bisect_right(ends, max(start, rows.start)) - 1  # row group
        groups = [number for number in range(first, len(ends) - 1) if number == first or ends[number] < rows.stop]
        batches = file.iter_batches(batch_size=batch_size, row_groups=groups, columns=columns)
        yield from _inside(rows, batches, ends[first], lambda end: end / metadata.num_rows)


def arrow_batches(source: Source, columns_of: Columns, start: int, part: Part | None) -> Iterator[Batch]:
    """As `parquet_batches`, of either of Arrow's IPC formats. Datasets are saved as streams, without an index."""
    from pyarrow import OSFile, PythonFile

    with OSFile(source) if isinstance(source, str) else PythonFile(source) as file:
        reader, size = _arrow_reader(file), max(1, file.size())
        columns = columns_of(reader.schema.names)
        first, ends, rows = 0, [0], range(maxsize)
        if isinstance(source, str) and part and part.end - part.begin < part.size:
            ends, offsets = _arrow_index(source)
            rows = rows_of(part, ends[1:])
            first = bisect_right(ends, max(start, rows.start)) - 1
            if first and not hasattr(reader, "get_batch"):
                # Later batches of a stream need the dictionaries before them.
                first = 0 if "dictionary<" in str(reader.schema) else first
                file.seek(offsets[first] or file.tell())
        batches = (batch.select(columns) for batch in _arrow_batches(reader, first))
        yield from _inside(rows, batches, ends[first], lambda _: file.tell() / size)


def _arrow_index(path: str) -> tuple[list[int], list[int]]:
    """The first rows and bytes of the batches, and the ends. A memory map reads little more than batches' headers."""
    from pyarrow import memory_map

    ends, offsets = [0], [0]
    with memory_map(path) as file:
        for batch in _arrow_batches(_arrow_reader(file)):
            ends.append(ends[-1] + len(batch))
            offsets.append(file.tell())
    return ends, offsets


def _arrow_reader(file: Any) -> Any:
    from pyarrow import ArrowInvalid, ipc

    try:
        return ipc.open_file(file)
    except ArrowInvalid:
        file.seek(0)
        return ipc.open_stream(file)


def _arrow_batches(reader: Any, first: int = 0) -> Iterator[Any]:
    """The batches of a file from number ``first`` on, or those of a stream from its position on."""
    if hasattr(reader, "get_batch"):
        return map(reader.get_batch, range(first, reader.num_record_batches))
    return iter(reader)


def _inside(rows: range, batches: Iterable[Any], first_row: int, fraction: Callable[[int], float]) -> Iterator[Batch]:
    """The parts of batches that are in ``rows``."""
    for batch in batches:
        if first_row >= rows.stop:
            return
        skipped, end = max(0, rows.start - first_row), first_row + len(batch)
        yield first_row + skipped, batch[skipped : rows.stop - first_row], fraction(end)
        first_row = end
