"""The mapping between BERT and Hugging Face's classes: BertFor… (norms after) and MegatronBertFor… (norms before).

The head of the first token decides which: MaskedLM has none, PreTraining one for pairs of sentences, and MultipleChoice
one for answers in place of that for tokens.
"""

from collections.abc import Iterator
from typing import Any

from titan_like.models.bert.config import BertConfig
from titan_like.models.fields import Field, Values, choice, dropouts, fixed, read_fields, renamed, write_fields
from titan_like.models.hugging_face import Fields, RefusedError, Stored, fused, linear, validated, whole

MODEL_TYPE = "bert"
ARCHITECTURE = "BertForMaskedLM"
ARCHITECTURES = {MODEL_TYPE: ARCHITECTURE, "megatron-bert": "MegatronBertForMaskedLM"}
PREFIX = "bert."
HEAD = ("cls.", "classifier.")
IGNORED = ("bert.pooler.", "cls.seq_relationship.")  # of the head for pairs of sentences, if the shape has none
_HEADS = {"none": "ForMaskedLM", "pair": "ForPreTraining", "choice": "ForMultipleChoice"}
_TABLE = "bert.embeddings.word_embeddings.weight"


def _read_tied(fields: Fields, shape: Values) -> Values:
    if shape["sentence_head"] != "choice":  # which has no output matrix
        fields.must_be("tie_word_embeddings", True)
    return {}


def _write_tied(config: BertConfig) -> Values:
    if not config.tied_embeddings and config.sentence_head != "choice":
        raise RefusedError(f"the model has tied_embeddings = false, but {ARCHITECTURE} can only be read tied")
    return {"tie_word_embeddings": config.tied_embeddings}


_FIELDS = (
    choice("norm_placement", "model_type", MODEL_TYPE, {MODEL_TYPE: "post", "megatron-bert": "pre"}),
    fixed("hidden_act", "gelu"),
    Field(_read_tied, _write_tied),
    fixed("position_embedding_type", "absolute", is_written=False),
    fixed("is_decoder", False, is_written=False),
    fixed("add_cross_attention", False, is_written=False),
    renamed("num_layers", "num_hidden_layers", int),
    renamed("hidden_size", "hidden_size", int),
    renamed("num_attention_heads", "num_attention_heads", int),
    renamed("ffn_hidden_size", "intermediate_size", int),
    renamed("vocab_size", "vocab_size", int),
    renamed("max_seq_len", "max_position_embeddings", 512),
    renamed("num_token_types", "type_vocab_size", 2),
    renamed("norm_eps", "layer_norm_eps", 1e-12),
    renamed("init_std", "initializer_range", 0.02),
    dropouts(0.1, "hidden_dropout_prob", "attention_probs_dropout_prob"),
)


def architecture(config: BertConfig) -> str:
    """The class in transformers."""
    model = "Bert" if config.norm_placement == "post" else "MegatronBert"
    return model + _HEADS[config.sentence_head]


def stored_parameters(config: BertConfig) -> Iterator[Stored]:
    """Where each parameter of the model is stored."""
    hidden, ffn, vocab, padded = config.hidden_size, config.ffn_hidden_size, config.vocab_size, config.padded_vocab_size
    table = (padded, hidden)
    decoder = "cls.predictions.decoder"
    is_post = config.norm_placement == "post"
    copies = (f"{decoder}.weight",) if config.tied_embeddings else ()
    yield whole("embedding.weight", _TABLE, table, vocab, copies=copies)
    for name, rows in (("position", config.max_seq_len), ("token_type", config.num_token_types)):
        yield whole(f"{name}_embedding.weight", f"bert.embeddings.{name}_embeddings.weight", (rows, hidden))
    if is_post:
        yield from linear("embedding_norm", "bert.embeddings.LayerNorm", (hidden,))
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"bert.encoder.layer.{layer}"
        # The same norm stands after the branch in BERT and before it in Megatron-BERT, under different names.
        after_attention, after_mlp = f"{theirs}.attention.output.LayerNorm", f"{theirs}.output.LayerNorm"
        before_attention, before_mlp = f"{theirs}.attention.ln", f"{theirs}.ln"
        yield from linear(f"{ours}.attention_norm", after_attention if is_post else before_attention, (hidden,))
        for part, columns in (("weight", (hidden,)), ("bias", ())):
            query, key, value = (f"{theirs}.attention.self.{name}.{part}" for name in ("query", "key", "value"))
            yield fused(config, f"{ours}.attention.qkv.{part}", columns, (query, key, value))
        yield from linear(f"{ours}.attention.proj", f"{theirs}.attention.output.dense", (hidden, hidden))
        yield from linear(f"{ours}.mlp_norm", after_mlp if is_post else before_mlp, (hidden,))
        yield from linear(f"{ours}.mlp.fc1", f"{theirs}.intermediate.dense", (ffn, hidden))
        yield from linear(f"{ours}.mlp.fc2", f"{theirs}.output.dense", (hidden, ffn))
    if not is_post:
        yield from linear("norm", "bert.encoder.ln", (hidden,))
    if config.sentence_head != "none":
        yield from linear("pooler", "bert.pooler.dense", (hidden, hidden))
    if config.sentence_head == "pair":
        yield from linear("pair", "cls.seq_relationship", (2, hidden))
    if config.sentence_head == "choice":
        yield from linear("choice", "classifier", (1, hidden))
        return
    yield from linear("transform.dense", "cls.predictions.transform.dense", (hidden, hidden))
    yield from linear("transform.norm", "cls.predictions.transform.LayerNorm", (hidden,))
    if not config.tied_embeddings:
        yield whole("output.weight", f"{decoder}.weight", table, vocab)
    yield whole("output_bias.bias", "cls.predictions.bias", (padded,), vocab, copies=(f"{decoder}.bias",))


def to_fields(config: BertConfig) -> dict[str, Any]:
    """Fields of config.json, or a `RefusedError` for an untied output matrix, which BERT lacks."""
    return write_fields(config, _FIELDS, ARCHITECTURE)


def from_fields(fields: Fields) -> BertConfig:
    """The shape that config.json describes. A `RefusedError` names a feature that this family lacks, or a bad field."""
    classes = fields.values.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    head = next((head for head, ending in _HEADS.items() if name.endswith(ending)), "none")
    return validated(BertConfig, read_fields(BertConfig, _FIELDS, fields, {"sentence_head": head}))
