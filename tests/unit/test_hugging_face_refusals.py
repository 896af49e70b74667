"""Folders that are damaged, malicious or of models that cannot be held: one sentence, nothing executed or written."""

import json
import math
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.attacks import Call, hide_pickle
from tests.unit.hugging_face_cases import (
    bert_config,
    gpt_config,
    llama_config,
    moe_config,
    random_model,
    save_checkpoint,
)
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.config.errors import ConfigError, RunError
from titan_like.config.schema import JobConfig, Model
from titan_like.evaluate.inference import load_for_inference
from titan_like.hugging_face.convert import from_hugging_face, to_hugging_face
from titan_like.hugging_face.folder import local_folder, open_hugging_face, read_model
from titan_like.models.hugging_face import family_of
from titan_like.models.registry import model_config
from titan_like.train.initial_weights import check_initial_weights

LLAMA = llama_config(num_layers=1)
GPT = gpt_config(num_layers=1)
BERT = bert_config(num_layers=1)
INDEX = "model.safetensors.index.json"
TABLE = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def whole_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in two files, and a GPT and a BERT in one, without fault."""
    folder = tmp_path_factory.mktemp("folders")
    for name, config in (("llama", LLAMA), ("gpt", GPT), ("bert", BERT)):
        weights = CheckpointWeights(save_checkpoint(folder / f"{name} run", random_model(config).float()))
        size = 30_000 if name == "llama" else 10**9
        tokenizer = str(folder / "tokenizer.json")
        (folder / "tokenizer.json").write_text(
            '{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"</s>": 0}, '
            '"unk_token": "</s>"}}'
        )
        to_hugging_face(weights, folder / name, None, size, tokenizer)
    assert len(list((folder / "llama").glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def llama(whole_folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_folders / "llama", tmp_path / "llama"))


@pytest.fixture
def gpt(whole_folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_folders / "gpt", tmp_path / "gpt"))


def refusal(folder: Path) -> str:
    """The sentence with which a folder is refused; the folders around it stay as they are."""
    before = sorted(folder.parent.rglob("*"))
    with pytest.raises(ConfigError) as error:
        open_hugging_face(folder, "--input")
    assert sorted(folder.parent.rglob("*")) == before
    text = str(error.value)
    assert text.startswith(f'--input = "{folder}": ') and "\n" not in text
    return text


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def first_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def test_folders_without_fault_are_read(whole_folders: Path) -> None:
    for name, model in (("llama", LLAMA), ("gpt", GPT), ("bert", BERT)):
        assert open_hugging_face(whole_folders / name, "--input").model == model


@pytest.mark.parametrize("content", ["{", "[1]", '{"eos_token_id": "</s>"}'])
def test_a_damaged_generation_config_is_not_copied(gpt: Path, content: str) -> None:
    (gpt / "generation_config.json").write_text(content)
    source = open_hugging_face(gpt, "--input")
    with pytest.raises(ConfigError, match=rf'^--input = "{gpt}": has a generation_config.json (that|whose) '):
        from_hugging_face(source, gpt.parent / "out")
    assert not (gpt.parent / "out").exists()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model_type", "gemma", "config.json has model_type = "),
        ("architectures", ["LlamaForSequenceClassification"], "config.json has architectures = "),
        ("architectures", "LlamaForCausalLM", "config.json has architectures = "),
        ("hidden_act", "mish", "config.json has hidden_act = "),
        (
            "quantization_config",
            {"quant_method": "gptq", "bits": 4},
            "has quantization_config.quant_method",
        ),
        ("num_attention_heads", 5, "num_attention_heads 5"),
        ("head_dim", 32, "q_proj.weight has the shape [64, 64], but config.json gives [128, 64]"),
        ("attention_bias", True, "the tensor model.layers.0.self_attn.q_proj.bias is missing"),
        ("mlp_bias", True, "the tensor model.layers.0.mlp.gate_proj.bias is missing"),
    ],
)
def test_what_cannot_be_held_is_refused_by_its_field(llama: Path, field: str, value: Any, words: str) -> None:
    """test_decoder_hugging_face.py has the fields of all classes."""
    edit(llama / "config.json", lambda config: config.update({field: value}))
    assert words in refusal(llama)


def test_one_dropout_rate_is_read_and_others_are_named(gpt: Path, capsys: pytest.CaptureFixture) -> None:
    edit(gpt / "config.json", lambda config: config.update(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0))
    assert open_hugging_face(gpt, "--input").model == GPT.model_copy(update={"dropout": 0.2})
    line = f"{gpt}/config.json: ignored attn_pdrop = 0.0 (the models here have one dropout rate, resid_pdrop)\n"
    assert capsys.readouterr().err == line


VALUES = (10**9, 10**400, -1, 0, 0.5, 1e308, math.nan, "x", [], {}, None, True, [1], {"a": {}}, [[[]]])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "bert", "t5", "llama", "moe"])
def test_a_field_of_any_value_is_read_or_refused(tmp_path: Path, family: str) -> None:
    """Every field of every family's config.json, and some that only others have."""
    shape = model_config(Model(family=family, flavor="debug"))
    fields = family_of(shape).to_fields(shape)
    others = dict.fromkeys(("text_config", "quantization_config", "rope_parameters", "layer_types", "mlp_only_layers"))
    if family == "moe":
        fields = fields | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    for field in {**fields, **others}:
        for value in VALUES:
            (tmp_path / "config.json").write_text(json.dumps(fields | {field: value}))
            with suppress(ConfigError):
                read_model(tmp_path, "--input")


PLACES = ["../../x", "../llama/model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "x.bin", 5, {"a": 1}]


@pytest.mark.parametrize("name", PLACES)
def test_index_that_names_another_place_is_refused(llama: Path, name: Any) -> None:
    for outside in (llama.parent / "x", llama.parent.parent / "x"):
        shutil.copyfile(first_file(llama), outside)  # what it names is there, and would be read
    edit(llama / INDEX, lambda index: index["weight_map"].update({TABLE: name}))
    assert "which is not a safetensors file in the folder" in refusal(llama)


def test_index_that_does_not_fit_the_files_is_refused(llama: Path) -> None:
    kept = (llama / INDEX).read_text()
    edit(llama / INDEX, lambda index: index.update(weight_map=[1]))
    assert "has no weight_map" in refusal(llama)
    (llama / INDEX).write_text(kept)
    edit(llama / INDEX, lambda index: index["weight_map"].update({TABLE: "model-00009-of-00009.safetensors"}))
    assert "model-00009-of-00009.safetensors does not exist" in refusal(llama)
    (llama / INDEX).unlink()
    assert f"neither model.safetensors nor {INDEX}" in refusal(llama)


def test_pickles_are_never_opened(llama: Path, tmp_path: Path) -> None:
    for file in (*llama.glob("*.safetensors"), llama / INDEX):
        file.unlink()
    mark = tmp_path / "mark"
    (llama / "pytorch_model.bin").write_bytes(pickle.dumps(Call(os.system, f"touch {mark}")))
    assert "pytorch_model.bin, a pickle, which could run code and is never opened" in refusal(llama)
    (llama / "model.safetensors").write_bytes(pickle.dumps(Call(os.system, f"touch {mark}")))  # under another name
    assert "model.safetensors is not a valid safetensors file" in refusal(llama)
    assert not mark.exists()


def test_names_that_would_act_on_a_terminal_are_not_printed(gpt: Path) -> None:
    file = gpt / "model.safetensors"
    save_file(load_file(file) | {"h.0.\x1b[2J\n\u202e" + "x" * 9999: torch.ones(1)}, file)
    sentence = refusal(gpt)
    assert sentence.isprintable() and len(sentence) < 1000


def test_tensors_that_are_not_the_model_s_are_refused(gpt: Path) -> None:
    file, name = gpt / "model.safetensors", "transformer.h.0.mlp.c_fc.weight"
    tensors = load_file(file)

    def with_tensors(changed: dict[str, torch.Tensor]) -> str:
        save_file({key: value.contiguous() for key, value in changed.items()}, file)
        return refusal(gpt)

    assert f"the tensor {name} is missing" in with_tensors({k: v for k, v in tensors.items() if k != name})
    words = f"the tensor {name} has the shape [192, 48], but config.json gives [48, 192]"
    assert words in with_tensors(tensors | {name: tensors[name].t()})
    assert "of type F64, but only F32, F16, BF16" in with_tensors(tensors | {name: tensors[name].double()})
    words = "the tensor transformer.h.0.extra does not belong to GPT2LMHeadModel"
    assert words in with_tensors(tensors | {"h.0.extra": torch.ones(1)})
    edit(gpt / "config.json", lambda config: config.update(tie_word_embeddings=False))
    assert "the tensor lm_head.weight is missing" in with_tensors(tensors)


def test_two_tables_that_should_be_one_are_refused(gpt: Path, tmp_path: Path) -> None:
    file = gpt / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, file)
    with pytest.raises(RunError, match=r"ties transformer\.wte\.weight and lm_head\.weight, but the files hold diff"):
        from_hugging_face(open_hugging_face(gpt, "--input"), tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())  # neither a checkpoint nor a part of one


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (gpt_config(num_kv_heads=2), "2 key and value heads for 4 query heads, but GPT2LMHeadModel has one"),
        (bert_config(num_kv_heads=2), "2 key and value heads"),
        (bert_config(tied_embeddings=False), "tied_embeddings = false"),
        (moe_config(num_shared_experts=1, qk_norm="head"), "num_shared_experts = 1, which Qwen3MoeForCausalLM cannot"),
        (moe_config(router_score="sigmoid"), "router_score = sigmoid"),
        (moe_config(balance="bias", qk_norm="head"), "balance = bias, which Qwen3MoeForCausalLM cannot"),
        (moe_config(renormalize=False), "renormalize = False"),
        (moe_config(num_dense_layers=1), "qk_norm = none, which Qwen3MoeForCausalLM cannot"),
    ],
)
def test_shapes_that_a_class_lacks_are_not_exported(tmp_path: Path, shape: Any, told: str) -> None:
    path = save_checkpoint(tmp_path, random_model(shape).float())
    with pytest.raises(ConfigError, match=told):
        to_hugging_face(CheckpointWeights(path), tmp_path / "hf", None, 10**9, None)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["step-1"]


CHECKPOINTS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "pickle among the tensors": (hide_pickle, "holds something that is not a tensor"),
    "other sizes in run.json": (
        lambda p, m: edit(p / "run.json", lambda run: run["model"].update(ffn_hidden_size=96)),
        "run.json describes a model.layers.0.mlp.gate.weight of shape [96, 64], which is not there",
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_malicious_checkpoint_is_refused(whole_folders: Path, tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(whole_folders / "llama run" / "step-1", tmp_path / "run" / "step-1"))
    mark = tmp_path / "mark"
    damage, words = CHECKPOINTS[name]
    damage(path, mark)
    with pytest.raises(RunError) as error:
        to_hugging_face(CheckpointWeights(path), tmp_path / "hf", None, 10**9, str(whole_folders / "tokenizer.json"))
    assert str(error.value).startswith(f"{path} cannot be loaded (") and words in str(error.value)
    assert "\n" not in str(error.value)
    shape = LLAMA.model_dump(mode="json", exclude_none=True)
    settings = {"model": {"family": "llama", "flavor": "x", "flavors": {"x": shape}}}
    if "run.json" not in name:
        with pytest.raises(RunError) as error:
            load_for_inference(JobConfig.model_validate(settings), path, torch.device("cpu"))
        assert str(error.value).startswith(f"{path} cannot be loaded (") and words in str(error.value)
    if name != "pickle among the tensors":  # found when training begins
        config = JobConfig.model_validate(settings | {"checkpoint": {"initial_load_path": str(path)}})
        with pytest.raises(ConfigError):
            check_initial_weights(config, model_config(config.model))
    assert not mark.exists()
    assert not (tmp_path / "hf").exists() and not (tmp_path / ".hf.unfinished").exists()


def test_a_path_is_itself_and_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object, **__: object) -> str:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    for path in ("org/name", "model", "/a/b", "a/b/c", "./a", "../a/b"):
        assert local_folder(path, "--input") == Path(path)
