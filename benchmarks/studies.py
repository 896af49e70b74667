"""What studies leave out of their rows: how they trained, and the shapes of models with experts that they name."""

from typing import Any

# What a study's rows leave out, from its paper or its scripts.
_MEGATRON_2021 = {"flash": False, "dropout": True, "dtype": "float16", "zero": 0, "recompute": "full"}
_FSDP = {"flash": True, "dtype": "bfloat16", "zero": 3, "recompute": "none"}
MCORE = {"flash": True, "dtype": "bfloat16", "zero": 1, "recompute": "none", "sp": True}
STUDIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("ptdp_table1", "ptdp_table2", "tf=hw96", "korthikanti_t5"), _MEGATRON_2021),
    **dict.fromkeys(("vtrain_multi", "vtrain_single"), _MEGATRON_2021),
    "bloom": {**_MEGATRON_2021, "zero": 1},
    "production": {**_MEGATRON_2021, "dtype": "bfloat16", "zero": 1},
    # Its memory is the first node's. Runs that filled a third of it ran out of memory elsewhere.
    "jz_v100": {**_MEGATRON_2021, "zero": 1, "memory_of_first": True},
    **dict.fromkeys(("foundry", "torchtitan", "tokens/s/gpu"), _FSDP),
    **dict.fromkeys(("tf=model", "mbridge", "nemo2407"), MCORE),
}


# Shapes of models with experts, which rows name without stating them: a flavor, or a Llama near to one that the family
# moe cannot express. GPT-OSS (arXiv 2508.10925) has windows of 128 tokens in every second layer, sinks and biases; here
# all its layers attend to everything. DeepSeek-V3 (arXiv 2412.19437) has latent attention, for which heads stand whose
# matrices are as large (187 million elements); their scores take 0.6 of the products. A second head, which predicts the
# token after the next, is left out.
EXPERTS: dict[str, Any] = {
    "Qwen3_235B_a22B": "qwen3_235b_a22b",
    "Qwen3_30B_a3B": "qwen3_30b_a3b",
    "GPT OSS 120B": {
        "num_layers": 36, "hidden_size": 2880, "num_attention_heads": 64, "num_kv_heads": 8, "head_size": 64,
        "num_experts": 128, "experts_per_token": 4, "expert_ffn_hidden_size": 2880, "vocab_size": 201088,
        "tied_embeddings": False,
    },
    "DeepSeekV3": {
        "num_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_kv_heads": 8, "head_size": 96,
        "num_experts": 256, "experts_per_token": 8, "expert_ffn_hidden_size": 2048, "num_shared_experts": 1,
        "num_dense_layers": 3, "ffn_hidden_size": 18432, "vocab_size": 129280, "tied_embeddings": False,
    },
}  # fmt: skip
