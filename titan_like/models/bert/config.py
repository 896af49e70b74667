"""The shape of a BERT model: bidirectional attention, learned positions, LayerNorm, GELU, biases, dropout."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from titan_like.models.config import TransformerConfig


class BertConfig(TransformerConfig):
    """The shape of BERT (arXiv 1810.04805) and Megatron-LM's BERT models (arXiv 1909.08053)."""

    objective: ClassVar = "mlm"
    not_in_weights: ClassVar = frozenset({"init_std", "dropout"})
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of embeddings, attention and residual branches")
    num_token_types: int = Field(2, gt=0, description="rows of the token-type table; training uses the first alone")
    norm_placement: Literal["pre", "post"] = Field(
        "pre",
        description="pre: a norm before attention and MLP and one after the last layer (Megatron-LM); post: a norm "
        "after each residual sum and after the embeddings (the original BERT)",
    )
