"""The shape of a Llama model: RoPE, RMSNorm, SwiGLU, grouped-query attention, no biases."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from titan_like.models.config import RopeScaling, TransformerConfig


class LlamaConfig(TransformerConfig):
    """The shape of Llama 2 and 3 (arXiv 2307.09288, 2407.21783).

    Raises:
        pydantic.ValidationError: as for every `TransformerConfig`, or the heads have an odd dimension.
    """

    supports_masks: ClassVar[bool] = True
    not_in_weights: ClassVar = frozenset({"init_std", "max_seq_len"})  # no position table depends on the length
    tied_embeddings: bool = Field(False, description="the output matrix is the embedding table")
    rope_theta: float = Field(10_000.0, gt=0, le=1e30, description="base of the rotary frequencies")
    rope_scaling: RopeScaling | None = Field(None, description="frequency scaling of Llama 3.1 and later")

    @model_validator(mode="after")
    def _check_head_dim(self) -> LlamaConfig:
        if self.head_dim % 2:
            raise ValueError(
                f"hidden_size / num_attention_heads = {self.head_dim} is odd, but rotary positions need pairs of "
                "dimensions; choose sizes that make it even"
            )
        return self

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """Keep the frequency scaling in effect by setting the original context to half of the sequence."""
        fields, scaling = super().shrunk(seq_len), self.rope_scaling
        if scaling is None:
            return fields
        return fields | {"rope_scaling": scaling.model_dump() | {"original_max_seq_len": seq_len // 2}}
