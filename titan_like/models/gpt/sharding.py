"""How a GPT is split over tensor-parallel processes."""

from titan_like.parallel.tensor_splits import (
    Plan,
    attention_core,
    column_linear,
    norm,
    parallel_region,
    position_embedding,
    row_linear,
    vocabulary_embedding,
    vocabulary_mask,
    vocabulary_output,
)

TENSOR_PARALLEL_PLAN: Plan = {
    "embedding": vocabulary_embedding,
    "position_embedding": position_embedding,
    "layers.*.attention_norm": norm,
    "layers.*.attention": parallel_region,
    "layers.*.attention.qkv": column_linear,  # whole heads, since its rows are ordered by them
    "layers.*.attention.core": attention_core,
    "layers.*.attention.proj": row_linear,
    "layers.*.mlp_norm": norm,
    "layers.*.mlp": parallel_region,
    "layers.*.mlp.fc1": column_linear,
    "layers.*.mlp.fc2": row_linear,
    "norm": norm,
    "output": vocabulary_output,
    "mask_padding": vocabulary_mask,
}
