"""Self-attention, multi-head or grouped-query (arXiv 1706.03762, 2305.13245): causal, full, or over given intervals."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.layers.interval_attention import interval_attention
from titan_like.models.layers.rope import apply_rope
from titan_like.models.layers.visible import VisibleKeys


class AttentionCore(nn.Module):
    """Softmax attention over given queries, keys and values. It has no parameters."""

    def __init__(self, dropout: float, is_causal: bool = True) -> None:
        super().__init__()
        self.dropout, self.is_causal = dropout, is_causal

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: VisibleKeys | None = None
    ) -> torch.Tensor:
        """q [batch, heads, seq, head_dim], k and v [batch, kv_heads, seq, head_dim] → shape of q.

        ``visible`` says which keys each query sees. Without it attention is causal, or sees all keys.
        """
        dropout, is_grouped = self.dropout if self.training else 0.0, q.shape[1] != k.shape[1]
        # Neither kernel for intervals drops probabilities. torch's takes a mask of all pairs, as dropout does anyway.
        if visible is None or dropout > 0:
            mask = None if visible is None else visible.mask()
            return F.scaled_dot_product_attention(
                q, k, v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=self.is_causal and mask is None,
                enable_gqa=is_grouped,
            )  # fmt: skip
        if visible.blocks is None or q.dtype == torch.float64:  # which FlexAttention lacks
            return interval_attention(q, k, v, visible.first, visible.end)
        return flex_attention(q, k, v, visible.blocks, is_grouped)


def flex_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Any, is_grouped: bool) -> torch.Tensor:
    """FlexAttention (arXiv 2412.05496), compiled, as it would otherwise compute a matrix of all pairs."""
    from torch.nn.attention import flex_attention as flex

    if torch.compiler.is_compiling():
        return flex.flex_attention(q, k, v, block_mask=blocks, enable_gqa=is_grouped)
    return _compiled_flex_attention()(q, k, v, block_mask=blocks, enable_gqa=is_grouped)


@cache
def _compiled_flex_attention() -> Callable:
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention)


class SelfAttention(nn.Module):
    """Attention with fused projections for queries, keys and values.

    Rows of the fused projection are ordered by key-value head, [kv_heads, queries per kv head + 2, head_dim], so that
    a contiguous slice of whole groups is itself a smaller attention layer.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_kv_heads: int,
        *,
        bias: bool,
        dropout: float = 0.0,
        is_causal: bool = True,
    ) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_attention_heads
        self.queries_per_kv_head = num_attention_heads // num_kv_heads
        self.qkv = nn.Linear(hidden_size, (num_attention_heads + 2 * num_kv_heads) * self.head_dim, bias=bias)
        self.core = AttentionCore(dropout, is_causal)
        self.proj = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
        visible: VisibleKeys | None = None,
    ) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden].

        ``rope`` is (cos, sin), each [seq, head_dim / 2] or [batch, seq, head_dim / 2]. ``visible`` is as in the core.
        """
        batch, seq, _ = x.shape
        group = self.queries_per_kv_head
        qkv = self.qkv(x).view(batch, seq, -1, group + 2, self.head_dim)
        # One split instead of three slices, because its backward pass writes the gradient only once.
        q, k, v = (part.flatten(2, 3) for part in qkv.split([group, 1, 1], dim=3))  # [batch, seq, heads, head_dim]
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        attended = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visible)
        return self.proj(attended.transpose(1, 2).flatten(2, 3))
