"""Windows, tasks and detokenization, and that they give transformers' numbers."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.float64 import bound
from tests.unit.hugging_face_cases import gpt_config
from tests.unit.record_cases import jsonl, write_records
from tests.unit.tokenizer_cases import save_kind
from titan_like.config.errors import ConfigError
from titan_like.config.schema import TokenOptions
from titan_like.data.readers.raw_text import UnreadableError
from titan_like.data.text.tokenizer import ByteTokenizer, build_tokenizer
from titan_like.evaluate.scoring import token_scores
from titan_like.evaluate.task import Score, Task, TextSettings, ending_window, sliding_windows
from titan_like.evaluate.tasks import (
    count_words,
    detokenize,
    lambada_task,
    named_tasks,
    open_tasks,
    split_passage,
    text_task,
    wikitext_task,
)

GPT = gpt_config()


@pytest.mark.parametrize(("seq_len", "stride"), [(1, 1), (4, 1), (4, 3), (4, 4), (7, 2), (7, 5), (7, 7)])
@pytest.mark.parametrize("length", [2, 3, 5, 8, 9, 23])
def test_windows_score_every_token_once_after_the_longest_context(seq_len: int, stride: int, length: int) -> None:
    scored = []
    for number, window in enumerate(sliding_windows(np.arange(length), seq_len, stride)):
        tokens = window.tokens.tolist()
        assert tokens == list(range(tokens[0], tokens[-1] + 1))
        assert len(tokens) <= seq_len + 1
        assert tokens[0] == number * stride
        targets = tokens[-window.num_targets :]
        assert targets[0] > tokens[0]  # something predicts it
        # A later window repeats as many inputs as the stride leaves.
        assert number == 0 or targets[0] - tokens[0] == seq_len - stride + 1
        scored += targets
    assert scored == list(range(1, length))


def test_ending_window_cuts_the_context_from_the_left() -> None:
    assert ending_window([1, 2, 3], [4, 5], 10).tokens.tolist() == [1, 2, 3, 4, 5]
    window = ending_window([1, 2, 3], [4, 5], 3)
    assert (window.tokens.tolist(), window.num_targets) == ([2, 3, 4, 5], 2)
    assert ending_window([1, 2, 3], [4, 5, 6], 3).tokens.tolist() == [3, 4, 5, 6]
    for context, target in (([], [1]), ([1], []), ([1], [2, 3, 4, 5])):
        with pytest.raises(ValueError, match="cannot be scored"):
            ending_window(context, target, 3)


PUBLISHED = [  # WikiText
    " \n = Homarus gammarus = \n \n The lobster , a \n",
    " = = = Early life = = = \n = = Description = = \n = = = = A = = = = \n",
    "5 – 6 kg ( 11 – 13 lb ) , 0 @.@ 7 of 1 @,@ 500 a two @-@ year @-@ old dog 's bone, the players ' goals",
    'the " cutter " , and ; then : go ! now ? yes . End',
    "a [ sic ] b { c } d ' e ' f at 30 ° C with N cases wait ... [ with ] .",
    " ( a ( b ) \" c [ d \" ] ' e \n s ' 10 @-@ N \n",
]


@pytest.mark.parametrize("text", [*PUBLISHED, "\n".join(PUBLISHED)])
def test_detokenizes_as_the_evaluation_harness_does(text: str) -> None:
    reference = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    assert detokenize(text) == reference.wikitext_detokenizer({"page": text})
    assert detokenize(" = A = \n The lobster , 0 @.@ 7 \n") == " = A =\nThe lobster, 0.7\n"


def test_line_ends_count_as_words(tmp_path: Path) -> None:
    text = " \n = A B = \n \n One two , three . \n"
    assert count_words(text) == 11  # = A B = \n \n One two , three . : without the first and the last line end
    task = wikitext_task("w", written(tmp_path, text), ByteTokenizer(), TextSettings(16, 8))
    targets = sum(window.num_targets for window in task.windows)
    assert targets == len(detokenize(text).encode()) - 1
    results = task.results([Score(-2.0 * window.num_targets, 0) for window in task.windows])
    assert results["word_perplexity"] == pytest.approx(math.exp(2 * targets / 10))
    assert (results["words"], results["tokens"]) == (11, targets)
    assert results["perplexity"] == pytest.approx(math.exp(2))


def test_bits_per_byte_are_over_utf8_bytes(tmp_path: Path) -> None:
    text = "naïve façade, für Ü"
    task = text_task("t", written(tmp_path, text), ByteTokenizer(), TextSettings(4, 2))
    results = task.results([Score(-math.log(2) * window.num_targets, 0) for window in task.windows])
    assert results["bits_per_byte"] == pytest.approx((len(text.encode()) - 1) / len(text.encode()))
    assert results["loss"] == pytest.approx(math.log(2))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "array.json"])
def test_records_are_texts_of_their_own(tmp_path: Path, name: str) -> None:
    task = text_task("t", write(tmp_path / name, [*PASSAGES, "a"]), ByteTokenizer(), TextSettings(4, 2))
    alone = [text_task("t", written(tmp_path, text), ByteTokenizer(), TextSettings(4, 2)) for text in PASSAGES]
    assert texts_of(task) == [text for each in alone for text in texts_of(each)]
    results = task.results([Score(-math.log(2) * window.num_targets, 0) for window in task.windows])
    sizes = [len(text.encode()) for text in PASSAGES]
    assert results["tokens"] == sum(sizes) - len(sizes)  # not the first ones
    assert results["bits_per_byte"] == pytest.approx((sum(sizes) - len(sizes)) / (sum(sizes) + 1))


def test_lambada_splits_off_the_last_word() -> None:
    assert split_passage(1, "he said that that \n") == ("he said that", " that")
    assert split_passage(1, "  a  b\tc") == ("a  b", " c")
    with pytest.raises(UnreadableError, match="fewer than two words in line 3"):
        split_passage(3, " word ")


PASSAGES = ["one two", "three\nfour", "sechs fünf"]


def written(folder: Path, text: str) -> Path:
    (folder / "text.txt").write_text(text)
    return folder / "text.txt"


def write(path: Path, texts: list[str], key: str = "text") -> Path:
    """A file of records, in the format that its name says."""
    if path.stem == "array":
        path.write_text(json.dumps([{key: text} for text in texts], indent=1))
    elif path.suffix == ".txt":
        path.write_bytes(b"\xef\xbb\xbf" + jsonl(texts, key) + b"\n")
    else:
        write_records(path, texts, key)
    return path


def texts_of(task: Task) -> list[str]:
    return [bytes(window.tokens.tolist()).decode() for window in task.windows]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.jsonl.gz", "a.parquet", "array.json"])
def test_lambada_is_read_in_every_format(tmp_path: Path, name: str) -> None:
    task = lambada_task("l", write(tmp_path / name, PASSAGES), ByteTokenizer(), TextSettings(64, 1))
    assert texts_of(task) == ["one two", "three four", "sechs fünf"]
    with pytest.raises(UnreadableError, match=r'(under|column) "text"'):
        lambada_task("l", write(tmp_path / name, PASSAGES, "txt"), ByteTokenizer(), TextSettings(64, 1))
    (tmp_path / "lines").write_text('one two\r\n\n"three" four', encoding="utf-8-sig")
    task = lambada_task("l", tmp_path / "lines", ByteTokenizer(), TextSettings(64, 1))
    assert texts_of(task) == ["one two", '"three" four']


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_wikitext_is_read_from_the_hubs_records(tmp_path: Path, name: str) -> None:
    published = " \n = A fox = \n \n One , two . \n Three . \n \n = = B = = \n"
    lines = ["" if line == " \n" else line for line in published.splitlines(keepends=True)]
    (tmp_path / "plain").write_text(published, encoding="utf-8-sig")
    for path in (write(tmp_path / name, lines), tmp_path / "plain"):
        task = wikitext_task("w", path, ByteTokenizer(), TextSettings(999, 999))
        assert texts_of(task) == [detokenize(published)]
    with pytest.raises(UnreadableError, match="in record 1; WikiText's records are lines"):
        wikitext_task("w", write(tmp_path / name, PASSAGES), ByteTokenizer(), TextSettings(999, 999))


def test_a_last_word_is_right_only_with_all_its_tokens(tmp_path: Path) -> None:
    task = lambada_task("l", written(tmp_path, "aa bb\ncc dd\nee f"), ByteTokenizer(), TextSettings(64, 1))
    assert texts_of(task) == ["aa bb", "cc dd", "ee f"]
    assert [window.num_targets for window in task.windows] == [3, 3, 2]
    results = task.results([Score(-1.0, 3), Score(-2.0, 2), Score(-6.0, 2)])
    assert results == {"passages": 3, "accuracy": pytest.approx(2 / 3), "perplexity": pytest.approx(math.exp(3))}


@pytest.mark.parametrize("kind", ["spm", "l3", "chatml"])
def test_texts_are_tokenized_whole_and_begin_as_documents_do(tmp_path: Path, kind: str) -> None:
    bos_token = {"bos_token": "<|im_start|>"} if kind == "chatml" else {}
    path, settings = save_kind(tmp_path / kind, kind, **bos_token), TextSettings(64, 32)
    theirs = AutoTokenizer.from_pretrained(path.parent)
    passages = {"the cat sat on the mat": " mat", "it said 日本 é日": " é日", "a \u0301b": " \u0301b"}
    task = lambada_task("l", written(tmp_path, "\n".join(passages)), build_tokenizer(str(path)), settings)
    for (passage, word), window in zip(passages.items(), task.windows, strict=True):
        assert window.tokens.tolist() == theirs(passage).input_ids
        whole, context = (theirs.decode(window.tokens[:end], True) for end in (None, -window.num_targets))
        assert whole == context + word == passage
    lines, text = "the mat\n" * 20, written(tmp_path, "the mat\n" * 20)
    for bos in ("auto", "always", "never"):
        tokenizer = build_tokenizer(str(path), options=TokenOptions(bos))
        first = [] if bos == "never" or (bos, kind) == ("auto", "chatml") else [theirs.bos_token_id]
        tokens = [*first, *theirs(lines, add_special_tokens=False).input_ids]
        for scored in (text_task("t", text, tokenizer, settings), wikitext_task("w", text, tokenizer, settings)):
            assert scored.windows[0].tokens.tolist() == tokens[:65]
            assert sum(window.num_targets for window in scored.windows) == len(tokens) - 1
            results = scored.results([Score(-1.0 * window.num_targets, 0) for window in scored.windows])
            assert (results["tokens"], results["loss"]) == (len(tokens) - 1, 1)


def test_what_begins_a_text_is_not_scored() -> None:
    windows = sliding_windows(np.arange(9), 4, 2, num_given=3)
    assert [window.tokens[-window.num_targets :].tolist() for window in windows] == [[3, 4], [5, 6], [7, 8]]


def test_token_scores() -> None:
    logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = logits.argmax(2)
    logits[0, 0, :] = 1.0  # a tie: the lowest token counts as the most probable one
    labels[0, 0], labels[0, 1], labels[2, 4] = 0, (labels[0, 1] + 1) % 11, -100
    log_probability, is_right = token_scores(logits, labels)
    expected = logits.log_softmax(2).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    expected[2, 4] = 0
    assert torch.allclose(log_probability, expected, rtol=bound())
    assert is_right.flatten().tolist() == [number not in (1, 14) for number in range(15)]


BAD: dict[str, tuple[str | bytes | None, str]] = {
    "lambada": (None, "must be NAME=PATH"),
    "squad=FILE": ("", "where NAME is text, wikitext103, lambada, race"),
    "race=FILE": ("", "FILE is not a folder; name one of the data set's"),
    "text=FILE": ("a", "fewer than two tokens"),
    "wikitext103=FILE": (b"ab\xff", "FILE byte 2 is not valid UTF-8; convert"),
    "lambada=FILE": ("a bcdefghijklmnop", "raise training.seq_len"),
    "text=.//FILE": ("ab".encode("utf-16"), "FILE contains no text, JSON, parquet or arrow; convert it to UTF-8 text"),
    "lambada=array.json": ('[{"text": "a b"},\n {"text": "c d"', r"array.json is damaged \("),
    "lambada=.//FILE": ('{"text": "a b"}\n{"text": 3}', r'because of record 2 \(the record has no text under "text"\)'),
    "text=./array.json": ('[{"txt": "a b"}]', "because of record 1"),
    "wikitext103=./FILE": ('{"txt": "a b"}', "because of record 1"),
}


@pytest.mark.parametrize("spec", BAD)
def test_a_bad_task_is_one_sentence(tmp_path: Path, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content, problem = BAD[spec]
    monkeypatch.chdir(tmp_path)
    if content is not None:
        name = Path(spec.partition("=")[2]).name
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=problem):
        open_tasks(named_tasks("--task", [spec], GPT), ByteTokenizer(), TextSettings(8, 4))


def test_names_of_tasks(tmp_path: Path) -> None:
    paths: dict[str, Any] = {name: tmp_path / f"{name}.txt" for name in ("a", "b")}
    for path in paths.values():
        path.write_text("two words")
    specs = [f"text={paths['a']}", f"lambada={paths['a']}", f"text={paths['b']}"]
    tasks = open_tasks(named_tasks("--task", specs, GPT), ByteTokenizer(), TextSettings(8, 4))
    assert [task.name for task in tasks] == ["text/a", "lambada", "text/b"]
    with pytest.raises(ConfigError, match="both be called text/a"):
        named_tasks("--task", [specs[0], specs[0]], GPT)
