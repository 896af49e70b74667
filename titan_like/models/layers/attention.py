"""Attention, multi-head or grouped-query (arXiv 1706.03762, 2305.13245), to the sequence itself or to another one."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.batch import Context
from titan_like.models.config import TransformerConfig
from titan_like.models.layers.interval_attention import Scores, interval_attention
from titan_like.models.layers.key_ranges import KeyRanges, block_mask
from titan_like.models.layers.positions import apply_rope

_PLAIN = Context()


class AttentionCore(nn.Module):
    """Softmax attention over given queries, keys and values. It has no parameters, except sinks."""

    takes_blocks = True  # whether FlexAttention computes it on GPUs, if keys are in ranges
    takes_sinks = False  # whether causal attention without ranges has sinks too
    sinks: nn.Parameter | None

    def __init__(
        self,
        dropout: float,
        is_causal: bool = True,
        scale: float | None = None,
        softcap: float = 0.0,
        window: int = 0,
        num_sinks: int = 0,
        chunk: int = 0,
    ) -> None:
        """``scale`` multiplies the scores; None is 1/√head_dim. Then scores s become softcap · tanh(s / softcap).

        A query sees at most the ``window`` keys that end with its own, or those from where its ``chunk`` begins:
        positions of the sequence in which samples are packed, not of a document. ``num_sinks`` heads, 0 or all, have
        one more logit each, a parameter, that has no value (arXiv 2309.17453, section 3.2). Raises a `ValueError` if no
        kernel computes the combination.
        """
        super().__init__()
        if dropout and (softcap or num_sinks):
            raise ValueError("attention with a soft cap or sinks drops no probabilities; set dropout to 0")
        if (window or chunk) and not is_causal:
            raise ValueError("only causal attention has a window or chunks; set both to 0")
        self.dropout, self.is_causal, self.scale, self.softcap = dropout, is_causal, scale, softcap
        self.window = window or chunk  # most keys that a query sees
        self.has_chunks = chunk > 0
        self.is_plain = not (self.window or softcap or num_sinks)
        self.register_parameter("sinks", nn.Parameter(torch.empty(num_sinks)) if num_sinks else None)

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
        result, may be narrower or, with a ``scale``, wider; the others are padded with zeros, because flash attention
        takes one width for all. Raises a `ValueError` if both are given, or a bias with a window, a soft cap or sinks.
        """
        needs_ranges = not self.is_plain and self.needs_ranges
        if bias is not None and (document_mask is not None or needs_ranges):
            raise ValueError("attention takes either the keys that queries see, or a bias that hides the others")
        if needs_ranges:
            document_mask = self.key_ranges(q.shape[0], q.shape[2], q.device, document_mask)
        width, padding = v.shape[3], k.shape[3] - v.shape[3]
        if padding > 0:
            return self.attend(q, k, F.pad(v, (0, padding)), document_mask, bias)[..., :width]
        if padding < 0 and self.scale is not None:  # or else the padded width would set the scale
            q, k = (F.pad(x, (0, -padding)) for x in (q, k))
        return self.attend(q, k, v, document_mask, bias)

    @property
    def needs_ranges(self) -> bool:
        """Whether a kernel for intervals computes it in any case, because torch's others lack what it has."""
        return self.window > 0 or not self._has_kernel

    @property
    def mask_settings(self) -> tuple[bool | int, ...]:
        """All of a core's settings that `key_ranges` reads: cores that agree in them may share its result."""
        return self.window, self.has_chunks, self.is_causal, self._has_kernel, self.takes_blocks

    @property
    def _has_kernel(self) -> bool:
        takes_sinks = self.takes_sinks and self.is_causal
        return not self.softcap and (self.sinks is None or takes_sinks)

    def key_ranges(
        self, batch: int, seq_len: int, device: torch.device, document_mask: KeyRanges | None
    ) -> KeyRanges | None:
        """The keys that ``seq_len`` queries on this process see within the window; None: plain causal attention.

        All cores with equal `mask_settings` may share the result, which they get as their ``document_mask``. Raises a
        `ValueError` if the mask belongs to another window.
        """
        order, num_keys = self.query_order(seq_len, device)
        window = self.window if self.window < num_keys else 0
        if document_mask is not None and document_mask.window not in (0, window):
            raise ValueError(f"attention with a window of {window} got a mask for a window of {document_mask.window}")
        if (document_mask is not None or self._has_kernel) and window == (
            0 if document_mask is None else document_mask.window
        ):
            return document_mask
        if document_mask is None:
            end = order + 1 if self.is_causal else torch.full_like(order, num_keys)
            document_mask = KeyRanges(torch.zeros_like(order).expand(batch, -1), end.expand(batch, -1))
        earliest = order - order % window if window and self.has_chunks else order - window + 1
        first = torch.maximum(document_mask.first, earliest) if window else document_mask.first
        blocks = block_mask(first, document_mask.end, num_keys) if first.is_cuda and self.takes_blocks else None
        return KeyRanges(first, document_mask.end, blocks, window)

    def query_order(self, seq_len: int, device: torch.device) -> tuple[torch.Tensor, int]:
        """The numbers, in the whole sequence, of the queries that it computes, int64 [queries]; the number of keys.

        ``seq_len`` is the number of queries that it is given.
        """
        return torch.arange(seq_len, device=device), seq_len

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
        return self.attend_to_ranges(q, k, v, document_mask)

    def attend_to_ranges(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: KeyRanges) -> torch.Tensor:
        """Attention to ranges of keys, without dropout, by FlexAttention if there are blocks."""
        if ranges.blocks is None or q.dtype == torch.float64:  # which FlexAttention lacks
            return interval_attention(q, k, v, ranges, self.scores_of(q))
        return flex_attention(q, k, v, ranges.blocks, self.scores_of(q))

    def scores_of(self, q: torch.Tensor) -> Scores:
        """How the scores of queries [batch, heads, seq, head_dim] become probabilities."""
        return Scores(self.scale_of(q), self.softcap, self.local_sinks())

    def local_sinks(self) -> torch.Tensor | None:
        """The sinks of the heads that this process computes: [heads]. An axis that splits heads extends it."""
        return self.sinks

    def scale_of(self, q: torch.Tensor) -> float:
        """What multiplies the scores of queries [batch, heads, seq, head_dim]."""
        return 1 / math.sqrt(q.shape[3]) if self.scale is None else self.scale


def flex_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: Any,
    scores: Scores,
    kernel: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """FlexAttention (arXiv 2412.05496) over the `BlockMask` ``blocks``.

    ``kernel`` takes the place of torch's `flex_attention`, which is compiled, because otherwise it would compute a
    matrix of all pairs.
    """
    from torch.nn.attention import flex_attention as flex

    if kernel is None:
        kernel = flex.flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    scale, softcap, sinks = scores
    options: dict[str, Any] = {"block_mask": blocks, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    options |= {"score_mod": _soft_capped(softcap)} if softcap else {}
    if sinks is None:
        return kernel(q, k, v, **options)
    output, more = kernel(q, k, v, return_aux=flex.AuxRequest(lse=True), **options)
    return (output * (more.lse - sinks[:, None]).sigmoid()[..., None]).to(output.dtype)


@cache
def _compiled_flex_attention() -> Callable:
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention)


@cache
def _soft_capped(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


class SelfAttention(nn.Module):
    """Attention with fused projections for queries, keys and values.

    Rows of the fused projection are ordered by key-value head, [kv_heads, queries per kv head + 2, head_dim], so that
    a contiguous slice of whole groups is itself a smaller attention layer. Each query may be followed by a gate, of
    which the sigmoid multiplies the head's result.
    """

    def __init__(
        self,
        shape: TransformerConfig,
        core: AttentionCore,
        *,
        bias: bool,
        proj_bias: bool | None = None,
        qk_norm: Literal["none", "head", "heads", "all"] = "none",
        norm_after_rope: bool = False,
        norm: Callable[[int, float], nn.Module] = nn.RMSNorm,
        has_gate: bool = False,
        clip: float = 0.0,
    ) -> None:
        """``shape`` has the sizes of the projections, and the epsilon of norms.

        ``bias``: of the projections; ``proj_bias``: of the output projection, if it differs. ``qk_norm``
        normalises queries and keys before the rotation, or after it: each head by itself, as in Qwen3, with weights for
        all heads, or all of a token's together, as in OLMoE (arXiv 2409.02060). ``norm`` makes a norm of a width and
        epsilon. Before the rotation queries, keys and values are limited to ± ``clip``, unless it is 0.
        """
        super().__init__()
        heads, kv_heads = shape.num_attention_heads, shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.is_norm_of_heads, self.norm_after_rope = qk_norm in ("head", "heads"), norm_after_rope
        self.clip = clip
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if qk_norm != "none":
            q_heads, k_heads = (1, 1) if qk_norm == "head" else (heads, kv_heads)  # whose weights differ
            self.q_norm = norm(q_heads * self.head_dim, shape.norm_eps)
            self.k_norm = norm(k_heads * self.head_dim, shape.norm_eps)
        self.has_gate = has_gate
        self.rows_per_kv_head = heads // kv_heads * (2 if has_gate else 1)  # those of its queries, in heads
        rows = (self.rows_per_kv_head + 2) * kv_heads * self.head_dim
        self.qkv = nn.Linear(shape.hidden_size, rows, bias=bias)
        self.core = core
        proj_bias = bias if proj_bias is None else proj_bias
        self.proj = nn.Linear(heads * self.head_dim, shape.hidden_size, bias=proj_bias)

    def forward(self, x: torch.Tensor, context: Context = _PLAIN) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]. It reads all but ``positions`` and what MLPs read."""
        batch, seq, _ = x.shape
        group = self.rows_per_kv_head
        qkv = self.qkv(x).view(batch, seq, -1, group + 2, self.head_dim)
        # One split instead of three slices, because its backward pass writes the gradient only once.
        q, k, v = (part.flatten(2, 3) for part in qkv.split([group, 1, 1], dim=3))  # [batch, seq, heads, head_dim]
        gate = None
        if self.has_gate:
            q, gate = q.unflatten(2, (-1, 2)).unbind(3)
        if not self.norm_after_rope:
            q, k = self.normalise(q, k)
        if self.clip:
            q, k, v = (x.clamp(-self.clip, self.clip) for x in (q, k, v))
        if context.rope is not None:
            q, k = apply_rope(q, *context.rope), apply_rope(k, *context.rope)
        if self.norm_after_rope:
            q, k = self.normalise(q, k)
        if context.query_scale is not None:
            q = q * context.query_scale[..., None, None].type_as(q)
        masks = context.document_mask, context.bias
        attended = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *masks).transpose(1, 2)
        return self.proj(self.gate_output(attended, gate, x).flatten(2, 3))

    def gate_output(self, attended: torch.Tensor, gate: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        """The core's result → what the output projection takes, both [batch, seq, heads, head_dim]; to be overridden.

        ``gate`` has the same shape, if there is one, and ``x``, [batch, seq, hidden], is the input of `forward`. Heads
        are those of this rank: matrices that make them from x are split by columns.
        """
        return attended if gate is None else attended * gate.sigmoid()

    def normalise(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, [batch, seq, heads, head_dim] each, after their norms, if there are any."""
        if self.q_norm is None or self.k_norm is None:
            return q, k
        if self.is_norm_of_heads:
            return self.q_norm(q), self.k_norm(k)
        return self.q_norm(q.flatten(2)).view(q.shape), self.k_norm(k.flatten(2)).view(k.shape)


ATTENTION_PLAN = {
    "": "region",
    "qkv": "column_linear",  # its rows are ordered by head groups, so each rank gets whole groups
    "core": "split_heads",
    "proj": "row_linear",
}
"""How tensor parallelism splits a `SelfAttention`: module name → style."""


class CrossAttention(nn.Module):
    """Attention of one sequence to another one, as of a decoder to its encoder's output.

    Rows of the fused projection for keys and values are ordered [kv_heads, 2, head_dim], as in `SelfAttention`.
    """

    def __init__(self, shape: TransformerConfig, core: AttentionCore) -> None:
        """``shape`` has the sizes of the projections."""
        super().__init__()
        self.head_dim = shape.head_dim
        width = shape.num_attention_heads * self.head_dim
        self.q = nn.Linear(shape.hidden_size, width, bias=False)
        self.kv = nn.Linear(shape.hidden_size, 2 * shape.num_kv_heads * self.head_dim, bias=False)
        self.core = core
        self.proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden], which sees all of memory [batch, other seq, hidden] → [batch, seq, hidden]."""
        q = self.q(x).unflatten(2, (-1, self.head_dim))
        k, v = self.kv(memory).unflatten(2, (-1, 2, self.head_dim)).unbind(3)  # [batch, other seq, kv_heads, head_dim]
        attended = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.proj(attended.transpose(1, 2).flatten(2, 3))
