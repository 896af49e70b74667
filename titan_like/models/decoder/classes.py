"""Classes of transformers that are decoders, a row of data for each.

An absent field of config.json has the class's default, which is often not what published files say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Entry = tuple[str, str, Any]  # our field, that of config.json, and the value of a file without it

LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.qkv": "self_attn.{}_proj",  # q, k, v; or one tensor
    "attention.proj": "self_attn.o_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts": "mlp.experts",
}
_GEMMA_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_GATE_UP = {"mlp.gate": "mlp.gate_up_proj", "mlp.up": "mlp.gate_up_proj"}  # gate above up


class Experts(NamedTuple):
    """How a class calls what experts have; last come defaults."""

    number: str  # the field with their number
    width: str  # the field with an expert's width
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    is_joined: bool = False  # all experts in one tensor, gate and up in turn
    has_groups: bool = False
    dense_layers: str = ""  # the field with the first layers, which have none
    defaults: tuple[int | None, int | None, int | None] = (None, None, None)  # number, width, experts per token
    renormalize: bool | None = None  # default of norm_topk_prob; None: without that field
    balance: float | None = 0.001  # default of router_aux_loss_coef; None: balanced otherwise


@dataclass(frozen=True)
class Class:
    """One class of transformers."""

    name: str
    model_types: tuple[str, ...]  # the first is written
    # Defaults of vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads,
    # num_key_value_heads (0: as many) and max_position_embeddings; None: a file must have it.
    sizes: tuple[int | None, ...] = (None, None, None, None, None, 0, 2048)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # our fields that all its models have
    fields: tuple[Entry, ...] = ()
    reciprocal: tuple[Entry, ...] = ()  # ours is one over theirs
    nullable: tuple[Entry, ...] = ()  # null is our 0
    must: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # values that can be read; the first is written
    may: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # the same, but never written
    ignored: frozenset[str] = frozenset()  # what the class does not read though files have it
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6)
    init_std: float = 0.02
    activation: tuple[str, str] | None = ("hidden_act", "silu")  # field and default; None: always the fixed one
    tied: bool = False
    head_dim: int | None = 0  # default; 0: hidden size / heads; None: always that
    bias: Literal["", "qkv", "all"] = ""  # attention_bias here, if it is true there
    has_bias: bool = False  # default of attention_bias
    parallel: str = ""  # the field that says whether a block is parallel, which is the default
    query_scalar: bool = False  # as in Gemma, which also scales embeddings
    # Which layers have a window: none; all; those of layer_types or else all but every n-th, n = period, or all if
    # period is 0; those after max_window_layers if use_sliding_window. Or every n-th does not rotate.
    layers: Literal["none", "all", "types", "switched", "unrotated"] = "none"
    window: int | None = None  # default of sliding_window
    period: int = 0
    period_field: str = ""
    theta: tuple[str, float] = ("rope_theta", 10_000.0)
    local_theta: tuple[str, float] | None = None  # of layers with a window, which are not scaled
    fraction: tuple[str, float] | None = None  # field and default of the part of a head that is rotated
    default_scaling: Mapping[str, Any] | None = None
    is_interleaved: bool = False  # rotated dimensions are stored in pairs
    has_latents: bool = False
    experts: Experts | None = None
    outer: str = ""  # the class around this one that has further modules, for all model_types but the first
    names: Mapping[str, str] = field(default_factory=dict)  # ours → theirs, where they are not Llama's
    renamed: Mapping[str, str] = field(default_factory=dict)  # how names in files begin → in the class


_MLP_BIAS = (("mlp_bias", "mlp_bias", False),)
_QK_HEAD, _QK_ALL = {"qk_norm": "head"}, {"qk_norm": "all"}
_GEMMA: dict[str, Any] = {
    "activation": ("hidden_activation", "gelu_pytorch_tanh"),
    "may": {"use_bidirectional_attention": (False, None)},
    "ignored": frozenset({"hidden_act", "sliding_window_size", "_sliding_window_pattern"}),
    "tied": True,
    "head_dim": 256,
    "bias": "all",
    "query_scalar": True,
    "layers": "types",
    "window": 4096,
    "names": _GEMMA_NORMS,
}
_GEMMA_FIXED = {"block": "sandwich", "norm_offset": True}
_QWEN: dict[str, Any] = {"layers": "switched", "window": 4096}
# fmt: off
CLASSES = (
    Class(
        "LlamaForCausalLM", ("llama",), (32000, 4096, 11008, 32, 32, 0, 2048), fields=_MLP_BIAS, bias="all",
    ),
    Class(
        "MistralForCausalLM", ("mistral",), (32000, 4096, 14336, 32, 32, 8, 131072), layers="all", window=4096,
    ),
    Class(
        "MinistralForCausalLM", ("ministral",), (32000, 4096, 14336, 32, 32, 8, 131072), layers="types", window=4096,
    ),
    Class(
        "Qwen2ForCausalLM", ("qwen2",), (151936, 4096, 22016, 32, 32, 32, 32768), {"attention_bias": "qkv"},
        ignored=frozenset({"attention_bias"}), **_QWEN,
    ),
    Class(
        "Qwen3ForCausalLM", ("qwen3",), (151936, 4096, 22016, 32, 32, 32, 32768), _QK_HEAD, head_dim=128, bias="all",
        **_QWEN,
    ),
    Class(
        "Olmo2ForCausalLM", ("olmo2",), (50304, 4096, 11008, 32, 32, 0, 2048), {"qk_norm": "all", "block": "post"},
        eps=("rms_norm_eps", 1e-5), bias="all",
        names={"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    ),
    Class(
        "SmolLM3ForCausalLM", ("smollm3",), (128256, 2048, 11008, 36, 16, 4, 32768),
        must={"use_sliding_window": (False,)}, fields=_MLP_BIAS, tied=True, bias="all", layers="unrotated",
        ignored=frozenset({"max_window_layers", "sliding_window"}), theta=("rope_theta", 2e6),
    ),
    Class(
        "GraniteForCausalLM", ("granite",), (32000, 4096, 11008, 32, 32, 0, 2048),
        fields=(
            *_MLP_BIAS, ("embedding_scale", "embedding_multiplier", 1.0),
            ("residual_scale", "residual_multiplier", 1.0), ("attention_scale", "attention_multiplier", 1.0),
        ),
        reciprocal=(("logit_scale", "logits_scaling", 1.0),), bias="all",
    ),
    Class(
        "Gemma2ForCausalLM", ("gemma2",), (256000, 2304, 9216, 26, 8, 4, 8192), _GEMMA_FIXED,
        nullable=(
            ("attention_softcap", "attn_logit_softcapping", 50.0), ("final_softcap", "final_logit_softcapping", 30.0),
        ),
        period=2, **_GEMMA,
    ),
    Class(
        "Gemma3ForCausalLM", ("gemma3_text", "gemma3"), (262208, 2304, 9216, 26, 8, 4, 131072),
        _GEMMA_FIXED | _QK_HEAD, nullable=(("final_softcap", "final_logit_softcapping", None),),
        period=6, period_field="sliding_window_pattern",
        theta=("rope_theta", 1e6), local_theta=("rope_local_base_freq", 10_000.0),
        outer="Gemma3ForConditionalGeneration",
        renamed={
            "language_model.model.": "model.", "language_model.lm_head.": "lm_head.",
            "model.language_model.": "model.",
        },
        **_GEMMA,
    ),
    Class(
        "Phi3ForCausalLM", ("phi3",), (32064, 3072, 8192, 32, 32, 0, 4096),
        ignored=frozenset({"full_attn_mod", "original_max_position_embeddings"}), eps=("rms_norm_eps", 1e-5),
        layers="all", fraction=("partial_rotary_factor", 1.0),
        names={"attention.qkv": "self_attn.qkv_proj"} | _GATE_UP,
    ),
    Class(
        "Glm4ForCausalLM", ("glm4",), (151552, 4096, 13696, 40, 32, 2, 131072), {"block": "sandwich"},
        eps=("rms_norm_eps", 1.5625e-7), head_dim=128, bias="qkv", has_bias=True,
        fraction=("partial_rotary_factor", 0.5), is_interleaved=True,
        names={"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"} | _GATE_UP,
    ),
    Class(
        "GPTNeoXForCausalLM", ("gpt_neox",), (50432, 6144, 24576, 44, 64, 0, 2048),
        {"norm": "layer", "gated": False, "mlp_bias": True}, activation=("hidden_act", "gelu"),
        ignored=frozenset({"num_key_value_heads"}), eps=("layer_norm_eps", 1e-5), head_dim=None, bias="all",
        has_bias=True, parallel="use_parallel_residual", theta=("rotary_emb_base", 10_000.0),
        fraction=("rotary_pct", 0.25),
        names={
            "embedding": "gpt_neox.embed_in", "layers": "gpt_neox.layers", "norm": "gpt_neox.final_layer_norm",
            "output": "embed_out", "attention.qkv": "attention.query_key_value", "attention.proj": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h",
        },
    ),
    Class(
        "NemotronForCausalLM", ("nemotron",), (256000, 6144, 24576, 32, 48, 0, 4096),
        {"norm": "layer", "norm_offset": True, "gated": False}, activation=("hidden_act", "relu2"), fields=_MLP_BIAS,
        eps=("norm_eps", 1e-5), init_std=0.0134, bias="all", fraction=("partial_rotary_factor", 0.5),
    ),
    Class(
        "Starcoder2ForCausalLM", ("starcoder2",), (49152, 3072, 12288, 30, 24, 2, 4096),
        {"norm": "layer", "gated": False, "attention_bias": "all", "mlp_bias": True}, must={"use_bias": (True,)},
        activation=("hidden_act", "gelu_pytorch_tanh"),
        eps=("norm_epsilon", 1e-5), init_std=0.018042, tied=True, head_dim=None, layers="all",
        names={"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    ),
    Class(
        "MixtralForCausalLM", ("mixtral",), (32000, 4096, 14336, 32, 32, 8, 131072),
        may={"router_jitter_noise": (0.0, 0)}, eps=("rms_norm_eps", 1e-5), layers="all", theta=("rope_theta", 1e6),
        experts=Experts("num_local_experts", "intermediate_size", ("w1", "w3", "w2"), defaults=(8, 14336, 2)),
        names={"mlp.router": "block_sparse_moe.gate", "mlp.experts": "block_sparse_moe.experts"},
    ),
    Class(
        "Qwen3MoeForCausalLM", ("qwen3_moe",), (151936, 2048, 6144, 24, 32, 4, 32768), _QK_HEAD, bias="all",
        ignored=frozenset({"max_window_layers", "sliding_window"}), may={"use_sliding_window": (False, None)},
        experts=Experts(
            "num_experts", "moe_intermediate_size", dense_layers="mlp_only_layers", defaults=(128, 768, 8),
            renormalize=False,
        ),
    ),
    Class(
        "OlmoeForCausalLM", ("olmoe",), (50304, 2048, 2048, 16, 16, 0, 4096), _QK_ALL, bias="all",
        may={"clip_qkv": (None,)}, eps=("rms_norm_eps", 1e-5), head_dim=None,
        experts=Experts("num_experts", "intermediate_size", defaults=(64, 2048, 8), renormalize=False, balance=0.01),
    ),
    Class(
        "GptOssForCausalLM", ("gpt_oss",), (201088, 2880, 2880, 36, 64, 8, 131072),
        {
            "attention_bias": "all", "attention_sinks": True, "activation": "clamped_swiglu", "router_bias": True,
            "expert_bias": True,
        },
        must={"attention_bias": (True,), "swiglu_limit": (7.0, 7), "swiglu_alpha": (1.702,)},
        activation=None, ignored=frozenset({"experts_per_token", "initial_context_length", "hidden_act"}),
        eps=("rms_norm_eps", 1e-5), head_dim=64,
        layers="types", window=128, period=2, theta=("rope_theta", 150_000.0),
        default_scaling={
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        experts=Experts("num_local_experts", "intermediate_size", is_joined=True, defaults=(128, 2880, 4)),
        names={"mlp.router": "mlp.router"},
    ),
    Class(
        "DeepseekV3ForCausalLM", ("deepseek_v3", "kimi_k2"), (129280, 7168, 18432, 61, 128, 128, 4096),
        {"router_score": "sigmoid", "balance": "bias", "bias_update_rate": 0.0},  # biases stay as they are
        must={  # of which DeepSeek's own code reads the first three, and transformers the last
            "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,),
            "rope_interleave": (True,),
        },
        fields=(
            ("kv_lora_rank", "kv_lora_rank", 512), ("nope_head_size", "qk_nope_head_dim", 128),
            ("rope_head_size", "qk_rope_head_dim", 64), ("value_head_size", "v_head_dim", 128),
            ("routed_scaling", "routed_scaling_factor", 2.5), ("router_groups", "n_group", 8),
            ("router_top_groups", "topk_group", 4),
        ),
        ignored=frozenset({"qk_head_dim", "num_mtp_layers"}), head_dim=None,
        bias="all", is_interleaved=True, has_latents=True,
        experts=Experts(
            "n_routed_experts", "moe_intermediate_size", has_groups=True, dense_layers="first_k_dense_replace",
            defaults=(256, 2048, 8), renormalize=True, balance=None,
        ),
    ),
)
# fmt: on
