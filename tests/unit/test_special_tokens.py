"""A tokenizer is what its folder says: begin, end, padding, added tokens and text that looks like a special token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tests.unit.hugging_face_cases import llama_config, random_model, save_checkpoint
from tests.unit.tokenizer_cases import save_kind
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Data, TokenOptions
from titan_like.data.indexed import IndexedDataset
from titan_like.data.preprocess import Job, tokenize_files
from titan_like.data.special_tokens import end_ids
from titan_like.data.tokenizer import build_tokenizer
from titan_like.hugging_face.convert import from_hugging_face, to_hugging_face
from titan_like.hugging_face.folder import open_hugging_face
from titan_like.hugging_face.origin import origin_files

KINDS = ("spm", "l3", "chatml")
DEEPSEEK = "<｜end▁of▁sentence｜>"
TEXTS = ["", "the cat", " two  spaces ", "def\tadd", "17+25=", "typed <s> </s> <|im_end|> <|eot_id|> <|endoftext|>"]


@pytest.mark.parametrize("kind", KINDS)
def test_begin_end_and_padding_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    ours, theirs = build_tokenizer(str(save_kind(tmp_path, kind))), _theirs(tmp_path)
    assert (ours.bos_id, ours.eod_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    for text in TEXTS:
        plain = ours.encode(text).tolist()
        assert plain == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text, parses_special=True).tolist() == theirs.encode(text, add_special_tokens=False)
        assert [*ours.first_ids, *plain] == theirs.encode(text, split_special_tokens=True)
    assert not ours.special_ids & {*ours.encode(TEXTS[-1]).tolist()}
    assert build_tokenizer(str(tmp_path)).eod_id == ours.eod_id  # the folder stands for its tokenizer.json


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"tokenizer_config.json": {"eos_token": DEEPSEEK, "bos_token": None}}, DEEPSEEK),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": {"content": "</s>"}}}, "</s>"),
        (
            {"tokenizer_config.json": {"eos_token": "<turn>", "added_tokens_decoder": {"3": {"content": "<turn>"}}}},
            "<turn>",
        ),
        ({"tokenizer_config.json": {"eos_token": "<new>"}}, "<new>"),  # which transformers adds at the end
    ],
)
def test_the_folder_names_the_end_of_a_document(tmp_path: Path, files: dict[str, Any], eos: str) -> None:
    _save_words(tmp_path, ["a", "</s>", DEEPSEEK])
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    ours, theirs = build_tokenizer(str(tmp_path)), _theirs(tmp_path)
    assert ours.eod_id == theirs.eos_token_id == theirs.convert_tokens_to_ids(eos) and ours.vocab_size == len(theirs)
    assert ours.encode(eos, parses_special=True).tolist() == [ours.eod_id]


def test_several_ends_of_text_are_all_kept(tmp_path: Path) -> None:
    save_kind(tmp_path, "l3")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert end_ids(tmp_path) == [9]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    assert end_ids(tmp_path) == [3, 5]  # transformers looks no further
    ours = build_tokenizer(str(tmp_path))
    assert ours.stop_ids == {3, 5, ours.eod_id}
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"generation_config\.json that is not a JSON object"):
        build_tokenizer(str(tmp_path))


def test_a_unigram_vocabulary_does_not_find_special_tokens_in_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    names = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=names, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat </s> hello"] * 50, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = build_tokenizer(str(tmp_path))
    ids, begins, ends = ours.encode_with_places("the cat</s> sat")
    assert np.array_equal(ids, ours.encode("the cat</s> sat")) and ours.eod_id not in ids
    assert "".join(str(ours.tokenizer.id_to_token(token)) for token in ids) == "▁the▁cat</s>▁sat"
    assert (begins <= ends).all() and (np.diff(begins) >= 0).all()
    assert ours.eod_id in ours.encode("the cat</s> sat", parses_special=True)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_begin_and_end_as_the_settings_say(tmp_path: Path, kind: str) -> None:
    spec = str(save_kind(tmp_path, kind))
    bos, eod = build_tokenizer(spec).bos_id, build_tokenizer(spec).eod_id
    (tmp_path / "text.jsonl").write_text('{"text": "the cat"}\n{"text": "sat</s>"}\n')
    texts = [build_tokenizer(spec).encode(text).tolist() for text in ("the cat", "sat</s>")]
    for number, (choice, first) in enumerate({"auto": [bos], "never": [], "always": [bos]}.items()):
        if bos is None:
            if choice == "always":
                with pytest.raises(ConfigError, match=r'data\.bos = "always": .* has no bos_token; use auto or never'):
                    build_tokenizer(spec, options=TokenOptions(bos=choice))
                continue
            first = []
        prefix = tmp_path / str(number)
        tokenize_files(Job([tmp_path / "text.jsonl"], spec, token_options=TokenOptions(bos=choice)), prefix)
        assert IndexedDataset(prefix).tokens[:].tolist() == [token for text in texts for token in [*first, *text, eod]]
    with pytest.raises(ConfigError, match=r'data\.eod_token = "<none>": is no token of'):
        build_tokenizer(spec, options=TokenOptions(eod_token="<none>"))
    other = build_tokenizer(spec, options=TokenOptions(eod_token="a"))
    assert other.tokenizer.id_to_token(other.eod_id) == "a"


@pytest.mark.parametrize("bos", ["auto", "never", "always"])
@pytest.mark.parametrize("kind", ["spm", "chatml"])
def test_an_export_begins_texts_as_training_did(tmp_path: Path, kind: str, bos: str) -> None:
    spec = save_kind(tmp_path / "tokenizer", kind, **({} if kind == "spm" else {"bos_token": "<|im_start|>"}))
    model = random_model(llama_config(vocab_size=512)).float()
    save_checkpoint(tmp_path / "run", model, data={"tokenizer": str(spec), "bos": bos})
    to_hugging_face(CheckpointWeights(tmp_path / "run" / "step-1"), tmp_path / "hf", None, 10**9, None)
    ours = build_tokenizer(str(spec), options=TokenOptions(bos=bos))
    theirs = _theirs(tmp_path / "hf")
    assert theirs("the cat").input_ids == [*ours.first_ids, *ours.encode("the cat").tolist()]
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (theirs.bos_token_id, theirs.eos_token_id)


def test_an_export_names_what_began_and_ended_documents(tmp_path: Path) -> None:
    spec = save_kind(tmp_path / "tokenizer", "l3", bos_token=None)
    data = {"tokenizer": str(spec), "eod_token": "<|end_of_text|>"}
    save_checkpoint(tmp_path / "run", random_model(llama_config(vocab_size=512)).float(), data=data)
    to_hugging_face(CheckpointWeights(tmp_path / "run" / "step-1"), tmp_path / "hf", None, 10**9, None)
    theirs = _theirs(tmp_path / "hf")
    assert (theirs.bos_token, theirs.eos_token) == ("<|begin_of_text|>", "<|end_of_text|>")


def test_what_a_source_says_survives_saves(tmp_path: Path) -> None:
    """From a folder into a run's checkpoint, from there into the next, and out again."""
    model = random_model(llama_config(vocab_size=512)).float()
    save_checkpoint(tmp_path / "run", model)
    to_hugging_face(CheckpointWeights(tmp_path / "run" / "step-1"), tmp_path / "hf", None, 10**9, "none")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    spec = save_kind(tmp_path / "hf", "chatml")
    ends = {"eos_token_id": [301, 302], "pad_token_id": 300, "custom": {"a": 1}}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | ends))
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [301, 302], "top_k": 20}))
    (tmp_path / "hf" / "chat_template.jinja").write_text("{{ messages }}")
    section, source = Data(tokenizer=str(spec)), tmp_path / "hf"
    for name in ("one", "two"):
        save_checkpoint(tmp_path / name, model, data={"tokenizer": str(spec)})
        path = tmp_path / name / "step-1"
        for file, content in origin_files(source, section).items():
            (path / file).write_bytes(content)
        source = path
    imported = from_hugging_face(open_hugging_face(tmp_path / "hf", "--input"), tmp_path / "imported")
    for path in (source, imported):
        assert end_ids(path) == [301, 302]
        out = tmp_path / f"out-{path.parent.name}"
        to_hugging_face(CheckpointWeights(path), out, None, 10**9, None)
        assert ends.items() <= json.loads((out / "config.json").read_text()).items()
        for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (out / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def _theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def _save_words(folder: Path, words: list[str]) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
