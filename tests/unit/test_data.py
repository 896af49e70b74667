import errno
import json
import os
import threading

import numpy as np
import pytest
import torch

from titan_like.config import ConfigError
from titan_like.config.schema import Data
from titan_like.data.loader import BackgroundLoader, GlobalSampler
from titan_like.data.packed import PackedDataset, build_datasets, split_bounds, split_weights, token_fingerprint
from titan_like.data.text import TokenFile, corpus_files, open_corpus
from titan_like.data.tokenizer import ByteTokenizer
from titan_like.train.loss import IGNORED_LABEL

EOD = ByteTokenizer.eod_id


def corpus_of(folder, files, **settings):
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    section = Data(dataset="text", paths=[str(folder / name) for name in files], **settings)
    return open_corpus(section, ByteTokenizer(), folder / "cache")


def documents_of(corpus):
    starts = [0, *corpus.document_ends[:-1]]
    return [corpus.tokens[start:end].tolist() for start, end in zip(starts, corpus.document_ends, strict=True)]


def test_every_document_is_followed_by_the_end_of_document(tmp_path):
    texts = {"a.txt": "first", "b.txt": "zweites, ä", "c.txt": "x"}
    corpus = corpus_of(tmp_path, texts)
    expected = [[*text.encode("utf-8"), EOD] for text in texts.values()]
    assert sorted(documents_of(corpus)) == sorted(expected)
    assert corpus.document_ends[-1] == len(corpus.tokens)


def test_jsonl_holds_one_document_a_line(tmp_path):
    texts = ["one", "two\nlines", "half\u2028a line\u0085more", "🐎", ""]
    lines = [json.dumps({"body": text, "id": 3}, ensure_ascii=False) for text in texts]
    content = "\n\n".join(lines[:3]) + "\r\n" + "\n".join(lines[3:]) + "\n"
    corpus = corpus_of(tmp_path, {"a.jsonl": content}, text_key="body")
    assert documents_of(corpus) == [[*text.encode("utf-8"), EOD] for text in texts]


def test_byte_order_mark_is_no_text(tmp_path):
    corpus = corpus_of(tmp_path, {"a.txt": b"\xef\xbb\xbfone", "b.jsonl": b'\xef\xbb\xbf{"text": "two"}\n'})
    assert sorted(documents_of(corpus)) == sorted([[*b"one", EOD], [*b"two", EOD]])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"", ["a.txt", "empty"]),
        ("a.txt", b"abc\xff", ["a.txt", "byte 3", "UTF-8"]),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', ["a.jsonl:2", "not JSON"]),
        ("a.jsonl", b'{"text": "x"}\n\n{"body": "x"}\n', ["a.jsonl:3", '"text"', "data.text_key"]),
        ("a.jsonl", b'["text"]\n', ["a.jsonl:1", "data.text_key"]),
        ("a.jsonl", b'{"text": 5}\n', ["a.jsonl:1", "data.text_key"]),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', ["a.jsonl:1", "surrogate"]),
        ("a.jsonl", b"\n\n", ["a.jsonl", "no document"]),
    ],
)
def test_bad_text_is_refused_and_leaves_no_cache(tmp_path, name, content, words):
    for _ in range(2):  # the second time must not find half a token file
        with pytest.raises(ConfigError) as error:
            corpus_of(tmp_path, {name: content})
        for word in ["data.paths", *words]:
            assert word in str(error.value)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.paths = .*no\*\.txt.*no such file"):
        corpus_files(Data(dataset="text", paths=[str(tmp_path / "no*.txt")]))
    with pytest.raises(ConfigError, match=r"data\.paths = \(not set\): .*needs files"):
        corpus_files(Data(dataset="text"))


def test_glob_names_each_file_once(tmp_path):
    for name in ("a.txt", "b.txt", "c.md"):
        (tmp_path / name).write_text("x")
    section = Data(dataset="text", paths=[str(tmp_path / "*.txt"), str(tmp_path / "a.txt")])
    assert sorted(path.name for path in corpus_files(section)) == ["a.txt", "b.txt"]


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
    again = open_corpus(section, ByteTokenizer(), tmp_path / "cache")
    assert capsys.readouterr().err == ""
    assert documents_of(again) == documents_of(first)
    assert not list((tmp_path / "cache").glob("*.unfinished"))

    longer = corpus_of(tmp_path, {"a.txt": "hello!", "b.txt": "world"})
    assert "tokenized 2 files into 13 tokens" in capsys.readouterr().err
    assert [*b"hello!", EOD] in documents_of(longer)

    (tmp_path / "b.txt").write_text("earth")  # as long as before, but later
    os.utime(tmp_path / "b.txt", (2e9, 2e9))
    assert [*b"earth", EOD] in documents_of(open_corpus(section, ByteTokenizer(), tmp_path / "cache"))


def test_small_vocabularies_take_two_bytes_a_token(tmp_path):
    class LargeTokenizer(ByteTokenizer):
        vocab_size = 100_000
        eod_id = 99_999

    corpus = corpus_of(tmp_path, {"a.txt": "hello"})
    assert corpus.tokens.dtype == np.uint16
    section = Data(dataset="text", paths=[str(tmp_path / "a.txt")])
    large = open_corpus(section, LargeTokenizer(), tmp_path / "other_cache")
    assert large.tokens.dtype == np.uint32
    assert large.tokens[-1] == 99_999


def test_full_disk_is_one_sentence_and_leaves_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("earth")
    section = Data(dataset="text", paths=[str(tmp_path / "text.txt")])

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match=r"dump_folder.*No space left.*make room"),
    ):
        patch.setattr(np, "save", full)
        open_corpus(section, ByteTokenizer(), tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert documents_of(open_corpus(section, ByteTokenizer(), tmp_path / "cache")) == [[*b"earth", EOD]]


def test_windows_tile_the_stream_and_labels_are_inputs_shifted():
    tokens = np.arange(1000, 1047, dtype=np.uint16)
    dataset = PackedDataset(tokens, 5, shuffled=False)
    assert len(dataset) == 9  # 46 labels
    for i in range(9):
        inputs, labels = dataset[i]
        assert inputs.tolist() == [1000 + 5 * i + k for k in range(5)]
        assert labels.tolist() == [1001 + 5 * i + k for k in range(5)]
        assert inputs.dtype == torch.int64
    assert len(PackedDataset(tokens[:46], 5, shuffled=False)) == 9
    assert len(PackedDataset(tokens[:45], 5, shuffled=False)) == 8
    assert len(PackedDataset(tokens[:5], 5, shuffled=False)) == 0


def test_past_the_end_of_an_unshuffled_split_there_are_no_labels():
    dataset = PackedDataset(np.arange(11), 5, shuffled=False)
    assert (dataset[1][1] != IGNORED_LABEL).all()
    assert (dataset[2][1] == IGNORED_LABEL).all()
    assert dataset[2].shape == dataset[1].shape


def test_each_epoch_is_another_permutation():
    dataset = PackedDataset(np.arange(401), 4, shuffled=True, seed=3)
    epochs = [[int(dataset[100 * epoch + i][0, 0]) // 4 for i in range(100)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(100))
    assert len({tuple(epoch) for epoch in [*epochs, range(100)]}) == 4
    same, other = (PackedDataset(np.arange(401), 4, shuffled=True, seed=seed) for seed in (3, 4))
    indices = [250, 7, 120, 8]  # in any order
    assert all(torch.equal(same[i], dataset[i]) for i in indices)
    assert [int(other[i][0, 0]) // 4 for i in range(100)] != epochs[0]


@pytest.mark.parametrize("seed", range(5))
def test_no_document_is_in_two_splits(seed):
    lengths = np.random.default_rng(seed).integers(1, 60, size=400)
    ends = np.cumsum(lengths)
    bounds = split_bounds(ends, split_weights("8,1,1"))
    assert bounds[0] == 0
    assert bounds[-1] == ends[-1]
    assert set(bounds) <= {0, *ends.tolist()}
    for bound, share in zip(bounds[1:3], (0.8, 0.9), strict=True):
        assert abs(bound - share * ends[-1]) <= 30  # half the longest document


def test_corpus_of_one_document_still_has_all_splits():
    assert split_bounds(np.array([10_000]), split_weights("969,30,1")) == [0, 9690, 9990, 10_000]
    datasets = build_datasets(TokenFile(np.arange(10_000), np.array([10_000])), "969,30,1", 64, seed=0)
    assert {name: len(dataset) for name, dataset in datasets.items()} == {"train": 151, "validation": 4, "test": 0}
    assert datasets["validation"][0][0, 0] == 9690


def test_first_document_longer_than_the_training_share_is_cut():
    assert split_bounds(np.array([100, 110]), split_weights("4,6,0")) == [0, 44, 110, 110]


@pytest.mark.parametrize(
    ("weights", "bounds"), [("1,0,0", [0, 90, 90, 90]), ("1,1,0", [0, 30, 90, 90]), ("2,0,1", [0, 60, 60, 90])]
)
def test_split_of_weight_zero_is_empty(weights, bounds):
    assert split_bounds(np.array([30, 60, 90]), split_weights(weights)) == bounds


def test_split_weights_are_shares():
    assert split_weights("969,30,1") == pytest.approx((0.969, 0.03, 0.001))
    assert split_weights("1, 1, 2") == (0.25, 0.25, 0.5)
    for bad in ("1,2", "1,2,3,4", "a,b,c", "", "-1,1,1", "0,1,1", "nan,1,1", "inf,1,1"):
        with pytest.raises(ConfigError, match='like "969,30,1"'):
            split_weights(bad)


def test_too_little_text_for_one_sample_is_refused():
    with pytest.raises(ConfigError, match=r"training\.seq_len = 64.*50 tokens"):
        build_datasets(TokenFile(np.arange(50), np.array([50])), "1,0,0", 64, seed=0)


def global_order(first, micro_batch, ranks, microbatches):
    """Samples in the order of the stream: microbatch by microbatch, rank by rank."""
    streams = [iter(GlobalSampler(first, micro_batch, rank, ranks)) for rank in range(ranks)]
    return [sample for _ in range(microbatches) for stream in streams for sample in next(stream)]


@pytest.mark.parametrize(("micro_batch", "ranks"), [(24, 1), (6, 2), (2, 4), (1, 3), (3, 8)])
def test_ranks_together_take_the_same_samples_in_every_layout(micro_batch, ranks):
    assert global_order(0, micro_batch, ranks, 48 // (micro_batch * ranks)) == list(range(48))


def test_resume_at_another_data_parallel_size_continues_with_the_next_sample():
    seen = global_order(0, 2, 4, 3)
    seen += global_order(len(seen), 3, 2, 5)
    seen += global_order(len(seen), 5, 1, 2)
    assert seen == list(range(64))


def test_sampler_ends_where_it_is_told_to():
    assert list(GlobalSampler(4, 2, 1, 2, last_sample=12)) == [[6, 7], [10, 11]]


class Numbers(torch.utils.data.Dataset):
    def __init__(self, bad=None):
        self.bad = bad

    def __getitem__(self, index):
        if index == self.bad:
            raise RuntimeError(f"sample {index} cannot be read")
        return torch.tensor(index)


def test_loader_yields_the_sampler_s_batches_and_ends():
    loader = BackgroundLoader(
        Numbers(), GlobalSampler(0, 2, 0, 1, last_sample=40), num_workers=0, device=torch.device("cpu")
    )
    assert torch.cat(list(loader)).tolist() == list(range(40))
    assert list(loader) == []  # and stays ended
    loader.close()


def test_loader_raises_a_worker_s_error_after_the_batches_before_it():
    loader = BackgroundLoader(Numbers(bad=5), GlobalSampler(0, 2, 0, 1), num_workers=0, device=torch.device("cpu"))
    assert next(loader).tolist() == [0, 1]
    assert next(loader).tolist() == [2, 3]
    for _ in range(2):  # asked again, it fails again instead of waiting for ever
        with pytest.raises(RuntimeError, match="sample 5 cannot be read"):
            next(loader)
    loader.close()


def test_closing_a_full_loader_ends_its_thread():
    before = set(threading.enumerate())
    loader = BackgroundLoader(Numbers(), GlobalSampler(0, 2, 0, 1), num_workers=0, device=torch.device("cpu"), depth=2)
    assert next(loader).tolist() == [0, 1]
    assert set(threading.enumerate()) - before
    loader.close()
    assert not set(threading.enumerate()) - before


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
