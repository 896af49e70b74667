"""Files of records, of the kind that the name says, and indexed datasets."""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from pyarrow import ipc

from titan_like.data.readers.indexed import DTYPES, IndexedWriter

COMPRESS = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def jsonl(texts: Sequence[str | None], key: str = "text") -> bytes:
    """A JSON object a line."""
    return "".join(json.dumps({"id": number, key: text}) + "\n" for number, text in enumerate(texts)).encode()


def write_records(path: Path, texts: Sequence[str | None], key: str = "text") -> Path:
    """JSON lines, perhaps compressed; or parquet of several row groups, or arrow of several batches (.stream.arrow)."""
    table = pa.table({"id": range(len(texts)), key: pa.array(texts, pa.large_string())})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=7)
    elif path.suffix == ".arrow":
        opened = ipc.new_stream if ".stream" in path.name else ipc.new_file
        with opened(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    else:
        path.write_bytes(COMPRESS.get(path.suffix, bytes)(jsonl(texts, key)))
    return path


def write_indexed(prefix: Path, documents: Iterable[Sequence[Sequence[int]]], dtype: np.dtype = DTYPES[8]) -> Path:
    """Documents of sequences of tokens."""
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add(np.array(sequence))
            writer.end_document()
    return prefix
