"""Text → indexed datasets."""

import bz2
import gzip
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import zstandard
from filelock import FileLock
from tokenizers import Tokenizer, models

from tests.e2e.scripts import Script
from tests.unit.record_cases import jsonl, write_records
from tests.unit.tokenizer_cases import ALPHABET, BYTES, trained
from titan_like.commands.preprocess_data import main
from titan_like.config import ConfigError
from titan_like.data.readers import raw_text
from titan_like.data.readers.indexed import IndexedDataset
from titan_like.data.readers.raw_text import read_pieces, texts_of
from titan_like.data.text import long_text, preprocess
from titan_like.data.text.preprocess import Job, tokenize_files

EOD = 256
WORDS = "the quick brown fox jumps over a lazy dog while it's raining; 3 cats and 12 naïve мыши watch".split()  # noqa: SIM905


def text_of(words: int, seed: int = 0) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choice(WORDS) + generator.choice(["", "", "", ",", ".\n"]) for _ in range(words))


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [dataset[number].tolist() for number in range(len(dataset))]


def tokenized(texts: list[str]) -> list[list[int]]:
    return [[*text.encode(), EOD] for text in texts]


@pytest.fixture(scope="module")
def byte_pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-pair tokenizer of GPT-2's kind."""
    special = ["<|endoftext|>"]
    tokenizer = trained(models.BPE(), [text_of(2000)], 400, special, pre_tokenizer=BYTES, initial_alphabet=ALPHABET)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_format_gives_its_documents_in_order(num_workers: int, tmp_path: Path) -> None:
    texts = [text_of(number % 50, number) for number in range(700)]
    lines = jsonl(texts)
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.replace(b"\n", b"\n\n", 3))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines[:5000]) + gzip.compress(lines[5000:]))  # two members
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "c.jsonl.zst").write_bytes(compress(lines[:7000]) + compress(lines[7000:]))
    write_records(tmp_path / "d.parquet", texts)
    (tmp_path / "e.txt").write_text(texts[40], encoding="utf-8")
    (tmp_path / "f.txt.gz").write_bytes(gzip.compress(texts[41].encode()))
    (tmp_path / "g.md.zst").write_bytes(compress(texts[42].encode()))
    done = tokenize_files(Job(sorted(tmp_path.iterdir()), "byte"), tmp_path / "out", num_workers)
    expected = tokenized([*texts * 4, *texts[40:43]])
    assert documents(tmp_path / "out") == expected
    assert (done.documents, done.tokens) == (len(expected), sum(map(len, expected)))
    assert not (tmp_path / "out.unfinished").exists()


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".stream.arrow"])
def test_pieces_go_on_after_any_of_them(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("_PIECE", 1 << 12), ("_CHUNK", 1 << 10)):
        monkeypatch.setattr(raw_text, name, size)
    texts, path = [text_of(30, number) for number in range(600)], tmp_path / f"a{ending}"
    texts[200] = text_of(5000)  # longer than a piece
    write_records(path, texts)
    pieces = [piece for piece, _ in read_pieces(path, "text")]
    assert len(pieces) >= 2 and [text for piece in pieces for _, text in texts_of(piece, "text")] == texts
    for number, piece in enumerate(pieces[:-1]):
        rest = [found for found, _ in read_pieces(path, "text", piece.end, piece.first_record + piece.num_records)]
        assert rest[0].first_record == pieces[number + 1].first_record
        assert joined(rest) == joined(pieces[number + 1 :])
        assert rest[-1].end == pieces[-1].end
    assert ending.endswith(".arrow") or list(read_pieces(path, "text"))[-1][1] == 1.0
    assert list(read_pieces(path, "text", pieces[-1].end, 99)) == []  # else an interruption there adds a document


def joined(pieces: list[raw_text.Piece]) -> object:
    contents = [piece.content for piece in pieces]
    return b"".join(contents) if isinstance(contents[0], bytes) else [row for rows in contents for row in rows]


class StoppedError(Exception):
    """Stands for a crash."""


def stopped_job(folder: Path) -> Job:
    """A job that a bad record has ended, after the documents of its first file."""
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl").write_bytes(b"{\n")
    job = Job([folder / "a.jsonl", folder / "b.jsonl"], "byte")
    with pytest.raises(ConfigError, match=r"b.jsonl:1.*the line is not JSON"):
        tokenize_files(job, folder / "out")
    return job


def test_another_job_does_not_go_on_with_an_interrupted_one(tmp_path: Path) -> None:
    job = stopped_job(tmp_path)
    with pytest.raises(ConfigError, match=r"out.unfinished.*interrupted job with other input.*delete the folder"):
        tokenize_files(replace(job, text_key="body"), tmp_path / "out")
    path = tmp_path / "out.unfinished" / "progress.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bad_lines": 1}))
    with pytest.raises(ConfigError, match="interrupted job with other input or settings"):  # which skips
        tokenize_files(job, tmp_path / "out")
    tokenize_files(replace(job, bad_lines="skip"), tmp_path / "out")
    assert documents(tmp_path / "out") == tokenized([text_of(100, number) for number in range(100)])


def run(*options: object) -> CompletedProcess[str]:
    return Script("scripts/preprocess_data.py", [*map(str, options)]).wait()


@pytest.mark.slow
def test_the_command_line(byte_pairs: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (tmp_path / "far").mkdir()
    os.symlink(tmp_path / "far", corpus / "more")
    (corpus / "a.jsonl").write_bytes(jsonl(["one two", "three"]) + b'{"body": "x"}\n' + jsonl(["four"]))
    (corpus / "more" / "b.txt").write_text("five")
    (corpus / "picture.png").write_bytes(b"\x89PNG")
    output = tmp_path / "data" / "corpus"
    options = ("--input", corpus, "--output", output, "--tokenizer", byte_pairs, "--json", tmp_path / "done.json")
    refused = run(*options)
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        f"{corpus}: reads 2 of 3 files (a.jsonl, more/b.txt) and leaves picture.png\n"
        f'error: --input = "{corpus}/a.jsonl:3": the record has no text under "text"; correct'
    )
    assert not output.with_name("corpus.unfinished").exists()
    (corpus / "0.txt").write_text("zero")  # its tokens are kept
    refused = run(*options)
    assert refused.returncode == 2
    assert f"; delete {output}.unfinished, which keeps the finished part, if you change anything but" in refused.stderr
    done = run(*options, "--bad_lines", "skip")
    assert done.returncode == 0, done.stderr
    assert f'skipped {corpus}/a.jsonl:3: the record has no text under "text"' in done.stderr
    assert "skipped 1 of 6 records\n" in done.stderr
    assert done.stdout.startswith("5 documents, ")
    assert "1 bad records skipped" in done.stdout
    assert json.loads((tmp_path / "done.json").read_text())["documents"] == 5
    tokenizer = Tokenizer.from_file(byte_pairs)
    end = tokenizer.token_to_id("<|endoftext|>")
    expected = [[*tokenizer.encode(text).ids, end] for text in ("zero", "one two", "three", "four", "five")]
    assert documents(output) == expected
    again = run(*options)
    assert again.returncode == 2
    assert "exists; remove it or name another place" in again.stderr


def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


LINES = jsonl([text_of(100, number) for number in range(100)])
ZST = zstandard.ZstdCompressor().compress(LINES)
BAD = [
    ("a.txt", b"\x80" * (2 << 20), '": byte 0 is not valid UTF-8'),
    ("a.txt", b"abc\xff", '": byte 3 is not valid UTF-8'),
    ("a.jsonl", b'{"text": "x"}\n{"text": \n', ':2": the line is not JSON'),
    ("a.jsonl", b'{"text": "x"}\n\n{"body": "x"}\n', ':3": the record has no text under "text"'),
    ("a.jsonl", b'["text"]\n', ':1": the record has no text under "text"'),
    ("a.jsonl", b'{"text": 5}\n', ':1": the record has no text under "text"'),
    ("a.jsonl", b'{"text": "\\ud83d"}\n', ':1": the text contains half a surrogate'),
    ("a.jsonl", b"\n\n", '": there is no document in it'),
    ("early.jsonl.gz", truncated(gzip.compress(LINES)), '": ends in the middle of compressed data'),
    ("none.jsonl.gz", LINES, '": is damaged (Error -3 while decompressing data: incorrect header'),
    ("second.jsonl.bz2", bz2.compress(LINES) + b"B" + bz2.compress(LINES)[2:], '": is damaged ('),
    ("early.jsonl.zst", truncated(ZST), '": ends in the middle'),
    ("none.jsonl.zst", LINES, '": is damaged (zstd decompress'),
    ("none.parquet", LINES, '": is damaged (Parquet magic bytes not found'),
    ("early.arrow", b"ARROW1\0\0", '": is damaged ('),
]


@pytest.mark.parametrize(("name", "content", "problem"), BAD, ids=[f"{name}{problem}" for name, _, problem in BAD])
def test_bad_files_are_one_sentence(name: str, content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    for _ in range(2):  # the second time must not find half a token file
        with pytest.raises(ConfigError) as error:
            tokenize_files(Job([tmp_path / name], "byte"), tmp_path / "out")
        assert str(error.value).startswith(f'data.paths = "{tmp_path}/{name}{problem}')
        assert not list(tmp_path.glob("out.[bi]*"))


@pytest.mark.slow
@pytest.mark.parametrize(("place", "workers"), [("piece 1", 0), ("piece 3", 2), ("a rename", 0), ("the end", 0)])
def test_an_interruption_loses_and_repeats_nothing(
    place: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where more had been written than the progress says."""
    for name, size in (("_PIECE", 1 << 12), ("_CHUNK", 1 << 10)):
        monkeypatch.setattr(raw_text, name, size)
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.txt").write_text(text_of(100))
    job, calls = Job([tmp_path / "a.jsonl", tmp_path / "b.txt"], "byte"), []
    module, name = {"a rename": (os, "replace"), "the end": (preprocess.shutil, "rmtree")}.get(
        place, (preprocess._Output, "add")
    )
    works = getattr(module, name)

    def stops(*arguments: object) -> None:
        calls.append(arguments)
        is_last = name == "rmtree" or (len(calls) == int(place[-1]) if name == "add" else ".idx" in str(arguments))
        if name == "add" or not is_last:
            works(*arguments)
        if is_last:
            raise StoppedError

    with monkeypatch.context() as patch, pytest.raises(StoppedError):
        patch.setattr(module, name, stops)
        tokenize_files(job, tmp_path / "out", workers)
    if name == "add":
        with open(tmp_path / "out.unfinished" / "tokens.bin", "ab") as file:
            file.write(b"half a token")
    assert tokenize_files(job, tmp_path / "out", workers).documents == 101
    assert documents(tmp_path / "out") == tokenized([*(text_of(100, number) for number in range(100)), text_of(100)])
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "b.txt", "out.bin", "out.idx"}


def test_only_one_job_at_a_time_writes_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "out.unfinished").mkdir()
    problem = rf'--output = "{tmp_path}/out": another job is writing it; wait until that'
    with FileLock(tmp_path / "out.unfinished" / "lock"), pytest.raises(ConfigError, match=problem):
        main([f"--input={tmp_path}/a.jsonl", f"--output={tmp_path}/out"])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_long_text_with_a_bad_byte_is_left_out_whole(
    num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(long_text, "PIECE", 1 << 13)
    monkeypatch.setattr(raw_text, "_CHUNK", 1 << 12)
    text = text_of(20_000, 1).encode()
    (tmp_path / "a.txt").write_bytes(text[:60_000] + b"\xe9" + text[60_000:])
    (tmp_path / "b.txt").write_bytes(b"good")
    job = Job([tmp_path / "a.txt", tmp_path / "b.txt"], "byte", bad_lines="skip")
    done = tokenize_files(job, tmp_path / "out", num_workers)
    assert documents(tmp_path / "out") == tokenized(["good"]) and (done.tokens, done.bad_lines) == (5, 1)
    problem = "byte 60000 is not valid UTF-8; convert the file or remove it"
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("tokenizing: ")]
    assert lines == [f"skipped {tmp_path}/a.txt: {problem}", "skipped 1 of 2 records"]
