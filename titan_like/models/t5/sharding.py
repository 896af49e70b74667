"""T5's tensor-parallel plan: module name → name of a style in `titan_like.parallel.tensor_styles.STYLES`."""

TENSOR_PARALLEL_PLAN = {
    "embedding": "vocabulary_embedding",
    "encoder_bias.table": "head_table",
    "decoder_bias.table": "head_table",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "region",
    "layers.*.attention.qkv": "column_linear",  # its rows are ordered by heads, so each rank gets whole heads
    "layers.*.attention.core": "split_heads",
    "layers.*.attention.proj": "row_linear",
    "layers.*.cross_norm": "norm",
    "layers.*.cross_attention": "cross_region",
    "layers.*.cross_attention.q": "column_linear",
    "layers.*.cross_attention.kv": "column_linear",
    "layers.*.cross_attention.core": "split_heads",
    "layers.*.cross_attention.proj": "row_linear",
    "layers.*.mlp_norm": "norm",
    "layers.*.mlp": "region",
    "layers.*.mlp.[gu]*": "column_linear",  # up, and in a gated MLP gate
    "layers.*.mlp.down": "row_linear",
    "layers.*.final_norm": "norm",
    "norm": "norm",
    "output": "vocabulary_output",
    "mask_padding": "vocabulary_mask",
    "token_loss": "vocabulary_loss",
}
