"""Our indexed datasets and Megatron-LM's own: each reads what the other writes, and writes the same bytes."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from titan_like.data.readers.indexed import DTYPES, IndexedDataset, IndexedWriter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that it does without
    megatron = pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed", exc_type=ImportError
    )

DOCUMENTS = [[5, 1], [0, 3, 2], [7], [1, 1, 1, 1]]  # lengths of their sequences


def sequences(dtype: np.dtype) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    most = 100 if dtype.itemsize == 1 else 30_000
    return [generator.integers(0, most, length).astype(dtype) for document in DOCUMENTS for length in document]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_both_write_the_same_bytes_and_read_each_other(dtype: np.dtype, tmp_path: Path) -> None:
    parts = iter(sequences(dtype))
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype.type)
    with IndexedWriter(tmp_path / "ours", dtype) as writer:
        for lengths in DOCUMENTS:
            document = [next(parts) for _ in lengths]
            # Their builder takes tensors, which know fewer types than the format; it converts what it is given.
            whole = np.concatenate(document)
            builder.add_document(torch.from_numpy(whole.astype(np.float64 if dtype.kind == "f" else np.int64)), lengths)
            for sequence in document:
                writer.add(sequence)
            writer.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()
    ours, theirs = IndexedDataset(tmp_path / "theirs"), megatron.IndexedDataset(str(tmp_path / "ours"))
    assert len(ours) == len(theirs) == sum(map(len, DOCUMENTS))
    assert theirs.document_indices.tolist() == [0, 2, 5, 6, 10]
    for number, expected in enumerate(sequences(dtype)):
        assert np.array_equal(ours[number], expected)
        assert np.array_equal(theirs[number], expected)
