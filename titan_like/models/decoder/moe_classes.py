"""Decoder classes of transformers with experts, a row for each; see `titan_like.models.decoder.classes`."""

from titan_like.models.decoder.class_row import BIAS, HEAD_SIZE, QK_ALL, QK_HEAD, Class
from titan_like.models.decoder.fields import (
    DENSE_LAYERS,
    Layers,
    auxiliary_loss,
    experts,
    head_size,
    latent_kv_heads,
)
from titan_like.models.decoder.rope import Rope
from titan_like.models.fields import Field, count, fixed, nullable, renamed

# fmt: off
MOE_CLASSES = (
    Class(
        "MixtralForCausalLM", ("mixtral",), (32000, 4096, 14336, 32, 32, 8, 131072),
        fields=(HEAD_SIZE, *experts("num_local_experts", 8, 2, "intermediate_size", 14336), auxiliary_loss()),
        fixed=(fixed("router_jitter_noise", 0.0, 0, is_written=False),), eps=("rms_norm_eps", 1e-5),
        layers=Layers("all", rope=Rope(("rope_theta", 1e6))),
        names={
            "mlp.router": "block_sparse_moe.gate", "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
            "mlp.experts.up": "block_sparse_moe.experts.{}.w3", "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
        },
    ),
    Class(
        "Qwen3MoeForCausalLM", ("qwen3_moe",), (151936, 2048, 6144, 24, 32, 4, 32768), QK_HEAD,
        (
            HEAD_SIZE, BIAS, *experts("num_experts", 128, 8, "moe_intermediate_size", 768),
            auxiliary_loss(dense_layers=DENSE_LAYERS), renamed("renormalize", "norm_topk_prob", False), DENSE_LAYERS,
        ),
        fixed=(fixed("use_sliding_window", False, None, is_written=False),),
        ignored=frozenset({"max_window_layers", "sliding_window"}),
    ),
    Class(
        "OlmoeForCausalLM", ("olmoe",), (50304, 2048, 2048, 16, 16, 0, 4096), QK_ALL,
        (
            head_size(None), BIAS, *experts("num_experts", 64, 8, "intermediate_size", 2048),
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
            head_size(None), latent_kv_heads(), BIAS, nullable("q_lora_rank", "q_lora_rank", 1536),
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
