"""BERT's tensor-parallel plan: GPT's, with what else there is before and after the layers."""

from titan_like.models.gpt.sharding import TENSOR_PARALLEL_PLAN as GPT

TENSOR_PARALLEL_PLAN = GPT | {
    "token_type_embedding": "position_embedding",
    "embedding_norm": "norm",
    "transform.dense": "replicated_linear",
    "transform.norm": "norm",
    "first_token": "first_token",
    "pooler": "pooled_linear",
    "pair": "pooled_linear",
    "pooled_dropout": "pooled_dropout",
    "choice": "pooled_linear",
    "output_bias": "vocabulary_bias",
}
