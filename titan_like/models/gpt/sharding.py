"""GPT's tensor-parallel plan: module name → name of a style in `titan_like.parallel.tensor_styles.STYLES`."""

TENSOR_PARALLEL_PLAN = {
    "embedding": "vocabulary_embedding",
    "position_embedding": "position_embedding",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "region",
    "layers.*.attention.qkv": "column_linear",  # its rows are ordered by heads, so each rank gets whole heads
    "layers.*.attention.core": "split_heads",
    "layers.*.attention.proj": "row_linear",
    "layers.*.mlp_norm": "norm",
    "layers.*.mlp": "region",
    "layers.*.mlp.fc1": "column_linear",
    "layers.*.mlp.fc2": "row_linear",
    "norm": "norm",
    "output": "vocabulary_output",
    "mask_padding": "vocabulary_mask",
    "token_loss": "vocabulary_loss",
}
