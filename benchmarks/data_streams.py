"""Streams, for `data.py`: bytes that a reader reads next to its share, and tokens per second of processor time."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import sysconfig
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from data_tokenize import text_of

READERS = {16: 4, 128: 16, 1024: 64}  # how many of them are counted; of compressed files, at most 4
# Of Parquet every reader reads the footer. In that of a text column, minima and maxima are most of the bytes.
FORMATS = ("jsonl", "parquet", "statistics.parquet", "jsonl.gz")
SHARDS = {"2,000 small shards": (2000, 20, 8e6), "8 big shards": (8, 1, 1e9)}  # number, distinct ones, mean bytes
WINDOWS, SEQ = 1000, 1024


def streams(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Bytes read by the readers of an epoch, by /proc/self/io, and the processor time of a reader's tokens."""
    from titan_like.config.schema import Data
    from titan_like.data.loading.stream import StreamSource
    from titan_like.data.source import DataRequest

    _, tokenizer = text_of(options, folder, 1)
    found: dict[str, Any] = {}
    for name, (number, distinct, mean_size) in SHARDS.items():
        for ending in FORMATS:
            shards = folder / f"{name} of {ending}"
            _write(shards, ending, number, distinct, mean_size * options.scale)

            def source_of(num_readers: int, paths: Path = shards) -> StreamSource:
                section = Data(dataset="hf", paths=[str(paths)], num_readers=num_readers, tokenizer=tokenizer)
                section = section.model_copy(update={"split": "1,0,0"})
                return StreamSource(DataRequest(section, "train", SEQ, 0, 50304, folder))

            cases: dict[str, Any] = {}
            for num_readers, counted in READERS.items():
                source = source_of(num_readers)
                readers = range(0, num_readers, num_readers // (4 if ending == "jsonl.gz" else counted))
                ratios = [_bytes_of(source, reader) * num_readers / _size_of(shards) for reader in readers]
                cases[str(num_readers)] = {"mean": statistics.mean(ratios), "max": max(ratios), "readers": len(ratios)}
                print(f"streams: {name}, {ending}, {num_readers} readers: bytes read ÷ share is on average "
                      f"{statistics.mean(ratios):.3f}, at most {max(ratios):.3f}")  # fmt: skip
            found[f"{name}, {ending}"] = cases
            if ending not in ("jsonl", "parquet"):
                continue
            rates: dict[int, list[float]] = {}
            for turn in range(5):
                for num_readers in (1, *READERS):
                    reader = turn * num_readers // 5
                    rates.setdefault(num_readers, []).append(_rate(source_of(num_readers), reader, num_readers))
            for num_readers in READERS:
                speed = statistics.median(rates[num_readers]) / statistics.median(rates[1])
                cases[str(num_readers)]["speed"] = speed
                print(f"streams: {name}, {ending}: a reader of {num_readers} gives {speed:.2f} × the tokens of one "
                      "reader in a second of processor time")  # fmt: skip
            cases["1"] = {"tokens_per_processor_second": statistics.median(rates[1])}
    return found


def _texts() -> Iterator[str]:
    """The standard library's source, without end, in documents of 1,000 to 7,000 characters."""
    draw, number = random.Random(0), 0
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    while True:
        for text in texts:
            at = 0
            while at < len(text):
                size = draw.randint(1000, 7000)
                yield f"copy {(number := number + 1)}\n{text[at : at + size]}"
                at += size


def _write(folder: Path, ending: str, number: int, distinct: int, mean_size: float) -> None:
    """Write ``distinct`` files of a quarter to seven quarters of the mean size, and links to them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    texts = _texts()
    for place in range(distinct):
        size = mean_size if distinct == 1 else mean_size * (0.25 + 1.5 * place / (distinct - 1))
        documents = list(islice(texts, max(1, round(size / 4000))))
        path = folder / f"{place:04}.{ending}"
        if ending.endswith("parquet"):
            has_statistics = ending == "statistics.parquet"
            pq.write_table(pa.table({"text": documents}), path, row_group_size=128, write_statistics=has_statistics)
        else:
            content = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
            path.write_bytes(gzip.compress(content, 1) if ending == "jsonl.gz" else content)
    for place in range(distinct, number):
        os.link(folder / f"{place % distinct:04}.{ending}", folder / f"{place:04}.{ending}")


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _bytes_of(source: Any, reader: int) -> int:
    """Bytes that this process reads from files for a reader's part of an epoch, without tokenizing it."""
    before = _bytes_read()
    for part in source.parts(reader, 0):
        for piece in source.shards[part.shard].pieces("text", part, 0, 1):
            source.records_of(piece, part)
    return _bytes_read() - before


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _rate(source: Any, reader: int, num_readers: int) -> float:
    """Tokens per second of this process, read by one reader."""
    source[reader]
    began = time.process_time()
    for number in range(1, 1 + WINDOWS):
        source[number * num_readers + reader]
    return WINDOWS * SEQ / (time.process_time() - began)
