"""A decoder: rotary positions, grouped-query attention, and MLPs that are dense or of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.layers.attention import SelfAttention
from titan_like.models.layers.experts import SparseMLP
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.layers.mlp import SwiGLUMLP
from titan_like.models.layers.positions import rope_cos_sin, rope_frequencies
from titan_like.models.transformer import Transformer


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.takes_padding_mask = isinstance(mlp, SparseMLP)  # experts do not count padding
        self.attention_norm = nn.RMSNorm(hidden, config.norm_eps)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(hidden, config.norm_eps)
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, document_mask: KeyRanges | None = None, **mlp: Any
    ) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]; cos and sin are [seq, head_dim / 2], or with a batch before.

        Causal without ``document_mask``. The MLP takes further inputs.
        """
        x = x + self.attention(self.attention_norm(x), (cos, sin), document_mask)
        return x + self.mlp(self.mlp_norm(x), **mlp)


class Decoder(Transformer):
    """A decoder over token sequences [batch, seq]; see `Transformer.forward`."""

    residual_outputs = ("attention.proj", "down")
    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.layers.update({str(i): self.new_layer(i) for i in range(config.num_layers)})
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)

    def new_layer(self, number: int) -> DecoderLayer:
        """Build the layer with this number."""
        config, hidden = self.config, self.config.hidden_size
        attention = SelfAttention(
            hidden,
            config.num_attention_heads,
            config.num_kv_heads,
            bias=False,
            head_dim=config.head_dim,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
        )
        has_experts = config.num_experts > 0 and number >= config.num_dense_layers
        mlp = SparseMLP(config) if has_experts else SwiGLUMLP(hidden, config.ffn_hidden_size)
        return DecoderLayer(config, attention, mlp)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tokens [batch, seq] → hidden states [batch, seq, hidden]. Positions enter in the attention."""
        return self.embedding(tokens)

    def layer_inputs(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rotary (cos, sin), each [*positions.shape, head_dim / 2], computed once for all layers."""
        config = self.config
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling, positions.device)
        return rope_cos_sin(positions, frequencies)


build = Decoder
