"""Logits equal those of transformers' GPT2LMHeadModel and LlamaForCausalLM, an independent implementation."""

import pytest
import torch
import transformers

from titan_like.models.gpt.config import GPTConfig
from titan_like.models.layers.rope import rope_frequencies
from titan_like.models.llama.config import LlamaConfig
from titan_like.models.registry import build_model, builtin_flavors

EPS32 = torch.finfo(torch.float32).eps
SEQ = 48
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 16}


def random_model(config, family):
    """A float64 model whose every weight, biases and norms included, is random and large enough to matter."""
    model = build_model(config, family).double()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            offset = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(offset + 0.15 * noise)
    return model


def split_qkv(fused, config):
    """Rows [kv_heads, queries per kv head + 2, head_dim] → query, key and value rows."""
    group = config.num_attention_heads // config.num_kv_heads
    rows = fused.view(config.num_kv_heads, group + 2, config.head_dim, *fused.shape[1:])
    return rows[:, :group].flatten(0, 2), rows[:, group].flatten(0, 1), rows[:, group + 1].flatten(0, 1)


def gpt2_state(ours, config):
    """GPT-2 keeps matrices as [in, out] and queries, keys and values as consecutive blocks."""
    vocab = config.vocab_size
    state = {
        "transformer.wte.weight": ours["embedding.weight"][:vocab],
        "transformer.wpe.weight": ours["position_embedding.weight"],
        "transformer.ln_f.weight": ours["norm.weight"],
        "transformer.ln_f.bias": ours["norm.bias"],
        "lm_head.weight": ours["output.weight" if "output.weight" in ours else "embedding.weight"][:vocab],
    }
    for i in range(config.num_layers):
        layer, theirs = f"layers.{i}", f"transformer.h.{i}"
        for part in ("weight", "bias"):
            state[f"{theirs}.ln_1.{part}"] = ours[f"{layer}.attention_norm.{part}"]
            state[f"{theirs}.ln_2.{part}"] = ours[f"{layer}.mlp_norm.{part}"]
            qkv = torch.cat(split_qkv(ours[f"{layer}.attention.qkv.{part}"], config))
            state[f"{theirs}.attn.c_attn.{part}"] = qkv.t() if part == "weight" else qkv
            for name, module in (("attn.c_proj", "attention.proj"), ("mlp.c_fc", "mlp.fc1"), ("mlp.c_proj", "mlp.fc2")):
                value = ours[f"{layer}.{module}.{part}"]
                state[f"{theirs}.{name}.{part}"] = value.t() if part == "weight" else value
    return state


def llama_state(ours, config):
    vocab = config.vocab_size
    state = {
        "model.embed_tokens.weight": ours["embedding.weight"][:vocab],
        "model.norm.weight": ours["norm.weight"],
        "lm_head.weight": ours["embedding.weight" if config.tied_embeddings else "output.weight"][:vocab],
    }
    for i in range(config.num_layers):
        layer, theirs = f"layers.{i}", f"model.layers.{i}"
        query, key, value = split_qkv(ours[f"{layer}.attention.qkv.weight"], config)
        state |= {
            f"{theirs}.self_attn.q_proj.weight": query,
            f"{theirs}.self_attn.k_proj.weight": key,
            f"{theirs}.self_attn.v_proj.weight": value,
            f"{theirs}.self_attn.o_proj.weight": ours[f"{layer}.attention.proj.weight"],
            f"{theirs}.mlp.gate_proj.weight": ours[f"{layer}.mlp.gate.weight"],
            f"{theirs}.mlp.up_proj.weight": ours[f"{layer}.mlp.up.weight"],
            f"{theirs}.mlp.down_proj.weight": ours[f"{layer}.mlp.down.weight"],
            f"{theirs}.input_layernorm.weight": ours[f"{layer}.attention_norm.weight"],
            f"{theirs}.post_attention_layernorm.weight": ours[f"{layer}.mlp_norm.weight"],
        }
    return state


def logits_of(model, theirs, state, vocab):
    theirs.double().load_state_dict(state)
    with torch.no_grad():
        return model.eval()(tokens(vocab))[..., :vocab], theirs.eval()(tokens(vocab)).logits


def tokens(vocab):
    return torch.randint(vocab, (3, SEQ), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("tied", [True, False])
def test_gpt_equals_gpt2(tied):
    config = GPTConfig(
        num_layers=3, hidden_size=48, num_attention_heads=4, vocab_size=101, max_seq_len=64, tied_embeddings=tied
    )
    model = random_model(config, "gpt")
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=101,
            n_positions=64,
            n_embd=48,
            n_layer=3,
            n_head=4,
            tie_word_embeddings=tied,
            attn_implementation="sdpa",
        )
    )
    ours, theirs = logits_of(model, reference, gpt2_state(model.state_dict(), config), 101)
    assert theirs.abs().max() > 1
    # float64 throughout: rounding is of order 1e-15 times the depth of the sums.
    assert (ours - theirs).abs().max() < 1e-11 * theirs.abs().max()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("scaling", [None, SCALING])
def test_llama_equals_hugging_face(tied, kv_heads, scaling):
    config = LlamaConfig.model_validate(
        {
            "num_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_kv_heads": kv_heads,
            "ffn_hidden_size": 88,
            "vocab_size": 101,
            "max_seq_len": 64,
            "norm_eps": 1e-5,
            "rope_theta": 500.0,
            "rope_scaling": scaling,
            "tied_embeddings": tied,
        }
    )
    model = random_model(config, "llama")
    rope = {"rope_type": "default", "rope_theta": 500.0}
    if scaling is not None:
        rope |= {**scaling, "rope_type": "llama3", "original_max_position_embeddings": 16}
        rope.pop("original_max_seq_len")
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=101,
            hidden_size=64,
            intermediate_size=88,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            rope_parameters=rope,
            tie_word_embeddings=tied,
            attn_implementation="sdpa",
        )
    )
    ours, theirs = logits_of(model, reference, llama_state(model.state_dict(), config), 101)
    assert theirs.abs().max() > 1
    # transformers rounds to float32 in every RMSNorm and in its frequencies even in a float64 model, so it may differ
    # by as much as float32 rounding moves this model's own logits.
    with torch.no_grad():
        rounding = (model.float()(tokens(101))[..., :101] - ours).abs().max()
    assert rounding < 1e-5 * theirs.abs().max()
    assert (ours - theirs).abs().max() < 4 * rounding


@pytest.mark.parametrize("name", ["llama3.1_8b", "llama3.2_1b", "llama2_7b"])
def test_rotary_frequencies_equal_hugging_face(name):
    config = LlamaConfig.model_validate(builtin_flavors("llama")[name])
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling.model_dump()
        rope |= {**scaling, "rope_type": "llama3", "original_max_position_embeddings": 8192}
        rope.pop("original_max_seq_len")
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            max_position_embeddings=config.max_seq_len,
            rope_parameters=rope,
        )
    )
    ours = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling, torch.device("cpu"))
    # A power, a division and the blend of two: a few float32 roundings.
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=8 * EPS32, atol=0)
