"""The tokens of a long text are those of the whole text, wherever it is cut and whoever tokenizes the pieces."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.unit.tokenizer_cases import ALPHABET, BYTES, trained
from titan_like.data.readers import raw_text
from titan_like.data.readers.indexed import IndexedDataset
from titan_like.data.text import long_text, preprocess
from titan_like.data.text.long_text import encode_piece, encode_texts, find_cut
from titan_like.data.text.preprocess import Job, tokenize_files
from titan_like.data.text.tokenizer import ByteTokenizer, build_tokenizer

DIGITS = Regex(r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CHINESE = [chr(0x4E00 + 7 * number) for number in range(300)]


def text_of(size: int, seed: int) -> str:
    """English, Chinese, letters and digits without spaces, and runs of one character."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 9))) for _ in range(400)]

    def chinese() -> str:
        signs = draw.choices(CHINESE, [1 / (1 + number) for number in range(300)], k=6000)
        return "".join(sign + draw.choice(["", "", "", "", "", "，", "。\n"]) for sign in signs)

    kinds = [
        lambda: " ".join(draw.choice(words) + draw.choice(["", "", ",", ".\n", ". Then"]) for _ in range(2500)),
        chinese,
        lambda: "".join(draw.choices("abcdefghij", k=5000)),
        lambda: "".join(draw.choices("0123456789", k=5000)),
        lambda: " " * 5000 + "x" + "-" * 4500 + "哈" * 300 + "0," * 2500 + "\n" * 1001,
    ]
    parts = ["  a text "]
    while sum(map(len, parts)) < size:
        parts += [kind() for kind in draw.sample(kinds, len(kinds))]
    return "".join(parts)


def learned(model: models.Model, size: int, special: list[str], **given: object) -> Tokenizer:
    text = text_of(40_000, 1)
    return trained(model, [text[at : at + 1000] for at in range(0, len(text), 1000)], size, special, **given)


def bpe(unknown: str | None = None, **given: object) -> Tokenizer:
    model, known = models.BPE(unk_token=unknown, fuse_unk=unknown is not None), ALPHABET if unknown is None else []
    given |= {"initial_alphabet": known, "limit_alphabet": 1000 if unknown is None else 200}  # others are unknown
    return learned(model, 700, ["<unk>", "<s>", "</s>"], max_token_length=16, **given)


def word_piece() -> Tokenizer:
    parts = {"normalizer": normalizers.BertNormalizer(), "pre_tokenizer": pre_tokenizers.BertPreTokenizer()}
    return learned(models.WordPiece(unk_token="[UNK]"), 600, ["[UNK]", "[SEP]"], **parts)


def unigram() -> Tokenizer:
    clean = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    parts = {"normalizer": clean, "pre_tokenizer": pre_tokenizers.Metaspace()}
    return learned(models.Unigram(), 500, ["<unk>", "</s>"], unk_token="<unk>", max_piece_length=8, **parts)


NO_REGEX = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
THREES = pre_tokenizers.Sequence([pre_tokenizers.Split(DIGITS, "isolated"), NO_REGEX])
ROBERTA = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), trim_offsets=True)
LLAMA_2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
STRIPPED = normalizers.Sequence([normalizers.Strip(), LLAMA_2])
TOKENIZERS = {
    "Llama 2": lambda: bpe("<unk>", normalizer=LLAMA_2),
    "stripped": lambda: bpe("<unk>", normalizer=STRIPPED),
    "Metaspace": lambda: bpe("<unk>", pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "GPT-2": lambda: bpe(pre_tokenizer=BYTES),
    "RoBERTa": lambda: bpe(pre_tokenizer=pre_tokenizers.ByteLevel(), post_processor=ROBERTA),
    "Llama 3": lambda: bpe(pre_tokenizer=THREES),
    "BERT": word_piece,
    "T5": unigram,
}


def saved(name: str, folder: Path) -> tuple[str, Tokenizer]:
    path = str(folder / "tokenizer.json")
    TOKENIZERS[name]().save(path)
    return path, Tokenizer.from_file(path)  # scores of Unigram are rounded in the file


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "PIECE", 15_000)
    monkeypatch.setattr(raw_text, "_CHUNK", 1 << 13)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.usefixtures("short_pieces")
def test_tokens_are_those_of_the_whole_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory and in a file; the pieces of a file are also entered where an interruption left it."""
    spec, tokenizer = saved(name, tmp_path)
    built, text = build_tokenizer(spec), text_of(50_000, 2)
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    found = encode_texts(built, ["short", text, ""])
    assert found[1].tolist() == expected
    assert found[0].tolist() == tokenizer.encode("short", add_special_tokens=False).ids and len(found[2]) == 0
    path, calls = tmp_path / "a.txt", []
    path.write_text(text, encoding="utf-8")
    job, tokenize = Job([path], spec, ends_documents=False), preprocess._tokenize

    def stops(*arguments: object) -> preprocess.Result:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyError
        return tokenize(*arguments)

    monkeypatch.setattr(preprocess, "_tokenize", stops)
    with pytest.raises(KeyError):
        tokenize_files(job, tmp_path / "out")
    tokenize_files(job, tmp_path / "out")
    assert len(calls) > 3
    assert IndexedDataset(tmp_path / "out")[0].tolist() == [*built.first_ids, *expected]


@pytest.mark.slow
def test_workers_and_long_records_give_the_same_tokens(tmp_path: Path) -> None:
    spec, tokenizer = saved("Llama 2", tmp_path)
    text = text_of(300_000, 3)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}) + "\n")
    tokenize_files(Job([tmp_path / "a.txt", tmp_path / "b.jsonl"], spec, ends_documents=False), tmp_path / "out", 2)
    dataset, expected = IndexedDataset(tmp_path / "out"), tokenizer.encode(text, add_special_tokens=False).ids
    assert [dataset[number].tolist() == expected for number in range(2)] == [True, True]
    texts = [piece.content[0] for piece, _ in raw_text.read_pieces(tmp_path / "a.txt", "text")]
    assert len(texts) > 1 and "".join(texts) == text


@pytest.mark.slow
@pytest.mark.usefixtures("short_pieces")
def test_no_cut_where_tokens_depend_on_the_beginning(tmp_path: Path) -> None:
    """Digits in threes, and equal letters, are cut by the place where tokenization begins."""
    built = build_tokenizer(saved("Llama 3", tmp_path)[0])
    assert find_cut(built, "7" * 4096) is None and find_cut(built, "-" * 4096) is None
    assert find_cut(ByteTokenizer(), "7" * 4096) == 2048
    _, begins, ends = built.encode_with_places(text := text_of(1000, 4))
    inside = 1 + begins[ends - begins > 1][5]  # a token
    assert encode_piece(built, text[:inside], text[inside:], "") is None
    repeated = "7" * 100_000
    assert encode_texts(built, [repeated])[0].tolist() == built.encode(repeated).tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("short_pieces")
def test_digits_in_groups_of_three_keep_their_groups(tmp_path: Path) -> None:
    """Where most groups are single digits, many tokens in a row are the same in other groups too."""
    digits, parts = "".join(random.Random(0).choices("0123456789", k=50_000)), {"pre_tokenizer": THREES}
    tokenizer = trained(models.BPE(), [digits[:3000]], 280, ["<|endoftext|>"], initial_alphabet=ALPHABET, **parts)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = build_tokenizer(str(tmp_path))
    assert encode_texts(ours, [digits])[0].tolist() == ours.encode(digits).tolist()
