"""Checkpoints become folders that transformers loads and computes the same from, and the other way round."""

import json
import logging
import tomllib
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.e2e.scripts import run_here
from tests.float64 import bound, in_float64
from tests.unit.hugging_face_cases import (
    SCALING,
    bert_config,
    gpt_config,
    llama_config,
    random_model,
    reference_model,
    reference_of,
    reference_state,
    save_checkpoint,
    t5_config,
)
from tests.unit.tokenizer_cases import save_gpt2
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.commands.convert import main
from titan_like.config import load_config
from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.data.text.tokenizer import build_tokenizer
from titan_like.evaluate.inference import find_checkpoint, load_for_inference
from titan_like.hugging_face.convert import to_hugging_face
from titan_like.models.batch import Batch
from titan_like.train.initial_weights import check_initial_weights
from titan_like.train.setup import check_folders

VOCAB = 301  # odd: the table is padded to 384
MODELS = {
    "gpt": gpt_config(vocab_size=VOCAB),
    "gpt, untied, narrow mlp": gpt_config(vocab_size=VOCAB, tied_embeddings=False, ffn_hidden_size=72),
    "bert": bert_config(vocab_size=VOCAB, norm_placement="post", ffn_hidden_size=72),
    "bert, norms first": bert_config(vocab_size=VOCAB),
    "bert, pairs": bert_config(vocab_size=VOCAB, sentence_head="pair"),
    "bert, choices": bert_config(vocab_size=VOCAB, norm_placement="post", sentence_head="choice"),
    "t5": t5_config(vocab_size=VOCAB),
    "t5, the original": t5_config(vocab_size=VOCAB, tied_embeddings=True, mlp="relu"),
    "llama": llama_config(vocab_size=VOCAB),
    "llama, tied, stretched": llama_config(vocab_size=VOCAB, tied_embeddings=True, rope_scaling=SCALING),
}


CLASSES = {
    "gpt": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertForMaskedLM",
    "bert, norms first": "MegatronBertForMaskedLM", "bert, pairs": "MegatronBertForPreTraining",
    "bert, choices": "BertForMultipleChoice", "t5": "T5ForConditionalGeneration",
}  # fmt: skip


def convert(*argv: object) -> None:
    """scripts/convert.py in this process."""
    assert main([str(word) for word in argv]) == 0


def load(folder: Path, caplog: pytest.LogCaptureFixture, **options):
    """transformers' model of a folder, loaded without a complaint."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        name = json.loads((folder / "config.json").read_text())["architectures"][0]
        kind = getattr(transformers, name)
        model, info = kind.from_pretrained(folder, output_loading_info=True, local_files_only=True, **options)
    finally:
        logger.removeHandler(caplog.handler)
    assert not any(info.values()), info
    records = [record for record in caplog.records if record.name.startswith("transformers")]
    told = [record.getMessage() for record in records if record.levelno >= logging.WARNING]
    # transformers 5 takes every T5 for one with tied embeddings, until it sees that the files hold two tables.
    assert [text for text in told if "T5" not in name or "we will NOT tie them" not in text] == []
    return model.eval()


ENCODER_LEN = 30  # of the tokens, where the model has an encoder


def outputs(ours, tokens) -> list[torch.Tensor]:
    """What our model returns, without the padding of the vocabulary."""
    with torch.no_grad():
        found = ours(Batch(tokens, encoder_len=ENCODER_LEN if ours.config.has_decoder else None))
    return [part[..., :VOCAB] for part in (found if isinstance(found, tuple) else (found,))]


def outputs_of_theirs(theirs, tokens) -> list[torch.Tensor]:
    with torch.no_grad():
        if theirs.config.is_encoder_decoder:
            found = theirs(input_ids=tokens[:, :ENCODER_LEN], decoder_input_ids=tokens[:, ENCODER_LEN:])
            return [found.logits]
        if "MultipleChoice" in type(theirs).__name__:
            return [theirs(tokens[None]).logits.view(-1, 1, 1)]
        found = theirs(tokens)
    return (
        [found.prediction_logits, found.seq_relationship_logits[:, None]] if "seq_r" in str(found) else [found.logits]
    )


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def same_bytes(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def is_quick(name: str, dtype: torch.dtype) -> bool:
    return name == "llama" or dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        # Every model in one type, and every type with one model.
        pytest.param(name, dtype, marks=[] if is_quick(name, dtype) else pytest.mark.exhaustive)
        for name in MODELS
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ],
)
def test_an_import_is_the_model_and_its_export_gives_back_every_byte(tmp_path, caplog, capsys, name, dtype):
    model = random_model(MODELS[name], size=0.08).to(dtype).eval()
    theirs = reference_of(model)
    assert type(theirs).__name__ == CLASSES.get(name, CLASSES[name.partition(",")[0]])
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    convert("from-hf", "--input", tmp_path / "hf", "--output", tmp_path / "run")
    settings = tomllib.loads(capsys.readouterr().out)
    weights = CheckpointWeights(tmp_path / "run" / "step-0")
    for parameter, expected in model.float().named_parameters():
        found = weights.read(parameter)
        if parameter in ("embedding.weight", "output.weight", "output_bias.bias"):
            assert found[VOCAB:].eq(0).all()
            found, expected = found[:VOCAB], expected[:VOCAB]
        assert torch.equal(found, expected), parameter

    # The settings that it prints describe the same model, and generate.py's way of loading takes it.
    settings = [f"--model.from={settings['model']['from']}", f"--checkpoint.folder={tmp_path}/run"]
    config = load_config([*settings, "--data.tokenizer=byte"])  # the folder has none
    loaded = load_for_inference(config, find_checkpoint(config), torch.device("cpu"))
    tokens = torch.randint(VOCAB, (4, 64), generator=torch.Generator().manual_seed(2))
    for one, other in zip(outputs(loaded, tokens), outputs(model, tokens), strict=True):
        assert torch.equal(one, other)
    with in_float64():
        exact = load(tmp_path / "hf", caplog, dtype=torch.float64)
        pairs = list(zip(outputs(model.double(), tokens), outputs_of_theirs(exact, tokens), strict=True))
    for one, logits in pairs:
        assert logits.shape == one.shape and 0.2 < logits.abs().max() < 50
        assert (one - logits).abs().max() <= bound() * logits.abs().max()

    convert("to-hf", "--checkpoint", tmp_path / "run", "--output", tmp_path / "back", "--max_shard_size", 1e-4)
    sizes = {path: path.stat().st_size for path in (tmp_path / "back").glob("*.safetensors")}
    assert all(size < 110_000 or len(load_file(path)) == 1 for path, size in sizes.items())  # with the header
    same_bytes(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "back"))
    again = load(tmp_path / "back", caplog)
    assert again.dtype == dtype
    theirs.config._name_or_path = again.config._name_or_path
    assert again.config.to_diff_dict() == theirs.config.to_diff_dict()


def test_types_of_single_tensors_are_kept(tmp_path):
    state = reference_state(random_model(MODELS["llama"]).float())
    mixed = {name: (tensor if "norm" in name else tensor.bfloat16()).contiguous() for name, tensor in state.items()}
    mixed["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # as older versions saved it
    reference_model(MODELS["llama"]).config.save_pretrained(tmp_path / "hf")
    save_file(mixed, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    convert("from-hf", "--input", tmp_path / "hf", "--output", tmp_path / "run")
    convert("to-hf", "--checkpoint", tmp_path / "run/step-0", "--output", tmp_path / "back")
    mixed.popitem()
    same_bytes(mixed, tensors_of(tmp_path / "back"))
    convert("to-hf", "--checkpoint", tmp_path / "run/step-0", "--output", tmp_path / "half", "--dtype", "float16")
    same_bytes({name: tensor.half() for name, tensor in mixed.items()}, tensors_of(tmp_path / "half"))


def test_files_of_gpt2_as_first_published(tmp_path, caplog):
    """Names without a prefix, masks among the weights, and the output matrix beside the table that it is tied to."""
    model = random_model(MODELS["gpt"]).float()
    state = {name: tensor.contiguous() for name, tensor in reference_state(model).items()}
    first = {name.removeprefix("transformer."): tensor.clone() for name, tensor in state.items()}
    first |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool).tril() for layer in range(3)}
    reference_model(MODELS["gpt"]).config.save_pretrained(tmp_path / "hf")
    save_file(first, tmp_path / "hf" / "model.safetensors")
    convert("from-hf", "--input", tmp_path / "hf", "--output", tmp_path / "run")
    convert("to-hf", "--checkpoint", tmp_path / "run", "--output", tmp_path / "back")
    same_bytes(state, tensors_of(tmp_path / "back"))
    load(tmp_path / "back", caplog)


def test_a_bert_with_tensorflow_s_names_pooler_and_sentence_head_is_read_alike(tmp_path):
    model = random_model(MODELS["bert"]).float()
    reference_of(model).save_pretrained(tmp_path / "hf")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        state = {key.replace(new, name): tensor for key, tensor in state.items()}
    state |= {"bert.pooler.dense.weight": torch.ones(48, 48), "cls.seq_relationship.bias": torch.ones(2)}
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    convert("from-hf", "--input", tmp_path / "hf", "--output", tmp_path / "run")
    weights = CheckpointWeights(tmp_path / "run" / "step-0")
    assert torch.equal(weights.read("layers.2.mlp_norm.weight"), model.state_dict()["layers.2.mlp_norm.weight"])


TEXTS = ["", "plain", "line\nbreak\ttab  ", "žluťoučký kůň 🐎 — 漢字", "\x00\x7f", "  two  spaces"]


def test_byte_tokenizer_comes_along(tmp_path):
    save_checkpoint(tmp_path / "run", random_model(MODELS["gpt"]).float())
    convert("to-hf", "--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    ours, again = build_tokenizer("byte"), build_tokenizer(str(tmp_path / "hf" / "tokenizer.json"))
    assert (len(theirs), theirs.eos_token_id, again.vocab_size, again.eod_id) == (257, 256, 257, 256)
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert theirs(text)["input_ids"] == again.encode(text).tolist() == ids
        assert theirs.decode([*ids, 256], skip_special_tokens=True) == text
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (256, 256)

    save_checkpoint(tmp_path / "bert run", random_model(MODELS["bert"]).float())  # which has a mask token
    convert("to-hf", "--checkpoint", tmp_path / "bert run", "--output", tmp_path / "bert")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert", local_files_only=True)
    assert theirs("a<mask>b")["input_ids"] == [97, 257, 98]
    assert (theirs.mask_token_id, theirs.eos_token_id) == (257, 256) == (build_tokenizer("byte").mask_id, 256)
    again = build_tokenizer(str(tmp_path / "bert" / "tokenizer.json"))
    assert (again.mask_id, again.special_ids) == (257, {256, 257})


def test_import_of_a_folder_without_tokenizer_json(tmp_path, capsys):
    save_checkpoint(tmp_path / "run", random_model(MODELS["gpt"]).float())
    convert("to-hf", "--checkpoint", tmp_path / "run", "--output", tmp_path / "hf", "--tokenizer", "none")
    capsys.readouterr()
    convert("from-hf", "--input", tmp_path / "hf", "--output", tmp_path / "without")
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    with pytest.raises(ConfigError, match=r"^data\.tokenizer = \(not set\): .*/step-0 has no tokenizer"):
        load_config(["--job.config_file", f"{tmp_path}/run.toml"])
    save_gpt2(tmp_path / "hf")
    convert("from-hf", "--input", tmp_path / "hf", "--output", tmp_path / "gpt2")
    (tmp_path / "run.toml").write_text(capsys.readouterr().out)
    spec = load_config(["--job.config_file", f"{tmp_path}/run.toml"]).data.tokenizer
    assert spec == f"gpt2:{tmp_path}/gpt2/step-0/vocab.json,{tmp_path}/gpt2/step-0/merges.txt"
    assert build_tokenizer(spec).decode(build_tokenizer(spec).encode("a b").tolist()) == "a b"
    convert("to-hf", "--checkpoint", tmp_path / "gpt2", "--output", tmp_path / "back")
    assert (tmp_path / "back" / "vocab.json").is_file()


def test_gpt2_files_come_along(tmp_path):
    """test_special_tokens.py has those of a tokenizer.json."""
    spec, _ = save_gpt2(tmp_path, [("h", "e")])
    save_checkpoint(tmp_path / "run", random_model(MODELS["llama"]).float(), data={"tokenizer": spec})
    convert("to-hf", "--checkpoint", tmp_path / "run", "--output", tmp_path / "hf")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), build_tokenizer(spec)
    assert theirs.eos_token_id == theirs.bos_token_id == ours.eod_id
    for text in TEXTS:
        assert theirs(text)["input_ids"] == ours.encode(text).tolist()


def settings_for(config, path: Path, **checkpoint: object) -> JobConfig:
    family = "gpt" if config in (MODELS["gpt"], MODELS["gpt, untied, narrow mlp"]) else "llama"
    flavors = {"x": config.model_dump(mode="json", exclude_none=True)}
    tree = {"model": {"family": family, "flavor": "x", "flavors": flavors}, "job": {"dump_folder": str(path.parent)}}
    return JobConfig.model_validate(tree | {"checkpoint": {"initial_load_path": str(path), **checkpoint}})


@pytest.mark.parametrize("source", ["hf", "run/step-1"])
def test_weights_of_another_model_are_refused_before_training(tmp_path, source):
    config, path = MODELS["llama"], tmp_path / source
    weights = CheckpointWeights(save_checkpoint(tmp_path / "run", random_model(config).float()))
    to_hugging_face(weights, tmp_path / "hf", None, 10**9, None)

    def check(model) -> None:
        check_folders(settings_for(model, path), model, make=False)

    check(config)
    check(config.model_copy(update={"init_std": 0.5, "max_seq_len": 32}))  # of no consequence for weights
    for field, value in {"num_layers": 2, "num_kv_heads": 4, "rope_theta": 5.0, "norm_eps": 1e-6}.items():
        with pytest.raises(ConfigError, match=rf"^model\.overrides\.{field} = .*{path} holds weights of a model with "):
            check(config.model_copy(update={field: value}))
    with pytest.raises(ConfigError, match=rf'^model\.family = "gpt": {path} holds a "llama"; choose that$'):
        check(MODELS["gpt"])
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"neither a checkpoint's step-N folder, nor.*; name one with run\.json or"):
        check_initial_weights(settings_for(config, tmp_path / "none"), config)
    # A run that has a checkpoint of its own goes on from that.
    settings = settings_for(config, tmp_path / "none", enable=True, folder=str(tmp_path / "mine"))
    with pytest.raises(ConfigError, match="neither a checkpoint"):
        check_folders(settings, config, make=False)
    (tmp_path / "mine" / "step-3").mkdir(parents=True)
    check_folders(settings, config, make=False)


def test_new_checkpoint_is_not_written_over_and_options_are_checked(tmp_path, monkeypatch, capsys):
    save_checkpoint(tmp_path / "run", random_model(gpt_config(vocab_size=256)).float())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty").mkdir()
    to_hf = ["to-hf", "--checkpoint", f"{tmp_path}/run"]
    for argv, words in [
        ([*to_hf, "--output", f"{tmp_path}/full"], ["--output", f"{tmp_path}/full", "already exists"]),
        ([*to_hf, "--output", f"{tmp_path}/full/file/x"], ["--output", "name one that you may write to"]),
        ([*to_hf, "--output", f"{tmp_path}/new", "--max_shard_size", "0"], ["--max_shard_size = 0.0", "at least"]),
        (
            [*to_hf, "--output", f"{tmp_path}/new", "--tokenizer", "no.json"],
            ['--tokenizer = "no.json"', "no such file"],
        ),
        ([*to_hf, "--output", f"{tmp_path}/new", "--tokenizer", "byte"], ['--tokenizer = "byte"', "257 tokens"]),
        (
            ["to-hf", "--checkpoint", f"{tmp_path}/empty", "--output", "x"],
            ["--checkpoint", "contains no checkpoint (it is empty)"],
        ),
        (["from-hf", "--input", f"{tmp_path}/empty", "--output", "x"], ["--input", "has no config.json"]),
    ]:
        code, (line,) = run_here("scripts/convert.py", *argv), capsys.readouterr().err.splitlines()
        assert code == 2 and line.startswith("error: ")
        assert all(word in line for word in words), line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "run"]
    monkeypatch.chdir(tmp_path / "empty")
    (tmp_path / ".empty.unfinished").mkdir()  # of a process that was killed
    convert(*to_hf, "--output", ".", "--tokenizer", "none")
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full", "run"]
