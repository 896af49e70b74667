"""The mapping between T5 and Hugging Face's T5ForConditionalGeneration."""

from collections.abc import Iterator
from typing import Any

from titan_like.models.fields import choice, fixed, read_fields, renamed, write_fields
from titan_like.models.hugging_face import Fields, Stored, fused, validated, whole
from titan_like.models.t5.config import T5Config

MODEL_TYPE = "t5"
ARCHITECTURE = "T5ForConditionalGeneration"
PREFIX = ""
# Of the first cross attention, which the first released weights have but nothing uses.
IGNORED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
_MATRICES = {"gated_gelu": {"gate": "wi_0", "up": "wi_1"}, "relu": {"up": "wi"}}


_FIELDS = (
    renamed("num_layers", "num_layers", 6, "num_hidden_layers"),  # the encoder's
    choice("mlp", "feed_forward_proj", "relu", {"relu": "relu", "gated-gelu": "gated_gelu"}),
    fixed("is_encoder_decoder", True),
    fixed("is_causal", True, is_written=False),
    renamed("tied_embeddings", "tie_word_embeddings", True),
    renamed("num_decoder_layers", "num_decoder_layers", 0),  # as many as the encoder has
    renamed("hidden_size", "d_model", int, "hidden_size"),
    renamed("num_attention_heads", "num_heads", int, "num_attention_heads"),
    renamed("head_size", "d_kv", int, "head_dim"),
    renamed("ffn_hidden_size", "d_ff", int),
    renamed("vocab_size", "vocab_size", int),
    renamed("max_seq_len", "n_positions", 512),
    renamed("num_position_buckets", "relative_attention_num_buckets", 32),
    renamed("max_position_distance", "relative_attention_max_distance", 128),
    renamed("norm_eps", "layer_norm_epsilon", 1e-6),
    renamed("init_std", "initializer_factor", 1.0),
    renamed("dropout", "dropout_rate", 0.1),
)


def stored_parameters(config: T5Config) -> Iterator[Stored]:
    """Where each parameter of the model is stored."""
    hidden, ffn, vocab = config.hidden_size, config.ffn_hidden_size, config.vocab_size
    table, inner = (config.padded_vocab_size, hidden), config.attention_size
    copies: tuple[str, ...] = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    if config.tied_embeddings:
        copies = (*copies, "lm_head.weight")
    yield whole("embedding.weight", "shared.weight", table, vocab, copies=copies)
    for stack in ("encoder", "decoder"):
        theirs = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        shape = (config.num_position_buckets, config.num_attention_heads)
        yield whole(f"{stack}_bias.table.weight", theirs, shape)
    for layer in range(config.num_layers):
        is_encoder = layer < config.num_encoder_layers
        number = layer if is_encoder else layer - config.num_encoder_layers
        ours, theirs = f"layers.{layer}", f"{'encoder' if is_encoder else 'decoder'}.block.{number}.layer"
        yield whole(f"{ours}.attention_norm.weight", f"{theirs}.0.layer_norm.weight", (hidden,))
        query, key, value = (f"{theirs}.0.SelfAttention.{part}.weight" for part in "qkv")
        yield fused(config, f"{ours}.attention.qkv.weight", (hidden,), (query, key, value))
        yield whole(f"{ours}.attention.proj.weight", f"{theirs}.0.SelfAttention.o.weight", (hidden, inner))
        if not is_encoder:
            cross, other = f"{ours}.cross_attention", f"{theirs}.1.EncDecAttention"
            yield whole(f"{ours}.cross_norm.weight", f"{theirs}.1.layer_norm.weight", (hidden,))
            yield whole(f"{cross}.q.weight", f"{other}.q.weight", (inner, hidden))
            yield fused(config, f"{cross}.kv.weight", (hidden,), (f"{other}.k.weight", f"{other}.v.weight"))
            yield whole(f"{cross}.proj.weight", f"{other}.o.weight", (hidden, inner))
        mlp = f"{theirs}.{1 if is_encoder else 2}"
        yield whole(f"{ours}.mlp_norm.weight", f"{mlp}.layer_norm.weight", (hidden,))
        for name, wi in _MATRICES[config.mlp].items():
            yield whole(f"{ours}.mlp.{name}.weight", f"{mlp}.DenseReluDense.{wi}.weight", (ffn, hidden))
        yield whole(f"{ours}.mlp.down.weight", f"{mlp}.DenseReluDense.wo.weight", (hidden, ffn))
        if layer == config.num_encoder_layers - 1:
            yield whole(f"{ours}.final_norm.weight", "encoder.final_layer_norm.weight", (hidden,))
    yield whole("norm.weight", "decoder.final_layer_norm.weight", (hidden,))
    if not config.tied_embeddings:
        yield whole("output.weight", "lm_head.weight", table, vocab)


def to_fields(config: T5Config) -> dict[str, Any]:
    """The shape as fields of config.json."""
    fields = {"model_type": MODEL_TYPE} | write_fields(config, _FIELDS, ARCHITECTURE)
    return fields | {"num_layers": config.num_encoder_layers}


def from_fields(fields: Fields) -> T5Config:
    """The shape that config.json describes. A `RefusedError` names a feature that this family lacks, or a bad field."""
    shape = read_fields(T5Config, _FIELDS, fields)
    shape["num_decoder_layers"] = shape["num_decoder_layers"] or shape["num_layers"]
    shape["num_layers"] += shape["num_decoder_layers"]
    is_gated = shape["mlp"] == "gated_gelu"  # transformers prefers the two fields below to feed_forward_proj
    fields.must_be("is_gated_act", is_gated)
    fields.must_be("dense_act_fn", *(("gelu_new", "gelu_pytorch_tanh") if is_gated else ("relu",)))
    # transformers 5 writes tie_word_embeddings = true for every T5; whether it is tied is in scale_decoder_outputs.
    shape["tied_embeddings"] = fields.flag("scale_decoder_outputs", shape["tied_embeddings"])
    return validated(T5Config, shape)
