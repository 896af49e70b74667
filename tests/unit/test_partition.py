"""The division of shards among readers, by brute force: every record has one owner, and shares are equal."""

import os
import random
from collections import Counter
from contextlib import nullcontext
from itertools import accumulate, chain, pairwise
from pathlib import Path

import fsspec
import numpy as np
import pytest

from tests.unit.record_cases import write_records
from tests.unit.test_stream import read, source_of
from titan_like.data.readers import shards
from titan_like.data.readers.partition import Part, is_in, parts_of, rows_of
from titan_like.data.readers.raw_text import UnreadableError, read_pieces, texts_of


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_equal_and_cover_every_shard_once(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 5, draw.randint(1, 1000)]) for _ in range(draw.randint(1, 12))]
    sizes[draw.randrange(len(sizes))] += 1
    order, count = draw.sample(range(len(sizes)), len(sizes)), draw.randint(1, 40)
    owners: dict[tuple[int, int], int] = {}
    for number in range(count):
        parts = list(parts_of(np.array(sizes), order, number, count))
        places = [(part.shard, place) for part in parts for place in range(part.begin, part.end)]
        assert abs(len(places) - sum(sizes) / count) < 1
        assert sum(part.end - part.begin < part.size for part in parts) <= 2
        assert all(part.size == sizes[part.shard] and 0 <= part.share - sum(sizes) / count < 1 for part in parts)
        assert not owners.keys() & set(places)
        owners |= dict.fromkeys(places, number)
    in_order = [(shard, place) for shard in order for place in range(sizes[shard])]
    assert [owners[place] for place in in_order] == sorted(owners.values())


def cuts_of(draw: random.Random, size: int, share: int) -> list[Part]:
    """All parts of a shard, cut at any places."""
    cuts = sorted({0, size, *(draw.randint(0, size) for _ in range(draw.randint(0, 9)))})
    return [Part(0, begin, end, size, share) for begin, end in pairwise(cuts)]


@pytest.mark.parametrize("seed", range(50))
def test_rows_and_records_have_one_owner(seed: int) -> None:
    draw = random.Random(seed)
    groups = [draw.choice([1, 3, draw.randint(1, 60)]) for _ in range(draw.randint(1, 9))]
    ends, size = list(accumulate(groups)), draw.randint(1, 3000)
    parts = cuts_of(draw, size, draw.randint(1, size))
    rows = [rows_of(part, ends) for part in parts]
    assert [row for some in rows for row in some] == list(range(ends[-1]))
    for part, some in zip(parts, rows, strict=True):
        for begin, end in pairwise([0, *ends]):
            if (end - begin) * size <= part.share * ends[-1]:  # the group is whole
                is_first = part.begin * ends[-1] <= begin * size < part.end * ends[-1]
                assert len(range(max(begin, some.start), min(end, some.stop))) == is_first * (end - begin)
            elif some.start > begin:  # else cut within a row of the exact place
                assert not begin < some.start < end or some.start - 1 < part.begin * ends[-1] / size <= some.start
    numbers = np.arange(1000, dtype=np.uint64)
    chosen = np.array([is_in(part, numbers) for part in parts])
    assert (chosen.sum(0) == 1).all()
    for part, mask in zip(parts, chosen, strict=True):
        assert abs(mask.sum() - 1000 * (part.end - part.begin) / size) < 5


@pytest.mark.parametrize("last", [b"", b"\n", b"\n\n"])
def test_every_line_has_one_reader_wherever_a_file_is_cut(tmp_path: Path, last: bytes) -> None:
    lines = [b'{"text": "%d%s"}' % (number, b"x" * (number * 7 % 23)) for number in range(12)]
    lines.insert(4, b"")
    content = b"\n".join(lines) + last
    path, size = tmp_path / "a.jsonl", len(content)
    path.write_bytes(content)
    begins = [0, *(place + 1 for place, byte in enumerate(content) if byte == ord("\n"))]
    texts = [None if not line else line[10:-2].decode() for line in content.split(b"\n")]

    def read(part: Part) -> list[str]:
        pieces = [piece for piece, _ in read_pieces(path, "text", part=part, kind="jsonl")]
        found = [text for piece in pieces for _, text in texts_of(piece, "text")]
        assert not pieces or not list(read_pieces(path, "text", pieces[-1].end, part=part, kind="jsonl"))
        return found

    for begin in range(size):
        for end in range(begin + 1, size + 1):
            wanted = [text for at, text in zip(begins, texts, strict=True) if begin <= at < end and text]
            assert read(Part(0, begin, end, size, end - begin)) == wanted, (begin, end)


@pytest.mark.parametrize("name, sizes", [("a.json", 3), ("a.part", 3), ("a.jsonl", 1), ("a.jsonl", 0)])
def test_urls_of_unknown_format_or_size_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sizes: int
) -> None:
    """The sizes of the first files are known."""
    storage, files = fsspec.filesystem("memory"), {}
    texts = [[f"{number}.{record}" for record in range(300)] for number in range(3)]
    for number in range(3):
        content = write_records(tmp_path / f"{number}.jsonl", texts[number]).read_bytes()
        storage.pipe(path := f"/once/{sizes}/{number}.{name}", content)
        files[f"memory:/{path}"] = (len(content) if number < sizes else None, "1")
    monkeypatch.setattr(shards, "_UNKNOWN_SIZE", 64)  # smaller than any of the files
    monkeypatch.setattr(shards, "find_remote", lambda *_: files)
    source = source_of(tmp_path, paths=["memory://once"], num_readers=7, split="1,0,0")
    read_by_all = Counter(text for reader in range(7) for _, text in read(source, reader, 0))
    storage.rm("/once", recursive=True)
    assert read_by_all == Counter(chain(*texts))


def test_lines_past_the_listed_size_are_not_left_out_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = write_records(tmp_path / "grown.jsonl", [str(record) for record in range(300)]).read_bytes()
    fsspec.filesystem("memory").pipe("/grown/0.jsonl", content)
    for size in (0, len(content) // 2):
        monkeypatch.setattr(shards, "find_remote", lambda *_, size=size: {"memory://grown/0.jsonl": (size, "1")})
        source = source_of(tmp_path, paths=["memory://grown"], num_readers=3, split="1,0,0")
        told = pytest.raises(UnreadableError, match="larger than the") if size else nullcontext()
        with told:
            assert len([text for reader in range(3) for text in read(source, reader, 0)]) == 300


def test_a_stream_that_is_no_longer_used_closes_its_files(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_records(tmp_path / "data" / "0.jsonl", ["a text of more than a sample"])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(4):
        source_of(tmp_path)[0]
    assert len(os.listdir("/proc/self/fd")) <= before
