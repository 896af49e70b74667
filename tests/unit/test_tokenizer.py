import json
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, processors

from tests.unit.plain_loop import prepared, run_settings
from tests.unit.tokenizer_cases import save_gpt2, save_words
from titan_like.config import ConfigError
from titan_like.config.load import edit
from titan_like.config.schema import Data, JobConfig
from titan_like.data.text.tokenizer import build_tokenizer, describe_vocabulary, tokenizer_files
from titan_like.train.job import run_job

TEXTS = ["", "plain", "line\nbreak\ttab  ", "žluťoučký kůň 🐎 — 漢字", "\x00\x7f"]


@pytest.fixture
def tokenizer_json(tmp_path):
    return partial(save_words, tmp_path)


@pytest.fixture
def gpt2_files(tmp_path):
    return save_gpt2(tmp_path, [("h", "e"), ("l", "l"), ("he", "ll")])


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(text, gpt2_files):
    for tokenizer in map(build_tokenizer, ("byte", gpt2_files[0])):
        ids = tokenizer.encode(text).tolist()
        assert tokenizer.decode(ids) == tokenizer.decode([*ids, tokenizer.eod_id]) == text
    tokenizer = build_tokenizer("byte")
    assert tokenizer.encode(text).tolist() == list(text.encode("utf-8"))
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert tokenizer.decode([104, 0xFF, 105]) == "h\ufffdi"


def test_a_tokenizer_is_read_again_only_if_its_file_has_changed(tokenizer_json):
    path = tokenizer_json(["?", "to", "be", "</s>"])
    first = build_tokenizer(path)
    assert build_tokenizer(path) is first and first.vocab_size == 4
    tokenizer_json(["?", "to", "be", "or", "</s>"])
    assert build_tokenizer(path).vocab_size == 5


def test_tokens_before_every_text(tokenizer_json):
    path = tokenizer_json(["?", "to", "<s>", "</s>"])
    assert build_tokenizer(path).first_ids == build_tokenizer("byte").first_ids == []
    tokenizer = Tokenizer.from_file(path)
    for single in ("<s> $A", "<s> $A </s>"):
        special = [("<s>", 2), ("</s>", 3)]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
        tokenizer.save(path)
        assert build_tokenizer(path).first_ids == [2]
        assert build_tokenizer(path).encode("to").tolist() == [1]


def test_stored_truncation_and_padding_are_ignored(tokenizer_json):
    path = tokenizer_json(["?", "to", "be", "</s>"])
    tokenizer = Tokenizer.from_file(path)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=4, pad_id=3)
    tokenizer.save(path)
    found = build_tokenizer(path)
    assert found.encode("to be to be to be").tolist() == [1, 2, 1, 2, 1, 2]
    assert [ids.tolist() for ids in found.encode_all(["to", "to be to"])] == [[1], [1, 2, 1]]


def test_a_folder_is_its_tokenizer(tokenizer_json, gpt2_files, tmp_path):
    spec, _ = gpt2_files
    folder, other = str(tmp_path), tmp_path / "other"
    assert tokenizer_files(folder) == [tmp_path / "vocab.json", tmp_path / "merges.txt"]
    assert build_tokenizer(folder).digest == build_tokenizer(spec).digest
    about = tmp_path / "tokenizer_config.json"
    known = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": False, "eos_token": {"content": "<|endoftext|>"}}
    about.write_text(json.dumps(known | {"added_tokens_decoder": {"259": {"content": "<|endoftext|>"}}}))
    assert build_tokenizer(folder).digest == build_tokenizer(spec).digest
    # What GPT-2's encoding would read otherwise than transformers does is refused.
    cure = r"no such file as .*tokenizer.json; let transformers write it: AutoTokenizer.from_pretrained\(\".*\"\).save"
    for more in ({"tokenizer_class": "Qwen2Tokenizer"}, {"add_prefix_space": True}, {"pad_token": "<pad>"}, "[]"):
        about.write_text(json.dumps(known | more) if isinstance(more, dict) else more)
        with pytest.raises(ConfigError, match=cure):
            build_tokenizer(folder)
    about.unlink()
    tokenizer_json(["?", "to", "be", "</s>"])  # where it is, nothing else counts
    assert build_tokenizer(folder).encode("to be").tolist() == [1, 2]
    other.mkdir()
    with pytest.raises(ConfigError, match=cure):
        build_tokenizer(str(other))


def test_bad_tokenizers_are_refused_with_their_cure(tokenizer_json, gpt2_files, tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    vocab_and_merges = gpt2_files[0]
    for bad, words in {
        "nowhere.json": ["no such file", "nowhere.json", '"byte"'],
        str(broken): ["not a Hugging Face tokenizer.json"],
        tokenizer_json(["?", "to"]): ["name the token that ends a document", "data.eod_token"],
        vocab_and_merges.partition(",")[0]: ["must name two files", "gpt2:vocab.json,merges.txt"],
        "gpt2:a.json,b.txt": ["no such file as a.json"],
        f"gpt2:{broken},{broken}": ["not GPT-2's vocab.json and merges.txt"],
    }.items():
        with pytest.raises(ConfigError) as error:
            build_tokenizer(bad)
        assert "\n" not in str(error.value)
        for word in [*words, "data.tokenizer", bad]:
            assert word in str(error.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (models.WordPiece({"to": 0, "</s>": 1}, unk_token="[UNK]"), "Missing [UNK] token"),
        (models.WordLevel({"to": 0, "</s>": 1}, unk_token="[UNK]"), "Missing [UNK] token"),
        (models.Unigram([("to", 0.0), ("</s>", 0.0)], None, False), "`unk_id` is missing"),
        (models.BPE({"to": 0, "</s>": 1}, [], unk_token="<unk>"), "Unk token `<unk>` not"),
    ],
)
def test_whatever_the_library_raises_is_one_sentence(model, words, tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(model).save(str(path))
    for encode in (lambda tokenizer: tokenizer.encode("not to be"), lambda tokenizer: tokenizer.encode_all(["or not"])):
        with pytest.raises(ConfigError) as error:
            encode(build_tokenizer(str(path), "--tokenizer"))
        assert str(error.value).startswith(f'--tokenizer = "{path}": ') and "\n" not in str(error.value)
        assert words in str(error.value)


def test_a_name_of_the_hub_is_its_tokenizer_json(tokenizer_json, tmp_path, monkeypatch):
    import huggingface_hub

    path = Path(tokenizer_json(["?", "to", "be", "</s>"]))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    cached, asked = [False], []

    def download(name, allow_patterns, local_files_only=False):
        asked.append((name, local_files_only))
        assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= {*allow_patterns}
        if local_files_only and not cached[0]:
            raise OSError("not in the cache")
        cached[0] = True
        return str(tmp_path)

    def unreachable(self, name, **_):
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
        problem = r'data\.tokenizer = "org/name": no such file, .* hub .*\(Name or service not known\); give "byte"'
        with pytest.raises(ConfigError, match=problem) as error:
            build_tokenizer("org/name")
        assert "\n" not in str(error.value)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, **_: None)
    assert build_tokenizer("org/name").encode("to be").tolist() == [1, 2]
    (tmp_path / "tokenizer_config.json").unlink()
    assert tokenizer_files("org/name") == [path] and asked[-1] == ("org/name", False)  # which completes the cache
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)  # so what is there has to do
    assert tokenizer_files("org/name") == [path] and asked[-1] == ("org/name", True)


def test_a_vocabulary_far_above_the_tokenizer_s_is_told_in_one_line(tmp_path, tokenizer_json, capsys):
    path = tokenizer_json(["?", "to", "be", "</s>"])
    line = "the model's vocabulary has 50,257 tokens and the tokenizer 4: the others cost memory and time; set "
    line += "model.overrides.vocab_size = 128"
    given = [Data(tokenizer=path), Data(dataset="indexed", tokenizer=path)]
    assert [describe_vocabulary(JobConfig(data=section), 50257) for section in given] == [line] * 2
    assert describe_vocabulary(edit(JobConfig(data=given[0]), {"model.from_": "folder"}), 50257) is None
    quiet = [(given[0], 1028), (Data(tokenizer=str(tmp_path / "none.json")), 50257)]
    # Indexed data, and that of other packages, may be of another tokenizer than the default.
    quiet += [(Data(dataset="indexed"), 50257), (Data(dataset="of_a_package"), 50257)]
    assert [describe_vocabulary(JobConfig(data=section), size) for section, size in quiet] == [None] * 4
    settings = {"training.steps": 1, "model.overrides.vocab_size": 1282}
    run_job(prepared(run_settings(tmp_path) | settings))
    line = " the model's vocabulary has 1,282 tokens and the tokenizer 257: the others cost memory and time; set "
    assert capsys.readouterr().out.count(line + "model.overrides.vocab_size = 384\n") == 1
