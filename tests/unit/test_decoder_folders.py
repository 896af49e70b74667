"""Folders of decoders as they are published: fields that nothing reads, tables under one name, models with images."""

import dataclasses
import inspect
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import save_file

from tests.float64 import in_float64
from tests.unit import test_decoder_hugging_face as folders
from tests.unit.test_decoder_hugging_face import close, exact_model, files_of, random_folder, rewrite, same
from tests.unit.transformers_cases import (
    CASES,
    CHUNKED,
    DELTA,
    EXPERTS,
    SEQ,
    SMALL,
    SMALL_SHAPE,
    TEMPERATURE,
    VOCAB,
    WIDE,
    WINDOW,
    YARN,
)
from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.config.errors import ConfigError
from titan_like.config.schema import Data
from titan_like.hugging_face.convert import from_hugging_face, to_hugging_face
from titan_like.hugging_face.folder import open_hugging_face
from titan_like.hugging_face.origin import origin_files
from titan_like.hugging_face.peft import write_peft
from titan_like.models.batch import Batch
from titan_like.models.decoder import classes
from titan_like.models.decoder import hugging_face as mapping
from titan_like.models.decoder.classes import CLASSES
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.hugging_face import Fields, RefusedError, family_module
from titan_like.models.registry import build_model, flavors

OF_CONFIG = re.compile(r"config\.([a-z]\w+)|getattr\(\s*(?:self\.)?config, \"(\w+)\"")


OF_OTHERS = (
    "max_sequence_length use_qk_norm clip_qkv pretraining_tp use_bidirectional_attention sliding_window_pattern"
    " attention_bias mlp_bias qkv_bias lm_head_bias use_sliding_window use_mrope dual_chunk_attention_config"
    " layer_norm_eps rope_percent embedding_multiplier attention_multiplier attn_logit_softcapping no_rope_layers"
    " swiglu_limit logit_scale partial_rotary_factor"
)


def logits_of(fields: dict[str, Any]) -> torch.Tensor:
    """Those of transformers' model of a config.json, in float64, with weights that depend on their shapes alone."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = transformers.AutoConfig.for_model(**fields)
    theirs = transformers.AutoModelForCausalLM.from_config(config, **options).double().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        return theirs(torch.arange(SEQ)[None]).logits


@pytest.mark.parametrize("model_type", [row.model_types[0] for row in CLASSES])
def test_what_is_ignored_transformers_ignores_too(model_type: str) -> None:
    """Every name that its class or another has, and one that none has: refused, read, or named and without effect."""
    base = CASES[model_type][1] | {"model_type": model_type}
    config = type(transformers.AutoConfig.for_model(model_type))
    code = inspect.getsource(inspect.getmodule(transformers.AutoModelForCausalLM._model_mapping[config]))
    names = {field.name for field in dataclasses.fields(config)} | {a or b for a, b in OF_CONFIG.findall(code)}
    ignored: dict[str, Any] = {}
    for name in sorted((names | {*OF_OTHERS.split()}) - {"get_text_config", *base}):
        for value in (3, True, 0.37):
            fields = Fields(base | {name: value})
            with suppress(RefusedError):
                family_module("decoder").from_fields(fields)
                if any(f"{name} = " in note for note in fields.notes):
                    ignored[name] = value
    assert "max_sequence_length" in ignored
    ignored |= {"pretraining_tp": 2, "num_labels": 2}  # types that transformers checks
    ignored |= {name: 0.5 for name in ignored if "drop" in name}
    assert torch.equal(logits_of(base), logits_of(base | ignored))
    if model_type not in (
        "gemma3_text",
        "ministral3",
        "kimi_linear",
        "nemotron_h",
        "olmo3",
        "phi3",
        "phimoe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
    ):  # which read no table like this one
        yarn, dead = (
            YARN | {"partial_rotary_factor": 1.0},
            {"attn_factor": 3.0, "finetuned": True, "mrope_section": [1]},
        )
        fields = [Fields(base | {"rope_parameters": table}) for table in (yarn, yarn | dead)]
        assert len({family_module("decoder").from_fields(one) for one in fields}) == 1
        assert "rope_parameters.attn_factor = 3.0, rope_parameters.finetuned = true" in fields[1].notes[-1]
        assert torch.equal(*(logits_of(one.values) for one in fields))


QWEN_VISION = {"depth": 1, "num_heads": 2, "out_hidden_size": 48}
AXES = {"rope_type": "default", "rope_theta": 900.0}
QWEN_NEXT = DELTA | {"sliding_window": None, "head_dim": 24}
MODELS_WITH_IMAGES = {  # the class around, and fields of the text's model
    "gemma3": ("Gemma3", {"num_key_value_heads": 1, "final_logit_softcapping": 3.0}),
    "mistral3": ("Mistral3", {"model_type": "mistral", "rope_parameters": YARN}),
    "mistral3, tempered": ("Mistral3", {"model_type": "ministral3", "rope_parameters": YARN | TEMPERATURE}),
    "qwen2_5_vl": ("Qwen2_5_VL", {"head_dim": None, "rope_parameters": AXES | {"mrope_section": [1, 2, 3]}}),
    "qwen3_vl": (
        "Qwen3VL",
        {"attention_bias": True, "rope_parameters": AXES | {"mrope_section": [4, 3, 3], "mrope_interleaved": True}},
    ),
    "qwen3_5": ("Qwen3_5", QWEN_NEXT | {"rope_parameters": AXES | {"mrope_section": [1, 1, 1]}}),
    "qwen3_5_moe": ("Qwen3_5Moe", QWEN_NEXT | EXPERTS | {"moe_intermediate_size": 24, "rope_parameters": AXES}),
    "llama4": ("Llama4", CHUNKED | {"num_local_experts": 3, "floor_scale": 3, "sliding_window": None}),
}
VISION = {
    "Qwen2_5_VL": QWEN_VISION | {"fullatt_block_indexes": [0]},
    "Qwen3VL": QWEN_VISION | {"deepstack_visual_indexes": [0]},
    "Qwen3_5": QWEN_VISION,
    "Qwen3_5Moe": QWEN_VISION,
    "Llama4": dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 32)
    | {"intermediate_size": 128},
}
ROOTS = dict.fromkeys(("Qwen2_5_VL", "Qwen3VL", "Qwen3_5", "Qwen3_5Moe"), "visual")
ROOTS |= {"Llama4": "multi_modal_projector, vision_model"}


def with_images(folder: Path, name: str = "gemma3") -> torch.nn.Module:
    """A model with images, as transformers writes it."""
    around, text = MODELS_WITH_IMAGES[name]
    vision = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{around}Config")(
        text_config={n: v for n, v in (WIDE | {"sliding_window": WINDOW} | text).items() if n != "head_dim" or v},
        vision_config=vision | {"image_size": 28, "patch_size": 14, "head_dim": 16} | VISION.get(around, {}),
        eos_token_id=[1, 106],
        tie_word_embeddings=around == "Gemma3",
        **({"mm_tokens_per_image": 1} if around == "Gemma3" else {}),
    )
    torch.manual_seed(5)
    model = getattr(transformers, f"{around}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS_WITH_IMAGES)
def test_the_text_of_a_model_with_images_goes_back_by_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    theirs, auto = with_images(tmp_path / "hf", name), transformers.AutoModelForImageTextToText
    source = open_hugging_face(tmp_path / "hf", "--input")
    weights = CheckpointWeights(from_hugging_face(source, tmp_path / "run"))
    with pytest.raises(ConfigError, match="its base has images, so that PEFT's names would be others; add --merge"):
        write_peft(weights, tmp_path / "peft", torch.float32)
    plain = files_of(tmp_path / "hf")
    around = MODELS_WITH_IMAGES[name][0]
    count = len([key for key in plain if re.search("vision|visual|projector", key)])
    roots = ROOTS.get(around, "multi_modal_projector, vision_tower")
    line = f"{count} of {len(plain)} tensors ({roots}) are not of this model and are not trained"
    assert line in (said := capsys.readouterr().err)
    assert ("final_logit_softcapping = 3.0" in said) == (name == "gemma3")
    tokens = torch.arange(SEQ)[None]
    expected = theirs(tokens).logits
    state = {stored.name: weights.read(stored.name) for stored in source.stored_parameters(source.model)}
    with torch.no_grad(), in_float64():
        ours, exact = build_model(source.model, source.family).eval(), exact_model(tmp_path / "hf", auto)(tokens).logits
        missing = ours.load_state_dict(state, strict=False).missing_keys
        assert all(key.endswith("router.load") for key in missing)
        assert close(ours(Batch(tokens))[..., :VOCAB], exact)

    to_hugging_face(weights, tmp_path / "back", None, 40_000, "none")
    same(files_of(tmp_path / "back"), plain)
    loaded = auto.from_pretrained(tmp_path / "back")
    assert type(loaded) is type(theirs) and torch.equal(loaded.eval()(tokens).logits, expected)
    fields = json.loads((tmp_path / "back/config.json").read_text())
    assert fields["eos_token_id"] == [1, 106] and fields["vision_config"]["image_size"] == 28
    assert fields.keys() - json.loads((tmp_path / "hf/config.json").read_text()).keys() <= {"torch_dtype"}
    to_hugging_face(weights, tmp_path / "half", torch.bfloat16, 10**9, "none")
    half = files_of(tmp_path / "half")
    of_images = {key for key in half if re.search("vision|visual|projector", key)}
    assert half.keys() == plain.keys() and {half[key].dtype for key in of_images} == {torch.float32}
    assert {half[key].dtype for key in half.keys() - of_images} == {torch.bfloat16}
    files = origin_files(tmp_path / "hf", Data())  # of a run that model.from starts
    assert json.loads(files["hugging_face.json"])["source"] == str(tmp_path / "hf")

    (tmp_path / "hf").rename(tmp_path / "moved")
    to_hugging_face(weights, tmp_path / "alone", None, 10**9, "none")
    assert f"{tmp_path}/hf has no tensors around the text's model, which is written alone" in capsys.readouterr().err
    with torch.no_grad(), in_float64():
        alone = exact_model(tmp_path / "alone")
        text = MODELS_WITH_IMAGES[name][1].get("model_type", name.partition("_")[0].replace("_vl", "")).capitalize()
        text = {"Qwen2_5_VL": "Qwen2", "Qwen3VL": "Qwen3"}.get(around, around if "Qwen3_5" in around else text)
        assert type(alone).__name__ == f"{text}ForCausalLM" and close(alone(tokens).logits, exact)


def test_experts_that_a_file_has_together_are_read_and_go_back_together(tmp_path: Path) -> None:
    """Qwen3.5 as it is published; transformers writes one tensor for each expert."""
    random_folder(*CASES["qwen3_5_moe_text"], tmp_path / "hf")
    source = open_hugging_face(tmp_path / "hf", "--input")
    plain, together = files_of(tmp_path / "hf"), {}
    for layer in range(SMALL["num_hidden_layers"]):
        experts = f"model.layers.{layer}.mlp.experts."
        of_each = [
            [plain.pop(f"{experts}{expert}.{part}_proj.weight") for part in ("gate", "up", "down")]
            for expert in range(6)
        ]
        together[f"{experts}gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in of_each])
        together[f"{experts}down_proj"] = torch.stack([down for _, _, down in of_each])
    expected = {stored.name: source.read(stored) for stored in source.stored_parameters(source.model)}
    save_file(plain | together, tmp_path / "hf/model.safetensors", {"format": "pt"})
    joined = open_hugging_face(tmp_path / "hf", "--input")
    for stored in joined.stored_parameters(joined.model):
        assert torch.equal(joined.read(stored), expected[stored.name]), stored.name
    weights = CheckpointWeights(from_hugging_face(joined, tmp_path / "run"))
    to_hugging_face(weights, tmp_path / "back", None, 10**9, "none")
    same(files_of(tmp_path / "back"), plain | together)


@pytest.mark.slow
def test_the_text_of_a_config_without_a_table_for_it_goes_back_as_it_came(tmp_path: Path) -> None:
    """Qwen2.5-VL as it is published."""
    theirs = with_images(tmp_path / "hf", "qwen2_5_vl")
    fields = json.loads((tmp_path / "hf/config.json").read_text())
    text = fields.pop("text_config")
    text |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}, "rope_theta": 900.0}
    flat = {name: value for name, value in text.items() if name not in ("model_type", "rope_parameters")} | fields
    (tmp_path / "hf/config.json").write_text(json.dumps(flat))
    path = from_hugging_face(open_hugging_face(tmp_path / "hf", "--input"), tmp_path / "run")
    to_hugging_face(CheckpointWeights(path), tmp_path / "back", None, 10**9, "none")
    same(files_of(tmp_path / "back"), files_of(tmp_path / "hf"))
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "back")
    tokens = torch.arange(SEQ)[None]
    assert torch.equal(loaded.eval()(tokens).logits, theirs(tokens).logits)
    assert loaded.config.text_config.rope_parameters["mrope_section"] == [1, 2, 3]
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert written["model_type"] == "qwen2_5_vl" and "text_config" not in written


@pytest.mark.parametrize(("name", "table"), [("qwen2", "model.embed_tokens"), ("gpt2", "transformer.wte")])
def test_a_tied_table_may_be_stored_as_the_output_matrix_alone(name: str, table: str, tmp_path: Path) -> None:
    sizes = SMALL | {"tie_word_embeddings": True} if name == "qwen2" else {"n_embd": 48, "n_head": 4, "n_layer": 2}
    random_folder(name, sizes | {"vocab_size": VOCAB}, tmp_path / "hf")
    tensors = files_of(tmp_path / "hf")
    tensors["lm_head.weight"] = tensors.pop(f"{table}.weight")
    rewrite(tmp_path / "hf", tensors)
    path = from_hugging_face(open_hugging_face(tmp_path / "hf", "--input"), tmp_path / "run")
    assert torch.equal(CheckpointWeights(path).read("embedding.weight")[:VOCAB], tensors["lm_head.weight"])
    to_hugging_face(CheckpointWeights(path), tmp_path / "back", None, 10**9, "none")
    same(files_of(tmp_path / "back"), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gemma_scales_embeddings_in_their_own_type(dtype: torch.dtype) -> None:
    """√640 is 25.25 in bfloat16. Next tokens are scaled alike."""
    fields = SMALL | {"hidden_size": 640, "head_dim": 16, "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model("gemma3_text", **fields)
    theirs = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    shape = family_module("decoder").from_fields(Fields(config.to_dict())).model_copy(update={"mtp_layers": 1})
    ours, tokens = build_model(shape, "decoder").to(dtype), torch.arange(SEQ)[None]
    seen: list[torch.Tensor] = []
    cast(Any, ours.layers["1"]).enorm.register_forward_pre_hook(lambda _, inputs: seen.append(*inputs))
    with torch.no_grad():
        table = theirs.model.embed_tokens.weight
        ours.embedding.weight[:VOCAB].copy_(table)
        assert torch.equal(ours.embed(Batch(tokens)), theirs.model.embed_tokens(tokens))
        assert dtype != torch.bfloat16 or torch.equal(ours.embed(Batch(tokens)), table[tokens] * 25.25)
        ours(Batch(tokens, tokens, next_tokens=tokens, next_labels=tokens, loss_factors=torch.ones(2)))
        assert torch.equal(seen[0], ours.embed(Batch(tokens)))
    granite = DecoderConfig.model_validate(SMALL_SHAPE | {"embedding_scale": 25.3})  # a number that is not rounded
    assert not granite.round_embedding_scale


def test_a_row_as_families_md_writes_it_is_all_that_a_class_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs/families.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"# a row of titan_like/models/decoder/classes.py\n(.*?)```", page, re.DOTALL)
    row = eval(code, vars(classes))
    monkeypatch.setattr(mapping, "CLASSES", (*CLASSES, row))
    monkeypatch.setitem(mapping.ARCHITECTURES, "jais2", row.name)
    monkeypatch.setitem(CASES, "jais2", ("jais2", WIDE | {"mlp_bias": False, "num_key_value_heads": 1}))
    folders.test_a_folder_of_transformers_is_read_and_written_again("jais2", tmp_path)
    folders.test_an_absent_field_has_the_default_of_the_class("jais2")
    test_what_is_ignored_transformers_ignores_too("jais2")


@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen3_next", "mtp.fc.weight"), ("ernie4_5_moe", "model.mtp_emb_norm.0.weight")]
)
def test_multi_token_prediction_that_transformers_leaves_out_is_left_out(
    model_type: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    random_folder(*CASES[model_type], tmp_path / "hf")
    tensors = files_of(tmp_path / "hf")
    rewrite(tmp_path / "hf", tensors | {name: torch.ones(2, 2)})
    source = open_hugging_face(tmp_path / "hf", "--input")
    root = name.removeprefix("model.").partition(".")[0]
    assert f"1 of {len(tensors) + 1} tensors ({root}) are not of this model" in capsys.readouterr().err
    from_hugging_face(source, tmp_path / "run")


def test_kimi_linear_as_it_is_published_is_the_flavor_and_each_layer_is_named_once() -> None:
    full = [*range(4, 25, 4), 27]
    table = {"full_attn_layers": full, "kda_layers": [i for i in range(1, 28) if i not in full], "num_heads": 32}
    table |= {"head_dim": 128, "short_conv_kernel_size": 4}
    fields = {"model_type": "kimi_linear", "first_k_dense_replace": 1, "head_dim": 72, "linear_attn_config": table}
    found = mapping.from_fields(Fields(fields))
    flavor = type(found).model_validate(flavors("decoder")["kimi_linear_48b_a3b"])
    assert [found.kind(found.kind_of(i)).mixer for i in range(27)] == [
        flavor.kind(flavor.kind_of(i)).mixer for i in range(27)
    ]
    assert found.num_parameters() == flavor.num_parameters() and found.mixer_of("linear") == flavor.mixer_of("linear")
    twice = fields | {"linear_attn_config": table | {"kda_layers": [1, *table["kda_layers"]]}}
    with pytest.raises(RefusedError, match="must name each of layers 1 to 27 once"):
        mapping.from_fields(Fields(twice))
