"""Streams: the same samples for every way of access, in every layout, whatever happens to readers."""

import json
import os
import random
import re
import sys
from collections import Counter
from itertools import chain, islice, product
from types import SimpleNamespace
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from tests.reference.sources import define
from tests.unit.record_cases import write_records
from titan_like.config.errors import ConfigError, RunError
from titan_like.config.schema import Data, JobConfig
from titan_like.data.loading import stream_reader
from titan_like.data.loading.loader import BackgroundLoader, GlobalSampler, merge_states
from titan_like.data.loading.stream import StreamSource, tokenized_times
from titan_like.data.readers import raw_text, shards
from titan_like.data.source import IGNORED_LABEL, SPLITS, UNKNOWN_LENGTH, DataRequest
from titan_like.data.text.tokenizer import ByteTokenizer
from titan_like.verify.watch import digest

SEQ = 8
EOD = ByteTokenizer.eod_id
ENDINGS = tuple(enumerate(("jsonl", "jsonl.gz", "parquet", "arrow", "stream.arrow")))


def texts_of(shard, count=60):
    """Texts of 0 to 29 letters, each beginning with its shard and number."""
    numbers = random.Random(shard)
    return [f"{shard}.{number}:{'abcdefgh' * 3}"[: numbers.randint(0, 29)] for number in range(count)]


@pytest.fixture
def folder(tmp_path):
    """Five shards, one of each kind."""
    (tmp_path / "data").mkdir()
    for number, ending in ENDINGS:
        write_records(tmp_path / "data" / f"{number}.{ending}", texts_of(number))
    return tmp_path


def source_of(folder, of="train", cache="cache", seq_len=SEQ, **section):
    section = {"dataset": "hf", "paths": [str(folder / "data")], "num_readers": 3, "split": "8,1,1"} | section
    return StreamSource(DataRequest(Data(**section), of, seq_len, 0, 257, folder / cache))


def samples_of(source, indices):
    return {index: digest(source[index]) for index in indices}


def read(source, reader, epoch):
    """A reader's documents of an epoch, by name of the shard and text."""
    for part in source.parts(reader, epoch):
        for piece in source.shards[part.shard].pieces("text", part, 0, 1):
            wanted = source.records_of(piece, part)
            for _, text in raw_text.texts_of(piece, "text", wanted.__contains__):
                yield os.path.basename(source.shards[part.shard].name), text


@pytest.mark.parametrize("num_readers", [1, 3, 10, 100])
def test_readers_and_splits_divide_the_records_among_them(folder, num_readers):
    """In each epoch, whatever the sizes of the parts: most readers begin and end inside a shard."""
    expected = Counter((f"{shard}.{ending}", text) for shard, ending in ENDINGS for text in texts_of(shard))
    for epoch in range(3):
        sources = [source_of(folder, split, num_readers=num_readers) for split in SPLITS]
        documents = (read(source, reader, epoch) for source in sources for reader in range(num_readers))
        assert Counter(chain.from_iterable(documents)) == expected
        assert all(len([*read(source, 0, epoch)]) > 0 for source in sources[:1] if num_readers < 100)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet", "arrow"])
@pytest.mark.parametrize("counts", [(300, 100), (400, 4)])
def test_shares_do_not_depend_on_the_sizes_of_shards(tmp_path, ending, counts):
    """Documents of two shards are read in the proportion of their numbers, to within 1 % in some epochs."""
    (tmp_path / "data").mkdir()
    for shard, count in enumerate(counts):
        write_records(tmp_path / "data" / f"{shard}.{ending}", [str(shard)] * count)
    source = source_of(tmp_path, num_readers=4, split="1,0,0")
    epochs = 200  # of which each reader's last one is not whole
    tokens = torch.cat([source[index].tokens for index in range(epochs * sum(counts) * 2 // SEQ)])
    in_second = int((tokens == ord("1")).sum())
    assert in_second / (len(tokens) / 2) == pytest.approx(counts[1] / sum(counts), rel=2 / epochs)


def test_a_source_goes_on_from_its_state_without_reading_again(folder, monkeypatch):
    last = 3 * 200
    source = source_of(folder)
    expected = samples_of(source, range(last)) | samples_of(source_of(folder), range(last, last + 60))
    state = source.state_dict()
    assert [mark[0] for mark in state.values()] == [200] * 3

    read, whole = [], 0
    encode_all = ByteTokenizer.encode_all
    monkeypatch.setattr(ByteTokenizer, "encode_all", lambda *call: read.append(len(call[1])) or encode_all(*call))
    data = folder / "data"
    same = [[str(data)], [str(data / "*")], [str(data), str(data / ".." / "data")]]
    for given, paths in product([{}, state], same):
        source = source_of(folder, paths=paths)
        source.load_state_dict(json.loads(json.dumps(given)))
        assert source.state_dict() == given
        read.clear()
        assert samples_of(source, range(last, last + 60)) == {n: expected[n] for n in range(last, last + 60)}
        whole = whole if given else sum(read)
        assert not given or sum(read) < whole / 2
        assert digest(source[0]) == expected[0]  # and also backwards
    for changes in ({"num_readers": 2}, {"split": "7,2,1"}, {"of": "validation"}, {"seq_len": 2 * SEQ}):
        other, fresh = source_of(folder, **changes), source_of(folder, **changes)
        other.load_state_dict(state)
        assert other.state_dict() == {} and digest(other[last]) == digest(fresh[last])


def test_16_then_4_then_64_ranks_read_the_same_samples(folder):
    size = 640
    expected = samples_of(source_of(folder, num_readers=64), range(3 * size))
    state = {}
    for leg, ranks in enumerate((16, 4, 64)):
        states = []
        for rank in range(ranks):
            source = source_of(folder, num_readers=64)
            source.load_state_dict(json.loads(json.dumps(state)))
            for (index,) in islice(GlobalSampler(leg * size, 1, rank, ranks), size // ranks):
                assert digest(source[index]) == expected[index]
            states.append(source.state_dict())
        state = merge_states(states)


def test_a_worker_s_error_is_the_sentence_alone(folder):
    write_records(folder / "data" / "0.jsonl", ["x"] * 200)
    (folder / "data" / "0.jsonl").open("a").write("{\n")
    for workers in (0, 1):
        settings = {"paths": [str(folder / "data" / "0.jsonl")], "num_readers": 1, "split": "1,0,0"}
        source = source_of(folder, cache=f"cache{workers}", **settings)
        loader = BackgroundLoader(source, GlobalSampler(0, 2, 0, 1), workers, torch.device("cpu"))
        seen = []
        with pytest.raises(ConfigError, match=r'^data\.paths = ".*0\.jsonl:201": the line is not JSON') as error:
            while True:
                seen.append(next(loader))
        assert "\n" not in str(error.value)
        with pytest.raises(ConfigError):  # asked again, it fails again instead of waiting for ever
            next(loader)
        assert len(seen) == (400 - 1) // SEQ // 2  # all that comes before the damage
        loader.close()


def test_held_out_samples_have_no_labels_after_their_end(folder):
    source = source_of(folder, "validation")
    assert (source[0].labels != IGNORED_LABEL).all() and (source[10**9].labels == IGNORED_LABEL).all()
    assert set(source[10**9].tokens.tolist()) == {EOD}
    lengths = [len(source_of(folder, "validation", split=split)) for split in ("8,1,1", "1,0,0", "1,0.0001,0")]
    assert lengths == [UNKNOWN_LENGTH, 0, 0]  # of the last one, there is not one record


@pytest.mark.parametrize("readers", [1, 6, 16, 24, 48])
def test_how_often_samples_are_tokenized_is_known(readers):
    for size, ranks, workers in product([1, 3, 4], [1, 2, 4], [0, 1, 2, 3]):
        pairs = set()
        for rank in range(ranks):
            for number, microbatch in enumerate(islice(GlobalSampler(0, size, rank, ranks), 200)):
                pairs |= {(rank, number % max(1, workers), index % readers) for index in microbatch}
        section = Data(dataset="hf", num_readers=readers, num_workers=workers)
        assert tokenized_times(section, size, ranks) == len(pairs) / readers, (size, ranks, workers)


def test_fingerprint_tells_what_decides_the_samples(folder):
    known = source_of(folder).fingerprint
    assert source_of(folder, cache="other").fingerprint == known
    others = [
        {"num_readers": 4},
        {"split": "7,2,1"},
        {"text_key": "body"},
        {"paths": [str(folder / "data" / "0.jsonl")]},
    ]
    fingerprints = {source_of(folder, **other).fingerprint for other in others}
    fingerprints |= {source_of(folder, split_name).fingerprint for split_name in ("validation", "test")}
    os.rename(folder / "data", folder / "moved")
    assert source_of(folder, paths=[str(folder / "moved")]).fingerprint == known
    content = (folder / "moved" / "0.jsonl").read_bytes()
    (folder / "moved" / "0.jsonl").write_bytes(content.replace(b"a", b"b", 1))
    fingerprints.add(source_of(folder, paths=[str(folder / "moved")]).fingerprint)
    assert len({known, *fingerprints}) == 8


@pytest.fixture
def waits(monkeypatch):
    waited = []
    monkeypatch.setattr(stream_reader, "time", SimpleNamespace(sleep=waited.append))  # other threads sleep too
    return waited


def failing(monkeypatch, times):
    """Lets each piece after the first of a file fail so many times."""
    real, failures = raw_text.read_pieces, Counter()

    def read(path, key, start=0, first_record=1, **settings):
        for piece, share in real(path, key, start, first_record, **settings):
            failures[piece.first_record] += piece.first_record > 1
            if 0 < failures[piece.first_record] <= times:
                raise raw_text.ReadFailure("cannot be read (Connection reset)")
            yield piece, share

    monkeypatch.setattr(shards, "read_pieces", read)


def test_reading_is_tried_again_and_then_the_reader_is_named(tmp_path, monkeypatch, waits, capsys):
    (tmp_path / "data").mkdir()
    write_records(tmp_path / "data" / "one.parquet", [f"{number:07}" for number in range(2000)])
    expected = samples_of(source_of(tmp_path, num_readers=1), range(1500))
    failing(monkeypatch, 2)
    assert samples_of(source_of(tmp_path, num_readers=1, cache="other"), range(1500)) == expected
    assert waits[:14] == [1, 2] * 7  # a piece of 256 records that was read lets the counting begin again
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(waits)
    assert told[1].startswith("reader 0 of 1: ") and "one.parquet cannot be read (Connection reset); " in told[1]
    assert told[1].endswith("trying again in 2 s (2 of 5 tries failed)")

    failing(monkeypatch, 10**9)
    waits.clear()
    source = source_of(tmp_path, num_readers=2)
    for _ in range(2):  # asked again, it does not take the error for the end of the data
        with pytest.raises(RunError) as error:
            samples_of(source, range(600, 601))
    problem = "one.parquet cannot be read (Connection reset) from record 257 on, 5 times"
    assert "reader 0 of 2: " in str(error.value) and problem in str(error.value)
    assert "\n" not in str(error.value) and waits == [1, 2, 4, 8] * 2


def test_a_damaged_file_is_not_read_again(tmp_path, waits):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.arrow").write_bytes(b"ARROW1\0\0")
    with pytest.raises(ConfigError, match=r"a\.arrow.* is damaged"):
        source_of(tmp_path, num_readers=1, split="1,0,0")[0]
    assert waits == []


def test_readers_without_text_in_an_epoch_go_on_to_the_next(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_bytes(b'{"text": "x"}\n\n' * 3)  # empty lines count as records
    source = source_of(tmp_path, num_readers=16, split="1,0,0")
    assert all(source[index][0].tolist() == [120, EOD] * 4 for index in range(32))
    with pytest.raises(ConfigError, match=r"^data\.paths = .*have no text for training; .*data\.split") as error:
        source_of(tmp_path, num_readers=16, split="1e-30,1,0")[0]
    assert "\n" not in str(error.value)


def test_names_that_mean_nothing_are_refused(folder, monkeypatch):
    import huggingface_hub

    def unreachable(self, name, **_):
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    for path, words in {
        "org/name": ["no such file or folder", "hub", "Name or service not known", "name the folder"],
        "org/name.jsonl": ["no such file or folder", "glob"],
        str(folder / "none*"): ["no such file or folder", "glob"],
    }.items():
        with pytest.raises(ConfigError, match=r"data\.paths = ") as error:
            source_of(folder, paths=[path])
        for word in [path, *words]:
            assert word in str(error.value)
    with pytest.raises(ConfigError, match=r"data\.paths = \(not set\).*needs files"):
        source_of(folder, paths=[])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the package datasets; install titan_like\[stream\]"):
        source_of(folder, paths=["org/name"])


class Storage(MemoryFileSystem):
    """Object storage that gives ranges of its objects, and counts their bytes."""

    protocol = "counted"
    fetched: ClassVar = Counter()

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("counted://"))

    def _open(self, path, mode="rb", **settings):
        if mode != "rb":
            return super()._open(path, mode, **settings)
        return Ranges(self, path, size=self.info(path)["size"], **settings)


class Ranges(AbstractBufferedFile):
    def _fetch_range(self, start, end):
        Storage.fetched[self.path.rpartition("/")[2]] += end - start
        return self.fs.store[self.path].getvalue()[start:end]


@pytest.fixture
def storage():
    """Copies files to counted://bucket/org/name@5a1."""
    fsspec.register_implementation("counted", Storage, clobber=True)
    url = "counted://bucket/org/name@5a1"
    yield lambda paths: Storage().put([str(path) for path in paths], f"{url}/") or url
    Storage().rm("/bucket", recursive=True)
    Storage.fetched.clear()


def test_a_folder_on_object_storage_gives_the_samples_of_a_copy(folder, storage):
    for path in (folder / "data").glob("*.arrow"):  # on storage it is read through, so its records have other readers
        path.unlink()
    url = storage((folder / "data").iterdir())
    expected = samples_of(source_of(folder), range(300))
    for path in (url, f"{url}/*"):
        source = source_of(folder, paths=[path], cache="remote")
        assert samples_of(source, range(300)) == expected
        state, again = source.state_dict(), source_of(folder, paths=[path], cache="remote")
        again.load_state_dict(state)
        assert samples_of(again, range(290, 330)) == samples_of(source, range(290, 330))
    assert source.fingerprint == again.fingerprint
    with pytest.raises(ConfigError, match=r'data\.paths = "counted://bucket/none": no such file or folder'):
        source_of(folder, paths=["counted://bucket/none"])


def test_a_reader_fetches_its_own_part(tmp_path, storage):
    texts = [f"{number}{'x' * 4000}" for number in range(1000)]
    url = storage(write_records(tmp_path / f"{number}.jsonl", texts) for number in range(4))
    size, expected = (tmp_path / "0.jsonl").stat().st_size, Counter(texts * 4)
    source = source_of(tmp_path, paths=[url], num_readers=16, split="1,0,0")
    assert not Storage.fetched
    for reader in range(16):
        Storage.fetched.clear()
        expected.subtract(text for _, text in read(source, reader, 0))
        line, read_ahead = 5000, 1 << 16
        assert Storage.fetched.total() <= 4 * size / 16 + 2 * line + 2 * read_ahead
        assert len(Storage.fetched) == 1
    assert not any(expected.values())


@pytest.mark.parametrize("ending", ["parquet", "jsonl.gz", "json"])
def test_a_dataset_of_the_hub_is_streamed_by_its_files(tmp_path, monkeypatch, waits, storage, ending):
    """Storage and, for endings that only `datasets` reads, a folder stand for the hub."""
    import datasets
    import huggingface_hub

    (tmp_path / "data").mkdir()
    paths = [write_records(tmp_path / "data" / f"{number}.{ending}", texts_of(number, 600)) for number in range(3)]
    load, asked, url = datasets.load_dataset, [], storage(paths)
    siblings = [{"rfilename": path.name, "size": path.stat().st_size} for path in paths]
    files = SimpleNamespace(config=SimpleNamespace(data_files={"train": [f"{url}/{path.name}" for path in paths]}))

    def load_folder(name, config, **settings):
        asked.append((name, config, settings.pop("revision")))
        return load(str(tmp_path / "data"), **settings)

    monkeypatch.setattr(datasets, "load_dataset", load_folder)
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_, **__: files)
    info = huggingface_hub.hf_api.DatasetInfo
    info = info(id="org/name", sha="5a1", tags=[], private=False, siblings=siblings)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: info)
    local, hub = source_of(tmp_path), source_of(tmp_path, paths=["org/name:big@main"], cache="hub")
    assert asked == ([("org/name", "big", "5a1")] if ending == "json" else [])
    if ending != "json":  # whose sizes are unknown
        assert samples_of(hub, range(900)) == samples_of(local, range(900))
    expected, read_by_all = Counter(text for number in range(3) for text in texts_of(number, 600)), Counter()
    whole = source_of(tmp_path, paths=["org/name:big@main"], split="1,0,0")
    for reader in range(3):
        read_by_all.update(text for _, text in read(whole, reader, 1))
    assert read_by_all == expected
    expected = samples_of(hub, range(900))
    again = source_of(tmp_path, paths=["org/name:big@main"], cache="hub")
    assert samples_of(again, range(890, 900)) == {index: expected[index] for index in range(890, 900)}
    assert again.fingerprint == hub.fingerprint != local.fingerprint
    if ending == "parquet":
        with pytest.raises(ConfigError, match=r'\d.parquet": has no column "body"; it has id, text'):
            source_of(tmp_path, paths=["org/name"], text_key="body")[0]


def test_skipped_records_are_no_documents(folder, capfd):
    """So the samples are a function of the data alone, also where another process goes on from a state."""
    lines = (folder / "data" / "0.jsonl").read_bytes().splitlines()
    for bad in (b"{", b'{"id": 1}', b'{"text": "\xff"}', b'{"text": "\\ud800"}', b"[1]"):
        lines.insert(3, bad)
    (folder / "data" / "0.jsonl").write_bytes(b"\n".join(lines))
    write_records(folder / "data" / "5.parquet", [*texts_of(5), None])
    skipping = {"bad_lines": "skip", "split": "1,0,0"}
    source = source_of(folder, **skipping)
    indices = range(3 * 256)
    config = JobConfig(data=source.request.section, job={"seed": 0}, training={"seq_len": SEQ})
    expected = samples_of(define(config, "train"), indices)
    assert samples_of(source, indices) == expected
    told = capfd.readouterr().err
    assert f"skipped {folder}/data/0.jsonl:8: the line is not JSON" in told
    assert f'skipped {folder}/data/5.parquet:61: the record has no text under "text"' in told
    assert re.search(r"reader \d of 3 skipped .* \(\d of [\d,]+ records so far\)", told)
    assert samples_of(source_of(folder, **skipping), indices[::-7]) == {n: expected[n] for n in indices[::-7]}
    stopping = source_of(folder, split="1,0,0")
    stopping.load_state_dict(source.state_dict())  # whose states do not lead past bad records
    with pytest.raises(ConfigError, match=r'set data.bad_lines to "skip"'):
        stopping[3 * 512]
