"""Every class that the decoder family maps to: folders that transformers wrote, with random weights and odd fields."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

from titan_like.checkpoint.loader import CheckpointWeights
from titan_like.evaluate.sampling import generate
from titan_like.hugging_face.convert import from_hugging_face, to_hugging_face
from titan_like.hugging_face.folder import open_hugging_face
from titan_like.models.hugging_face import to_tensors
from titan_like.models.registry import build_model

VOCAB, SEQ, WINDOW = 101, 40, 9
SMALL = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None}
WIDE = SMALL | {"head_dim": 20}  # heads that are together wider than the hidden states
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 300.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 700.0, "factor": 3.0}
LONG = {"rope_type": "longrope", "rope_theta": 900.0, "short_factor": [1.0, 1.5, 2.0, 2.5], "factor": 4.0}
LONG |= {"long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 16}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 6}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 2}
LATENT |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "head_dim": 8}
CASES = {
    "llama": ("llama", WIDE | {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "mistral": ("mistral", WIDE | {"sliding_window": WINDOW, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral, no window": ("mistral", SMALL | {"sliding_window": None, "rope_parameters": YARN}),
    "ministral": ("ministral", WIDE | {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", SMALL | {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "qwen2, windows": ("qwen2", SMALL | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", WIDE | {"attention_bias": True}),
    "olmo2": ("olmo2", SMALL | {"num_key_value_heads": 4, "rms_norm_eps": 1e-4}),
    "olmo2, grouped": ("olmo2", SMALL | {"rope_parameters": YARN, "attention_bias": True}),
    "smollm3": ("smollm3", SMALL | {"no_rope_layers": [1, 0, 1, 1], "mlp_bias": True}),
    "granite": (
        "granite",
        SMALL
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 7.0}
        | {"tie_word_embeddings": True},
    ),
    "gemma2": ("gemma2", WIDE | {"sliding_window": WINDOW, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0}),
    "gemma3_text": (
        "gemma3_text",
        WIDE
        | {"sliding_window": WINDOW, "num_hidden_layers": 5, "final_logit_softcapping": 3.0, "num_key_value_heads": 1}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}},
    ),
    "phi3": ("phi3", SMALL | {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "phi3, long": (
        "phi3",
        SMALL | {"rope_parameters": LONG | {"partial_rotary_factor": 0.7}, "original_max_position_embeddings": 16},
    ),
    "glm4": ("glm4", WIDE | {"num_key_value_heads": 1}),
    "gpt_neox": ("gpt_neox", {k: v for k, v in SMALL.items() if "key" not in k} | {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}),
    "gpt_neox, one after the other": ("gpt_neox", {k: v for k, v in SMALL.items() if "key" not in k} | {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.5}),
    "nemotron": ("nemotron", WIDE | {"attention_bias": True, "mlp_bias": True}),
    "mixtral": ("mixtral", WIDE | {"num_local_experts": 5, "sliding_window": WINDOW}),
    "qwen3_moe": ("qwen3_moe", WIDE | EXPERTS | {"moe_intermediate_size": 24, "mlp_only_layers": [0], "attention_bias": True}),
    "olmoe": ("olmoe", SMALL | EXPERTS | {"rope_parameters": YARN}),
    "gpt_oss": ("gpt_oss", WIDE | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "deepseek_v3": ("deepseek_v3", SMALL | LATENT | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.8}}),
    "deepseek_v3, queries of the hidden states": ("deepseek_v3", SMALL | LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "attention_bias": True}),
}  # fmt: skip


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
            is_offset = "norm" in name and model_type not in ("gemma2", "gemma3_text", "nemotron")
            one = 1.0 if is_offset and name.endswith("weight") else 0.0
            tensor.copy_(one + 0.1 * torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(folder)
    return model.eval()


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def close(ours: torch.Tensor, theirs: torch.Tensor, bound: float = 2e-6) -> bool:
    return bool((ours - theirs).norm() <= bound * theirs.norm())


@pytest.mark.parametrize("name", CASES)
def test_a_folder_of_transformers_is_read_and_written_again(name: str, tmp_path: Path) -> None:
    theirs = random_folder(*CASES[name], tmp_path / "hf")
    source = open_hugging_face(tmp_path / "hf", "--input")
    weights = CheckpointWeights(from_hugging_face(source, tmp_path / "run"))
    ours = build_model(source.model, source.family).eval()
    state = {key: weights.read(key) for key in ours.state_dict() if not key.endswith("router.load")}
    ours.load_state_dict(state, strict=False)
    padding = (source.model.padded_vocab_size - VOCAB) * 48 * (1 if source.model.tied_embeddings else 2)
    assert sum(p.numel() for p in ours.parameters()) - padding == theirs.num_parameters()

    tokens = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(1))
    logits, expected = ours(tokens)[..., :VOCAB], theirs(tokens).logits
    assert close(logits, expected), ((logits - expected).norm() / expected.norm()).item()
    for one in (logits, expected):
        F.cross_entropy(one[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {key: parameter.grad for key, parameter in ours.named_parameters()}
    stored = [one for one in source.stored_parameters(source.model) if not one.is_buffer]
    found = dict(to_tensors(stored, gradients.__getitem__))
    with torch.no_grad():
        weights_of = {key: parameter.clone() for key, parameter in theirs.named_parameters()}
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            parameter.copy_(weights_of[key])
    for key, gradient in files_of(tmp_path / "gradients").items():
        if "e_score_correction_bias" not in key and gradient.norm() > 1e-5:
            assert close(found[key], gradient), (key, ((found[key] - gradient).norm() / gradient.norm()).item())

    to_hugging_face(weights, tmp_path / "back", None, 40_000, "none")
    first, again = files_of(tmp_path / "hf"), files_of(tmp_path / "back")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) and first[key].dtype == again[key].dtype for key in first)
    fields = json.loads((tmp_path / "back" / "config.json").read_text())
    assert fields["model_type"] == CASES[name][0] and "quantization_config" not in fields
    loaded, info = type(theirs).from_pretrained(
        tmp_path / "back", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        assert close(loaded(tokens).logits, expected.detach())
        prompt = tokens[:1, :12]
        options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
        continued = theirs.generate(prompt, **options)[0, 12:].tolist()
        assert loaded.generate(prompt, **options)[0, 12:].tolist() == continued
        assert generate(ours, prompt[0].tolist(), 20, temperature=0) == continued
