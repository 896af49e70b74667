"""How a Llama is split over tensor-parallel processes."""

from titan_like.parallel.tensor_splits import (
    Plan,
    attention_core,
    column_linear,
    norm,
    parallel_region,
    row_linear,
    vocabulary_embedding,
    vocabulary_mask,
    vocabulary_output,
)

TENSOR_PARALLEL_PLAN: Plan = {
    "embedding": vocabulary_embedding,
    "layers.*.attention_norm": norm,
    "layers.*.attention": parallel_region,
    "layers.*.attention.qkv": column_linear,  # whole groups of heads, since its rows are ordered by them
    "layers.*.attention.core": attention_core,
    "layers.*.attention.proj": row_linear,
    "layers.*.mlp_norm": norm,
    "layers.*.mlp": parallel_region,
    "layers.*.mlp.gate": column_linear,
    "layers.*.mlp.up": column_linear,
    "layers.*.mlp.down": row_linear,
    "norm": norm,
    "output": vocabulary_output,
    "mask_padding": vocabulary_mask,
}
