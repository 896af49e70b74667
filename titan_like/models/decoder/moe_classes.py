"""Decoder classes of transformers with experts, a row for each; see `titan_like.models.decoder.classes`."""

from titan_like.models.decoder.class_row import (
    BIAS,
    GRANITE_SCALES,
    HEAD_SIZE,
    IN_LANGUAGE_MODEL,
    QK_ALL,
    QK_HEAD,
    Class,
)
from titan_like.models.decoder.expert_fields import (
    BY_INTERVAL,
    BY_LIST,
    BY_STEP,
    BY_TYPE,
    GROUP_LIMIT,
    MARGIN,
    auxiliary_loss,
    experts,
    of_each_layer,
    shared_width,
)
from titan_like.models.decoder.fields import TEMPERATURE, ChunkedLayers, Layers, bias, head_size, latent_kv_heads
from titan_like.models.decoder.rope import Rope
from titan_like.models.fields import Field, choice, count, fixed, nullable, renamed

SIGMOID = {"router_score": "sigmoid", "balance": "bias", "bias_update_rate": 0.0}  # biases stay as they are
_SCALING, _FRACTION = renamed("routed_scaling", "routed_scaling_factor", 1.0), ("partial_rotary_factor", 0.5)
_GROUPS = renamed("router_groups", "n_group", 1), renamed("router_top_groups", "topk_group", 1)
_RENORMALIZE, _NO_RENORMALIZE = (renamed("renormalize", "norm_topk_prob", default) for default in (True, False))
_INTERLEAVE = choice("stores_rope_in_halves", "rope_interleave", True, {True: False, False: True})
_MTP = count("mtp_layers", "num_nextn_predict_layers", 0)
_LATENTS = (
    renamed("kv_lora_rank", "kv_lora_rank", 512),
    renamed("rope_head_size", "qk_rope_head_dim", 64),
    head_size(None),
    latent_kv_heads(),
    BIAS,
)
_NO_LOSS = fixed("output_router_logits", False, is_written=False)
# fmt: off
MIXTRAL_NAMES = {
    "mlp.router": "block_sparse_moe.gate", "mlp.router.bias": "block_sparse_moe.e_score_correction_bias",
    "mlp.experts.gate": "block_sparse_moe.experts.{}.w1", "mlp.experts.up": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
}
_GRANITE_NAMES = {
    "mlp.router": "block_sparse_moe.router.layer", "mlp.experts.down": "block_sparse_moe.output_linear",
    "mlp.experts.gate": "block_sparse_moe.input_linear", "mlp.experts.up": "block_sparse_moe.input_linear",
}
_GRANITE = (
    *GRANITE_SCALES, HEAD_SIZE, BIAS, *experts("num_local_experts", 8, 2, "intermediate_size", 11008), auxiliary_loss(),
)
_NO_JITTER = fixed("router_jitter_noise", 0.0, 0, is_written=False)
MOE_CLASSES = (
    Class(
        "MixtralForCausalLM", ("mixtral",), (32000, 4096, 14336, 32, 32, 8, 131072),
        fields=(HEAD_SIZE, *experts("num_local_experts", 8, 2, "intermediate_size", 14336), auxiliary_loss()),
        fixed=(_NO_JITTER,), eps=("rms_norm_eps", 1e-5), layers=Layers("all", rope=Rope(("rope_theta", 1e6))),
        names=MIXTRAL_NAMES,
    ),
    Class(
        "Qwen3MoeForCausalLM", ("qwen3_moe",), (151936, 2048, 6144, 24, 32, 4, 32768), QK_HEAD,
        (
            HEAD_SIZE, BIAS, *experts("num_experts", 128, 8, "moe_intermediate_size", 768),
            auxiliary_loss(dense=BY_STEP), _NO_RENORMALIZE,
        ),
        layers=Layers("switched all", 4096), dense=BY_STEP, ignored=frozenset({"max_window_layers"}),
    ),
    Class(
        "Qwen2MoeForCausalLM", ("qwen2_moe",), (151936, 2048, 5632, 24, 16, 16, 32768), {"shared_expert_gate": True},
        (
            HEAD_SIZE, choice("attention_bias", "qkv_bias", True, {False: "none", True: "qkv"}),
            *experts("num_experts", 60, 4, "moe_intermediate_size", 1408),
            shared_width("shared_expert_intermediate_size", 5632), auxiliary_loss(dense=BY_STEP), _NO_RENORMALIZE,
        ),
        layers=Layers("alternating", 4096), dense=BY_STEP,
        names={f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    ),
    Class(
        "OlmoeForCausalLM", ("olmoe",), (50304, 2048, 2048, 16, 16, 0, 4096), QK_ALL,
        (
            head_size(None), BIAS, *experts("num_experts", 64, 8, "intermediate_size", 2048),
            auxiliary_loss(0.01), _NO_RENORMALIZE, nullable("clip_qkv", "clip_qkv", None),
        ),
        eps=("rms_norm_eps", 1e-5),
    ),
    Class(
        "FlexOlmoForCausalLM", ("flex_olmo",), (100352, 4096, 11008, 32, 32, 0, 4096), QK_ALL | {"block": "post"},
        (
            HEAD_SIZE, BIAS, *experts("num_experts", 7, 5, "intermediate_size", 11008), auxiliary_loss(0.01),
            _NO_RENORMALIZE,
        ),
        layers=Layers(rope=Rope(("rope_theta", 500_000.0))),
        names={"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"},
    ),
    Class(
        "GraniteMoeForCausalLM", ("granitemoe",), (32000, 4096, 11008, 32, 32, 0, 2048), fields=_GRANITE,
        names=_GRANITE_NAMES,
    ),
    Class(
        "GraniteMoeSharedForCausalLM", ("granitemoeshared",), (32000, 4096, 11008, 32, 32, 0, 2048),
        fields=(*_GRANITE, shared_width("shared_intermediate_size", 0)),
        names=_GRANITE_NAMES | {
            "mlp.shared.gate": "shared_mlp.input_linear", "mlp.shared.up": "shared_mlp.input_linear",
            "mlp.shared.down": "shared_mlp.output_linear",
        },
    ),
    Class(
        "PhimoeForCausalLM", ("phimoe",), (32064, 4096, 6400, 32, 32, 8, 131072),
        {"norm": "layer", "router_score": "sparsemixer", "renormalize": False},
        (HEAD_SIZE, BIAS, *experts("num_local_experts", 16, 2, "intermediate_size", 6400), auxiliary_loss(), MARGIN,
         renamed("output_bias", "lm_head_bias", False)),
        fixed=(fixed("num_experts_per_tok", 2),), eps=("rms_norm_eps", 1e-5),
        layers=Layers("all", rope=Rope(("rope_theta", 1e6), has_mscales=True)), names=MIXTRAL_NAMES,
    ),
    Class(
        "HunYuanMoEV1ForCausalLM", ("hunyuan_v1_moe",), (290943, 4096, 11008, 32, 32, 0, 2048),
        QK_HEAD | {"norm_after_rope": True, "num_shared_experts": 1, "balance": "none"},
        (
            HEAD_SIZE, BIAS, of_each_layer("num_experts", "num_experts", 1, "num_local_experts"),
            of_each_layer("experts_per_token", "moe_topk", 1, "num_experts_per_tok"),
            renamed("expert_ffn_hidden_size", "intermediate_size", 11008),
        ),
        eps=("rms_norm_eps", 1e-5), layers=Layers(rope=Rope(has_alpha=True)),
        names={
            "attention.q_norm": "self_attn.query_layernorm", "attention.k_norm": "self_attn.key_layernorm",
            "mlp.router": "mlp.gate.wg",
            **{f"mlp.shared.{part}": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
    ),
    Class(
        "MiniMaxM2ForCausalLM", ("minimax_m2",), (200064, 3072, 1536, 62, 48, 8, 196608), SIGMOID | QK_ALL,
        (head_size(128), *experts("num_local_experts", 256, 8, "intermediate_size", 1536)),
        fixed=(_NO_JITTER, _NO_LOSS), names=MIXTRAL_NAMES,
        layers=Layers(rope=Rope(("rope_theta", 5e6), fraction=(_FRACTION[0], 1.0), rotated=("rotary_dim", 128))),
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
        transposed_experts="in turn",
        names={
            "mlp.router": "mlp.router", "mlp.experts.gate": "mlp.experts.gate_up_proj",
            "mlp.experts.up": "mlp.experts.gate_up_proj", "mlp.experts.down": "mlp.experts.down_proj",
        },
    ),
    Class(
        "Llama4ForCausalLM", ("llama4_text", "llama4"), (202048, 5120, 16384, 48, 40, 8, 131072),
        {
            "router_score": "sigmoid", "renormalize": False, "balance": "none", "scale_expert_inputs": True,
            "num_shared_experts": 1,
        },
        (
            head_size(128), BIAS, renamed("ffn_hidden_size", "intermediate_size_mlp", 16384), TEMPERATURE,
            *experts("num_local_experts", 16, 1, "intermediate_size", 8192),
            choice("qk_norm", "use_qk_norm", True, {True: "l2", False: "none"}),
        ),
        eps=("rms_norm_eps", 1e-5), layers=ChunkedLayers(rope=Rope(("rope_theta", 500_000.0))), dense=BY_LIST,
        is_interleaved=True, transposed_experts="in halves", outer="Llama4ForConditionalGeneration",
        renamed=IN_LANGUAGE_MODEL,
        names={
            **{f"mlp.{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            **{f"mlp.shared.{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
            "mlp.router": "feed_forward.router", "mlp.experts.gate": "feed_forward.experts.gate_up_proj",
            "mlp.experts.up": "feed_forward.experts.gate_up_proj", "mlp.experts.down": "feed_forward.experts.down_proj",
        },
    ),
    Class(
        "DeepseekV3ForCausalLM", ("deepseek_v3", "kimi_k2"), (129280, 7168, 18432, 61, 128, None, 4096), SIGMOID,
        (
            *_LATENTS, nullable("q_lora_rank", "q_lora_rank", 1536), renamed("nope_head_size", "qk_nope_head_dim", 128),
            renamed("value_head_size", "v_head_dim", 128), renamed("routed_scaling", "routed_scaling_factor", 2.5),
            renamed("router_groups", "n_group", 8), renamed("router_top_groups", "topk_group", 4),
            *experts("n_routed_experts", 256, 8, "moe_intermediate_size", 2048), _RENORMALIZE, _MTP, _INTERLEAVE,
            count("num_dense_layers", "first_k_dense_replace", 3), count("num_shared_experts", "n_shared_experts", 1),
        ),
        fixed=(  # which DeepSeek's own code reads
            fixed("scoring_func", "sigmoid"), fixed("topk_method", "noaux_tc"), fixed("moe_layer_freq", 1),
        ),
        ignored=frozenset({"qk_head_dim", "num_mtp_layers"}), is_interleaved=True,
    ),
    Class(
        "Glm4MoeLiteForCausalLM", ("glm4_moe_lite",), (154880, 2048, 10240, 47, 20, None, 202752), SIGMOID,
        (
            *_LATENTS, nullable("q_lora_rank", "q_lora_rank", 768), renamed("nope_head_size", "qk_nope_head_dim", 192),
            renamed("value_head_size", "v_head_dim", 256), renamed("routed_scaling", "routed_scaling_factor", 1.8),
            *_GROUPS, *experts("n_routed_experts", 64, 4, "moe_intermediate_size", 1536), _RENORMALIZE, _MTP,
            _INTERLEAVE, count("num_shared_experts", "n_shared_experts", 1),
        ),
        eps=("rms_norm_eps", 1e-5), dense=BY_TYPE,
        ignored=frozenset({"qk_head_dim"}), is_interleaved=True,
    ),
    Class(
        "DeepseekV2ForCausalLM", ("deepseek_v2",), (102400, 4096, 11008, 32, 32, None, 2048),
        {"balance": "none", "renormalize": False},
        (
            GROUP_LIMIT, *_LATENTS, nullable("q_lora_rank", "q_lora_rank", 1536), _SCALING,
            renamed("nope_head_size", "qk_nope_head_dim", 128), renamed("value_head_size", "v_head_dim", 128),
            *experts("n_routed_experts", 64, int, "moe_intermediate_size", 1407),
            count("num_dense_layers", "first_k_dense_replace", 0), count("num_shared_experts", "n_shared_experts", 2),
        ),
        fixed=(  # of which transformers reads the last
            fixed("scoring_func", "softmax"), fixed("moe_layer_freq", 1), fixed("norm_topk_prob", False),
            fixed("mlp_bias", False),
        ),
        ignored=frozenset({"qk_head_dim"}), is_interleaved=True,
    ),
    Class(
        "Dots1ForCausalLM", ("dots1",), (152064, 4608, 10944, 62, 32, 32, 2048), QK_HEAD | SIGMOID,
        (
            HEAD_SIZE, BIAS, *_GROUPS, _SCALING, *experts("n_routed_experts", int, int, "moe_intermediate_size", 1408),
            _NO_RENORMALIZE, count("num_dense_layers", "first_k_dense_replace", 0),
            renamed("num_shared_experts", "n_shared_experts", int),
        ),
        layers=Layers("last", 4096, first=62),
    ),
    Class(
        "Glm4MoeForCausalLM", ("glm4_moe",), (151552, 4096, 10944, 46, 96, 8, 131072), SIGMOID,
        (
            HEAD_SIZE, bias("qkv"), choice("qk_norm", "use_qk_norm", False, {False: "none", True: "head"}), *_GROUPS,
            _SCALING, *experts("n_routed_experts", 128, 8, "moe_intermediate_size", 1408), _RENORMALIZE, _MTP,
            count("num_dense_layers", "first_k_dense_replace", 1), count("num_shared_experts", "n_shared_experts", 1),
        ),
        eps=("rms_norm_eps", 1e-5), layers=Layers(rope=Rope(fraction=_FRACTION)),
        ignored=frozenset({"num_mtp_layers"}),
    ),
    Class(
        "Ernie4_5_MoeForCausalLM", ("ernie4_5_moe",), (103424, 2560, 12288, 28, 20, 4, 131072),
        {"balance": "bias", "bias_update_rate": 0.0},
        (
            HEAD_SIZE, *experts("moe_num_experts", 64, 6, "moe_intermediate_size", 1536, "moe_k"),
            count("num_shared_experts", "moe_num_shared_experts", 2),
        ),
        fixed=(
            fixed("use_bias", False), fixed("moe_norm_min", 1e-12),
            _NO_LOSS,
        ),
        eps=("rms_norm_eps", 1e-5), tied=True, layers=Layers(rope=Rope(("rope_theta", 500_000.0))), dense=BY_INTERVAL,
        is_interleaved=True, has_stacked_bias=True, others=("model.mtp_",),
        names={"mlp.router.bias": "mlp.moe_statics.e_score_correction_bias"},
    ),
)
# fmt: on
