import errno
import os
import pickle
import threading
from dataclasses import replace
from multiprocessing import active_children

import numpy as np
import pytest
import torch

from tests.e2e.scripts import install
from titan_like.config import ConfigError
from titan_like.config.entry_points import DATASETS, find_dataset
from titan_like.config.errors import RunError
from titan_like.config.schema import Data
from titan_like.data.batch import Batch
from titan_like.data.loading.loader import BackgroundLoader, GlobalSampler
from titan_like.data.loading.open_source import open_source
from titan_like.data.readers import raw_text
from titan_like.data.readers.indexed import StoredTokens
from titan_like.data.source import DataRequest, Source
from titan_like.data.text import long_text, preprocess
from titan_like.data.text.packed import (
    corpus_files,
    open_corpus,
    split_bounds,
    split_weights,
    token_fingerprint,
)
from titan_like.data.text.tokenizer import ByteTokenizer

EOD = ByteTokenizer.eod_id


def request_of(folder, seq_len=5, split="validation", seed=0, vocab_size=257, **section):
    return DataRequest(Data(**section), split, seq_len, seed, vocab_size, folder / "cache")


def corpus_of(folder, files, **settings):
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    section = Data(dataset="text", paths=[str(folder / name) for name in files], **settings)
    return open_corpus(section, folder / "cache")


def bounds_of(ends, weights):
    return split_bounds(
        int(ends[-1]), lambda token: min([0, *ends.tolist()], key=lambda end: abs(end - token)), weights
    )


def documents_of(corpus):
    return [corpus[number].tolist() for number in range(len(corpus))]


def test_only_the_file_s_beginning_has_a_byte_order_mark(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_text, "_CHUNK", 8)
    monkeypatch.setattr(long_text, "PIECE", 8)
    content, mark = b"1 line\n\xef\xbb\xbf2 lines\n", b"\xef\xbb\xbf"
    assert documents_of(corpus_of(tmp_path, {"a.txt": mark + content})) == [[*content, EOD]]
    with pytest.raises(ConfigError, match=r"b\.jsonl:2.*the line is not JSON \(Unexpected UTF-8 BOM"):
        corpus_of(tmp_path, {"b.jsonl": b'{"text": ""}\n\xef\xbb\xbf{"text": ""}\n'})


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.paths = .*no\*\.txt.*no such file"):
        corpus_files(Data(dataset="text", paths=[str(tmp_path / "no*.txt")]))
    with pytest.raises(ConfigError, match=r"data\.paths = \(not set\): .*needs files"):
        corpus_files(Data(dataset="text"))


def test_standard_library_is_there_and_in_a_fixed_order():
    files = corpus_files(Data())
    assert len(files) > 300
    assert files == corpus_files(Data())
    assert files != sorted(files)
    assert not any("site-packages" in path.parts for path in files)


def test_token_cache_is_reused_until_a_file_changes(tmp_path, capsys):
    files = {"a.txt": "hello", "b.txt": "world"}
    first = corpus_of(tmp_path, files)
    assert "tokenized 2 files into 12 tokens" in capsys.readouterr().err
    section = Data(dataset="text", paths=[str(tmp_path / name) for name in files])
    again = open_corpus(section, tmp_path / "cache")
    assert capsys.readouterr().err == ""
    assert documents_of(again) == documents_of(first)
    assert not list((tmp_path / "cache").glob("*.unfinished"))

    longer = corpus_of(tmp_path, {"a.txt": "hello!", "b.txt": "world"})
    assert "tokenized 2 files into 13 tokens" in capsys.readouterr().err
    assert [*b"hello!", EOD] in documents_of(longer)

    (tmp_path / "b.txt").write_text("earth")  # as long as before, but later
    os.utime(tmp_path / "b.txt", (2e9, 2e9))
    assert [*b"earth", EOD] in documents_of(open_corpus(section, tmp_path / "cache"))


def test_stored_tokens_are_read_like_an_array(tmp_path):
    expected = np.arange(1000, dtype=np.uint16)
    expected.tofile(tmp_path / "tokens.bin")
    stored = StoredTokens(tmp_path / "tokens.bin", expected.dtype)
    in_a_worker = pickle.loads(pickle.dumps(stored.part(100, 900)))
    (tmp_path / "tokens.bin").unlink()  # as a cache may be, while a run goes on
    assert len(stored) == 1000
    for start, stop in [(0, 1000), (3, 700), (999, 2000), (5, 5)]:
        assert np.array_equal(stored[start:stop], expected[start:stop])
    assert len(in_a_worker) == 800
    assert np.array_equal(in_a_worker[10:900], expected[100:900][10:900])


def test_full_disk_is_one_sentence_and_a_later_run_goes_on(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("earth")
    section = Data(dataset="text", paths=[str(tmp_path / "text.txt")])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"dump_folder.*No space left.*make room"):
        patch.setattr(preprocess, "write_index", full)
        open_corpus(section, tmp_path / "cache")
    assert documents_of(open_corpus(section, tmp_path / "cache")) == [[*b"earth", EOD]]
    assert not list((tmp_path / "cache").glob("*.unfinished"))


@pytest.mark.parametrize(
    ("ends", "weights", "bounds"),
    [
        ([30, 60, 90], "1,0,0", [0, 90, 90, 90]),
        ([30, 60, 90], "1,1,0", [0, 30, 90, 90]),
        ([30, 60, 90], "2,0,1", [0, 60, 60, 90]),
        ([100, 110], "4,6,0", [0, 44, 110, 110]),  # the first document is longer than the training share
    ],
)
def test_a_split_is_empty_only_if_its_weight_is_zero(ends, weights, bounds):
    assert bounds_of(np.array(ends), split_weights(weights)) == bounds


def test_split_weights_are_shares():
    assert split_weights("969,30,1") == pytest.approx((0.969, 0.03, 0.001))
    assert split_weights("1, 1, 2") == (0.25, 0.25, 0.5)
    for bad in ("1,2", "1,2,3,4", "a,b,c", "", "-1,1,1", "0,1,1", "nan,1,1", "inf,1,1"):
        with pytest.raises(ConfigError, match='like "969,30,1"'):
            split_weights(bad)


def test_too_little_text_for_one_sample_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 49)
    section = Data(dataset="text", paths=[str(tmp_path / "a.txt")], split="1,0,0")
    request = replace(request_of(tmp_path, 64, "train"), section=section)
    with pytest.raises(ConfigError, match=r"training\.seq_len = 64.*50 tokens"):
        open_source(request)


class Ones(Source):
    """Samples of the number 1; a subclass is wrong in one way."""

    fingerprint = "ones"
    shape, dtype, token = (5,), torch.int64, 1

    def __len__(self):
        return 7

    def sample(self, position):
        ones = torch.full(self.shape, self.token, dtype=self.dtype)
        return Batch(ones, ones)


ShortOnes, LargeOnes = (type("WrongOnes", (Ones,), change) for change in ({"shape": (4,)}, {"token": 257}))


class BareOnes(Ones):
    def sample(self, position):
        return super().sample(position).tokens


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (f"{__name__}:request_of", ["is not a subclass of titan_like.data.source.Source"]),
        (f"{__name__}:ShortOnes", ["torch.int64 [4], not torch.int64 [5]"]),
        (f"{__name__}:BareOnes", ["Tensor; return titan_like.data.batch.Batch(tokens, labels)"]),
        (f"{__name__}:LargeOnes", ["from 257 to 257", "from 0 to 256"]),
    ],
)
def test_what_is_no_dataset_is_refused(tmp_path, monkeypatch, place, words):
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, "toys", "titan_like.datasets", f"ones = {place}")
    with pytest.raises(ConfigError, match=r'data\.dataset = "ones"') as error:
        open_source(request_of(tmp_path, dataset="ones"))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("name", "packages", "places"),
    [("ones", ("a", "b"), "a:Ones and b:Ones"), ("text", ("a",), r"a:Ones and titan_like\..*:TextSource")],
)
def test_two_packages_with_one_name_are_refused(tmp_path, monkeypatch, name, packages, places):
    """A built-in dataset is one of them too."""
    monkeypatch.syspath_prepend(tmp_path)
    for package in packages:
        install(tmp_path, f"of_{package}", "titan_like.datasets", f"{name} = {package}:Ones")
    with pytest.raises(ConfigError, match=f"is defined by {places}; rename it"):
        find_dataset(Data(dataset=name))


@pytest.mark.parametrize("name", DATASETS)
def test_built_in_datasets_are_found_and_have_no_options(name):
    assert issubclass(find_dataset(Data(dataset=name)).load(), Source)
    with pytest.raises(ConfigError, match=r"data\.options = .*has no options"):
        find_dataset(Data(dataset=name, options={"size": 3}))


class Numbers(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return Batch(torch.tensor(index))


@pytest.mark.parametrize("workers", [0, 2])
def test_closing_a_full_loader_ends_its_thread_and_its_processes(workers):
    def running():  # a queue's own thread ends a moment after its queue is closed
        loaders = [thread for thread in threading.enumerate() if thread.name == "data-loader"]
        return {*loaders, *active_children()}

    before = running()
    loader = BackgroundLoader(Numbers(), GlobalSampler(0, 2, 0, 1), workers, device=torch.device("cpu"), depth=2)
    assert next(loader).tokens.tolist() == [0, 1]
    assert len(running() - before) >= 1 + workers
    loader.close()
    assert not running() - before


def test_a_loader_that_repeats_keeps_its_processes():
    before, sampler = set(active_children()), GlobalSampler(0, 2, 0, 1, last_sample=40)
    loader = BackgroundLoader(Numbers(), sampler, 2, device=torch.device("cpu"), repeats=True)
    for number_of_batches in (20, 1, 20):  # in the second pass it is closed in the middle
        batches = [next(loader) for _ in range(number_of_batches)]
        assert torch.cat([batch.tokens for batch in batches]).tolist() == list(range(2 * number_of_batches))
        assert number_of_batches == 1 or list(loader) == list(loader) == []  # and stays ended
        processes = set(active_children()) - before
        loader.close()
        loader.start()
    assert set(active_children()) - before == processes and len(processes) == 2
    loader.close()
    del loader
    assert set(active_children()) == before


@pytest.mark.slow
def test_a_process_that_dies_between_two_passes_is_named():
    before = set(active_children())
    loader = BackgroundLoader(Numbers(), GlobalSampler(0, 2, 0, 1, 40), 1, device=torch.device("cpu"), repeats=True)
    assert len(list(loader)) == 20
    (process,) = set(active_children()) - before
    process.kill()
    loader.close()
    loader.start()
    with pytest.raises(RunError, match=rf"process \(pid {process.pid}\) was killed by signal 9, .* data\.num_workers"):
        next(loader)
    loader.close()


def test_fingerprint_tells_tokens_apart():
    tokens = np.arange(3_000_000, dtype=np.uint16) % 50_000
    known = token_fingerprint(tokens)
    assert token_fingerprint(tokens.copy()) == known and token_fingerprint(tokens.astype(np.int32)) == known
    assert token_fingerprint(tokens[:-1]) != known
    for place in (0, 4_000, 2_999_999):
        changed = tokens.copy()
        changed[place] += 1
        assert token_fingerprint(changed) != known
    assert token_fingerprint(tokens[:5]) != token_fingerprint(tokens[:4])
