"""A tokenizer is what its folder says: begin, end, padding, added tokens and text that looks like a special token."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import models, pre_tokenizers, processors

from tests.unit.hugging_face_cases import llama_config, random_model, save_checkpoint
from tests.unit.tokenizer_cases import save_kind, save_words, trained
from titan_like.checkpoint.checks import OtherRunError, check_same_run
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.checkpoint.step_folders import RunState, complete_checkpoint, read_run_state, unfinished_path
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Data, JobConfig, TokenOptions
from titan_like.data.loading.stream import StreamSource
from titan_like.data.readers.indexed import IndexedDataset
from titan_like.data.source import DataRequest
from titan_like.data.text.preprocess import Job, tokenize_files
from titan_like.data.text.special_tokens import end_ids
from titan_like.data.text.tokenizer import build_tokenizer, decode_after
from titan_like.evaluate.sampling import stop_ids
from titan_like.hugging_face.convert import from_hugging_face, to_hugging_face
from titan_like.hugging_face.folder import open_hugging_face
from titan_like.hugging_face.origin import origin_files

KINDS = ("spm", "l3", "chatml")
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
TURN = {"4": {"content": "<turn>", "special": True}}
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
    ("files", "names"),  # special and added tokens, of which the first ends documents
    [
        ({"tokenizer_config.json": {"eos_token": DEEPSEEK, "bos_token": None}}, [DEEPSEEK]),
        ({"tokenizer_config.json": {}, "special_tokens_map.json": {"eos_token": {"content": "</s>"}}}, ["</s>"]),
        ({"tokenizer_config.json": {"eos_token": "<turn>", "added_tokens_decoder": TURN}}, ["<turn>"]),
        ({"tokenizer_config.json": {"eos_token": "<new>"}}, ["<new>"]),  # which transformers adds at the end
        ({"tokenizer_config.json": {"eos_token": "</s>", "additional_special_tokens": ["b"]}}, ["</s>", "b"]),
        ({"tokenizer_config.json": {"mask_token": "b", "eos_token": "<n>", "pad_token": "<m>"}}, ["<n>", "<m>", "b"]),
        ({"tokenizer_config.json": {"eos_token": "<n>"}, "added_tokens.json": {"<m>": 4, "<n>": 5}}, ["<n>", "<m>"]),
    ],
)
def test_tokens_of_a_folder_are_those_of_transformers(tmp_path: Path, files: dict[str, Any], names: list[str]) -> None:
    save_words(tmp_path, ["a", "</s>", DEEPSEEK, "b"])
    _save_json(tmp_path, files | {"tokenizer_config.json": FAST | files["tokenizer_config.json"]})
    ours, theirs = build_tokenizer(str(tmp_path)), _theirs(tmp_path)
    assert ours.eod_id == theirs.eos_token_id == theirs.convert_tokens_to_ids(names[0])
    assert ours.vocab_size == len(theirs)
    assert ours.encode(names[0], parses_special=True).tolist() == [ours.eod_id]
    added = ours.tokenizer.get_added_tokens_decoder()
    assert repr(added) == repr(theirs._tokenizer.get_added_tokens_decoder())
    assert sorted(token.content for token in added.values()) == sorted(names)


def test_a_unigram_vocabulary_does_not_find_special_tokens_in_text(tmp_path: Path) -> None:
    texts, parts = ["the cat sat on the mat </s> hello"] * 50, {"pre_tokenizer": pre_tokenizers.Metaspace()}
    tokenizer = trained(models.Unigram(), texts, 60, ["<pad>", "</s>", "<unk>"], unk_token="<unk>", **parts)
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


def test_what_a_source_says_survives_saves(tmp_path: Path) -> None:
    """From a folder into a run's checkpoint, from there into the next, and out again."""
    model = random_model(llama_config(vocab_size=512)).float()
    save_checkpoint(tmp_path / "run", model)
    to_hugging_face(CheckpointWeights(tmp_path / "run" / "step-1"), tmp_path / "hf", None, 10**9, "none")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    spec = save_kind(tmp_path / "hf", "chatml")
    ends = {"eos_token_id": [301, 302], "pad_token_id": 300, "task_specific_params": {"a": 1}}
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
    to_hugging_face(CheckpointWeights(tmp_path / "run" / "step-1"), tmp_path / "given", None, 10**9, str(spec))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "given" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


@pytest.mark.parametrize("bos", ["auto", "always"])
def test_an_end_of_document_does_not_begin_one_too(tmp_path: Path, bos: str) -> None:
    template = processors.TemplateProcessing("</s> $A", "</s> $A $B", [("</s>", 1)])
    save_words(tmp_path, ["a", "</s>"], template)
    _save_json(tmp_path, {"tokenizer_config.json": FAST | {"bos_token": "</s>", "eos_token": "</s>"}})
    assert build_tokenizer(str(tmp_path), options=TokenOptions(bos=bos)).first_ids == []
    out = _export(tmp_path, {"tokenizer": str(tmp_path), "bos": bos})
    assert _theirs(out)("a").input_ids == [0]


@pytest.mark.parametrize(("name", "bos"), [("CodeLlamaTokenizer", "never"), ("LlamaTokenizer", "auto")])
def test_a_class_of_transformers_does_not_replace_what_texts_become(tmp_path: Path, name: str, bos: str) -> None:
    spec = save_kind(tmp_path / "tokenizer", "spm", tokenizer_class=name)
    theirs = transformers.AutoTokenizer.from_pretrained(_export(tmp_path, {"tokenizer": str(spec), "bos": bos}))
    ours = build_tokenizer(str(spec), options=TokenOptions(bos=bos))
    for text in ("the cat", "  two  spaces "):
        assert theirs(text).input_ids == [*ours.first_ids, *ours.encode(text).tolist()]


def test_a_run_on_bytes_exports_bytes(tmp_path: Path) -> None:
    source = save_kind(tmp_path / "source", "l3").parent
    _save_json(source, {"config.json": {"eos_token_id": [301, 302]}, "generation_config.json": {"eos_token_id": 301}})
    out = _export(tmp_path, {"tokenizer": "byte", "dataset": "text", "paths": ["a.txt"]}, source)
    assert transformers.AutoTokenizer.from_pretrained(out)("the cat").input_ids == list(b"the cat")
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 256
    assert not (out / "generation_config.json").exists()


def test_a_run_goes_on_with_a_copy_of_its_tokenizer(tmp_path: Path) -> None:
    spec, other = save_kind(tmp_path / "one", "chatml"), save_kind(tmp_path / "other", "l3")
    _export(tmp_path, {"tokenizer": str(spec)})
    path = tmp_path / "run" / "step-1"
    (tmp_path / "one").rename(tmp_path / "moved")
    tree = read_run_state(path).config
    for name in (tmp_path / "moved", path, other):
        config = JobConfig.model_validate(tree | {"data": tree["data"] | {"tokenizer": str(name)}})
        with pytest.raises(OtherRunError, match="was saved with") if name == other else nullcontext():
            check_same_run(path, config, CheckpointWeights(path).model)


OF_SOURCE = {"generation_config.json": {"eos_token_id": 298, "top_k": 5}}
BOTH_ENDS = {"generation_config.json": {"eos_token_id": [302, 299], "temperature": 0.5}}


# Files of the tokenizer's folder and of the source's.
ENDS: list[tuple[Any, Any]] = [
    (BOTH_ENDS, None),  # a run from scratch
    (BOTH_ENDS, {"config.json": {"eos_token_id": 298}}),
    (BOTH_ENDS, {"config.json": {"eos_token_id": 298}} | OF_SOURCE),
    ({"config.json": {"eos_token_id": [299, 302]}}, {"config.json": {"eos_token_id": None}}),
    ({"generation_config.json": {"eos_token_id": 299}}, {"generation_config.json": {"top_k": 5}}),
]
OWN_END = {}, {"config.json": {"eos_token_id": 299}, "generation_config.json": {"eos_token_id": 299}}


@pytest.mark.parametrize(  # the source's folder has the same tokenizer, or another
    ("about", "of_source", "same"), [*((*files, same) for files in ENDS for same in (False, True)), (*OWN_END, False)]
)
def test_all_ends_of_the_tokenizers_folder_end_texts_everywhere(
    tmp_path: Path, about: dict[str, Any], of_source: dict[str, Any] | None, same: bool
) -> None:
    spec, folder = save_kind(tmp_path / "tokenizer", "l3"), None
    _save_json(spec.parent, about)
    if of_source is not None:
        folder = save_kind(tmp_path / "source", "l3" if same else "chatml").parent
        _save_json(folder, of_source)
    wanted = {302, 299} | ({298} if "298" in str(of_source) else set())
    for name in ("one", "two"):  # and from there into the next run
        out, run = _export(tmp_path / name, {"tokenizer": str(spec)}, folder), tmp_path / name / "run" / "step-1"
        for place in (run, out):
            assert stop_ids(build_tokenizer(str(place)), place) == stop_ids(build_tokenizer(str(spec)), run) == wanted
        ends = (
            transformers.GenerationConfig.from_pretrained(out).eos_token_id
            if "generation" in str([*out.iterdir()])
            else json.loads((out / "config.json").read_text())["eos_token_id"]
        )
        assert {*ends} == wanted and len(ends) == len(wanted)
        folder = run
    to_hugging_face(CheckpointWeights(run), tmp_path / "other", None, 10**9, str(spec))  # to-hf --tokenizer
    own = {302, 299} if about else {302}
    assert stop_ids(build_tokenizer(str(tmp_path / "other")), tmp_path / "other") == own


def test_tokens_of_the_folder_change_what_is_tokenized_already(tmp_path: Path) -> None:
    spec = save_kind(tmp_path, "chatml")
    (tmp_path / "a.jsonl").write_text('{"text": "a<tool>b"}')
    section = Data(dataset="hf", paths=[str(tmp_path / "a.jsonl")], tokenizer=str(spec), split="1,0,0")
    request = DataRequest(section, "train", 8, 1, 512, tmp_path)
    before = Job([tmp_path / "a.jsonl"], str(spec)).fingerprint(), StreamSource(request).fingerprint
    save_kind(tmp_path, "chatml", added_tokens_decoder={"301": {"content": "<tool>"}})
    after = Job([tmp_path / "a.jsonl"], str(spec)).fingerprint(), StreamSource(request).fingerprint
    assert before[0] != after[0] and before[1] != after[1]


def test_text_after_a_prompt_does_not_repeat_it(tmp_path: Path) -> None:
    ours = build_tokenizer(str(save_kind(tmp_path, "l3")))
    prompt, (first, *others) = ours.encode("日本").tolist(), ours.encode("語 the").tolist()
    assert decode_after(ours, prompt, [first]) == "\ufffd"
    assert decode_after(ours, prompt, [first, *others]) == decode_after(ours, [*prompt, first], others) == "語 the"


def _export(folder: Path, data: dict[str, Any], source: Path | None = None) -> Path:
    """What a run with random weights, or from ``source``, exports; its checkpoint is ``folder``/run/step-1."""
    path = save_checkpoint(folder / "run", random_model(llama_config(vocab_size=512)).float(), data=data)
    os.rename(path, unfinished_path(folder / "run", 1))
    run = RunState(**json.loads((unfinished_path(folder / "run", 1) / "run.json").read_text()))
    complete_checkpoint(folder / "run", run, 0, origin_files(source, Data(**data)))
    to_hugging_face(CheckpointWeights(path), folder / "hf", None, 10**9, None)
    return folder / "hf"


def _theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def _save_json(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
