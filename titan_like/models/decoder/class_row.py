"""What tells a decoder class of transformers from Llama's: its fields, their defaults, and its tensors' names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from titan_like.models.decoder.expert_fields import DenseLayers
from titan_like.models.decoder.fields import (
    Layers,
    activation,
    bias,
    head_size,
    kv_heads,
)
from titan_like.models.fields import Field, reciprocal, renamed

# Ours → Llama's, or the names of the only class that has such tensors. Names in layers begin with the layer's.
# fmt: off
NAMES = {
    "embedding": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm", "output": "lm_head",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
    "attention.qkv": "self_attn.{}_proj",  # q, k, v; or one tensor
    "attention.proj": "self_attn.o_proj", "attention.core.sinks": "self_attn.sinks",
    "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm",
    # Of latent attention; q if queries have no latent.
    "latent.q": "self_attn.q_proj", "latent.q_a": "self_attn.q_a_proj", "latent.q_b": "self_attn.q_b_proj",
    "latent.q_norm": "self_attn.q_a_layernorm", "latent.kv_norm": "self_attn.kv_a_layernorm",
    "latent.kv_a": "self_attn.kv_a_proj_with_mqa", "latent.kv_b": "self_attn.kv_b_proj",
    # Of gated delta nets.
    "delta.matrix": "linear_attn.in_proj_{}",
    "delta.conv": "linear_attn.conv1d.weight", "delta.a_log": "linear_attn.A_log",
    "delta.dt_bias": "linear_attn.dt_bias", "delta.norm": "linear_attn.norm", "delta.proj": "linear_attn.out_proj",
    # Of Kimi's delta attention.
    "kimi.latents": "self_attn.{}_a_proj", "kimi.qkv": "self_attn.{}_proj", "kimi.core.conv": "self_attn.{}_conv1d",
    "kimi.beta": "self_attn.b_proj", "kimi.step": "self_attn.f_b_proj", "kimi.gate": "self_attn.g_b_proj",
    "kimi.a_log": "self_attn.A_log", "kimi.dt_bias": "self_attn.dt_bias", "kimi.norm": "self_attn.o_norm",
    # Of Mamba-2.
    "mamba.in_proj": "mamba.in_proj", "mamba.conv": "mamba.conv1d", "mamba.a_log": "mamba.A_log",
    "mamba.dt_bias": "mamba.dt_bias", "mamba.skip": "mamba.D", "mamba.norm": "mamba.norm",
    "mamba.proj": "mamba.out_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",  # gate = up: gate above up
    "mlp.activation": "mlp.act_fn",
    "mlp.router": "mlp.gate", "mlp.router.bias": "mlp.gate.e_score_correction_bias",  # on scores for the choice alone
    # One tensor an expert, or without {} one of all experts: gate above up of each. With `transposed_experts` they are
    # parameters, transposed, where gate = up has rows of both in turn, or in two halves.
    "mlp.experts.gate": "mlp.experts.{}.gate_proj", "mlp.experts.up": "mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj", "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj", "mlp.shared.down": "mlp.shared_experts.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
    # Of layers of multi-token prediction, which have copies of both tables.
    "mtp.embedding": "embed_tokens", "mtp.output": "shared_head.head", "mtp.norm": "shared_head.norm",
    "mtp.enorm": "enorm", "mtp.hnorm": "hnorm", "mtp.eh_proj": "eh_proj",
}
# fmt: on
# How names in files of models with images begin → in the class of their text.
IN_LANGUAGE_MODEL = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}  # fmt: skip
QK_HEAD, QK_ALL = {"qk_norm": "head"}, {"qk_norm": "all"}
MLP_BIAS, HEAD_SIZE, BIAS = renamed("mlp_bias", "mlp_bias", False), head_size(), bias()
GRANITE_SCALES = (
    renamed("embedding_scale", "embedding_multiplier", 1.0),
    renamed("residual_scale", "residual_multiplier", 1.0),
    Field(
        lambda fields, shape: {"attention_scale": fields.positive("attention_multiplier", 1.0)},
        lambda config: {"attention_multiplier": config.score_scale},
    ),
    reciprocal("logit_scale", "logits_scaling", 1.0),
)


@dataclass(frozen=True)
class Class:
    """One class of transformers."""

    name: str
    model_types: tuple[str, ...]  # the first is written
    # Defaults of vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
    # num_key_value_heads (0: as many; None: it is in ``fields``) and max_position_embeddings.
    sizes: tuple[int, int, int, int, int, int | None, int]
    always: Mapping[str, Any] = field(default_factory=dict)  # our fields that all its models have
    fields: tuple[Field, ...] = (MLP_BIAS, HEAD_SIZE, BIAS)  # besides those that follow
    fixed: tuple[Field, ...] = ()  # with the only values that can be read
    activation: Field = activation("hidden_act", "silu")  # noqa: RUF009
    eps: tuple[str, float] | None = ("rms_norm_eps", 1e-6)  # None: always 1e-5
    init_std: float = 0.02
    tied: bool = False
    layers: Layers = Layers()  # noqa: RUF009
    dense: DenseLayers | None = None  # layers without experts, if they need not be the first ones
    may_be_dense: bool = False  # whether models may have no experts, in a class that has them
    ignored: frozenset[str] = frozenset()  # what the class does not read though files have it
    is_interleaved: bool = False  # rotated dimensions are stored in pairs
    transposed_experts: Literal["", "in turn", "in halves"] = ""
    has_stacked_bias: bool = False  # the router's bias is [1, experts]
    has_fused_heads: bool = False  # one tensor of queries, keys and values has them head by head
    delta_matrices: tuple[str, ...] = ("qkvz", "ba")  # what the rows of each are; these are ordered by head
    others: tuple[str, ...] = ()  # how names of tensors begin that files have and the class leaves out
    outer: str = ""  # the class around this one that has further modules, for all model_types but the first
    outer_defaults: Mapping[str, Any] = field(default_factory=dict)  # of its text's fields, where they are not these
    # Ours → theirs, where they are not Llama's; "ours, or" → what files may have instead.
    names: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)  # how names in files begin → in the class

    @cached_property
    def all_fields(self) -> tuple[Field, ...]:
        """Every field, in the order in which they are read and written."""
        vocab, hidden, ffn, layers, heads, groups, length = self.sizes
        return (
            renamed("vocab_size", "vocab_size", vocab),
            renamed("hidden_size", "hidden_size", hidden),
            renamed("ffn_hidden_size", "intermediate_size", ffn),
            renamed("num_layers", "num_hidden_layers", layers),
            renamed("num_attention_heads", "num_attention_heads", heads),
            *([] if groups is None else [kv_heads(groups)]),
            renamed("max_seq_len", "max_position_embeddings", length),
            *self.fixed,
            self.activation,
            *([] if self.eps is None else [renamed("norm_eps", *self.eps)]),
            renamed("init_std", "initializer_range", self.init_std),
            renamed("tied_embeddings", "tie_word_embeddings", self.tied),
            *self.fields,
            Field(self.layers.read, self.layers.write),
            *([] if self.dense is None else [self.dense.field]),
        )
