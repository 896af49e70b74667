"""Megatron-LM's .bin and .idx files, and blends of them."""

import struct
from pathlib import Path

import numpy as np
import pytest

from tests.unit.record_cases import write_indexed
from titan_like.config import ConfigError
from titan_like.config.schema import Data
from titan_like.data.loading.blend import Blend, Share, shares_of
from titan_like.data.loading.open_source import open_source
from titan_like.data.readers import indexed
from titan_like.data.readers.indexed import DTYPES, IndexedDataset, IndexedWriter, prefix_of, token_dtype
from titan_like.data.source import DataRequest

SEQ_LEN = 8


def corpus(prefix: Path, first_token: int, documents: int, length: int = 40) -> str:
    return str(write_indexed(prefix, [[[first_token + number % 50] * length] for number in range(documents)]))


def request(paths: list[str | float], part: str = "train", split: str = "969,30,1") -> DataRequest:
    section = Data(dataset="indexed", paths=paths, split=split)
    return DataRequest(section, part, SEQ_LEN, seed=0, vocab_size=300, cache_folder=Path("unused"))


@pytest.mark.parametrize("code", DTYPES)
def test_bytes_are_those_of_the_format(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out by hand from Megatron-LM's description of the format."""
    dtype = DTYPES[code]
    monkeypatch.setattr(indexed, "_PIECE", 1)
    write_indexed(tmp_path / "data", [[[1, 2, 3]], [[], [4]], []], dtype)
    size = dtype.itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 3, 4)
    index += struct.pack("<3i", 3, 0, 1) + struct.pack("<3q", 0, 3 * size, 3 * size) + struct.pack("<4q", 0, 1, 3, 3)
    assert (tmp_path / "data.idx").read_bytes() == index
    assert (tmp_path / "data.bin").read_bytes() == np.array([1, 2, 3, 4], dtype).tobytes()
    dataset = IndexedDataset(tmp_path / "data")
    assert [dataset[number].tolist() for number in range(len(dataset))] == [[1, 2, 3], [], [4]]
    assert [dataset.document_end(number) for number in range(-1, 3)] == [0, 3, 4, 4]
    assert {path.name for path in tmp_path.iterdir()} == {"data.bin", "data.idx"}


def test_tokens_take_two_bytes_up_to_the_vocabulary_for_which_megatron_s_do() -> None:
    assert (token_dtype(65499), token_dtype(65500)) == (np.dtype("<u2"), np.dtype("<i4"))


def test_nearest_document_end_is_that_of_a_scan(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 9, size=40)
    write_indexed(tmp_path / "data", [[[1] * length] for length in lengths])
    dataset, ends = IndexedDataset(tmp_path / "data.bin"), [0, *np.cumsum(lengths).tolist()]
    for token in range(ends[-1] + 1):
        assert abs(dataset.nearest_document_end(token) - token) == min(abs(end - token) for end in ends)
        assert dataset.nearest_document_end(token) in ends


def cut(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def patch(path: Path, at: int, content: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[at : at + len(content)] = content
    path.write_bytes(whole)


def swap(prefix: Path) -> None:
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    index.rename(f"{prefix}.old")
    data.rename(index)
    Path(f"{prefix}.old").rename(data)


DAMAGE = {
    "no index": (lambda p: Path(f"{p}.idx").unlink(), "data.idx", "there is no such file"),
    "no tokens": (lambda p: Path(f"{p}.bin").unlink(), "data.bin", "there is no such file"),
    "header cut": (lambda p: cut(Path(f"{p}.idx"), 90), "data.idx", "is no index of Megatron-LM, or is cut off"),
    "index cut": (lambda p: cut(Path(f"{p}.idx"), 5), "data.idx", "is cut off: it has 117 bytes"),
    "tokens cut": (lambda p: cut(Path(f"{p}.bin"), 1), "data.bin", "is cut off: it has 23 bytes"),
    "tokens longer": (
        lambda p: Path(f"{p}.bin").open("ab").write(b"x"),
        "data.bin",
        "is longer than its index says",
    ),
    "swapped": (swap, "data.idx", "is no index of Megatron-LM"),
    "version": (lambda p: patch(Path(f"{p}.idx"), 9, b"\x07"), "data.idx", "has version 7 of the format"),
    "type": (lambda p: patch(Path(f"{p}.idx"), 17, b"\x20"), "data.idx", "tokens of type 32, which are unknown"),
    "other type": (lambda p: patch(Path(f"{p}.idx"), 17, b"\x04"), "data.bin", "is cut off"),
    "documents": (lambda p: patch(Path(f"{p}.idx"), 114, b"\x02"), "data.idx", "its documents do not cover its 4"),
}


@pytest.mark.parametrize("case", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_named_with_what_is_wrong(case: tuple, tmp_path: Path) -> None:
    damage, name, problem = case
    write_indexed(tmp_path / "data", [[[1, 2, 3]], [[4, 5]], [[6, 7, 8, 9]], [[10, 11, 12]]])
    damage(tmp_path / "data")
    with pytest.raises(ConfigError, match=rf'^data.paths = "{tmp_path}/{name}": .*{problem}'):
        open_source(request([str(tmp_path / "data")]))


def test_nothing_is_left_where_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"), IndexedWriter(tmp_path / "data", DTYPES[8]) as writer:
        writer.add(np.arange(10))
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_a_source_without_validation_samples_leaves_its_share_to_the_others(tmp_path: Path) -> None:
    full = [corpus(tmp_path / name, 0, 300) for name in "ac"]
    paths = [5, str(write_indexed(tmp_path / "b", [[[1] * 100]])), 1, full[0], 3, full[1]]
    blend = open_source(request(paths, "validation", split="969,31,0"))
    assert blend.paths == full
    assert blend.blend.shares == Blend([1, 3], 0).shares
    assert blend.blend.counts(len(blend))[1] == len(blend.sources[1])


IN_TURN = r"data.paths = \[.*weights and paths must come in turn, as in .*, with positive weights"
REFUSED = {
    "a weight that is none": ([0.5, "A", "half", "B"], IN_TURN),
    "a number for a path": ([2023, 2024], IN_TURN),
    "a weight in quotes": (["0.5", "A"], IN_TURN),
    "no weight at a path that looks like one": (["0.7", "A", "0.3", "2024"], IN_TURN),
    "a weight too many": ([0.5, "A", 0.5], IN_TURN),
    "a tiny weight": ([1, "A", 1e-9, "B"], "weight 1e-09 is below one sample in 16,777,216; leave that source out"),
    "an empty source": ([1, "A", 1, "E"], r"the training split of .*E has 0 tokens"),
    "a source named twice": ([1, "A", 3, "A"], "A.*is named twice; give it once"),
    "no path": ([], 'dataset "indexed" needs the paths'),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_bad_sources_are_one_sentence(case: tuple[list[str | float], str], tmp_path: Path) -> None:
    corpus(tmp_path / "A", 0, 20)
    corpus(tmp_path / "B", 0, 20)
    write_indexed(tmp_path / "E", [])
    paths, problem = case
    with pytest.raises(ConfigError, match=problem):
        open_source(request([str(tmp_path / path) if str(path).isupper() else path for path in paths]))


@pytest.mark.parametrize(
    "paths",
    [
        ["in"],
        ["in/*"],
        ["in/**/*.idx"],
        ["in/**/*.bin"],
        ["in/a", "in/deep"],
        ["in/a.bin", "in/*/*"],
        ["in", "in/a.idx"],
    ],
    ids=str,
)
def test_files_folders_and_patterns_mean_the_same_datasets(paths: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep/er").mkdir(parents=True)
    names = [corpus(folder / "a", 0, 20), corpus(folder / "deep/b", 50, 10), corpus(folder / "deep/er/c", 100, 10)]
    (folder / "README.md").write_text("about them")
    listed, blend = open_source(request([*names])), open_source(request([str(tmp_path / path) for path in paths]))
    assert list(map(str, map(prefix_of, blend.paths))) == names and blend.fingerprint == listed.fingerprint
    # One weight for all of them is divided by their sizes.
    other = corpus(tmp_path / "other", 150, 20)
    weighed = open_source(request([3, str(folder), 1, other]))
    sizes = [len(source) for source in weighed.sources[:3]]
    shares = np.array(weighed.blend.shares) / sum(weighed.blend.shares)
    np.testing.assert_allclose(shares, [*(0.75 * size / sum(sizes) for size in sizes), 0.25], atol=1e-6)


def test_numbers_are_weights_and_strings_are_paths() -> None:
    assert Data(paths=[0.7, "/a", 3, "/b"]).paths == [0.7, "/a", 3.0, "/b"]
    assert Data(paths=["2023", "2024"]).paths == ["2023", "2024"]
    assert shares_of(Data(paths=["2023", "2024"]).paths) == [Share(None, ["2023", "2024"])]
    for unfit in (True, float("nan"), float("inf"), None):
        with pytest.raises(ValueError, match="should be paths in quotes"):
            Data(paths=[unfit, "/a"])


def test_masks_need_documents_that_end_with_the_tokenizers_token(tmp_path: Path) -> None:
    paths = {end: str(write_indexed(tmp_path / str(end), [[[1, 2, 3, end]]] * 40)) for end in (256, 4)}

    def opened(end: int, **settings: bool) -> int:
        section = Data(dataset="indexed", paths=[paths[end]], **settings)
        return len(open_source(DataRequest(section, "train", SEQ_LEN, 0, 257, tmp_path)))

    assert opened(256, reset_attention_mask=True) and opened(4, prefix_lm=True)
    for key in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss"):
        with pytest.raises(ConfigError, match=r"do not end with token 256.*data\.tokenizer.*--append_eod"):
            opened(4, **{key: True})


@pytest.mark.parametrize("wrong", [300, -7])
def test_a_token_that_the_model_has_not_is_named(tmp_path: Path, wrong: int) -> None:
    path = str(write_indexed(tmp_path / "a", [[[1] * 200], [[*[2] * 100, wrong, *[2] * 100]]], DTYPES[4]))
    source = open_source(request([path], split="1,0,0"))
    with pytest.raises(ConfigError, match=rf"data\.paths.*contains the token {wrong}.*vocab_size is 300") as error:
        for index in range(len(source)):
            source[index]
    assert path in str(error.value)
