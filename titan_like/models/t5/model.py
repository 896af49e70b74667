"""T5: an encoder and a decoder with relative position biases, RMSNorm before each block, no biases (arXiv 1910.10683).

A sample is one sequence, the encoder's inputs and then the decoder's. So are its hidden states, [batch, encoder_len +
decoder_len, hidden], on their way through the layers: an encoder's layer changes the first part, and a decoder's layer
the second, which sees the first by cross attention. With sequence parallelism each process has its share of both parts.
"""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.batch import Batch, Context
from titan_like.models.layers.attention import AttentionCore, CrossAttention, SelfAttention
from titan_like.models.layers.mlp import GatedMLP, PlainMLP
from titan_like.models.layers.positions import RelativeBias
from titan_like.models.t5.config import T5Config
from titan_like.models.transformer import Transformer


class T5Context(NamedTuple):
    """Inputs of every layer besides the hidden states."""

    encoder_part: int  # how many of the positions on this process are the encoder's
    encoder_bias: torch.Tensor | None  # [1, heads, encoder_len, encoder_len]; None in a stage without encoder layers
    decoder_bias: torch.Tensor | None  # [1, heads, decoder_len, decoder_len], causal


def attention_core(config: T5Config, is_causal: bool) -> AttentionCore:
    """Attention whose scores are not scaled, because the initial queries are small enough."""
    return AttentionCore(config.dropout, is_causal, scale=1.0)


class T5Layer(nn.Module):
    """Base class of the layers of both stacks."""

    def __init__(self, config: T5Config, is_causal: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dropout = config.dropout
        self.attention_norm = nn.RMSNorm(hidden, config.norm_eps)
        self.attention = SelfAttention(config, attention_core(config, is_causal), bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, config.norm_eps)
        kind, activation = (GatedMLP, "gelu_tanh") if config.mlp == "gated_gelu" else (PlainMLP, "relu")
        self.mlp = kind(hidden, config.ffn_hidden_size, activation)

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        """Dropout of a residual branch or of a stack's output, [batch, positions, hidden]."""
        return F.dropout(x, self.dropout, self.training)


class EncoderLayer(T5Layer):
    """Changes the encoder's part: x + attention(norm(x)), then x + mlp(norm(x)). The last one normalises its output."""

    uses: ClassVar = ("encoder_bias",)

    def __init__(self, config: T5Config, is_last: bool) -> None:
        super().__init__(config, is_causal=False)
        self.final_norm = nn.RMSNorm(config.hidden_size, config.norm_eps) if is_last else None

    def forward(self, x: torch.Tensor, context: T5Context) -> torch.Tensor:
        """[batch, positions of both parts, hidden] → the same shape."""
        rest = x[:, context.encoder_part :]
        x = x[:, : context.encoder_part]
        x = x + self.drop(self.attention(self.attention_norm(x), Context(bias=context.encoder_bias)))
        x = x + self.drop(self.mlp(self.mlp_norm(x)))
        if self.final_norm is not None:
            x = self.drop(self.final_norm(x))
        return torch.cat((x, rest), 1)


class DecoderLayer(T5Layer):
    """Changes the decoder's part: causal attention, attention to the encoder, and MLP, each as x + block(norm(x))."""

    uses: ClassVar = ("decoder_bias",)
    stack: ClassVar = 1

    def __init__(self, config: T5Config) -> None:
        super().__init__(config, is_causal=True)
        self.cross_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.cross_attention = CrossAttention(config, attention_core(config, is_causal=False))

    def forward(self, x: torch.Tensor, context: T5Context) -> torch.Tensor:
        """[batch, positions of both parts, hidden] → the same shape."""
        memory = x[:, : context.encoder_part]
        x = x[:, context.encoder_part :]
        x = x + self.drop(self.attention(self.attention_norm(x), Context(bias=context.decoder_bias)))
        x = x + self.drop(self.cross_attention(self.cross_norm(x), memory))
        x = x + self.drop(self.mlp(self.mlp_norm(x)))
        return torch.cat((memory, x), 1)


class Readout(nn.Module):
    """Dropout before the output matrix. If that is the embedding table, whose rows are large, it also scales."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.factor = config.hidden_size**-0.5 if config.tied_embeddings else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, decoder positions, hidden] → the same shape."""
        x = F.dropout(x, self.dropout, self.training)
        return x if self.factor == 1.0 else x * self.factor


class T5(Transformer):
    """T5 over pairs of token sequences [batch, encoder_len + decoder_len]; see `Transformer.forward`."""

    shared = ("encoder_bias", "decoder_bias")
    head = ("norm", "readout")
    config: T5Config

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.dropout = config.dropout
        buckets, distance = config.num_position_buckets, config.max_position_distance
        self.encoder_bias = RelativeBias(buckets, distance, config.num_attention_heads, is_causal=False)
        self.decoder_bias = RelativeBias(buckets, distance, config.num_attention_heads, is_causal=True)
        encoder_layers = config.num_encoder_layers
        for i in range(config.num_layers):
            is_encoder = i < encoder_layers
            self.layers[str(i)] = EncoderLayer(config, i == encoder_layers - 1) if is_encoder else DecoderLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.readout = Readout(config)

    def embed(self, batch: Batch) -> torch.Tensor:
        """As in the base class. Positions enter in the attention."""
        tokens, encoder_len = batch.tokens, cast(int, batch.encoder_len)
        if self.sequence_shards > 1:  # order tokens so that the share of each process has its share of both parts
            parts = tokens.split([encoder_len, tokens.shape[1] - encoder_len], dim=1)
            chunks = [part.chunk(self.sequence_shards, dim=1) for part in parts]
            tokens = torch.cat([chunk for pair in zip(*chunks, strict=True) for chunk in pair], 1)
        return F.dropout(self.embedding(tokens), self.dropout, self.training)

    def contexts(self, batch: Batch) -> Mapping[str, T5Context]:
        """The biases of both stacks, computed once for all layers.

        Positions, [encoder_len + decoder_len], count from 0 in both parts if each is a CP shard of its sequence.
        """
        positions, encoder_len = cast(torch.Tensor, batch.positions), cast(int, batch.encoder_len)
        parts = {"encoder_bias": positions[:encoder_len], "decoder_bias": positions[encoder_len:]}
        if self.context_shards == 1:
            parts["decoder_bias"] = parts["decoder_bias"] - encoder_len
        biases = [
            self.get_submodule(name)(part, len(part) * self.context_shards) if hasattr(self, name) else None
            for name, part in parts.items()
        ]
        return dict.fromkeys(self.layers, T5Context(encoder_len // self.sequence_shards, *biases))

    def predict(self, x: torch.Tensor, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """As in the base class, of the decoder's positions."""
        return super().predict(self.decoder_part(x, batch), batch)

    def loss(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """As in the base class, of the decoder's positions."""
        labels = cast(torch.Tensor, batch.labels)[:, batch.encoder_len :]
        return super().loss(self.decoder_part(x, batch), batch._replace(labels=labels))

    def decoder_part(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Hidden states of both parts → the decoder's: [batch, decoder positions here, hidden]."""
        return x[:, cast(int, batch.encoder_len) // self.sequence_shards :]

    def initial_std(self, name: str, parameter: torch.Tensor) -> float | torch.Tensor:
        """As in T5: each matrix keeps the size of its inputs, and queries make up for scores without a scale.

        The result is a number, or [rows] for the fused projection of queries, keys and values. An output matrix of its
        own begins like the other matrices; Hugging Face's N(0, 1) would begin with a loss of hundreds.
        """
        config = self.config
        queries, factor = config.head_dim**-0.5, config.init_std
        if name == "embedding.weight":
            return factor
        if name.endswith("bias.table.weight"):
            return factor * config.hidden_size**-0.5
        std = factor * parameter.shape[1] ** -0.5
        if name.endswith("cross_attention.q.weight"):
            return std * queries
        if name.endswith("attention.qkv.weight"):
            group = config.num_attention_heads // config.num_kv_heads
            rows = torch.full((config.num_kv_heads, group + 2, config.head_dim), std)
            rows[:, :group] *= queries
            return rows.flatten()
        return std


build = T5
