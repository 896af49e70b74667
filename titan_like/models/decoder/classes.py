"""Classes of transformers that are decoders, a row of fields and names for each.

An absent field of config.json has the class's default, which is often not what published files say.
"""

from typing import Any

from titan_like.models.decoder.class_row import BIAS, HEAD_SIZE, IN_LANGUAGE_MODEL, MLP_BIAS, QK_ALL, QK_HEAD, Class
from titan_like.models.decoder.fields import OUTPUT_BIAS, Layers, activation, bias, biases, head_size
from titan_like.models.decoder.hybrid_classes import HYBRID_CLASSES
from titan_like.models.decoder.moe_classes import MOE_CLASSES
from titan_like.models.decoder.rope import Rope
from titan_like.models.fields import Field, choice, fixed, nullable, reciprocal, renamed

_GATE_UP = {"mlp.gate": "mlp.gate_up_proj", "mlp.up": "mlp.gate_up_proj"}
# fmt: off
_MISTRAL3: dict[str, Any] = {"outer": "Mistral3ForConditionalGeneration", "renamed": IN_LANGUAGE_MODEL}
_GEMMA: dict[str, Any] = {
    "activation": activation("hidden_activation", "gelu_pytorch_tanh"), "tied": True,
    "fixed": (fixed("use_bidirectional_attention", False, None, is_written=False),),
    "ignored": frozenset({"hidden_act", "sliding_window_size", "_sliding_window_pattern"}),
    "names": {"mlp_norm": "pre_feedforward_layernorm"},
}
_GEMMA_ALWAYS = {"block": "sandwich", "norm_offset": True}
_SCALED_BY_WIDTH = Field(
    lambda fields, shape: {"embedding_scale": shape["hidden_size"] ** 0.5, "round_embedding_scale": True}
)
_GEMMA_FIELDS = (
    head_size(256), BIAS,
    Field(
        lambda fields, shape: {"attention_scale": fields.positive("query_pre_attn_scalar", 256) ** -0.5},
        lambda config: {"query_pre_attn_scalar": round(config.score_scale**-2)},
    ),
    _SCALED_BY_WIDTH,
)
_GEMMA2_FIELDS = (
    nullable("attention_softcap", "attn_logit_softcapping", 50.0),
    nullable("final_softcap", "final_logit_softcapping", 30.0),
    *_GEMMA_FIELDS,
)
_COHERE = {"norm": "layer_no_bias", "block": "parallel_one_norm"}
_POST = {"block": "post"}
_POST_NORMS = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
_DENSE_CLASSES = (
    Class("LlamaForCausalLM", ("llama",), (32000, 4096, 11008, 32, 32, 0, 2048)),
    Class(
        "MistralForCausalLM", ("mistral", "mistral3"), (32000, 4096, 14336, 32, 32, 8, 131072), fields=(HEAD_SIZE,),
        layers=Layers("all", 4096), **_MISTRAL3,
    ),
    Class(
        "MinistralForCausalLM", ("ministral",), (32000, 4096, 14336, 32, 32, 8, 131072), fields=(HEAD_SIZE,),
        layers=Layers("types", 4096),
    ),
    Class(
        "Ministral3ForCausalLM", ("ministral3", "mistral3"), (131072, 4096, 14336, 34, 32, 8, 262144),
        fields=(head_size(128),), eps=("rms_norm_eps", 1e-5), **_MISTRAL3,
        layers=Layers(
            "all",
            rope=Rope(
                has_temperature=True,
                default_scaling={
                    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
                    "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0,
                    "llama_4_scaling_beta": 0.1,
                },
            ),
        ),
    ),
    Class(
        "Qwen2ForCausalLM", ("qwen2", "qwen2_5_vl"), (151936, 4096, 22016, 32, 32, 32, 32768),
        {"attention_bias": "qkv"}, (HEAD_SIZE,),
        ignored=frozenset({"attention_bias"}), layers=Layers("switched", 4096), renamed=IN_LANGUAGE_MODEL,
        outer="Qwen2_5_VLForConditionalGeneration",
        outer_defaults={
            "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
            "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
            "max_window_layers": 80,
        },
    ),
    Class(
        "Qwen3ForCausalLM", ("qwen3", "qwen3_vl"), (151936, 4096, 22016, 32, 32, 32, 32768), QK_HEAD,
        (head_size(128), BIAS), layers=Layers("switched", 4096), renamed=IN_LANGUAGE_MODEL,
        outer="Qwen3VLForConditionalGeneration",
        outer_defaults={"max_position_embeddings": 128000, "rope_theta": 5e5},
    ),
    Class(
        "Olmo2ForCausalLM", ("olmo2",), (50304, 4096, 11008, 32, 32, 0, 2048), QK_ALL | _POST, (HEAD_SIZE, BIAS),
        eps=("rms_norm_eps", 1e-5), names=_POST_NORMS,
    ),
    Class(
        "Olmo3ForCausalLM", ("olmo3",), (50304, 4096, 11008, 32, 32, 0, 2048), QK_ALL | _POST, (HEAD_SIZE, BIAS),
        eps=("rms_norm_eps", 1e-5), names=_POST_NORMS,
        layers=Layers("types", 4096, period=4, rope=Rope(("rope_theta", 5e5), local_theta=("", 5e5))),
    ),
    Class(
        "Exaone4ForCausalLM", ("exaone4",), (102400, 4096, 16384, 32, 32, 32, 2048), QK_HEAD | _POST, (HEAD_SIZE,),
        eps=("rms_norm_eps", 1e-5), names=_POST_NORMS,
        layers=Layers(
            "types", 4096, period=4, period_field="sliding_window_pattern", rotated="windows if any"
        ),
    ),
    Class(
        "SmolLM3ForCausalLM", ("smollm3",), (128256, 2048, 11008, 36, 16, 4, 32768), tied=True,
        fixed=(fixed("use_sliding_window", False),), ignored=frozenset({"max_window_layers", "sliding_window"}),
        layers=Layers("unrotated", rope=Rope(("rope_theta", 2e6))),
    ),
    Class(
        "GraniteForCausalLM", ("granite",), (32000, 4096, 11008, 32, 32, 0, 2048),
        fields=(
            MLP_BIAS,
            renamed("embedding_scale", "embedding_multiplier", 1.0),
            renamed("residual_scale", "residual_multiplier", 1.0),
            Field(
                lambda fields, shape: {"attention_scale": fields.positive("attention_multiplier", 1.0)},
                lambda config: {"attention_multiplier": config.score_scale},
            ),
            reciprocal("logit_scale", "logits_scaling", 1.0),
            HEAD_SIZE, BIAS,
        ),
    ),
    Class(
        "HyperCLOVAXForCausalLM", ("hyperclovax",), (32000, 4096, 11008, 32, 32, 0, 2048),
        fields=(
            MLP_BIAS,
            renamed("embedding_scale", "embedding_multiplier", 1.0),
            renamed("residual_scale", "residual_multiplier", 1.0),
            renamed("logit_scale", "logits_scaling", 1.0),
            choice("block", "use_post_norm", True, {False: "pre", True: "sandwich"}),
            HEAD_SIZE, BIAS,
            Field(
                lambda fields, shape: {
                    "attention_scale": fields.positive("attention_multiplier", shape["head_size"] ** -0.5)
                },
                lambda config: {"attention_multiplier": config.score_scale},
            ),
        ),
        names={"attention_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"},
    ),
    Class(
        "GemmaForCausalLM", ("gemma",), (256000, 3072, 24576, 28, 16, 16, 8192), {"norm_offset": True},
        (head_size(256), BIAS, _SCALED_BY_WIDTH), fixed=_GEMMA["fixed"], tied=True,
        activation=activation("hidden_act", "gelu_pytorch_tanh", gelu="gelu_tanh"),
        ignored=frozenset({"hidden_activation"}),
    ),
    Class(
        "Gemma2ForCausalLM", ("gemma2",), (256000, 2304, 9216, 26, 8, 4, 8192), _GEMMA_ALWAYS, _GEMMA2_FIELDS,
        layers=Layers("types", 4096, period=2), **_GEMMA,
    ),
    Class(
        "VaultGemmaForCausalLM", ("vaultgemma",), (256000, 2304, 9216, 26, 8, 4, 8192), {"norm_offset": True},
        _GEMMA2_FIELDS, layers=Layers("types", 4096, period=2), **_GEMMA,
    ),
    Class(
        "Gemma3ForCausalLM", ("gemma3_text", "gemma3"), (262208, 2304, 9216, 26, 8, 4, 131072),
        _GEMMA_ALWAYS | QK_HEAD, (nullable("final_softcap", "final_logit_softcapping", None), *_GEMMA_FIELDS),
        layers=Layers(
            "types", 4096, period=6, period_field="sliding_window_pattern",
            rope=Rope(("rope_theta", 1e6), local_theta=("rope_local_base_freq", 10_000.0)),
        ),
        outer="Gemma3ForConditionalGeneration", **_GEMMA, renamed=IN_LANGUAGE_MODEL,
    ),
    Class(
        "Phi3ForCausalLM", ("phi3",), (32064, 3072, 8192, 32, 32, 0, 4096), fields=(HEAD_SIZE,),
        ignored=frozenset({"full_attn_mod", "original_max_position_embeddings"}), eps=("rms_norm_eps", 1e-5),
        layers=Layers("all", rope=Rope(fraction=("partial_rotary_factor", 1.0), is_longrope=True)),
        names={"attention.qkv": "self_attn.qkv_proj"} | _GATE_UP,
    ),
    Class(
        "GlmForCausalLM", ("glm",), (151552, 4096, 13696, 40, 32, 2, 131072),
        fields=(head_size(128), bias("qkv", True)), eps=("rms_norm_eps", 1.5625e-7),
        layers=Layers(rope=Rope(fraction=("partial_rotary_factor", 0.5))), is_interleaved=True, names=_GATE_UP,
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
        {"norm": "layer", "gated": False}, (head_size(None), biases("use_bias", True)),
        activation=activation("hidden_act", "gelu_pytorch_tanh"),
        eps=("norm_epsilon", 1e-5), init_std=0.018042, tied=True, layers=Layers("all"),
        names={"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"},
    ),
    Class(
        "ArceeForCausalLM", ("arcee",), (32000, 2560, 18432, 32, 32, 0, 4096), {"gated": False},
        activation=activation("hidden_act", "relu2"), eps=("rms_norm_eps", 1e-5),
    ),
    Class(
        "Ernie4_5ForCausalLM", ("ernie4_5",), (103424, 1024, 3072, 18, 16, 2, 131072),
        fields=(head_size(128), biases("use_bias", False)), eps=("rms_norm_eps", 1e-5), tied=True,
        layers=Layers(rope=Rope(("rope_theta", 5e5))), is_interleaved=True,
    ),
    Class(
        "SeedOssForCausalLM", ("seed_oss",), (155136, 4096, 27648, 64, 80, 8, 524288),
        fields=(MLP_BIAS, head_size(128), OUTPUT_BIAS),
    ),
    Class(
        "CwmForCausalLM", ("cwm",), (128256, 6144, 21504, 64, 48, 8, 131072), fields=(MLP_BIAS, head_size(128)),
        eps=("rms_norm_eps", 1e-5),
        layers=Layers(
            "types", 8192, period=4, first_full=0,
            rope=Rope(
                ("rope_theta", 1e6),
                default_scaling={
                    "rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                },
            ),
        ),
    ),
    Class(
        "CohereForCausalLM", ("cohere",), (256000, 8192, 22528, 40, 64, 0, 8192), _COHERE,
        (
            renamed("logit_scale", "logit_scale", 0.0625), HEAD_SIZE, BIAS,
            choice("qk_norm", "use_qk_norm", False, {False: "none", True: "heads"}),
        ),
        eps=("layer_norm_eps", 1e-5), tied=True, layers=Layers(rope=Rope(("rope_theta", 5e5))), is_interleaved=True,
    ),
    Class(
        "Cohere2ForCausalLM", ("cohere2",), (256000, 8192, 22528, 40, 64, 0, 8192), _COHERE,
        (renamed("logit_scale", "logit_scale", 0.0625), HEAD_SIZE, BIAS), eps=("layer_norm_eps", 1e-5), tied=True,
        layers=Layers("types", 4096, period=4, period_field="sliding_window_pattern", rotated="windows"),
        is_interleaved=True,
    ),
    Class(
        "StableLmForCausalLM", ("stablelm",), (50304, 2560, 6912, 32, 32, 32, 4096), {"norm": "layer"},
        (
            head_size(None), bias("qkv", theirs="use_qkv_bias"),
            choice("block", "use_parallel_residual", False, {False: "pre", True: "parallel_one_norm"}),
            choice("qk_norm", "qk_layernorm", False, {False: "none", True: "heads"}),
        ),
        eps=("layer_norm_eps", 1e-5), layers=Layers(rope=Rope(fraction=("partial_rotary_factor", 0.25))),
        names={f"attention.{part}_norm": f"self_attn.{part}_layernorm.norms.{{}}" for part in "qk"},
    ),
    Class(
        "PhiForCausalLM", ("phi",), (51200, 2048, 8192, 24, 32, 0, 2048),
        {
            "norm": "layer", "block": "parallel_one_norm", "gated": False, "attention_bias": "all", "mlp_bias": True,
            "output_bias": True,
        },
        (HEAD_SIZE, choice("qk_norm", "qk_layernorm", False, {False: "none", True: "head"})),
        activation=activation("hidden_act", "gelu_new"), eps=("layer_norm_eps", 1e-5),
        layers=Layers(rope=Rope(fraction=("partial_rotary_factor", 0.5))),
        names={
            "norm": "model.final_layernorm", "attention.proj": "self_attn.dense", "mlp.up": "mlp.fc1",
            "mlp.down": "mlp.fc2", "attention.q_norm": "self_attn.q_layernorm",
            "attention.k_norm": "self_attn.k_layernorm",
        },
    ),
    Class(
        "HunYuanDenseV1ForCausalLM", ("hunyuan_v1_dense",), (290943, 4096, 11008, 32, 32, 0, 2048),
        QK_HEAD | {"norm_after_rope": True}, (HEAD_SIZE, BIAS), eps=("rms_norm_eps", 1e-5),
        layers=Layers(rope=Rope(has_alpha=True)),
        names={"attention.q_norm": "self_attn.query_layernorm", "attention.k_norm": "self_attn.key_layernorm"},
    ),
    Class(
        "OlmoForCausalLM", ("olmo",), (50304, 4096, 11008, 32, 32, 0, 2048), {"norm": "layer_no_weight"},
        (HEAD_SIZE, BIAS, nullable("clip_qkv", "clip_qkv", None)), eps=None,
    ),
    Class(
        "HeliumForCausalLM", ("helium",), (48000, 2560, 7040, 24, 20, 20, 4096),
        fields=(MLP_BIAS, head_size(128), bias("qkv")), eps=("rms_norm_eps", 1e-8),
        layers=Layers(rope=Rope(("rope_theta", 1e5))), is_interleaved=True,
    ),
    Class(
        "ApertusForCausalLM", ("apertus",), (131072, 4096, 14336, 32, 32, 0, 65536), QK_HEAD | {"gated": False},
        (HEAD_SIZE, BIAS), activation=activation("hidden_act", "xielu"), eps=("rms_norm_eps", 1e-5),
        layers=Layers(
            rope=Rope(
                ("rope_theta", 1.2e7),
                default_scaling={
                    "rope_type": "llama3", "rope_theta": 1.2e7, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                },
            ),
        ),
        names={"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
    ),
)
# fmt: on
CLASSES = (*_DENSE_CLASSES, *MOE_CLASSES, *HYBRID_CLASSES)
