"""A decoder: rotary positions, grouped-query attention, and MLPs that are dense or of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.layers.attention import AttentionCore, SelfAttention
from titan_like.models.layers.experts import SparseMLP
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.layers.latent_attention import LatentAttention, LatentSizes
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


class MTPLayer(DecoderLayer):
    """A decoder layer that sees each next token too, to predict the one after it (arXiv 2412.19437, section 2.2).

    Its modules outside attention and MLP have DeepSeek's names; ``norm`` is before the output matrix.
    """

    takes_next_tokens = True

    def __init__(self, config: DecoderConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(config, attention, mlp)
        hidden = config.hidden_size
        self.enorm, self.hnorm = nn.RMSNorm(hidden, config.norm_eps), nn.RMSNorm(hidden, config.norm_eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden, config.norm_eps)

    def forward(
        self, x: torch.Tensor, *inputs: Any, next_embedding: torch.Tensor | None = None, **mlp: Any
    ) -> torch.Tensor:
        """[batch, seq, hidden] → the same and, after it, what predicts tokens after the next: [2 · batch, seq, hidden].

        Without ``next_embedding``, the embeddings of the next tokens, [batch, seq, hidden] → the same.
        """
        if next_embedding is None:
            return x
        both = torch.cat((self.enorm(next_embedding), self.hnorm(x)), 2)
        return torch.cat((x, self.norm(super().forward(self.eh_proj(both), *inputs, **mlp))))


class Decoder(Transformer):
    """A decoder over token sequences [batch, seq]; see `Transformer.forward`."""

    residual_outputs: tuple[str, ...] = ("attention.proj", "down")
    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        if config.kv_lora_rank:
            self.residual_outputs = ("heads.proj", "down")
        self.layers.update({str(i): self.new_layer(i) for i in range(sum(config.layer_counts))})
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)

    def new_layer(self, number: int) -> DecoderLayer:
        """Build the layer with this number."""
        config, hidden = self.config, self.config.hidden_size
        attention = self.new_latent_attention() if config.kv_lora_rank else self.new_attention()
        has_experts = config.num_experts > 0 and number >= config.num_dense_layers
        mlp = SparseMLP(config) if has_experts else SwiGLUMLP(hidden, config.ffn_hidden_size)
        kind = DecoderLayer if number < config.num_layers else MTPLayer
        return kind(config, attention, mlp)

    def new_attention(self) -> SelfAttention:
        """Build the attention of a layer."""
        config = self.config
        return SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_kv_heads,
            bias=False,
            head_dim=config.head_dim,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
        )

    def new_latent_attention(self) -> LatentAttention:
        """Build the latent attention of a layer."""
        config = self.config
        sizes = LatentSizes(
            config.q_lora_rank,
            config.kv_lora_rank,
            config.nope_head_size,
            config.rope_head_size,
            config.value_head_size,
        )
        core, has_bias = AttentionCore(0.0, scale=config.attention_scale or None), config.attention_bias == "all"
        return LatentAttention(config.hidden_size, config.num_attention_heads, sizes, core, bias=has_bias)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tokens [batch, seq] → hidden states [batch, seq, hidden]. Positions enter in the attention."""
        return self.embedding(tokens)

    def layer_inputs(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rotary (cos, sin), each [*positions.shape, rotary_size / 2], computed once for all layers."""
        config = self.config
        frequencies = rope_frequencies(config.rotary_size, config.rope_theta, config.rope_scaling, positions.device)
        return rope_cos_sin(positions, frequencies)


build = Decoder
