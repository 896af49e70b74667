"""Shape of a GPT: learned positions, LayerNorm, GELU, biases, dropout."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from titan_like.models.config import TransformerConfig


class GPTConfig(TransformerConfig):
    """GPT-2, GPT-3 and Megatron-LM's GPT models."""

    mlp_matrices: ClassVar[int] = 2
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of embeddings, attention and residual branches")

    @property
    def layer_parameters(self) -> int:
        """12h² + 13h for an MLP of width 4h."""
        kv_size = self.num_kv_heads * self.head_dim
        biases = (self.hidden_size + 2 * kv_size) + self.hidden_size + self.ffn_hidden_size + self.hidden_size
        return self.attention_weights + self.mlp_weights + biases + 4 * self.hidden_size  # two LayerNorms

    @property
    def entry_parameters(self) -> int:
        """Positions, and the embedding table where it is not the output matrix."""
        table = 0 if self.tied_embeddings else self.padded_vocab_size
        return (self.max_seq_len + table) * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Output matrix and final LayerNorm."""
        return (self.padded_vocab_size + 2) * self.hidden_size
