"""The shape of a GPT model: learned positions, LayerNorm, GELU, biases, dropout."""

from typing import ClassVar

from pydantic import Field

from titan_like.models.config import TransformerConfig


class GPTConfig(TransformerConfig):
    """The shape of GPT-2, GPT-3 (arXiv 2005.14165) and Megatron-LM's GPT models."""

    supports_masks: ClassVar[bool] = True
    not_in_weights: ClassVar = frozenset({"init_std", "dropout"})
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of embeddings, attention and residual branches")
