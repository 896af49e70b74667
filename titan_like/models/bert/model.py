"""BERT: bidirectional attention, learned positions and token types, GELU, biases, dropout, a head for masked tokens.

Norms stand before attention and MLP, as in Megatron-LM: that removes the instabilities of the original placement, after
each residual sum, and lets larger models train to a lower loss (arXiv 1909.08053, section 5.3). The original placement
is an option.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.bert.config import BertConfig
from titan_like.models.layers.attention import SelfAttention
from titan_like.models.layers.mlp import GeluMLP
from titan_like.models.transformer import Transformer


class BertLayer(nn.Module):
    """Attention and MLP, each in a residual branch with dropout. The norms are in the branches, or after the sums."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dropout = config.dropout
        self.norms_first = config.norm_placement == "pre"
        self.attention_norm = nn.LayerNorm(hidden, config.norm_eps)
        self.attention = SelfAttention(
            hidden,
            config.num_attention_heads,
            config.num_kv_heads,
            bias=True,
            dropout=config.dropout,
            is_causal=False,
        )
        self.mlp_norm = nn.LayerNorm(hidden, config.norm_eps)
        self.mlp = GeluMLP(hidden, config.ffn_hidden_size, approximate="none")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        if self.norms_first:
            x = x + F.dropout(self.attention(self.attention_norm(x)), self.dropout, self.training)
            return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)
        x = self.attention_norm(x + F.dropout(self.attention(x), self.dropout, self.training))
        return self.mlp_norm(x + F.dropout(self.mlp(x), self.dropout, self.training))


class Transform(nn.Module):
    """norm(gelu(dense(x))), before the output matrix."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        return self.norm(F.gelu(self.dense(x)))


class Bert(Transformer):
    """BERT over token sequences [batch, seq] of the first token type; see `Transformer.forward`."""

    residual_outputs: tuple[str, ...] = ("attention.proj", "mlp.fc2")
    entry = ("embedding", "position_embedding", "token_type_embedding", "embedding_norm")
    head = ("norm", "transform")
    has_output_bias = True

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        hidden, is_post = config.hidden_size, config.norm_placement == "post"
        self.dropout = config.dropout
        self.position_embedding = nn.Embedding(config.max_seq_len, hidden)
        self.token_type_embedding = nn.Embedding(config.num_token_types, hidden)
        self.embedding_norm = nn.LayerNorm(hidden, config.norm_eps) if is_post else nn.Identity()
        self.layers.update({str(i): BertLayer(config) for i in range(config.num_layers)})
        self.norm = nn.Identity() if is_post else nn.LayerNorm(hidden, config.norm_eps)
        self.transform = Transform(config)
        if is_post:  # whose norms bound the residual stream
            self.residual_outputs = ()

    @property
    def last_norm(self) -> nn.Module:
        """The norm whose weights scale the logits. Only the last stage has it."""
        return self.transform.norm

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tokens [batch, seq] and positions [seq] or [batch, seq] → hidden states [batch, seq, hidden]."""
        first_type = self.token_type_embedding(torch.zeros_like(positions))
        x = self.embedding(tokens) + self.position_embedding(positions) + first_type
        return F.dropout(self.embedding_norm(x), self.dropout, self.training)


def build(config: BertConfig) -> Bert:
    """Build the model on the current default device, without initialising its weights."""
    return Bert(config)
