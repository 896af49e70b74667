"""Classes of transformers that are decoders, a row of fields and names for each.

An absent field of config.json has the class's default, which is often not what published files say.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from titan_like.models.decoder.fields import (
    DENSE_LAYERS,
    Layers,
    activation,
    auxiliary_loss,
    bias,
    experts,
    head_size,
    kv_heads,
    latent_kv_heads,
)
from titan_like.models.decoder.rope import Rope
from titan_like.models.fields import Field, choice, count, fixed, nullable, reciprocal, renamed

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
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",  # gate = up: gate above up
    "mlp.router": "mlp.gate", "mlp.router.bias": "mlp.gate.e_score_correction_bias",  # on scores for the choice alone
    # One tensor an expert, or without {} one of all experts, transposed, where gate = up has rows of both in turn.
    "mlp.experts.gate": "mlp.experts.{}.gate_proj", "mlp.experts.up": "mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj", "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj", "mlp.shared.down": "mlp.shared_experts.down_proj",
    # Of layers of multi-token prediction, which have copies of both tables.
    "mtp.embedding": "embed_tokens", "mtp.output": "shared_head.head", "mtp.norm": "shared_head.norm",
    "mtp.enorm": "enorm", "mtp.hnorm": "hnorm", "mtp.eh_proj": "eh_proj",
}
# fmt: on
_MLP_BIAS, _HEAD, _BIAS = renamed("mlp_bias", "mlp_bias", False), head_size(), bias()


@dataclass(frozen=True)
class Class:
    """One class of transformers."""

    name: str
    model_types: tuple[str, ...]  # the first is written
    # Defaults of vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
    # num_key_value_heads (0: as many; None: it is in ``fields``) and max_position_embeddings.
    sizes: tuple[int, int, int, int, int, int | None, int]
    always: Mapping[str, Any] = field(default_factory=dict)  # our fields that all its models have
    fields: tuple[Field, ...] = (_MLP_BIAS, _HEAD, _BIAS)  # besides those that follow
    fixed: tuple[Field, ...] = ()  # with the only values that can be read
    activation: Field = activation("hidden_act", "silu")  # noqa: RUF009
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6)
    init_std: float = 0.02
    tied: bool = False
    layers: Layers = Layers()  # noqa: RUF009
    ignored: frozenset[str] = frozenset()  # what the class does not read though files have it
    is_interleaved: bool = False  # rotated dimensions are stored in pairs
    has_fused_heads: bool = False  # one tensor of queries, keys and values has them head by head
    outer: str = ""  # the class around this one that has further modules, for all model_types but the first
    names: Mapping[str, str] = field(default_factory=dict)  # ours → theirs, where they are not Llama's
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
            renamed("norm_eps", *self.eps),
            renamed("init_std", "initializer_range", self.init_std),
            renamed("tied_embeddings", "tie_word_embeddings", self.tied),
            *self.fields,
            Field(self.layers.read, self.layers.write),
        )


_QK_HEAD, _QK_ALL = {"qk_norm": "head"}, {"qk_norm": "all"}
_GATE_UP = {"mlp.gate": "mlp.gate_up_proj", "mlp.up": "mlp.gate_up_proj"}
# fmt: off
_GEMMA: dict[str, Any] = {
    "activation": activation("hidden_activation", "gelu_pytorch_tanh"), "tied": True,
    "fixed": (fixed("use_bidirectional_attention", False, None, is_written=False),),
    "ignored": frozenset({"hidden_act", "sliding_window_size", "_sliding_window_pattern"}),
    "names": {"mlp_norm": "pre_feedforward_layernorm"},
}
_GEMMA_ALWAYS = {"block": "sandwich", "norm_offset": True}
_GEMMA_FIELDS = (
    head_size(256), _BIAS,
    Field(
        lambda fields, shape: {"attention_scale": fields.positive("query_pre_attn_scalar", 256) ** -0.5},
        lambda config: {"query_pre_attn_scalar": round(config.score_scale**-2)},
    ),
    Field(lambda fields, shape: {"embedding_scale": shape["hidden_size"] ** 0.5, "round_embedding_scale": True}),
)
CLASSES = (
    Class("LlamaForCausalLM", ("llama",), (32000, 4096, 11008, 32, 32, 0, 2048)),
    Class(
        "MistralForCausalLM", ("mistral",), (32000, 4096, 14336, 32, 32, 8, 131072), fields=(_HEAD,),
        layers=Layers("all", 4096),
    ),
    Class(
        "MinistralForCausalLM", ("ministral",), (32000, 4096, 14336, 32, 32, 8, 131072), fields=(_HEAD,),
        layers=Layers("types", 4096),
    ),
    Class(
        "Qwen2ForCausalLM", ("qwen2",), (151936, 4096, 22016, 32, 32, 32, 32768), {"attention_bias": "qkv"}, (_HEAD,),
        ignored=frozenset({"attention_bias"}), layers=Layers("switched", 4096),
    ),
    Class(
        "Qwen3ForCausalLM", ("qwen3",), (151936, 4096, 22016, 32, 32, 32, 32768), _QK_HEAD, (head_size(128), _BIAS),
        layers=Layers("switched", 4096),
    ),
    Class(
        "Olmo2ForCausalLM", ("olmo2",), (50304, 4096, 11008, 32, 32, 0, 2048), {"qk_norm": "all", "block": "post"},
        (_HEAD, _BIAS), eps=("rms_norm_eps", 1e-5),
        names={"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    ),
    Class(
        "SmolLM3ForCausalLM", ("smollm3",), (128256, 2048, 11008, 36, 16, 4, 32768), tied=True,
        fixed=(fixed("use_sliding_window", False),), ignored=frozenset({"max_window_layers", "sliding_window"}),
        layers=Layers("unrotated", rope=Rope(("rope_theta", 2e6))),
    ),
    Class(
        "GraniteForCausalLM", ("granite",), (32000, 4096, 11008, 32, 32, 0, 2048),
        fields=(
            _MLP_BIAS,
            renamed("embedding_scale", "embedding_multiplier", 1.0),
            renamed("residual_scale", "residual_multiplier", 1.0),
            Field(
                lambda fields, shape: {"attention_scale": fields.positive("attention_multiplier", 1.0)},
                lambda config: {"attention_multiplier": config.score_scale},
            ),
            reciprocal("logit_scale", "logits_scaling", 1.0),
            _HEAD, _BIAS,
        ),
    ),
    Class(
        "Gemma2ForCausalLM", ("gemma2",), (256000, 2304, 9216, 26, 8, 4, 8192), _GEMMA_ALWAYS,
        (
            nullable("attention_softcap", "attn_logit_softcapping", 50.0),
            nullable("final_softcap", "final_logit_softcapping", 30.0),
            *_GEMMA_FIELDS,
        ),
        layers=Layers("types", 4096, period=2), **_GEMMA,
    ),
    Class(
        "Gemma3ForCausalLM", ("gemma3_text", "gemma3"), (262208, 2304, 9216, 26, 8, 4, 131072),
        _GEMMA_ALWAYS | _QK_HEAD, (nullable("final_softcap", "final_logit_softcapping", None), *_GEMMA_FIELDS),
        layers=Layers(
            "types", 4096, period=6, period_field="sliding_window_pattern",
            rope=Rope(("rope_theta", 1e6), local_theta=("rope_local_base_freq", 10_000.0)),
        ),
        outer="Gemma3ForConditionalGeneration", **_GEMMA,
        renamed={
            "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
            "model.language_model.": "model.",
        },
    ),
    Class(
        "Phi3ForCausalLM", ("phi3",), (32064, 3072, 8192, 32, 32, 0, 4096), fields=(_HEAD,),
        ignored=frozenset({"full_attn_mod", "original_max_position_embeddings"}), eps=("rms_norm_eps", 1e-5),
        layers=Layers("all", rope=Rope(fraction=("partial_rotary_factor", 1.0), is_longrope=True)),
        names={"attention.qkv": "self_attn.qkv_proj"} | _GATE_UP,
    ),
    Class(
        "Glm4ForCausalLM", ("glm4",), (151552, 4096, 13696, 40, 32, 2, 131072), {"block": "sandwich"},
        (head_size(128), bias("qkv", True)), eps=("rms_norm_eps", 1.5625e-7),
        layers=Layers(rope=Rope(fraction=("partial_rotary_factor", 0.5))), is_interleaved=True,
        names={"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"} | _GATE_UP,
    ),
    Class(
        "GPTNeoXForCausalLM", ("gpt_neox",), (50432, 6144, 24576, 44, 64, None, 2048),
        {"norm": "layer", "gated": False, "mlp_bias": True},
        (
            head_size(None), bias("all", True),
            choice("block", "use_parallel_residual", True, {False: "pre", True: "parallel"}),
        ),
        activation=activation("hidden_act", "gelu"), ignored=frozenset({"num_key_value_heads"}),
        eps=("layer_norm_eps", 1e-5), has_fused_heads=True,
        layers=Layers(rope=Rope(("rotary_emb_base", 10_000.0), fraction=("rotary_pct", 0.25))),
        names={
            "embedding": "gpt_neox.embed_in", "layers": "gpt_neox.layers", "norm": "gpt_neox.final_layer_norm",
            "output": "embed_out", "attention.qkv": "attention.query_key_value", "attention.proj": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
        },
    ),
    Class(
        "NemotronForCausalLM", ("nemotron",), (256000, 6144, 24576, 32, 48, 0, 4096),
        {"norm": "layer", "norm_offset": True, "gated": False},
        activation=activation("hidden_act", "relu2"), eps=("norm_eps", 1e-5), init_std=0.0134,
        layers=Layers(rope=Rope(fraction=("partial_rotary_factor", 0.5))),
    ),
    Class(
        "Starcoder2ForCausalLM", ("starcoder2",), (49152, 3072, 12288, 30, 24, 2, 4096),
        {"norm": "layer", "gated": False, "attention_bias": "all", "mlp_bias": True}, (head_size(None),),
        fixed=(fixed("use_bias", True),), activation=activation("hidden_act", "gelu_pytorch_tanh"),
        eps=("norm_epsilon", 1e-5), init_std=0.018042, tied=True, layers=Layers("all"),
        names={"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    ),
    Class(
        "MixtralForCausalLM", ("mixtral",), (32000, 4096, 14336, 32, 32, 8, 131072),
        fields=(_HEAD, *experts("num_local_experts", 8, 2, "intermediate_size", 14336), auxiliary_loss()),
        fixed=(fixed("router_jitter_noise", 0.0, 0, is_written=False),), eps=("rms_norm_eps", 1e-5),
        layers=Layers("all", rope=Rope(("rope_theta", 1e6))),
        names={
            "mlp.router": "block_sparse_moe.gate", "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
            "mlp.experts.up": "block_sparse_moe.experts.{}.w3", "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
        },
    ),
    Class(
        "Qwen3MoeForCausalLM", ("qwen3_moe",), (151936, 2048, 6144, 24, 32, 4, 32768), _QK_HEAD,
        (
            _HEAD, _BIAS, *experts("num_experts", 128, 8, "moe_intermediate_size", 768),
            auxiliary_loss(dense_layers=DENSE_LAYERS), renamed("renormalize", "norm_topk_prob", False), DENSE_LAYERS,
        ),
        fixed=(fixed("use_sliding_window", False, None, is_written=False),),
        ignored=frozenset({"max_window_layers", "sliding_window"}),
    ),
    Class(
        "OlmoeForCausalLM", ("olmoe",), (50304, 2048, 2048, 16, 16, 0, 4096), _QK_ALL,
        (
            head_size(None), _BIAS, *experts("num_experts", 64, 8, "intermediate_size", 2048),
            auxiliary_loss(0.01), renamed("renormalize", "norm_topk_prob", False),
        ),
        fixed=(fixed("clip_qkv", None, is_written=False),), eps=("rms_norm_eps", 1e-5),
    ),
    Class(
        "GptOssForCausalLM", ("gpt_oss",), (201088, 2880, 2880, 36, 64, 8, 131072),
        {
            "attention_bias": "all", "attention_sinks": True, "activation": "clamped_swiglu", "router_bias": True,
            "expert_bias": True,
        },
        (head_size(64), *experts("num_local_experts", 128, 4, "intermediate_size", 2880), auxiliary_loss()),
        fixed=(fixed("attention_bias", True), fixed("swiglu_limit", 7.0, 7), fixed("swiglu_alpha", 1.702)),
        activation=Field(), ignored=frozenset({"experts_per_token", "initial_context_length", "hidden_act"}),
        eps=("rms_norm_eps", 1e-5),
        layers=Layers(
            "types", 128, period=2,
            rope=Rope(
                ("rope_theta", 150_000.0),
                default_scaling={
                    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            ),
        ),
        names={
            "mlp.router": "mlp.router", "mlp.experts.gate": "mlp.experts.gate_up_proj",
            "mlp.experts.up": "mlp.experts.gate_up_proj", "mlp.experts.down": "mlp.experts.down_proj",
        },
    ),
    Class(
        "DeepseekV3ForCausalLM", ("deepseek_v3", "kimi_k2"), (129280, 7168, 18432, 61, 128, None, 4096),
        {"router_score": "sigmoid", "balance": "bias", "bias_update_rate": 0.0},  # biases stay as they are
        (
            renamed("kv_lora_rank", "kv_lora_rank", 512), renamed("nope_head_size", "qk_nope_head_dim", 128),
            renamed("rope_head_size", "qk_rope_head_dim", 64), renamed("value_head_size", "v_head_dim", 128),
            renamed("routed_scaling", "routed_scaling_factor", 2.5),
            renamed("router_groups", "n_group", 8), renamed("router_top_groups", "topk_group", 4),
            head_size(None), latent_kv_heads(), _BIAS, nullable("q_lora_rank", "q_lora_rank", 1536),
            count("mtp_layers", "num_nextn_predict_layers", 0),
            *experts("n_routed_experts", 256, 8, "moe_intermediate_size", 2048),
            renamed("renormalize", "norm_topk_prob", True), count("num_dense_layers", "first_k_dense_replace", 3),
            count("num_shared_experts", "n_shared_experts", 1),
        ),
        fixed=(  # of which DeepSeek's own code reads the first three, and transformers the last
            fixed("scoring_func", "sigmoid"), fixed("topk_method", "noaux_tc"), fixed("moe_layer_freq", 1),
            fixed("rope_interleave", True),
        ),
        ignored=frozenset({"qk_head_dim", "num_mtp_layers"}), is_interleaved=True,
    ),
)
# fmt: on
