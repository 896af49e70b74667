"""GPT: learned positions, pre-LayerNorm, GELU, biases, dropout, tied embeddings (GPT-2, GPT-3, Megatron-LM)."""

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.batch import Batch, Context
from titan_like.models.gpt.config import GPTConfig
from titan_like.models.layers.attention import AttentionCore, SelfAttention
from titan_like.models.layers.mlp import GeluMLP
from titan_like.models.transformer import Transformer


class GPTLayer(nn.Module):
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)), with dropout on each branch."""

    def __init__(self, config: GPTConfig, is_causal: bool = True, approximate: str = "tanh") -> None:
        """``approximate`` is GELU's."""
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.attention = SelfAttention(config, AttentionCore(config.dropout, is_causal), bias=True)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.mlp = GeluMLP(config.hidden_size, config.ffn_hidden_size, approximate)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        attended = self.attention(self.attention_norm(x), context)
        x = x + F.dropout(attended, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class GPT(Transformer):
    """GPT over token sequences [batch, seq]; see `Transformer.forward`."""

    residual_outputs = ("attention.proj", "mlp.fc2")
    entry = ("embedding", "position_embedding")

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.dropout = config.dropout
        self.position_embedding = nn.Embedding(config.max_seq_len, config.hidden_size)
        self.layers.update({str(i): GPTLayer(config) for i in range(config.num_layers)})
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)

    def embed(self, batch: Batch) -> torch.Tensor:
        """As in the base class."""
        x = self.embedding(batch.tokens) + self.position_embedding(batch.positions)
        return F.dropout(x, self.dropout, self.training)


build = GPT
