"""The tensor-parallel plan of a Llama, for families of one's own that extend it."""

from titan_like.models.decoder.sharding import LLAMA as TENSOR_PARALLEL_PLAN

__all__ = ["TENSOR_PARALLEL_PLAN"]
