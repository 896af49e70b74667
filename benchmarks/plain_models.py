"""A plain GPT and a plain Llama, each on one page, for comparisons with the product's own models.

They compute what `titan_like.models` computes for the same shape, without pipelines, shards, masks or dropout. Run them
under autocast for bfloat16. No code of the product is used: a mistake there must not slow these down too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    """Causal self-attention with separate numbers of query and key-value heads."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim, bias=bias)
        self.out = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]; ``rotation`` is the cos and sin of every position."""
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)  # [batch, all heads, seq, head_dim]
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        return self.out(y.transpose(1, 2).reshape(batch, seq, hidden))


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of dimensions of x, [batch, heads, seq, head_dim], by rotation, float32 [2, seq, head_dim / 2]."""
    cos, sin = rotation.unbind()
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """A pre-norm layer: attention, then an MLP with GELU, or SwiGLU in a Llama."""

    def __init__(self, shape: Any, is_llama: bool) -> None:
        super().__init__()
        hidden, ffn = shape.hidden_size, shape.ffn_hidden_size
        norm = nn.RMSNorm if is_llama else nn.LayerNorm
        self.is_llama = is_llama
        self.norm1, self.norm2 = norm(hidden, eps=shape.norm_eps), norm(hidden, eps=shape.norm_eps)
        self.attention = Attention(hidden, shape.num_attention_heads, shape.num_kv_heads, bias=not is_llama)
        self.up = nn.Linear(hidden, 2 * ffn if is_llama else ffn, bias=not is_llama)
        self.down = nn.Linear(ffn, hidden, bias=not is_llama)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor | None) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        x = x + self.attention(self.norm1(x), rotation)
        inner = self.up(self.norm2(x))
        if self.is_llama:
            gate, value = inner.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * value)
        return x + self.down(F.gelu(inner, approximate="tanh"))


class PlainTransformer(nn.Module):
    """A GPT or a Llama of the shape of a `TransformerConfig`, on the current default device, with initial weights."""

    def __init__(self, shape: Any, seq_len: int) -> None:
        super().__init__()
        is_llama = hasattr(shape, "rope_theta")
        vocab, hidden = shape.padded_vocab_size, shape.hidden_size
        self.embedding = nn.Embedding(vocab, hidden)
        self.positions = None if is_llama else nn.Embedding(shape.max_seq_len, hidden)
        self.blocks = nn.ModuleList(Block(shape, is_llama) for _ in range(shape.num_layers))
        self.norm = (nn.RMSNorm if is_llama else nn.LayerNorm)(hidden, eps=shape.norm_eps)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if shape.tied_embeddings:
            self.head.weight = self.embedding.weight
        rotation = rotations(shape.head_dim, shape.rope_theta, seq_len) if is_llama else None
        self.register_buffer("rotation", rotation, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_residual = name.endswith(("attention.out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.num_layers) if is_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [batch, seq] → logits [batch, seq, vocab]."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x, self.rotation)
        return self.head(self.norm(x))


def rotations(head_dim: int, theta: float, seq_len: int) -> torch.Tensor:
    """The cos and sin of every position's angles, float32 [2, seq, head_dim / 2]; no scaling to longer contexts."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(seq_len)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()))
