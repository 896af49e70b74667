"""The shape of a mixture-of-experts model: a Llama whose MLPs are experts."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from titan_like.models.config import WithExperts, WithHeadSize
from titan_like.models.llama.config import LlamaConfig


class MoEConfig(LlamaConfig, WithHeadSize, WithExperts):  # in this order: pydantic takes defaults from the first base
    """The shape of Mixtral (arXiv 2401.04088), OLMoE (2409.02060), DeepSeekMoE (2401.06066) and Qwen3 MoE (2505.09388).

    Raises:
        pydantic.ValidationError: as for every `LlamaConfig`, or the numbers of experts or of layers do not fit.
    """

    not_in_weights: ClassVar = LlamaConfig.not_in_weights | WithExperts.not_in_weights
    qk_norm: Literal["none", "head", "all"] = Field(
        "none", description="RMSNorm of queries and keys: of each head (Qwen3) or of all heads together (OLMoE)"
    )

    @model_validator(mode="after")
    def _check_head_dim(self) -> MoEConfig:
        if self.head_size % 2:
            raise ValueError(
                f"head_size {self.head_size} is odd, but rotary positions need pairs of dimensions; make it even"
            )
        return self

    def shrunk(self, seq_len: int) -> dict[str, Any]:
        """Few, small experts. Heads together stay wider or narrower than the hidden states."""
        return super().shrunk(seq_len) | {"head_size": 32 if self.attention_size > self.hidden_size else 0}
