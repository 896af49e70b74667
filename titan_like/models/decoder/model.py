"""A decoder: rotary positions, grouped-query attention, and MLPs that are dense or of experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from titan_like.models.decoder.config import DecoderConfig, LayerKind
from titan_like.models.layers.attention import AttentionCore, SelfAttention
from titan_like.models.layers.experts import SparseMLP
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.layers.latent_attention import LatentAttention, LatentSizes, latent_scale
from titan_like.models.layers.mlp import GatedMLP, PlainMLP
from titan_like.models.layers.norms import make_norm
from titan_like.models.layers.positions import rope_cos_sin, rope_frequencies, rope_magnitude
from titan_like.models.transformer import Labels, Transformer


class DecoderLayer(nn.Module):
    """A block of attention and one of an MLP. What a block computes is added to the hidden states."""

    def __init__(self, config: DecoderConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.block, self.residual_scale = config.block, config.residual_scale
        self.takes_padding_mask = isinstance(mlp, SparseMLP)  # experts do not count padding
        has_two = config.block == "sandwich"
        self.attention_norm = norm_of(config)
        self.attention = attention
        self.attention_post_norm = norm_of(config) if has_two else None
        self.mlp_norm = norm_of(config)
        self.mlp = mlp
        self.mlp_post_norm = norm_of(config) if has_two else None

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        document_mask: KeyRanges | None = None,
        **mlp: Any,
    ) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]; cos and sin are [seq, rotated / 2], or with a batch before.

        Causal without ``document_mask``, and without positions if cos and sin are None. The MLP takes further inputs.
        """
        rope = None if cos is None else (cos, sin)
        if self.block == "post":
            x = self.add(x, self.attention(x, rope, document_mask), self.attention_norm)
            return self.add(x, self.mlp(x, **mlp), self.mlp_norm)
        after = self.add(x, self.attention(self.attention_norm(x), rope, document_mask), self.attention_post_norm)
        entered = x if self.block == "parallel" else after
        return self.add(after, self.mlp(self.mlp_norm(entered), **mlp), self.mlp_post_norm)

    def add(self, x: torch.Tensor, result: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        """The hidden states x plus what a block computed, normalised and scaled; all [batch, seq, hidden]."""
        result = result if norm is None else norm(result)
        return x + (result if self.residual_scale == 1 else self.residual_scale * result)


def norm_of(config: DecoderConfig) -> nn.Module:
    """A norm over the hidden states."""
    return make_norm(config.hidden_size, config.norm_eps, config.norm, config.norm_offset)


class MTPLayer(DecoderLayer):
    """A decoder layer that sees each next token too, to predict the one after it (arXiv 2412.19437, section 2.2).

    Its modules outside attention and MLP have DeepSeek's names; ``norm`` is before the output matrix. The hidden states
    that it gets for a loss have gone through the model's own last norm.
    """

    takes_next_tokens = True

    def __init__(self, config: DecoderConfig, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__(config, attention, mlp)
        self.enorm, self.hnorm, self.norm = norm_of(config), norm_of(config), norm_of(config)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

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

    has_kinds = takes_num_tokens = True
    residual_outputs: tuple[str, ...] = ("attention.proj", "down")
    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        if config.kv_lora_rank:
            self.residual_outputs = ("heads.proj", "down")
        self.layers.update({str(i): self.new_layer(i) for i in range(len(config.layer_kinds))})
        self.norm = norm_of(config)

    @property
    def final_softcap(self) -> float:  # type: ignore[override]
        """The soft cap of the logits."""
        return self.config.final_softcap

    def new_layer(self, number: int) -> DecoderLayer:
        """Build the layer with this number."""
        config, mlp = self.config, GatedMLP if self.config.gated else PlainMLP
        layer = DecoderLayer if number < config.num_layers else MTPLayer
        attention = self.new_latent_attention(number) if config.kv_lora_rank else self.new_attention(number)
        if config.num_experts and number >= config.num_dense_layers:
            return layer(config, attention, SparseMLP(config))
        dense = mlp(config.hidden_size, config.ffn_hidden_size, config.activation, bias=config.mlp_bias)
        return layer(config, attention, dense)

    def new_attention(self, number: int) -> SelfAttention:
        """Build the attention of the layer with this number."""
        config = self.config
        return SelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_kv_heads,
            bias=config.attention_bias != "none",
            proj_bias=config.attention_bias == "all",
            head_dim=config.head_dim,
            scale=config.attention_scale or None,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            norm=partial(make_norm, kind=config.norm, offset=config.norm_offset),
            softcap=config.attention_softcap,
            window=config.kind(config.kind_of(number)).window,
            sinks=config.attention_sinks,
        )

    def new_latent_attention(self, number: int) -> LatentAttention:
        """Build the latent attention of the layer with this number."""
        config, kind = self.config, self.config.kind(self.config.kind_of(number))
        ranks, heads = (config.q_lora_rank, config.kv_lora_rank), config.num_attention_heads
        sizes = LatentSizes(*ranks, config.nope_head_size, config.rope_head_size, config.value_head_size)
        scale = config.attention_scale or latent_scale(config.head_size, kind.rope_scaling)
        num_sinks = heads if config.attention_sinks else 0
        core = AttentionCore(0.0, True, scale, config.attention_softcap, kind.window, num_sinks)
        return LatentAttention(config.hidden_size, heads, sizes, core, bias=config.attention_bias == "all")

    def embed_next(self, next_tokens: torch.Tensor) -> torch.Tensor:
        """As in the base class."""
        return self._scale_embedding(super().embed_next(next_tokens))

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """tokens [batch, seq] → hidden states [batch, seq, hidden]. Positions enter in the attention."""
        return self._scale_embedding(self.embedding(tokens))

    def _scale_embedding(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.config.embedding_scale
        if self.config.round_embedding_scale:  # to the type of x
            return x * torch.full((), factor, dtype=x.dtype, device=x.device)
        return _scaled(x, factor)

    def layer_inputs(self, positions: torch.Tensor, num_tokens: torch.Tensor | None = None) -> tuple[Any, ...]:
        """The rotary (cos, sin) of each kind of layer, each [*positions.shape, rotated / 2], or None without rotation.

        They are computed once for all layers. Of a single kind, (cos, sin) is the result itself. longrope chooses
        by the length of the sequences, or for each by ``num_tokens``, int64 [batch].
        """
        length = positions.shape[-1] * self.context_shards if num_tokens is None else num_tokens[:, None, None]
        tables = [self._cos_sin(self.config.kind(name), positions, length) for name in self.config.kind_names]
        return tables[0] if len(tables) == 1 else tuple(tables)

    def _cos_sin(
        self, kind: LayerKind, positions: torch.Tensor, length: int | torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not kind.rope_theta:
            return None, None
        rope = self.config.rotary_size, kind.rope_theta, kind.rope_scaling
        frequencies = rope_frequencies(*rope, positions.device, length)
        return rope_cos_sin(positions, frequencies, rope_magnitude(kind.rope_scaling))

    def inputs_of(self, layer: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """As in the base class: (cos, sin) of the layer's kind."""
        names = self.config.kind_names
        return inputs if len(names) == 1 else inputs[names.index(self.config.kind_of(layer))]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """As in the base class."""
        return super().logits(_scaled(x, self.config.logit_scale))

    def loss_of_tokens(self, x: torch.Tensor, labels: Labels, factor: torch.Tensor) -> torch.Tensor:
        """As in the base class."""
        return super().loss_of_tokens(_scaled(x, self.config.logit_scale), labels, factor)


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1 else factor * x


build = Decoder
