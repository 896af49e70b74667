"""Attention, multi-head or grouped-query (arXiv 1706.03762, 2305.13245), to the sequence itself or to another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.layers.interval_attention import interval_attention
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.layers.norms import Norm
from titan_like.models.layers.positions import apply_rope


class AttentionCore(nn.Module):
    """Softmax attention over given queries, keys and values. It has no parameters."""

    def __init__(self, dropout: float, is_causal: bool = True, scale: float | None = None) -> None:
        """``scale`` multiplies the scores; None is 1/√head_dim."""
        super().__init__()
        self.dropout, self.is_causal, self.scale = dropout, is_causal, scale

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_mask: KeyRanges | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [batch, heads, seq, head_dim], k and v [batch, kv_heads, keys, head_dim] → shape of q.

        ``document_mask`` says which keys each query sees. ``bias``, [1, heads, seq, keys], is added to the scores, and
        hides a key where it is -inf. Without either, attention is causal, or sees all keys. Heads of v, and of the
        result, may be narrower; they are padded with zeros, because flash attention takes one width for all.

        Raises:
            ValueError: both are given.
        """
        if bias is not None and document_mask is not None:
            raise ValueError("attention takes either the keys that queries see, or a bias that hides the others")
        width, padding = v.shape[3], k.shape[3] - v.shape[3]
        if padding > 0:
            return self.attend(q, k, F.pad(v, (0, padding)), document_mask, bias)[..., :width]
        return self.attend(q, k, v, document_mask, bias)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        document_mask: KeyRanges | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """`forward` with heads of one width. Context parallelism extends it."""
        dropout, is_grouped = self.dropout if self.training else 0.0, q.shape[1] != k.shape[1]
        # Neither kernel for intervals drops probabilities. torch's takes a mask of all pairs, as dropout does anyway.
        if document_mask is None or dropout > 0:
            mask = bias if document_mask is None else document_mask.mask()
            return F.scaled_dot_product_attention(
                q, k, v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=self.is_causal and mask is None,
                scale=self.scale,
                enable_gqa=is_grouped,
            )  # fmt: skip
        if document_mask.blocks is None or q.dtype == torch.float64:  # which FlexAttention lacks
            return interval_attention(q, k, v, document_mask.first, document_mask.end, self.scale_of(q))
        return flex_attention(q, k, v, document_mask.blocks, is_grouped, self.scale)

    def scale_of(self, q: torch.Tensor) -> float:
        """What multiplies the scores of queries [batch, heads, seq, head_dim]."""
        return 1 / math.sqrt(q.shape[3]) if self.scale is None else self.scale


def flex_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Any, is_grouped: bool, scale: float | None
) -> torch.Tensor:
    """FlexAttention (arXiv 2412.05496) over the `BlockMask` ``blocks``; shapes are as in `AttentionCore`.

    It is compiled, because otherwise it would compute a matrix of all pairs.
    """
    from torch.nn.attention import flex_attention as flex

    if torch.compiler.is_compiling():
        return flex.flex_attention(q, k, v, block_mask=blocks, scale=scale, enable_gqa=is_grouped)
    return _compiled_flex_attention()(q, k, v, block_mask=blocks, scale=scale, enable_gqa=is_grouped)


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
        head_dim: int | None = None,
        scale: float | None = None,
        qk_norm: Literal["none", "head", "all"] = "none",
        norm_eps: float = 1e-5,
        norm: Callable[[int, float], Norm] = nn.RMSNorm,
        proj_bias: bool | None = None,
    ) -> None:
        """``head_dim`` is hidden_size / num_attention_heads by default; ``scale`` is as in the core.

        ``qk_norm`` normalises queries and keys before the rotation: each head by itself, as in Qwen3, or all of a
        token's together, as in OLMoE (arXiv 2409.02060). ``norm`` makes a norm of this width and epsilon.
        ``proj_bias`` is that of the output projection, if not ``bias``.
        """
        super().__init__()
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        self.q_norm, self.k_norm = (
            None if qk_norm == "none" else norm(self.head_dim * (1 if qk_norm == "head" else heads), norm_eps)
            for heads in (num_attention_heads, num_kv_heads)
        )
        self.is_norm_of_heads = qk_norm == "head"
        self.queries_per_kv_head = num_attention_heads // num_kv_heads
        self.qkv = nn.Linear(hidden_size, (num_attention_heads + 2 * num_kv_heads) * self.head_dim, bias=bias)
        self.core = AttentionCore(dropout, is_causal, scale)
        proj_bias = bias if proj_bias is None else proj_bias
        self.proj = nn.Linear(num_attention_heads * self.head_dim, hidden_size, bias=proj_bias)

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor] | None = None,
        document_mask: KeyRanges | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden].

        ``rope`` is (cos, sin), each [seq, rotated / 2] or [batch, seq, rotated / 2]. ``document_mask`` and ``bias``
        are as in the core.
        """
        batch, seq, _ = x.shape
        group = self.queries_per_kv_head
        qkv = self.qkv(x).view(batch, seq, -1, group + 2, self.head_dim)
        # One split instead of three slices, because its backward pass writes the gradient only once.
        q, k, v = (part.flatten(2, 3) for part in qkv.split([group, 1, 1], dim=3))  # [batch, seq, heads, head_dim]
        if self.q_norm is not None and self.k_norm is not None:
            if self.is_norm_of_heads:
                q, k = self.q_norm(q), self.k_norm(k)
            else:
                q, k = (norm(x.flatten(2)).view(x.shape) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        attended = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), document_mask, bias)
        return self.proj(attended.transpose(1, 2).flatten(2, 3))


class CrossAttention(nn.Module):
    """Attention of one sequence to another one, as of a decoder to its encoder's output.

    Rows of the fused projection for keys and values are ordered [kv_heads, 2, head_dim], as in `SelfAttention`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q = nn.Linear(hidden_size, num_attention_heads * head_dim, bias=False)
        self.kv = nn.Linear(hidden_size, 2 * num_kv_heads * head_dim, bias=False)
        self.core = AttentionCore(dropout, is_causal=False, scale=scale)
        self.proj = nn.Linear(num_attention_heads * head_dim, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden], which sees all of memory [batch, other seq, hidden] → [batch, seq, hidden]."""
        q = self.q(x).unflatten(2, (-1, self.head_dim))
        k, v = self.kv(memory).unflatten(2, (-1, 2, self.head_dim)).unbind(3)  # [batch, other seq, kv_heads, head_dim]
        attended = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.proj(attended.transpose(1, 2).flatten(2, 3))
