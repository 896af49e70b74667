"""Every class that the decoder family maps to: folders that transformers wrote, with random weights and odd fields."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.float64 import bound, in_float64
from tests.unit.hugging_face_cases import random_model, save_checkpoint
from tests.unit.transformers_cases import (
    CASES,
    DYNAMIC,
    EVEN,
    LINEAR,
    NEAR,
    NEEDED,
    NEOX,
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
from titan_like.evaluate.sampling import Sampling, generate
from titan_like.hugging_face.convert import from_hugging_face, to_hugging_face
from titan_like.hugging_face.folder import open_hugging_face, slice_reader
from titan_like.models.batch import Batch
from titan_like.models.decoder.classes import CLASSES
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.hugging_face import Fields, RefusedError, family_module, family_of, fill_part
from titan_like.models.registry import build_model


def random_folder(model_type: str, fields: dict, folder: Path):
    """A folder that transformers wrote, and its model, whose every number is random and large enough to matter."""
    config = transformers.AutoConfig.for_model(model_type, **fields)
    torch.manual_seed(3)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **options).float()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or tensor.ndim == 0 or "embed_scale" in name:
                continue
            is_offset = "norm" in name and model_type not in (
                "gemma",
                "gemma2",
                "gemma3_text",
                "nemotron",
                "vaultgemma",
            )
            one = 1.0 if is_offset and name.endswith("weight") else 0.0
            tensor.copy_(one + 0.1 * torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(folder)
    return model.eval()


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@in_float64()
def exact_model(folder: Path, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    """The model of transformers of a folder, in float64."""
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
    loaded, info = kind.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return loaded.eval()


def close(ours: torch.Tensor, theirs: torch.Tensor, rounding: float = 0.0) -> bool:
    print(f"relative difference {((ours - theirs).norm() / theirs.norm()).item():.2g}")
    return bool((ours - theirs).norm() <= (bound() + rounding) * theirs.norm())


RARE: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2, no window": ("cohere2", SMALL | {"layer_types": ["full_attention"] * 4, "logit_scale": 2.0}),
    "ministral3, no temperature": (
        "ministral3",
        SMALL | {"rope_parameters": YARN | TEMPERATURE | {"llama_4_scaling_beta": 0.0}},
    ),
    "hyperclovax, no post norms": ("hyperclovax", WIDE | {"use_post_norm": False}),
    "olmo3, one table": ("olmo3", SMALL | {"sliding_window": WINDOW, "rope_theta": 900.0}),
    "exaone4, no layer with a window": ("exaone4", SMALL | {"layer_types": ["full_attention"] * 4}),
    "seed_oss, no biases": ("seed_oss", SMALL | {"attention_bias": False}),
    "ernie4_5, no biases": ("ernie4_5", SMALL | {"tie_word_embeddings": False}),
    "cwm, other scaling": ("cwm", SMALL | {"rope_parameters": YARN, "sliding_window": 3}),
    "cwm, no scaling": ("cwm", SMALL | {"rope_theta": 60.0, "rope_parameters": {"rope_type": "default"}}),
    "smollm3, not rotated": ("smollm3", SMALL | {"no_rope_layers": [0] * 4}),
    "gemma2, no window": ("gemma2", WIDE | {"layer_types": ["full_attention"] * 4}),
    "gpt_neox, another GELU": ("gpt_neox", NEOX | {"hidden_act": "gelu_fast", "rotary_pct": 0.5}),
    "llama, original length not in the table": (
        "llama",
        SMALL | {"original_max_position_embeddings": 32, "rope_parameters": YARN},
    ),
    "gemma3_text, scaled windows": (
        "gemma3_text",
        CASES["gemma3_text"][1] | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": NEAR}},
    ),
}


FIRST = {model_type: name for name, (model_type, _) in reversed(CASES.items())}
VARIANTS = [pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES | RARE if name not in FIRST.values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FIRST.values(), *VARIANTS])
def test_a_folder_of_transformers_is_read_and_written_again(name: str, tmp_path: Path) -> None:
    theirs = random_folder(*(CASES | RARE)[name], tmp_path / "hf")
    source = open_hugging_face(tmp_path / "hf", "--input")
    weights = CheckpointWeights(from_hugging_face(source, tmp_path / "run"))
    with in_float64():
        ours, exact = build_model(source.model, source.family).eval(), exact_model(tmp_path / "hf")
    state = {key: weights.read(key) for key in ours.state_dict() if not key.endswith("router.load")}
    ours.load_state_dict(state, strict=False)
    per_token = 48 * (1 if source.model.tied_embeddings else 2) + source.model.output_bias
    padding = (source.model.padded_vocab_size - VOCAB) * per_token
    assert sum(p.numel() for p in ours.parameters()) - padding == theirs.num_parameters(only_trainable=True)

    tokens = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(1))
    with in_float64():
        logits, expected = ours(Batch(tokens))[..., :VOCAB], exact(tokens).logits
    # gelu_fast has ten digits of √(2/π), in each of four layers.
    digits = 4 * (1 - 0.7978845608 / math.sqrt(2 / math.pi)) if name.endswith("GELU") else 0.0
    assert close(logits, expected, digits)
    for one in (logits, expected):
        F.cross_entropy(one[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    with torch.no_grad():
        for parameter, other in zip(theirs.parameters(), exact.parameters(), strict=True):
            parameter.copy_(torch.zeros_like(parameter) if other.grad is None else other.grad)
        theirs.save_pretrained(tmp_path / "gradients")
    gradients, parameters = open_hugging_face(tmp_path / "gradients", "--input"), dict(ours.named_parameters())
    read = slice_reader(gradients.tensors)
    for stored in gradients.stored_parameters(source.model):
        if not stored.is_buffer:
            fill_part(gradient := torch.empty(stored.shape), (0,) * len(stored.shape), stored, read)
            assert close(parameters[stored.name].grad, gradient, 2**-24), stored.name  # files hold float32

    to_hugging_face(weights, tmp_path / "back", None, 40_000, "none")
    first, again = files_of(tmp_path / "hf"), files_of(tmp_path / "back")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) and first[key].dtype == again[key].dtype for key in first)
    fields = json.loads((tmp_path / "back" / "config.json").read_text())
    assert fields["model_type"] == (CASES | RARE)[name][0] and "quantization_config" not in fields
    with torch.no_grad(), in_float64():
        loaded = exact_model(tmp_path / "back")
        assert type(loaded) is type(theirs) and close(loaded(tokens).logits, expected.detach(), digits)
        prompt = tokens[:1, :12]
        options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
        continued = exact.generate(prompt, **options)[0, 12:].tolist()
        assert loaded.generate(prompt, **options)[0, 12:].tolist() == continued
        assert generate(ours, prompt[0].tolist(), Sampling(20, temperature=0)) == continued


@pytest.mark.parametrize("model_type", [one.model_types[0] for one in CLASSES])
def test_an_absent_field_has_the_default_of_the_class(model_type: str) -> None:
    read = family_module("decoder").from_fields
    given = {"model_type": model_type} | NEEDED.get(model_type, {})
    theirs = transformers.AutoConfig.for_model(**given).to_dict()
    if model_type in ("deepseek_v3", "glm4_moe"):
        theirs["num_nextn_predict_layers"] = 0  # transformers does not save these layers
    assert read(Fields(given)) == read(Fields(theirs))
    assert read(Fields(given | {"rope_scaling": {}})) == read(Fields(theirs))
    heads = {"num_attention_heads": 6, "num_key_value_heads": None}  # as many, whatever the default
    assert read(Fields(SMALL | given | heads)).num_kv_heads == 6


def test_dynamic_scaling_and_long_magnitudes_are_those_of_transformers_beyond_the_length(tmp_path: Path) -> None:
    """Phi-3.5-MoE's factors for long sequences are its short ones here, which is all that transformers reads."""
    long = EVEN | {"short_mscale": 0.8, "long_mscale": 1.7, "original_max_position_embeddings": 16}
    for kind, fields in {
        "llama": {"rope_parameters": DYNAMIC, "max_position_embeddings": 24},
        "phimoe": {"rope_parameters": long, "num_local_experts": 5},
    }.items():
        random_folder(kind, SMALL | fields, tmp_path / kind)
        source = open_hugging_face(tmp_path / kind, "--input")
        weights = CheckpointWeights(from_hugging_face(source, tmp_path / f"{kind}-run"))
        with in_float64():
            ours = build_model(source.model, source.family).eval()
        state = {key: weights.read(key) for key in ours.state_dict() if not key.endswith("router.load")}
        ours.load_state_dict(state, strict=False)
        with in_float64(), torch.no_grad():
            for length in (12, 40, 30):  # transformers keeps the frequencies of the longest sequence so far
                tokens = torch.arange(length)[None]
                exact = exact_model(tmp_path / kind)
                assert close(ours(Batch(tokens))[..., :VOCAB], exact(tokens).logits), (kind, length)


GPT2 = {"n_layer": 2, "n_embd": 48, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64}
T5 = {"num_layers": 2, "num_heads": 4, "d_model": 48, "d_kv": 12, "d_ff": 96, "vocab_size": VOCAB}
GROUPED = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}
REFUSED: dict[str, dict[str, Any]] = {
    "qwen2": {"layer_types": ["chunked_attention"] * 4, "rope_scaling": {"type": "ntk", "factor": 2.0}},
    "gemma2": {"attn_logit_softcapping": 0.0, "query_pre_attn_scalar": 0, "is_causal": False},
    "gemma3_text": {
        "use_bidirectional_attention": True, "rope_parameters": {"rope_type": "linear", "factor": 2.0},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "granite": {"attention_multiplier": 0.0, "logits_scaling": 0},
    "glm4": {"partial_rotary_factor": None},
    "llama": {
        "rope_scaling": YARN | {"attention_factor": 0.0}, "rope_parameters": LINEAR | {"partial_rotary_factor": 0.5},
        "rms_norm_eps": math.nan, "hidden_size": "64",
    },
    "deepseek_v3": {"scoring_func": "softmax", "num_key_value_heads": 2, "moe_layer_freq": 2, "head_dim": 1},
    "gpt_oss": {"attention_bias": False, "swiglu_limit": 5.0, "attention_chunk_size": 64},
    "phi3": {"hidden_act": "mish", "resid_pdrop": "high", "rope_scaling": {"type": "longrope", "short_factor": 1}},
    "smollm3": {"use_sliding_window": True, "no_rope_layers": [1, 2, 1, 1]},
    "olmo2": {"sliding_window": 8, "head_dim": "4", "layer_types": ["sliding_attention"] * 4},
    "qwen3_moe": {
        "decoder_sparse_step": 0, "mlp_only_layers": [1.0], "per_layer_config": {"0": {"intermediate_size": 8}},
    },
    "qwen2_moe": {"shared_expert_intermediate_size": -1},
    "deepseek_v2": {"topk_method": "noaux_tc", "norm_topk_prob": True, "mlp_bias": True},
    "phimoe": {"num_experts_per_tok": 3, "rope_scaling": LINEAR},
    "minimax_m2": {"router_jitter_noise": 0.1, "output_router_logits": True, "rotary_dim": 0},
    "ernie4_5_moe": {"use_bias": True, "moe_layer_end_index": None, "moe_norm_min": 1.0},
    "qwen3_next": {
        "layer_types": ["sliding_attention"] * 4, "hidden_act": "gelu", "linear_num_value_heads": 5,
        "shared_expert_intermediate_size": -1, "linear_conv_kernel_dim": 0,
    },
    "olmo": {"clip_qkv": 0.0}, "stablelm": {"qk_layernorm": 1}, "cohere": {"use_qk_norm": None},
    "exaone4": {"sliding_window": 0, "sliding_window_pattern": "LLLG"},
    "gpt_neox": {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "dynamic", "factor": "2"}},
    "llama4_text": {
        "moe_layers": [1.0], "attention_chunk_size": 0, "attn_temperature_tuning": 4, "use_qk_norm": None,
        "layer_types": ["sliding_attention"] * 4, "no_rope_layers": [1, 2, 1, 1],
    },
    "apertus": {"hidden_act": "mish"},
    "gpt": {
        "activation_function": "gelu", "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True,
        "add_cross_attention": True, "embd_pdrop": "high", "is_causal": False,
    },
    "bert": {
        "hidden_act": "gelu_new", "position_embedding_type": "relative_key", "is_decoder": True,
        "tie_word_embeddings": False, "attention_probs_dropout_prob": True,
    },
    "t5": {"is_causal": False, "dense_act_fn": "gelu_new"},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind in REFUSED for field in REFUSED[kind]])
def test_fields_that_mean_something_else_are_refused_by_name(kind: str, field: str) -> None:
    family = kind if kind in ("gpt", "bert", "t5") else "decoder"
    fields = {"gpt": GPT2, "t5": T5}.get(kind, SMALL | {"model_type": kind})
    with pytest.raises(RefusedError, match=rf"config\.json has {field}"):
        family_module(family).from_fields(Fields(fields | {field: REFUSED[kind][field]}))


def test_fields_that_contradict_others_are_refused_by_name() -> None:
    for family, values in (
        ("decoder", SMALL | {"model_type": "gemma3_text", "rope_scaling": GROUPED}),
        ("decoder", SMALL | {"model_type": "gemma3_text", "rope_scaling": LINEAR, "rope_parameters": GROUPED}),
        ("t5", T5 | {"feed_forward_proj": "gated-gelu", "is_gated_act": False}),
    ):
        with pytest.raises(RefusedError, match=r"has (rope_scaling|is_gated_act) = "):
            family_module(family).from_fields(Fields(values))
    both = {"rotary_pct": 0.5, "partial_rotary_factor": 0.5, "rope_theta": 10_000}  # as older versions save
    shape = family_module("decoder").from_fields(Fields(SMALL | {"model_type": "gpt_neox"} | both))
    assert shape.rotary_fraction == 0.5
    plain = family_module("decoder").from_fields(Fields(SMALL | {"model_type": "gpt_oss", "rope_parameters": {}}))
    assert plain.kinds["full"].rope_scaling is None


@pytest.mark.parametrize(("family", "name", "values"), [("gpt", "GPT2", GPT2), ("t5", "T5", T5)])
def test_other_names_that_transformers_gives_a_field_are_read_and_do_not_contradict_it(
    family: str, name: str, values: dict[str, int]
) -> None:
    kind, read = getattr(transformers, f"{name}Config"), family_module(family).from_fields
    for alias, field in kind.attribute_map.items():
        without = {key: value for key, value in values.items() if key != field}
        other = values[field] * 2
        assert getattr(kind(**values, **{alias: other}), field) == other  # it prefers the alias
        assert read(Fields(without | {alias: other})) == read(Fields(values | {field: other}))
        assert read(Fields(values | {alias: values[field]})) == read(Fields(values))
        with pytest.raises(
            RefusedError, match=rf"has {field} = {values[field]}, but its other name {alias} is {other};"
        ):
            read(Fields(values | {alias: other}))


DENSE = {"num_experts": 5, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "ffn_hidden_size": 40}
DENSE |= {"layer_pattern": ["dense", "full"], "kinds": {"dense": {"dense": True}}}


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Glm4", {"block": "sandwich", "rotary_fraction": 0.5, "attention_bias": "qkv"}),
        ("Phi3", {"rotary_fraction": 0.5}),
        ("SmolLM3", {"layer_pattern": ["a", "b"], "kinds": {"a": {}, "b": {"rope_theta": 0.0}}}),
        ("Ernie4_5_Moe", DENSE | {"balance": "bias", "num_shared_experts": 2}),
        ("Qwen2Moe", DENSE | {"num_shared_experts": 1, "shared_expert_gate": True, "attention_bias": "qkv"}),
        ("Gemma2", {"block": "sandwich", "norm_offset": True, "activation": "gelu_tanh", "attention_softcap": 2.0}
         | {"embedding_scale": 48**0.5, "tied_embeddings": True}),
    ],
)  # fmt: skip
def test_models_that_came_from_no_folder_load_in_transformers(
    name: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(DecoderConfig.model_validate(SMALL_SHAPE | fields)).float()
    to_hugging_face(CheckpointWeights(save_checkpoint(tmp_path / "run", model)), tmp_path / "hf", None, 10**9, "none")
    with in_float64():
        theirs, tokens = exact_model(tmp_path / "hf"), torch.arange(SEQ)[None]
        assert type(theirs).__name__ == f"{name}ForCausalLM"
        assert close(model.double().eval()(Batch(tokens))[..., :VOCAB], theirs(tokens).logits)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **fields: object) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


def both_ways(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """What an export of an imported folder holds."""
    path = from_hugging_face(open_hugging_face(folder, "--input"), folder.parent / "run")
    to_hugging_face(CheckpointWeights(path), folder.parent / "back", None, 10**9, "none")
    return files_of(folder.parent / "back"), json.loads((folder.parent / "back" / "config.json").read_text())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [
        name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ] == []


def test_mxfp4_experts_become_bfloat16(tmp_path: Path) -> None:
    shape = SMALL | {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3, "num_experts_per_tok": 2}
    random_folder("gpt_oss", shape | {"head_dim": 20, "num_hidden_layers": 2}, tmp_path / "hf")
    plain = {name: tensor.bfloat16() for name, tensor in files_of(tmp_path / "hf").items()}
    packed = dict(plain)
    for name in [name for name in plain if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = plain[name].shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, rows, columns // 32), dtype=torch.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales)
        del packed[name]
    table = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    rewrite(tmp_path / "hf", packed, quantization_config=table)
    found, fields = both_ways(tmp_path / "hf")
    same(found, plain)
    assert "quantization_config" not in fields and fields["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_float8_blocks_become_bfloat16_and_a_layer_of_mtp_comes_along(model_type: str, tmp_path: Path) -> None:
    random_folder(model_type, CASES[model_type][1], tmp_path / "hf")
    plain = files_of(tmp_path / "hf")
    last = {name.replace("layers.3.", "layers.4."): t + 1 for name, t in plain.items() if "layers.3." in name}
    for name, size in (("enorm", (48,)), ("hnorm", (48,)), ("shared_head.norm", (48,)), ("eh_proj", (48, 96))):
        last[f"model.layers.4.{name}.weight"] = torch.randn(size)
    plain |= last
    plain["model.layers.4.embed_tokens.weight"] = plain["model.embed_tokens.weight"].clone()
    plain["model.layers.4.shared_head.head.weight"] = plain["lm_head.weight"].clone()
    packed = {name: tensor.clone() for name, tensor in plain.items()}
    for name in [name for name in plain if "_proj.weight" in name and "eh_proj" not in name]:
        rows, columns = plain[name].shape
        scales = torch.rand(-(-rows // 16), -(-columns // 16)) + 0.5
        packed |= {name: plain[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
        every = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
        plain[name] = (packed[name].float() * every).bfloat16()
    table = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    rewrite(tmp_path / "hf", packed, quantization_config=table, num_nextn_predict_layers=1)
    found, fields = both_ways(tmp_path / "hf")
    same(found, plain)
    assert fields["num_nextn_predict_layers"] == 1 and "quantization_config" not in fields
    to_hugging_face(CheckpointWeights(tmp_path / "run" / "step-0"), tmp_path / "half", torch.float16, 10**9, "none")
    kinds = {name: tensor.dtype for name, tensor in files_of(tmp_path / "half").items()}
    biases = {name for name, kind in kinds.items() if kind == torch.float32}
    assert biases == {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2, 3, 4)}


def test_shapes_of_no_class_are_refused_in_a_sentence() -> None:
    shape = SMALL_SHAPE | {"block": "parallel", "qk_norm": "head", "norm": "layer", "gated": False}
    with pytest.raises(RefusedError, match=r"the model has qk_norm = head, which GPTNeoXForCausalLM cannot"):
        family_of(DecoderConfig.model_validate(shape))
    two = {"layer_pattern": ["a", "b"], "kinds": {"a": {"window": 4}, "b": {"window": 8}}}
    with pytest.raises(RefusedError, match="layer_pattern = "):
        family_of(DecoderConfig.model_validate(SMALL_SHAPE | two))
