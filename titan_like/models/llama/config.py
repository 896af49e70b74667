"""Shape of a Llama: RoPE, RMSNorm, SwiGLU, grouped-query attention, no biases."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from titan_like.models.config import TransformerConfig
from titan_like.models.rope_scaling import RopeScaling


class LlamaConfig(TransformerConfig):
    """Llama 2 and 3."""

    not_in_weights: ClassVar = frozenset({"init_std", "max_seq_len"})  # there is no table of positions
    tied_embeddings: bool = Field(False, description="the output matrix is the embedding table")
    rope_theta: float = Field(10_000.0, gt=0, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(None, description="frequency scaling of Llama 3.1 and later")

    @model_validator(mode="after")
    def _check_head_dim(self) -> LlamaConfig:
        if self.head_dim % 2:
            raise ValueError(
                f"hidden_size / num_attention_heads = {self.head_dim} is odd, and rotary positions turn pairs; "
                "choose sizes that make it even"
            )
        return self

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """Frequencies are still scaled: beyond half of the sequence."""
        scaling = self.rope_scaling
        if scaling is None:
            return {}
        return {"rope_scaling": scaling.model_dump() | {"original_max_seq_len": seq_len // 2}}
