"""Small config.json of each class of transformers that the decoder reads, with values that are no default."""

VOCAB, SEQ, WINDOW = 101, 40, 9

SMALL = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None}
SMALL_SHAPE = {"num_layers": 4, "hidden_size": 48, "num_attention_heads": 4, "vocab_size": VOCAB, "max_seq_len": 64}
WIDE = SMALL | {"head_dim": 20}  # heads that are together wider than the hidden states
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 24}
TEMPERATURE = {"llama_4_scaling_beta": 0.6, "max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 300.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 700.0, "factor": 3.0}
NEAR = LINEAR | {"rope_theta": 90.0, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 900.0, "short_factor": [1.0, 1.5, 2.0, 2.5], "factor": 4.0}
LONG |= {"long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 16}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 300.0, "factor": 3.0}
LONG_PHI = LONG | {"short_factor": [*LONG["short_factor"], 3.0, 4.0], "original_max_position_embeddings": 50}
LONG_PHI |= {"long_factor": [1.0] * 6}
EVEN = LONG_PHI | {"long_factor": LONG_PHI["short_factor"], "original_max_position_embeddings": 16}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 6}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 2}
LATENT |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "head_dim": 8}
ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 24}
ROUTED |= {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1}
QWEN_MOE = EXPERTS | {"moe_intermediate_size": 24, "sliding_window": WINDOW, "use_sliding_window": True}
# What has no default in the class, or one that cannot be computed.
NEEDED = {"dots1": {"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2}}
NEEDED |= {
    "granitemoehybrid": {"mamba_n_heads": 32},
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "attention"]},
}
NEEDED |= {"hunyuan_v1_moe": {"num_experts": 5, "moe_topk": 2}}
NEEDED |= {"deepseek_v2": {"num_experts_per_tok": 2}, "glm4_moe": {"head_dim": 128}}
KINDS = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding")]
BY_KIND = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 60.0}}
ALPHA = {"rope_type": "dynamic", "rope_theta": 70.0, "alpha": 5.0, "factor": 1.0}
NEOX = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
CHUNKED = {"attention_chunk_size": WINDOW, "attn_scale": 0.7, "bos_token_id": None, "eos_token_id": None}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10}
DELTA |= {"linear_value_head_dim": 14, "linear_conv_kernel_dim": 3}
KIMI = {"linear_num_heads": 6, "linear_head_dim": 10, "linear_conv_kernel_dim": 3, "num_experts": 6, "kv_lora_rank": 16}
KIMI |= {"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "moe_intermediate_size": 24}
KIMI |= {"num_experts_per_token": 2, "routed_scaling_factor": 1.7}
MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 10, "mamba_d_conv": 3}
GRANITE = MAMBA | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3}
GRANITE |= {"logits_scaling": 7.0, "layer_types": ["mamba", "attention", "mamba", "mamba"]}
NEMOTRON = {"mamba_num_heads": 6, "mamba_head_dim": 14, "n_groups": 3, "ssm_state_size": 10, "conv_kernel": 3}
NEMOTRON |= {"layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba"], "layer_norm_epsilon": 1e-4}
CASES = {
    "llama": ("llama", WIDE | {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "mistral": ("mistral", WIDE | {"sliding_window": WINDOW, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "mistral, no window": ("mistral", SMALL | {"sliding_window": None, "rope_parameters": YARN}),
    "ministral": ("ministral", WIDE | {"sliding_window": WINDOW}),
    "ministral3": ("ministral3", WIDE | {"sliding_window": WINDOW, "rope_parameters": YARN | TEMPERATURE}),
    "ministral3, no scaling": (
        "ministral3", SMALL | {"rope_parameters": TEMPERATURE | {"original_max_position_embeddings": 7}}
    ),
    "qwen2": ("qwen2", SMALL | {"tie_word_embeddings": True, "rope_parameters": LINEAR}),
    "qwen2, windows": ("qwen2", SMALL | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", WIDE | {"attention_bias": True}),
    "olmo2": ("olmo2", SMALL | {"num_key_value_heads": 4, "rms_norm_eps": 1e-4}),
    "olmo2, grouped": ("olmo2", SMALL | {"rope_parameters": YARN, "attention_bias": True}),
    "olmo3": ("olmo3", SMALL | {"layer_types": KINDS, "sliding_window": WINDOW, "rope_parameters": BY_KIND}),
    "exaone4": ("exaone4", WIDE | {"layer_types": KINDS, "sliding_window": WINDOW, "sliding_window_pattern": "LLLG"}),
    "exaone4, no window": ("exaone4", SMALL | {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "smollm3": ("smollm3", SMALL | {"no_rope_layers": [1, 0, 1, 1], "mlp_bias": True}),
    "granite": (
        "granite",
        SMALL
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 7.0}
        | {"tie_word_embeddings": True},
    ),
    "hyperclovax": (
        "hyperclovax",
        SMALL
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3, "logits_scaling": 0.7},
    ),
    "gemma": ("gemma", WIDE | {"num_key_value_heads": 1, "hidden_act": "gelu", "rope_parameters": LINEAR}),
    "gemma2": ("gemma2", WIDE | {"sliding_window": WINDOW, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 2.0}),
    "vaultgemma": (
        "vaultgemma", WIDE | {"sliding_window": WINDOW, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 10}
    ),
    "gemma3_text": (
        "gemma3_text",
        WIDE
        | {"sliding_window": WINDOW, "num_hidden_layers": 5, "final_logit_softcapping": 3.0, "num_key_value_heads": 1}
        | {"layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")]}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default"}}},
    ),
    "phi3": ("phi3", SMALL | {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "phi3, long": (
        "phi3",
        SMALL | {"rope_parameters": LONG | {"partial_rotary_factor": 0.7}, "original_max_position_embeddings": 16},
    ),
    "glm": ("glm", WIDE | {"rope_parameters": YARN | {"partial_rotary_factor": 0.3}, "attention_bias": False}),
    "glm4": ("glm4", WIDE | {"num_key_value_heads": 1}),
    "gpt_neox": ("gpt_neox", NEOX | {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}}),
    "gpt_neox, not parallel": (
        "gpt_neox", NEOX | {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 0.5}
    ),
    "nemotron": ("nemotron", WIDE | {"attention_bias": True, "mlp_bias": True}),
    "starcoder2": ("starcoder2", SMALL | {"sliding_window": WINDOW, "num_key_value_heads": 1}),
    "starcoder2, no biases": ("starcoder2", SMALL | {"use_bias": False, "tie_word_embeddings": False}),
    "arcee": ("arcee", WIDE | {"mlp_bias": True, "attention_bias": True, "rope_parameters": LLAMA3}),
    "ernie4_5": ("ernie4_5", WIDE | {"use_bias": True, "num_key_value_heads": 1, "rope_parameters": YARN}),
    "seed_oss": ("seed_oss", WIDE | {"attention_out_bias": True, "mlp_bias": True, "rope_parameters": LINEAR}),
    "cwm": ("cwm", WIDE | {"sliding_window": WINDOW, "num_hidden_layers": 5, "mlp_bias": True}),
    "cohere": ("cohere", WIDE | {"logit_scale": 0.7, "attention_bias": True, "rope_parameters": YARN}),
    "cohere2": ("cohere2", SMALL | {"sliding_window": WINDOW, "layer_types": KINDS, "attention_bias": True}),
    "stablelm": (
        "stablelm", SMALL | {"use_qkv_bias": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5}
    ),
    "stablelm, not parallel": ("stablelm", SMALL | {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.7}}),
    "phi": ("phi", SMALL | {"qk_layernorm": True, "rope_parameters": LINEAR | {"partial_rotary_factor": 0.35}}),
    "phi, tied": ("phi", WIDE | {"tie_word_embeddings": True}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", WIDE | {"attention_bias": True, "rope_parameters": ALPHA}),
    "hunyuan_v1_dense, yarn": ("hunyuan_v1_dense", WIDE | {"rope_parameters": YARN}),
    "olmo": ("olmo", SMALL | {"attention_bias": True, "rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "helium": ("helium", SMALL | {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "mixtral": ("mixtral", WIDE | {"num_local_experts": 5, "sliding_window": WINDOW}),
    "qwen3_moe": (
        "qwen3_moe", WIDE | EXPERTS | {"moe_intermediate_size": 24, "mlp_only_layers": [0], "attention_bias": True}
    ),
    "olmoe": ("olmoe", SMALL | EXPERTS | {"rope_parameters": YARN}),
    "gpt_oss": ("gpt_oss", WIDE | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "deepseek_v3": ("deepseek_v3", SMALL | LATENT | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.8}}),
    "deepseek_v3, one latent": (
        "deepseek_v3",
        SMALL | LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "attention_bias": True},
    ),
    "deepseek_v3, not interleaved": ("deepseek_v3", SMALL | LATENT | {"rope_interleave": False}),
    "dots1": (
        "dots1",
        WIDE | ROUTED | {"sliding_window": WINDOW, "max_window_layers": 2, "norm_topk_prob": True}
        | {"attention_bias": True},
    ),
    "glm4_moe": ("glm4_moe", WIDE | ROUTED | {"use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False}),
    "glm4_moe, no norms": ("glm4_moe", SMALL | ROUTED | {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.34}}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        WIDE
        | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 4, "moe_layer_interval": 2, "num_hidden_layers": 5},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        SMALL | LATENT | ROUTED | {"topk_method": "group_limited_greedy"}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.8}},
    ),
    "deepseek_v2, greedy": ("deepseek_v2", SMALL | LATENT | {"q_lora_rank": None, "attention_bias": True}),
    "deepseek_v2, one group": (
        "deepseek_v2", SMALL | LATENT | {"topk_method": "group_limited_greedy", "n_group": 1, "topk_group": 1}
    ),
    "qwen2_moe": (
        "qwen2_moe",
        WIDE | QWEN_MOE | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [2], "max_window_layers": 2}
        | {"norm_topk_prob": True},
    ),
    "qwen2_moe, no biases": (
        "qwen2_moe",
        SMALL | EXPERTS
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20, "decoder_sparse_step": 2}
        | {"qkv_bias": False},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        SMALL | LATENT | ROUTED | {"rope_interleave": False, "v_head_dim": 20}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.8}},
    ),
    "minimax_m2": ("minimax_m2", WIDE | {"num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 8}),
    "flex_olmo": ("flex_olmo", WIDE | EXPERTS | {"norm_topk_prob": True, "attention_bias": True}),
    "phimoe": (
        "phimoe",
        WIDE | {"num_local_experts": 6, "attention_bias": True, "router_jitter_noise": 0.6, "sliding_window": WINDOW}
        | {"lm_head_bias": True},
    ),
    "hunyuan_v1_moe": (
        "hunyuan_v1_moe",
        WIDE | {"num_experts": 5, "moe_topk": [2] * 4, "attention_bias": True, "rope_parameters": ALPHA},
    ),
    "granitemoeshared": (
        "granitemoeshared",
        SMALL | {"num_local_experts": 5, "shared_intermediate_size": 40, "attention_multiplier": 0.2}
        | {"tie_word_embeddings": True},
    ),
    "granitemoe": (
        "granitemoe",
        WIDE | {"num_local_experts": 5, "num_experts_per_tok": 3, "embedding_multiplier": 3.0, "logits_scaling": 7.0}
        | {"residual_multiplier": 0.4, "attention_multiplier": 0.3, "attention_bias": True},
    ),
    "qwen3_moe, windows": ("qwen3_moe", WIDE | QWEN_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "apertus": ("apertus", WIDE | {"attention_bias": True, "rope_parameters": YARN}),
    "apertus, default scaling": ("apertus", SMALL | {"tie_word_embeddings": True}),
    "cohere, qk norm": ("cohere", WIDE | {"use_qk_norm": True, "num_key_value_heads": 1}),
    "stablelm, qk norm": ("stablelm", SMALL | {"qk_layernorm": True, "partial_rotary_factor": 0.5}),
    "olmo, clipped": ("olmo", SMALL | {"clip_qkv": 0.3, "attention_bias": True}),
    "olmoe, clipped": ("olmoe", SMALL | EXPERTS | {"clip_qkv": 0.3}),
    "llama, dynamic": ("llama", SMALL | {"rope_parameters": DYNAMIC}),
    "phimoe, long": (
        "phimoe",
        SMALL | {"num_local_experts": 5, "router_jitter_noise": 0.6}
        | {"rope_parameters": EVEN | {"short_mscale": 0.8, "long_mscale": 1.7}},
    ),
    "phimoe, short": (
        "phimoe",
        SMALL | {"num_local_experts": 5, "router_jitter_noise": 0.6}
        | {"rope_parameters": LONG_PHI | {"short_mscale": 0.8, "long_mscale": 1.7}},
    ),
    "deepseek_v3, wide values": ("deepseek_v3", SMALL | LATENT | {"v_head_dim": 26}),
    "llama4_text": (
        "llama4_text",
        WIDE | CHUNKED
        | {"num_local_experts": 5, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 40, "floor_scale": 3}
        | {"num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 1, 0], "rope_parameters": LLAMA3},
    ),
    "llama4_text, no norm": (
        "llama4_text",
        WIDE | CHUNKED
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "use_qk_norm": False, "attention_bias": True}
        | {"layer_types": [f"{kind}_attention" for kind in ("chunked", "full", "full", "chunked")]}
        | {"no_rope_layers": [1, 0, 1, 0], "attn_temperature_tuning": False, "tie_word_embeddings": True},
    ),
    "qwen3_next": (
        "qwen3_next",
        WIDE | EXPERTS | DELTA | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 48}
        | {"attention_bias": True, "num_key_value_heads": 1, "mlp_only_layers": [2], "head_dim": 24}
        | {"layer_types": [f"{kind}_attention" for kind in ("linear", "full", "linear", "linear")]}
        | {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}},
    ),
    "qwen3_5_text": (
        "qwen3_5_text",
        WIDE | DELTA | {"attention_bias": True, "layer_types": ["full_attention", *["linear_attention"] * 3]}
        | {"tie_word_embeddings": True, "rope_parameters": LINEAR | {"partial_rotary_factor": 0.5}, "head_dim": 24},
    ),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        WIDE | EXPERTS | DELTA | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 36, "head_dim": 24},
    ),
    "kimi_linear": (
        "kimi_linear",
        SMALL | KIMI | {"num_key_value_heads": 4, "num_shared_experts": 2, "moe_renormalize": False}
        | {"layer_types": [f"{kind}_attention" for kind in ("linear", "full", "linear", "linear")]},
    ),
    "kimi_linear, latents": (
        "kimi_linear",
        SMALL | KIMI | {"num_key_value_heads": 4, "q_lora_rank": 20, "mlp_layer_types": ["sparse", "dense"] * 2}
        | {"num_expert_group": 3, "topk_group": 2, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        SMALL | GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 40}
        | {"mamba_n_groups": 1, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "granitemoehybrid, dense": (
        "granitemoehybrid",
        SMALL | GRANITE | {"num_local_experts": 0, "shared_intermediate_size": 40, "mamba_n_groups": 2}
        | {"mamba_proj_bias": True, "mamba_conv_bias": False, "position_embedding_type": "rope"},
    ),
    "nemotron_h": ("nemotron_h", WIDE | NEMOTRON | {"mlp_bias": True, "time_step_min": 0.6}),
    "nemotron_h, biases": ("nemotron_h", SMALL | NEMOTRON | {"use_bias": True, "use_conv_bias": False, "n_groups": 1}),
}  # fmt: skip
