"""The mapping between GPT and Hugging Face's GPT2LMHeadModel."""

from collections.abc import Iterator
from typing import Any

from titan_like.models.fields import dropouts, fixed, read_fields, renamed, write_fields
from titan_like.models.gpt.config import GPTConfig
from titan_like.models.hugging_face import Fields, Stored, fused, linear, validated, whole

MODEL_TYPE = "gpt2"
ARCHITECTURE = "GPT2LMHeadModel"
PREFIX = "transformer."
_FIELDS = (
    fixed("activation_function", "gelu_new", "gelu_pytorch_tanh"),
    fixed("scale_attn_weights", True, is_written=False),
    fixed("scale_attn_by_inverse_layer_idx", False, is_written=False),
    fixed("add_cross_attention", False, is_written=False),
    fixed("is_causal", True, is_written=False),
    renamed("num_layers", "n_layer", int, "num_hidden_layers"),
    renamed("hidden_size", "n_embd", int, "hidden_size"),
    renamed("num_attention_heads", "n_head", int, "num_attention_heads"),
    renamed("ffn_hidden_size", "n_inner", 0),  # 4 · n_embd
    renamed("vocab_size", "vocab_size", int),
    renamed("max_seq_len", "n_positions", int, "max_position_embeddings"),
    renamed("norm_eps", "layer_norm_epsilon", 1e-5),
    renamed("init_std", "initializer_range", 0.02),
    renamed("tied_embeddings", "tie_word_embeddings", True),
    dropouts(0.1, "resid_pdrop", "embd_pdrop", "attn_pdrop"),
)


def stored_parameters(config: GPTConfig) -> Iterator[Stored]:
    """Where each parameter is stored. GPT-2 stores the matrices of its layers as [in, out], the transpose of ours."""
    hidden, ffn, vocab = config.hidden_size, config.ffn_hidden_size, config.vocab_size
    table = (config.padded_vocab_size, hidden)
    head = "lm_head.weight"
    copies = (head,) if config.tied_embeddings else ()
    yield whole("embedding.weight", "transformer.wte.weight", table, vocab, copies=copies)
    yield whole("position_embedding.weight", "transformer.wpe.weight", (config.max_seq_len, hidden))
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"transformer.h.{layer}"
        yield from linear(f"{ours}.attention_norm", f"{theirs}.ln_1", (hidden,))
        yield from linear(f"{ours}.mlp_norm", f"{theirs}.ln_2", (hidden,))
        for part, columns in (("weight", (hidden,)), ("bias", ())):
            yield fused(config, f"{ours}.attention.qkv.{part}", columns, (f"{theirs}.attn.c_attn.{part}",), True)
        yield from linear(f"{ours}.attention.proj", f"{theirs}.attn.c_proj", (hidden, hidden), is_transposed=True)
        yield from linear(f"{ours}.mlp.fc1", f"{theirs}.mlp.c_fc", (ffn, hidden), is_transposed=True)
        yield from linear(f"{ours}.mlp.fc2", f"{theirs}.mlp.c_proj", (hidden, ffn), is_transposed=True)
    yield from linear("norm", "transformer.ln_f", (hidden,))
    if not config.tied_embeddings:
        yield whole("output.weight", head, table, vocab)


def to_fields(config: GPTConfig) -> dict[str, Any]:
    """The shape as fields of config.json."""
    return {"model_type": MODEL_TYPE} | write_fields(config, _FIELDS, ARCHITECTURE)


def from_fields(fields: Fields) -> GPTConfig:
    """The shape that config.json describes. A `RefusedError` names a feature that this family lacks, or a bad field."""
    return validated(GPTConfig, read_fields(GPTConfig, _FIELDS, fields))
