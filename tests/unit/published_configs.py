"""config.json of published models, from knowledge of the field, unusual fields included; what never varies left out."""

from typing import Any

Table = dict[str, Any]


def sizes(
    hidden: int, ffn: int, layers: int, heads: int, kv: int | None, vocab: int, length: int, **more: Any
) -> Table:
    table: Table = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
    table |= {"num_attention_heads": heads, "vocab_size": vocab, "max_position_embeddings": length}
    table |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "use_cache": True}
    table |= {"initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    return table | ({} if kv is None else {"num_key_value_heads": kv}) | more


def of(model_type: str, architecture: str, table: Table, **more: Any) -> Table:
    return {"architectures": [architecture], "model_type": model_type, **table, **more}


def llama(*args: Any, **more: Any) -> Table:
    return of("llama", "LlamaForCausalLM", sizes(*args, **more))


def mistral(*args: Any, **more: Any) -> Table:
    return of("mistral", "MistralForCausalLM", sizes(*args, **more))


def qwen(kind: str, *args: Any, **more: Any) -> Table:
    usual = {"attention_dropout": 0.0, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False}
    usual |= {"sliding_window": 131072, "max_window_layers": 28}
    return of(kind, f"{kind.title()}ForCausalLM", sizes(*args, **(usual | more)))


def neox(hidden: int, ffn: int, layers: int, heads: int, vocab: int, **more: Any) -> Table:
    usual: Table = {"rotary_pct": 0.25, "rotary_emb_base": 10000, "layer_norm_eps": 1e-5, "hidden_act": "gelu"}
    usual |= {"use_parallel_residual": True, "torch_dtype": "float16", "classifier_dropout": 0.1}
    table = sizes(hidden, ffn, layers, heads, None, vocab, 2048) | usual | more
    del table["rms_norm_eps"]
    return of("gpt_neox", "GPTNeoXForCausalLM", table)


def deepseek(model_type: str, architecture: str, *args: Any, **more: Any) -> Table:
    latent = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    latent |= {"v_head_dim": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8}
    latent |= {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "moe_intermediate_size": 2048}
    usual = {"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "moe_layer_freq": 1, "norm_topk_prob": True}
    usual |= {"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "pretraining_tp": 1}
    usual |= {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "auto_map": {"AutoConfig": "a.B"},
    }
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    usual |= {"rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}}
    return of(model_type, architecture, sizes(*args) | latent | usual | more)


def gemma(kind: str, *args: Any, **more: Any) -> Table:
    usual: Table = {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 256, "rms_norm_eps": 1e-6, "pad_token_id": 0}
    usual |= {"query_pre_attn_scalar": 256, "attention_bias": False, "attention_dropout": 0.0}
    table = sizes(*args) | usual | more
    del table["tie_word_embeddings"], table["hidden_act"]
    return of(kind, f"{kind.removesuffix('_text').title()}ForCausalLM", table)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 |= {"rope_type": "llama3"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
STARCODER2 = {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "activation_function": "gelu", "use_bias": True}
STARCODER2 |= {"residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1, "mlp_type": "default"}
STARCODER2 |= {"attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True, "scale_attn_weights": True}
STARCODER2 |= {"norm_type": "layer_norm", "layer_norm_epsilon": 1e-5, "sliding_window": 4096, "rope_theta": 1e6}
GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257}
GPT2 |= {"activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}
GPT2 |= {"summary_type": "cls_index", "summary_use_proj": True, "layer_norm_epsilon": 1e-5}
QWEN1M = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 16.0, "rope_theta": 1e7}
GRANITE |= {"attention_multiplier": 0.0078125, "attention_dropout": 0.1, "attention_bias": False, "mlp_bias": False}
GEMMA4B = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
GEMMA4B |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}

QWEN_MOE: Table = {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60}
QWEN_MOE |= {"num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 1, "rope_theta": 1e6}
QWEN_MOE |= {"output_router_logits": False, "router_aux_loss_coef": 0.001, "use_sliding_window": False}
QWEN_MOE |= {"sliding_window": 32768, "max_window_layers": 21, "qkv_bias": True, "rms_norm_eps": 1e-6}
YARN8 = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0}
YARN8 |= {"beta_slow": 1.0, "attention_factor": 1.2079441541679836}
ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
SLIDING = ["sliding_attention"] * 3 + ["full_attention"]
LAYER_NORM = {"rms_norm_eps": None, "layer_norm_eps": 1e-5}
R7B = {"head_dim": 128, "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj"}
R7B |= {"use_parallel_block": True, "sliding_window_pattern": 4, "layer_switch": 4, "cache_implementation": "hybrid"}

# (config.json, the names of the fields whose values the line about ignored fields has)
READ: dict[str, tuple[Table, str]] = {
    "LLaMA-1 7B": (llama(4096, 11008, 32, 32, None, 32000, 2048, max_sequence_length=2048), "max_sequence_length"),
    "Llama 3.2 1B": (
        llama(2048, 8192, 16, 32, 8, 128256, 131072, rope_scaling=LLAMA3 | {"factor": 32.0}, head_dim=64,
              tie_word_embeddings=True), "",
    ),
    "SmolLM2 135M": (
        llama(576, 1536, 30, 9, 3, 49152, 8192, rope_theta=100000, is_llama_config=True, rope_interleaved=False,
              tie_word_embeddings=True, **{"transformers.js_config": {"dtype": "q4"}}), "",
    ),
    "Mistral 7B v0.1": (mistral(4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096, rope_theta=10000.0), ""),
    "Yarn-Mistral 7B": (
        mistral(4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=131072, max_sequence_length=131072,
                rope_scaling={"factor": 16.0, "finetuned": True, "original_max_position_embeddings": 8192,
                "type": "yarn"},
                use_flash_attention=True, auto_map={"AutoConfig": "configuration_mistral.MistralConfig"}),
        "max_sequence_length use_flash_attention rope_scaling.finetuned",
    ),
    "Qwen2.5 7B 1M": (
        qwen("qwen2", 3584, 18944, 28, 28, 4, 152064, 1010000, dual_chunk_attention_config=QWEN1M, rope_theta=1e7),
        "dual_chunk_attention_config",
    ),
    "DeepSeek-R1-0528-Qwen3 8B": (
        qwen("qwen3", 4096, 12288, 36, 32, 8, 151936, 131072, head_dim=128, attention_bias=False, sliding_window=None,
             rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
                           "attn_factor": 0.8782488562869419}),
        "rope_scaling.attn_factor",
    ),
    "Qwen3 30B A3B": (
        of("qwen3_moe", "Qwen3MoeForCausalLM", sizes(2048, 6144, 48, 32, 4, 151936, 40960), head_dim=128,
            num_experts=128,
           num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, decoder_sparse_step=1,
           mlp_only_layers=[], router_aux_loss_coef=0.001, output_router_logits=False, attention_bias=False,
           use_sliding_window=False, sliding_window=None, max_window_layers=48, use_qk_norm=True, qkv_bias=False),
        "use_qk_norm",
    ),
    "Qwen3-Next 80B A3B": (
        of("qwen3_next", "Qwen3NextForCausalLM", sizes(2048, 5120, 48, 16, 2, 151936, 262144), head_dim=256,
           num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
           norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], router_aux_loss_coef=0.001,
           output_router_logits=False, attention_bias=False, use_sliding_window=False, full_attention_interval=4,
           linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
           linear_num_value_heads=32, partial_rotary_factor=0.25, rope_scaling=None, rope_theta=10_000_000),
        "",
    ),
    "Gemma 2 2B": (
        gemma("gemma2", 2304, 9216, 26, 8, 4, 256000, 8192, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
              sliding_window=4096, cache_implementation="hybrid", hidden_act="gelu_pytorch_tanh"), "",
    ),
    "Gemma 3 270M": (
        gemma("gemma3_text", 640, 2048, 18, 4, 1, 262144, 32768, sliding_window=512, _sliding_window_pattern=6,
              rope_local_base_freq=10000.0, rope_theta=1e6, attn_logit_softcapping=None,
              use_bidirectional_attention=False,
              layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3), "",
    ),
    "Gemma 3 4B": (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": GEMMA4B,
         "boi_token_index": 255999, "image_token_index": 262144, "mm_tokens_per_image": 256, "eos_token_id": [1, 106],
         "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"}}, "",
    ),
    "Mistral Small 3.1 24B": (
        {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
         "text_config": sizes(5120, 32768, 40, 32, 8, 131072, 131072, model_type="mistral", head_dim=128,
                              rope_theta=1e9, sliding_window=None), "vision_feature_layer": -1,
         "vision_config": {"hidden_size": 1024, "model_type": "pixtral"}}, "",
    ),
    "Phi-4 mini": (
        of("phi3", "Phi3ForCausalLM", sizes(3072, 8192, 32, 24, 8, 200064, 131072), partial_rotary_factor=0.75,
           rope_scaling=LONG, original_max_position_embeddings=4096, full_attn_mod=1, interpolate_factor=1,
           lm_head_bias=False, mlp_bias=False, sliding_window=262144), "interpolate_factor",
    ),
    "OLMo 2 7B": (
        of("olmo2", "Olmo2ForCausalLM", sizes(4096, 11008, 32, 32, 32, 100352, 4096), rope_theta=500000, clip_qkv=None,
           attention_bias=False), "",
    ),
    "OLMoE 1B 7B": (
        of("olmoe", "OlmoeForCausalLM", sizes(2048, 1024, 16, 16, 16, 50304, 4096), num_experts=64,
            num_experts_per_tok=8,
           norm_topk_prob=False, router_aux_loss_coef=0.01, clip_qkv=None, attention_bias=False), "",
    ),
    "GPT-OSS 20B": (
        of("gpt_oss", "GptOssForCausalLM", sizes(2880, 2880, 24, 64, 8, 201088, 131072), head_dim=64,
            sliding_window=128,
           num_local_experts=32, num_experts_per_tok=4, experts_per_token=4, initial_context_length=4096,
           attention_bias=True, swiglu_limit=7.0, router_aux_loss_coef=0.9, quantization_config=MXFP4,
           rope_theta=150000,
           layer_types=["sliding_attention", "full_attention"] * 12,
           rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096}), "",
    ),
    "Kimi-K2": (
        deepseek("kimi_k2", "DeepseekV3ForCausalLM", 7168, 18432, 61, 64, 64, 163840, 131072, n_routed_experts=384,
                 n_group=1, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.827, rope_theta=50000.0,
                 quantization_config=FP8), "",
    ),
    "Qwen1.5 MoE A2.7B": (
        of("qwen2_moe", "Qwen2MoeForCausalLM", sizes(2048, 5632, 24, 16, 16, 151936, 8192) | QWEN_MOE), "",
    ),
    "Qwen2 57B-A14B": (
        of("qwen2_moe", "Qwen2MoeForCausalLM", sizes(3584, 18944, 28, 28, 4, 151936, 131072) | QWEN_MOE,
           moe_intermediate_size=2560, shared_expert_intermediate_size=20480, num_experts=64, num_experts_per_tok=8),
        "",
    ),
    "DeepSeek-V2-Lite": (
        deepseek("deepseek_v2", "DeepseekV2ForCausalLM", 2048, 10944, 27, 16, 16, 102400, 163840, q_lora_rank=None,
                 n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
                 first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy", scoring_func="softmax",
                 norm_topk_prob=False, routed_scaling_factor=1.0), "n_group topk_group",
    ),
    "DeepSeek-V2": (
        deepseek("deepseek_v2", "DeepseekV2ForCausalLM", 5120, 12288, 60, 128, 128, 102400, 163840, topk_group=3,
                 n_routed_experts=160, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1536,
                 first_k_dense_replace=1, topk_method="group_limited_greedy", scoring_func="softmax",
                 norm_topk_prob=False, routed_scaling_factor=16.0), "",
    ),
    "dots.llm1": (
        of("dots1", "Dots1ForCausalLM", sizes(4096, 10944, 62, 32, 32, 152064, 32768), n_routed_experts=128,
           num_experts_per_tok=6, n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1,
           topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, scoring_func="noaux_tc", rope_theta=1e7,
           sliding_window=None, max_window_layers=62), "scoring_func",
    ),
    "GLM-4.5-Air": (
        of("glm4_moe", "Glm4MoeForCausalLM", sizes(4096, 10944, 46, 96, 8, 151552, 131072), head_dim=128,
           attention_bias=True, partial_rotary_factor=0.5, use_qk_norm=False, n_routed_experts=128, n_shared_experts=1,
           num_experts_per_tok=8, moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1, topk_group=1,
           norm_topk_prob=True, routed_scaling_factor=1.0, rope_theta=1e6, rope_scaling=None), "",
    ),
    "GLM-4.7-Flash": (
        deepseek("glm4_moe_lite", "Glm4MoeLiteForCausalLM", 2048, 10240, 47, 20, 20, 154880, 202752, q_lora_rank=768,
                 qk_nope_head_dim=192, v_head_dim=256, n_routed_experts=64, num_experts_per_tok=4,
                 moe_intermediate_size=1536, first_k_dense_replace=1, n_group=1, topk_group=1,
                 routed_scaling_factor=1.8, rope_theta=1e6, rope_scaling=None),
        "first_k_dense_replace moe_layer_freq scoring_func topk_method",
    ),
    "MiniMax-M2": (
        of("minimax_m2", "MiniMaxM2ForCausalLM", sizes(3072, 1536, 62, 48, 8, 200064, 196608), head_dim=128,
           rms_norm_eps=1e-6, rotary_dim=64, rope_theta=5e6, num_local_experts=256, num_experts_per_tok=8,
           scoring_func="sigmoid", use_qk_norm=True, use_routing_bias=True, use_mtp=True, num_mtp_modules=3,
           shared_intermediate_size=0, output_router_logits=False, router_aux_loss_coef=0.001, quantization_config=FP8),
        "num_mtp_modules router_aux_loss_coef scoring_func shared_intermediate_size use_mtp use_qk_norm"
        " use_routing_bias",
    ),
    "Granite 3.0 3B-A800M": (
        of("granitemoe", "GraniteMoeForCausalLM", sizes(1536, 512, 32, 24, 8, 49155, 4096), num_local_experts=40,
           num_experts_per_tok=8, embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22,
           attention_multiplier=0.015625, router_aux_loss_coef=0.0, output_router_logits=False,
           attention_dropout=0.0, attention_bias=False, rms_norm_eps=1e-6, tie_word_embeddings=True), "",
    ),
    "Hunyuan A13B": (
        of("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", sizes(4096, 3072, 32, 32, 8, 128167, 32768), head_dim=128,
           attention_head_dim=128, num_experts=64, moe_topk=[8] * 32, num_shared_expert=[1] * 32, use_qk_norm=True,
           moe_intermediate_size=[3072] * 32, tie_word_embeddings=True, eod_token_id=127967,
           rope_scaling={"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}),
        "attention_head_dim moe_intermediate_size num_shared_expert use_qk_norm",
    ),
    "FlexOlmo 7x7B": (
        of("flex_olmo", "FlexOlmoForCausalLM", sizes(4096, 11008, 32, 32, 32, 100352, 4096), num_experts=7,
           num_experts_per_tok=5, norm_topk_prob=False, rms_norm_eps=1e-6, rope_theta=500000.0,
           router_aux_loss_coef=0.01), "",
    ),
    "ERNIE 4.5 21B-A3B": (
        of("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", sizes(2560, 12288, 28, 20, 4, 103424, 131072), use_bias=False,
           moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, moe_num_shared_experts=2, moe_layer_start_index=1,
           moe_layer_interval=1, moe_gate="topk", moe_use_aux_free=True, rope_theta=500000.0, tie_word_embeddings=True),
        "moe_gate moe_use_aux_free",
    ),
    "GLM-4 9B 0414": (
        of("glm4", "Glm4ForCausalLM", sizes(4096, 13696, 40, 32, 2, 151552, 32768), head_dim=128, attention_bias=True,
           partial_rotary_factor=0.5, eos_token_id=[151329, 151336, 151338], pad_token_id=151329), "",
    ),
    "SmolLM3 3B": (
        of("smollm3", "SmolLM3ForCausalLM", sizes(2048, 11008, 36, 16, 4, 128256, 65536), rope_theta=5e6,
           no_rope_layers=[1, 1, 1, 0] * 9, no_rope_layer_interval=4, use_sliding_window=False, sliding_window=None,
           pretraining_tp=2, max_window_layers=28, layer_types=["full_attention"] * 36, tie_word_embeddings=True), "",
    ),
    "StarCoder2 3B": (
        of("starcoder2", "Starcoder2ForCausalLM", sizes(3072, 12288, 30, 24, 2, 49152, 16384) | STARCODER2),
            "residual_dropout"
        " embedding_dropout attention_dropout mlp_type norm_type attention_softmax_in_fp32 activation_function",
    ),
    "Granite 3.3 8B": (of("granite", "GraniteForCausalLM", sizes(4096, 12800, 40, 32, 8, 49159, 131072) | GRANITE),
                       "attention_dropout"),
    "Minitron 4B": (
        of("nemotron", "NemotronForCausalLM", sizes(3072, 9216, 32, 24, 8, 256000, 4096), hidden_act="relu2",
            norm_eps=1e-5,
           rms_norm_eps=None, partial_rotary_factor=0.5, head_dim=128), "",
    ),
    "dolly v2 3B": (
        neox(2560, 10240, 32, 32, 50280, custom_pipelines={"text-generation": {"impl": "instruct_pipeline.Instruct"}}),
        "custom_pipelines",
    ),
    "GPT-2": (of("gpt2", "GPT2LMHeadModel", GPT2), ""),
    "OLMo 3 7B": (
        of("olmo3", "Olmo3ForCausalLM", sizes(4096, 11008, 32, 32, 32, 100278, 65536), rope_theta=500000,
           rope_scaling=YARN8, sliding_window=4096, layer_types=SLIDING * 8, attention_bias=False), "",
    ),
    "OLMo 7B": (
        of("olmo", "OlmoForCausalLM", sizes(4096, 11008, 32, 32, 32, 50304, 2048) | {"rms_norm_eps": None},
           clip_qkv=None, rope_scaling=None), "",
    ),
    "EXAONE 4.0 32B": (
        of("exaone4", "Exaone4ForCausalLM", sizes(5120, 27392, 64, 40, 8, 102400, 131072), head_dim=128,
           sliding_window=4096, sliding_window_pattern="LLLG", layer_types=SLIDING * 16, rope_theta=1000000,
           rope_scaling=LLAMA3 | {"factor": 16.0}), "",
    ),
    "EXAONE 4.0 1.2B": (
        of("exaone4", "Exaone4ForCausalLM", sizes(2048, 4096, 30, 32, 8, 102400, 65536), head_dim=64,
           sliding_window=None, sliding_window_pattern=None, layer_types=["full_attention"] * 30, rope_theta=1000000,
           rope_scaling=LLAMA3 | {"factor": 16.0}, tie_word_embeddings=True), "",
    ),
    "Command R 08-2024": (
        of("cohere", "CohereForCausalLM", sizes(8192, 24576, 40, 64, 8, 256000, 131072) | LAYER_NORM,
           logit_scale=0.0625, use_qk_norm=False, rope_theta=4e6), "",
    ),
    "Command R7B": (
        of("cohere2", "Cohere2ForCausalLM", sizes(4096, 14336, 32, 32, 8, 256000, 132096) | LAYER_NORM | R7B,
           logit_scale=0.25, sliding_window=4096, rope_theta=50000),
        "order_of_interleaved_layers position_embedding_type use_parallel_block layer_switch",
    ),
    "Hunyuan 7B": (
        of("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", sizes(4096, 14336, 32, 32, 8, 128167, 32768), head_dim=128,
           rope_theta=10000.0, rope_scaling=ALPHA, use_qk_norm=True, eod_token_id=127957, tie_word_embeddings=True),
        "use_qk_norm rope_scaling.beta_fast rope_scaling.mscale",
    ),
    "Phi-2": (
        of("phi", "PhiForCausalLM", sizes(2560, 10240, 32, 32, 32, 51200, 2048) | LAYER_NORM, hidden_act="gelu_new",
           partial_rotary_factor=0.4, qk_layernorm=False, resid_pdrop=0.1, embd_pdrop=0.0), "resid_pdrop",
    ),
    "StableLM 2 1.6B": (
        of("stablelm", "StableLmForCausalLM", sizes(2048, 5632, 24, 32, 32, 100352, 4096) | LAYER_NORM,
           partial_rotary_factor=0.25, use_qkv_bias=True, rope_theta=10000, use_parallel_residual=False), "",
    ),
    "Seed-OSS 36B": (
        of("seed_oss", "SeedOssForCausalLM", sizes(5120, 27648, 64, 80, 8, 155136, 524288), head_dim=128,
           attention_bias=True, attention_out_bias=False, mlp_bias=False, residual_dropout=0.1, attention_dropout=0.1,
           rope_scaling={"rope_type": "default"}, rope_theta=1e7), "residual_dropout attention_dropout",
    ),
    "Gemma 2B": (
        gemma("gemma", 2048, 16384, 18, 8, 1, 256000, 8192, hidden_act="gelu", hidden_activation=None,
              query_pre_attn_scalar=None, rope_theta=10000.0), "",
    ),
    "GLM-4 9B chat": (
        of("glm", "GlmForCausalLM", sizes(4096, 13696, 40, 32, 2, 151552, 131072), head_dim=128, attention_bias=True,
           rms_norm_eps=1.5625e-7, partial_rotary_factor=0.5, rope_theta=10000.0), "",
    ),
    "CWM": (
        of("cwm", "CwmForCausalLM", sizes(6144, 21504, 64, 48, 8, 128256, 131072), head_dim=128, sliding_window=8192,
           rope_theta=1e6, rope_scaling=LLAMA3 | {"factor": 16.0}), "",
    ),
    "Command R+": (
        of("cohere", "CohereForCausalLM", sizes(12288, 33792, 64, 96, 8, 256000, 131072) | LAYER_NORM,
           use_qk_norm=True), "",
    ),
    "Llama 4 Scout's text": (
        of("llama4_text", "Llama4ForCausalLM", sizes(5120, 8192, 48, 40, 8, 202048, 10485760), head_dim=128,
           intermediate_size_mlp=16384, num_local_experts=16, num_experts_per_tok=1, rope_theta=5e5,
           rope_scaling=LLAMA3 | {"factor": 16.0}, attention_chunk_size=8192, attn_temperature_tuning=True), "",
    ),
    "Llama 4 Maverick's text": (
        of("llama4_text", "Llama4ForCausalLM", sizes(5120, 8192, 48, 40, 8, 202048, 1048576), head_dim=128,
           intermediate_size_mlp=16384, num_local_experts=128, interleave_moe_layer_step=2, use_qk_norm=False,
           rope_theta=5e5), "",
    ),
    "Apertus 8B": (
        of("apertus", "ApertusForCausalLM", sizes(4096, 21504, 32, 32, 8, 131072, 65536), hidden_act="xielu",
           rope_theta=1.2e7, rope_scaling=LLAMA3 | {"factor": 8.0}, qk_norm=True, post_norm=False), "qk_norm",
    ),
    "Phi-3.5-MoE": (
        of("phimoe", "PhimoeForCausalLM", sizes(4096, 6400, 32, 32, 8, 32064, 131072), num_local_experts=16,
           num_experts_per_tok=2, attention_bias=True, lm_head_bias=True, sliding_window=131072, rope_theta=10000.0,
           router_jitter_noise=0.01, original_max_position_embeddings=4096,
           rope_scaling={"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64,
                         "short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122,
                         "original_max_position_embeddings": 4096}), "",
    ),
}  # fmt: skip

# (config.json, the names of all that is wrong with it)
REFUSED: dict[str, tuple[Table, str]] = {
    "Falcon 7B": (of("falcon", "FalconForCausalLM", sizes(4544, 18176, 32, 71, 1, 65024, 2048)), "model_type"),
    "Llama 2 7B, GPTQ, dynamic": (
        llama(4096, 11008, 32, 32, 32, 32000, 4096, rope_scaling={"type": "dynamic", "factor": 2.0}, use_fp8=True,
              quantization_config=GPTQ, hidden_act="quick_gelu"),
        "quantization_config.quant_method hidden_act",
    ),
    "Qwen2-VL's text": (
        qwen("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768, architectures=["Qwen2VLForConditionalGeneration"],
             rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}), "architectures rope_scaling.type",
    ),
    "Qwen3 MoE, sparse steps": (
        of("qwen3_moe", "Qwen3MoeForCausalLM", sizes(2048, 6144, 48, 32, 4, 151936, 40960), decoder_sparse_step=0,
           mlp_only_layers=5, rope_scaling={"type": "dynamic", "factor": 2.0}),
        "decoder_sparse_step mlp_only_layers",
    ),
    "DeepSeek-V3, softmax": (
        deepseek("deepseek_v3", "DeepseekV3ForCausalLM", 7168, 18432, 61, 128, 128, 129280, 163840,
            scoring_func="softmax",
                 topk_method="greedy", moe_layer_freq=2), "scoring_func topk_method moe_layer_freq",
    ),
}  # fmt: skip
