"""Which files a path means, and of which kind each is: by their content, and of folders what `datasets` reads."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
from pathlib import Path

import pytest
import zstandard

from titan_like.config import ConfigError
from titan_like.config.schema import HELD_OUT, Data
from titan_like.data.loading.open_source import open_source
from titan_like.data.readers import files as data_files
from titan_like.data.readers import raw_text
from titan_like.data.readers.files import find_files
from titan_like.data.readers.raw_text import kind_of, read_pieces, texts_of
from titan_like.data.readers.shards import find_shards
from titan_like.data.source import DataRequest
from titan_like.data.text.packed import corpus_files

datasets = pytest.importorskip("datasets")

TEXTS = [f"line {number}\n" + "é漢" * (number % 5) for number in range(200)]
RECORDS = [{"id": number, "text": text, "more": {"a": [1, "]"]}} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()
PRETTY = json.dumps(RECORDS, indent=2, ensure_ascii=False).encode()
ZSTD = zstandard.ZstdCompressor().compress


def table(separator: str, ends: str = "\r\n") -> bytes:
    """Records with a list, which is no text, in a table as Python writes one: line feeds within quotes."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["id", "text", "more"], delimiter=separator, lineterminator=ends)
    writer.writeheader()
    writer.writerows(RECORDS)
    return file.getvalue().encode()


SAME = {
    **dict.fromkeys(("p.txt", "p.json", "p.jsonl", "p"), "\n".join(json.dumps(r, indent=1) for r in RECORDS).encode()),
    "q.json": "".join(map(json.dumps, RECORDS)).encode(),
    "q.md.gz": gzip.compress("".join(map(json.dumps, RECORDS)).encode()),
    **dict.fromkeys(("r.txt", "r", "r.data"), PRETTY),
    "one line.txt": json.dumps(RECORDS).encode(),
    **dict.fromkeys(("t.csv", "T.CSV", "t.txt", "t"), table(",")),
    "u.csv": b"\xef\xbb\xbf" + table(",", "\n"),
    **dict.fromkeys(("v.tsv", "v.text"), table("\t")),
    "w.csv.gz": gzip.compress(table(",")),
    "w.tsv.zst": ZSTD(table("\t")),
    **dict.fromkeys(("a.jsonl", "a.json", "a.ndjson", "a.jsonlines", "a.JSONL", "a.txt", "part-0001"), LINES),
    "a.json.gz": gzip.compress(LINES),
    "a.jsonl.zst": ZSTD(LINES),
    "a.ndjson.bz2": bz2.compress(LINES),
    "A.JSON.XZ": lzma.compress(LINES),
    "b.json": json.dumps(RECORDS).encode(),
    "c.json": b"\xef\xbb\xbf" + PRETTY,
    "d.jsonl": PRETTY.replace(b"\n", b"\r\n"),
    "e.json.gz": gzip.compress(PRETTY),
}


def texts_in(path: Path, start: int = 0, record: int = 1) -> list[object]:
    return [text for piece, _ in read_pieces(path, "text", start, record) for _, text in texts_of(piece, "text")]


@pytest.mark.parametrize("size", [10, 150_000])
def test_long_records_are_records_too(size: int, tmp_path: Path) -> None:
    """Also where the head of the file does not hold the first one, or a line."""
    records = [{"text": "a " * size + str(number)} for number in range(90_000 // size + 3)]
    texts = [record["text"] for record in records]
    contents = [json.dumps(records), json.dumps(records, indent=1), "\n".join(map(json.dumps, records))]
    contents.append("\n".join(json.dumps(record, indent=1) for record in records))
    for content in [*contents, "".join(map(json.dumps, records))][: None if size == 10 else 4]:
        (tmp_path / "a").write_text(content)
        assert texts_in(tmp_path / "a") == texts


@pytest.mark.parametrize("name", SAME)
def test_records_are_known_by_their_content(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name_of_size, size in (("_PIECE", 1 << 10), ("_CHUNK", 1 << 9), ("_ROWS", 20)):
        monkeypatch.setattr(raw_text, name_of_size, size)
    (tmp_path / name).write_bytes(SAME[name])
    assert texts_in(tmp_path / name) == TEXTS
    pieces = [piece for piece, _ in read_pieces(tmp_path / name, "text")]
    middle = pieces[len(pieces) // 2]
    rest = texts_in(tmp_path / name, middle.end, middle.first_record + middle.num_records)
    assert rest == TEXTS[len(TEXTS) - len(rest) :] and len(rest) < 150
    assert find_files([str(tmp_path / name)], "data.paths") == [tmp_path / name]


UNFIT = {
    "a.pdf": (b"%PDF-1.4\nabc", "contains no text, JSON, parquet or arrow; convert it"),
    "a.json": (b'{\n "data": [],\n // none yet\n}', "contains neither a JSON array nor JSON objects"),
    "utf-16.jsonl": (LINES.decode().encode("utf-16"), "contains no text, .*; convert it to UTF-8 text"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_holds_no_documents_is_refused_by_name(name: str, tmp_path: Path) -> None:
    content, problem = UNFIT[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf'^--input = "{tmp_path}/{name}": {problem}'):
        find_files([str(tmp_path / name)], "--input")


def test_text_stays_text(tmp_path: Path) -> None:
    code = (
        '[{"role": role} for role in roles]',
        '{"a": x for x in y}\n',
        '{"a": 1,\n "b": 2}["a"]',
        '{"a": 1}.get(b)\n',
    )
    prose = (
        "Yes, he said.\nNo, she did.\n",
        "a,b\n",
        "key,lock\nsun,moon\nsalt,pepper\n",
        "one\ttwo\nthree\n",
        "id,id\n1,2\n",
        "a, b\nc, d\n",
    )
    json_like = (
        '[{"a": 1}] is a list\n',
        "[1, 2] and more",
        '{"a": 1\n}\nthe end\n',
        "[{'a': 1}]",
        '{\n"a": "\n"}',
    )
    texts = ("[Verse 1]\nhello", "{braces}\n", "<html></html>", "", "[1] a note", "BZh is how it begins")
    for content in (*texts, *code, *prose, *json_like):
        (tmp_path / "a.txt").write_text(content)
        assert (kind_of(tmp_path / "a.txt"), texts_in(tmp_path / "a.txt")) == ("text", [content])


TABLES = {
    "quotes": 'text,n\n"a\nb, ""c""",1\n\n plain ,2\n"x\r\ny",3',
    "words": "text,label\nsun,warm\nmoon,cold\n",
    "a column of text alone": "\ufefftext\none\ntwo three",
    "fewer fields": "n,text\n1,a\n2\n3,\n4,d\n",
    "an index": ",text\n0,a\n1,b\n",
    "carriage returns": 'text,n\ra,1\r"b\rc",2\r',
    "separators of unicode": "n,text\n1,a\u2028b\x0bc\x85d\n2,e\n",
    "long": "text,n\n" + "x" * 200_000 + ",1\nb,2\n",
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", ["csv", "tsv"])
def test_a_table_is_what_load_dataset_reads(name: str, kind: str, tmp_path: Path) -> None:
    content = TABLES[name] if kind == "csv" else TABLES[name].replace(",", "\t")
    (tmp_path / f"a.{kind}").write_bytes(content.encode())
    expected = datasets.load_dataset(str(tmp_path), split="train", cache_dir=str(tmp_path / "cache"))["text"]
    texts = texts_in(tmp_path / f"a.{kind}")
    assert [None if isinstance(text, raw_text.BadRecord) else text for text in texts] == expected
    if name in ("an index", "carriage returns", "quotes", "words"):  # by any name
        assert texts_in((tmp_path / f"a.{kind}").rename(tmp_path / "a.txt")) == texts


def test_conversations_in_a_table_are_those_of_json_lines(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}\n+ 1, that is?", "answer": f'"{n + 1}"'} for n in range(40)]
    datasets.Dataset.from_list(rows).to_csv(str(tmp_path / "a.csv"), index=False)
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.txt").write_text(json.dumps(rows, indent=2))
    prints = set()
    for name in ("a.csv", "a.jsonl", "a.txt"):
        section = Data(dataset="conversations", paths=[str(tmp_path / name)])
        prints.add(open_source(DataRequest(section, "train", 64, 0, 257, tmp_path / "cache")).fingerprint)
    assert len(prints) == 1


def test_a_table_of_words_is_one_wherever_its_columns_are_read(tmp_path: Path) -> None:
    """By the same columns, those who list files and those who read them tell a table from a list of words."""
    (tmp_path / "a.txt").write_text("prompt,answer\nsun,warm\nmoon,cold\n")
    section = Data(dataset="conversations", paths=[str(tmp_path / "a.txt")], split="1,0,0")
    assert len(open_source(DataRequest(section, "train", 64, 0, 257, tmp_path / "cache"))) == 1
    assert len(find_shards(section.paths, column="answer")[0]) == 1
    with pytest.raises(ConfigError, match="contains text"):
        find_shards(section.paths)


def test_what_a_table_or_json_lacks_is_one_sentence(tmp_path: Path) -> None:
    """Each of these was one document of raw text, or is of no use as records."""
    unfit = {
        "a.txt": ("title,body\na,b c\n", r'has no column "text"; it has title, body'),
        "b.csv": ('text,n\n"a,1\n', r"is damaged \(unexpected end of data\)"),
        "c.csv": ("", r'has no column "text"; it has '),
        "g.txt": ('[{"text": "a"},\n{"text": ', r"is damaged \(Expecting value"),
        "h": ('{"text": "a"},\n{"text": "b"},\n', r"is damaged \(Expecting value"),
    }
    (tmp_path / "i.csv").write_bytes(b"text,n\n\xe9,1\n")
    with pytest.raises(raw_text.UnreadableError, match="is not valid UTF-8; convert it"):
        texts_in(tmp_path / "i.csv")
    for name, (content, problem) in unfit.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(raw_text.UnreadableError, match=problem):
            texts_in(tmp_path / name)
    records = {"d.csv": "text,n\na,b,c\n", "e.txt": '[{"title": "a"}]', "f": '{\n"body": "a"\n}'}
    for name, content in (records | {"j.txt": '["a"]', "k.txt": '[[{"text": "a"}]]'}).items():
        (tmp_path / name).write_text(content)
        (problem,) = texts_in(tmp_path / name)
        assert isinstance(problem, raw_text.BadRecord), name


def write(folder: Path, *names: str) -> Path:
    """Files of two rows, which say where they are from."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        dataset = datasets.Dataset.from_dict({"text": [f"{name} 1", f"{name} 2"]})
        if path.suffix == ".parquet":
            dataset.to_parquet(str(path))
        elif path.suffix == ".arrow":
            with datasets.arrow_writer.ArrowWriter(path=str(path)) as writer:
                writer.write_table(dataset.data.table)
        elif path.suffix == ".csv":
            dataset.to_csv(str(path), index=False)
        elif path.suffix in (".json", ".jsonl"):
            path.write_text("".join(json.dumps(row) + "\n" for row in dataset))
        else:
            path.write_text(f"{name}\n")
    return folder


README = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: {}
  - split: test
    path: b*
---
"""
SHARDS = ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")
FOLDERS = {
    "shards": tuple(f"data/{shard}.parquet" for shard in SHARDS),
    "shards in a folder": ("data/en/train-00000-of-00001.jsonl", "data/en/test-00000-of-00001.jsonl"),
    "plain shards": ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet", "README.md"),
    "a folder a split": ("train/a.jsonl", "train/deep/b.jsonl", "validation/c.jsonl", "extra.jsonl"),
    "words in names": ("my_train_1.jsonl", "dev.jsonl", "eval-2.jsonl", "trainer.jsonl", "dataset_info.json"),
    "one name": ("training.jsonl", "notes.jsonl"),
    "no splits": ("a.parquet", "deep/b.parquet", "__cache__/c.parquet", "config.json"),
    "two formats": ("train.jsonl", "train.parquet"),
    "tables": ("a.csv", "deep/b.csv", "README.md"),
    "tables by split": ("train.csv", "test.csv", "labels.txt"),
    "tables about records": ("a.jsonl", "b.jsonl", "labels.csv"),
    "records about tables": ("a.csv", "b.csv", "labels.json"),
    "more of one format": ("train-1.json", "train-2.json", "train.parquet"),
}


def rows_of(paths: list[Path]) -> list[object]:
    return sorted(text for path in paths for text in texts_in(path))


@pytest.mark.parametrize("names", FOLDERS.values(), ids=FOLDERS)
def test_a_folder_is_what_load_dataset_reads(
    names: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "corpus", *names)
    expected = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))["text"]
    found = find_files([str(folder)], "data.paths", "contains text")
    assert rows_of(found) == sorted(expected)
    line = capsys.readouterr().err
    assert f"{folder}: reads {len(found)} of " in line
    read, left = line.split(" and leaves ")
    for name in names:
        assert name.startswith("__") or name in (read if folder / name in found else left)
    sections = {name: Data(dataset=name, paths=[str(folder)]) for name in ("text", "hf")}
    assert rows_of(corpus_files(sections["text"])) == sorted(expected)
    assert rows_of([Path(shard.name) for shard in find_shards(sections["hf"].paths)[0]]) == sorted(expected)


def test_readme_says_which_files_are_of_which_split(tmp_path: Path) -> None:
    folder = write(tmp_path / "corpus", "a1.jsonl", "a2.jsonl", "b.jsonl", "train.jsonl")
    for pattern in ("a*", "[a1.jsonl, a2.jsonl]"):
        (folder / "README.md").write_text(README.format(f'"{pattern}"' if pattern == "a*" else pattern))
        expected = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))["text"]
        assert rows_of(find_files([str(folder)], "--input")) == sorted(expected)
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: en\n- config_name: de\n---\n")
    with pytest.raises(ConfigError, match=r"has several configurations \(en, de\); name the files"):
        find_files([str(folder)], "--input")
    (folder / "README.md").write_text("---\npretty_name: a---b\nconfigs:\n- data_files: b.jsonl\n---\n")
    assert [path.name for path in find_files([str(folder)], "--input")] == ["b.jsonl"]
    for name, told in (("c", "  data_dir: en\n"), ("train", "  data_dir: en\n"), ("test", "")):
        write(folder, f"en/{name}.jsonl")
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n{told}---\n")
        expected = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))["text"]
        assert rows_of(find_files([str(folder)], "--input")) == sorted(expected)
    (folder / "README.md").write_text("# no front matter\n")
    assert {path.name for path in find_files([str(folder)], "--input")} == {"train.jsonl"}


def test_a_saved_folder_means_what_load_from_disk_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = datasets.Dataset.from_dict({"text": [f"row {number}" for number in range(20)]})
    dataset.save_to_disk(str(tmp_path / "one"), num_shards=2)
    datasets.load_from_disk(str(tmp_path / "one")).map(lambda row: {"text": row["text"] + "!"})
    assert list((tmp_path / "one").glob("cache-*.arrow"))
    both = datasets.DatasetDict(train=dataset.select(range(12)), test=dataset.select(range(12, 20)))
    both.save_to_disk(str(tmp_path / "both"))
    for name, expected in {
        "one": dataset["text"],
        "both": both["train"]["text"],
        "both/test": both["test"]["text"],
    }.items():
        found = find_files([str(tmp_path / name)], "data.paths", "contains text")
        assert rows_of(found) == sorted(expected)
        read, left = capsys.readouterr().err.split(" and leaves ")
        assert "-of-00002.arrow" in read if name == "one" else "data-00000-of-00001.arrow" in read
        assert "state.json" in left and "cache-" not in read
    os.rename(tmp_path / "one" / "state.json", tmp_path / "one" / "lost")  # still, a cache is no data
    assert len(find_files([str(tmp_path / "one")], "data.paths", "contains text")) == 2
    (tmp_path / "one" / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"state.json\": is damaged .* save it again"):
        find_files([str(tmp_path / "one")], "data.paths")


@pytest.mark.parametrize(
    "names", [("test.jsonl", "dev.jsonl"), ("data/test-00000-of-00001.parquet",), ("test/a.jsonl",)]
)
def test_a_folder_without_training_data_is_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    folder = write(tmp_path / "corpus", *names)
    with pytest.raises(ConfigError, match=r"has no split named train, but .*test"):
        find_files([str(folder)], "data.paths", "contains text")
    datasets.DatasetDict(test=datasets.Dataset.from_dict({"text": ["a"]})).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=r"saved\": has no split named train, but test"):
        find_files([str(tmp_path / "saved")], "data.paths", "contains text")


def test_a_validation_set_takes_the_held_out_split_of_a_folder(tmp_path: Path) -> None:
    """Never that of training, if there is one; a split that is alone may have any name."""
    several = write(tmp_path / "several", "train.jsonl", "valid.jsonl", "test.jsonl")
    assert [path.name for path in find_files([str(several)], "data.paths", split="validation")] == ["valid.jsonl"]
    rows = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("train", "validation")}
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "saved"))
    section = Data(dataset="text", paths=[str(tmp_path / "saved")], split=HELD_OUT)
    assert rows_of(corpus_files(section)) == ["validation"]
    shards, _ = find_shards(section.paths, section.read_split)
    assert rows_of([Path(shard.name) for shard in shards]) == ["validation"]
    alone = write(tmp_path / "alone", "test.jsonl")
    assert [path.name for path in find_files([str(alone)], "data.paths", split="validation")] == ["test.jsonl"]
    with pytest.raises(ConfigError, match="has no split named validation, but test, train; name the files"):
        find_files([str(write(tmp_path / "two", "train.jsonl", "test.jsonl"))], "data.paths", split="validation")


def test_folders_of_text_and_patterns(tmp_path: Path) -> None:
    folder = write(tmp_path / "docs", "evaluation.md", "README.md", "deep/a.txt", "b.rst")
    assert [path.name for path in find_files([str(folder)], "--input")] == ["README.md", "a.txt", "evaluation.md"]
    write(folder, "rows.jsonl")  # which README.md describes
    assert [path.name for path in find_files([str(folder)], "--input")] == ["a.txt", "rows.jsonl"]
    write(tmp_path / "wiki", "train.txt", "test.txt")
    assert [path.name for path in find_files([str(tmp_path / "wiki")], "--input")] == ["train.txt"]
    named = find_files([str(folder / "*.md"), str(tmp_path / "*"), str(folder / "b.rst")], "--input")
    expected = ["README.md", "a.txt", "b.rst", "evaluation.md", "rows.jsonl", "train.txt"]
    assert sorted(path.name for path in named) == expected
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "far").symlink_to(tmp_path / "wiki")
    assert [path.name for path in find_files([str(tmp_path / "links")], "--input")] == ["train.txt"]
    (tmp_path / "links" / "gone").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"links/gone\": is a broken link"):
        find_files([str(tmp_path / "links")], "--input")
    with pytest.raises(ConfigError, match=r"no file in the folder ends with \.jsonl, \.parquet, \.arrow"):
        find_files([str(write(tmp_path / "none", "a.rst"))], "--input")
    spelled = [str(tmp_path / "wiki" / "**" / "train.txt"), str(tmp_path / "docs" / ".." / "wiki" / "train.txt")]
    assert len(find_files(spelled, "--input")) == 1
    assert data_files.named_paths(str(tmp_path / "no*such")) == []
