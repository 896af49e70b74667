"""Shapes of transformers: what a flavor is. Pure numbers, no torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TransformerConfig(BaseModel):
    """The fields every family has.

    Raises:
        pydantic.ValidationError: unknown field, wrong type, or sizes that do not divide.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    mlp_matrices: ClassVar[int]  # matrices in one MLP: 2 (GELU) or 3 (SwiGLU)

    num_layers: int = Field(gt=0, description="transformer layers")
    hidden_size: int = Field(gt=0, description="width of the residual stream")
    num_attention_heads: int = Field(gt=0, description="query heads")
    num_kv_heads: int = Field(0, ge=0, description="key and value heads; 0 means one per query head")
    ffn_hidden_size: int = Field(0, ge=0, description="width of the MLP; 0 means 4 × hidden_size")
    vocab_size: int = Field(gt=0, description="tokens the tokenizer can produce")
    vocab_multiple: int = Field(128, gt=0, description="the embedding table is padded to a multiple of this")
    max_seq_len: int = Field(gt=0, description="longest sequence, tokens")
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of the norms")
    init_std: float = Field(0.02, gt=0, description="standard deviation of initial weights")
    tied_embeddings: bool = Field(True, description="the output matrix is the embedding table")

    def __hash__(self) -> int:  # looked up a million times in a search; what mostly differs suffices
        return hash((self.num_layers, self.hidden_size))

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: dict) -> dict:
        filled = dict(values)
        if not filled.get("num_kv_heads"):
            filled["num_kv_heads"] = filled.get("num_attention_heads", 0)
        hidden = filled.get("hidden_size", 0)
        if not filled.get("ffn_hidden_size"):
            filled["ffn_hidden_size"] = 4 * hidden if isinstance(hidden, int) else 0
        return filled

    @model_validator(mode="after")
    def _check_divisible(self) -> TransformerConfig:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} does not divide hidden_size {self.hidden_size}; "
                "choose a divisor"
            )
        if self.num_attention_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads {self.num_kv_heads} does not divide num_attention_heads {self.num_attention_heads}; "
                "choose a divisor"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding table. Depends on the model alone, never on the layout."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def attention_weights(self) -> int:
        """Elements of one layer's query, key, value and output matrices."""
        kv_size = self.num_kv_heads * self.head_dim
        return 2 * self.hidden_size * self.hidden_size + 2 * self.hidden_size * kv_size

    @property
    def mlp_weights(self) -> int:
        """Elements of one layer's MLP matrices."""
        return self.mlp_matrices * self.hidden_size * self.ffn_hidden_size

    @property
    def layer_parameters(self) -> int:
        """Trainable parameters of one layer."""
        raise NotImplementedError

    @property
    def entry_parameters(self) -> int:
        """Parameters before the first layer that nothing after the layers shares."""
        raise NotImplementedError

    @property
    def head_parameters(self) -> int:
        """Parameters after the last layer: final norm and output matrix, be it the embedding table."""
        raise NotImplementedError

    def num_parameters(self, padded: bool = True) -> int:
        """Trainable parameters, exact; ``padded=False`` counts the published model without vocabulary padding."""
        tables = 1 if self.tied_embeddings else 2
        padding = 0 if padded else tables * (self.padded_vocab_size - self.vocab_size) * self.hidden_size
        return self.entry_parameters + self.num_layers * self.layer_parameters + self.head_parameters - padding
