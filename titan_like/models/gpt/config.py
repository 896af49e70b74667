"""Shape of a GPT: learned positions, LayerNorm, GELU, biases, dropout."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from titan_like.models.config import TransformerConfig


class GPTConfig(TransformerConfig):
    """GPT-2, GPT-3 and Megatron-LM's GPT models."""

    mlp_matrices: ClassVar[int] = 2
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout of embeddings, attention and residual branches")

    def num_parameters(self, padded: bool = True) -> int:
        """Trainable parameters, exact: 12·l·h² + 13·l·h + (V+s)·h + 2h for an MLP of width 4h."""
        hidden, vocab = self.hidden_size, self.padded_vocab_size if padded else self.vocab_size
        kv_size = self.num_kv_heads * self.head_dim
        biases = (hidden + 2 * kv_size) + hidden + self.ffn_hidden_size + hidden
        layer = self.attention_weights + self.mlp_weights + biases + 4 * hidden  # two LayerNorms
        embeddings = (vocab + self.max_seq_len) * hidden + (0 if self.tied_embeddings else vocab * hidden)
        return self.num_layers * layer + embeddings + 2 * hidden
