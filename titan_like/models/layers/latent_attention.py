"""Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1): keys and values come from a narrow latent.

A head's queries and keys have a part without positions, then a rotated part, whose key all heads share.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from titan_like.models.batch import Context
from titan_like.models.config import RopeScaling
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.positions import apply_rope

LATENT_EPS = 1e-6  # epsilon of the latents' norms, whatever that of the model's other norms


class LatentSizes(NamedTuple):
    """Widths of latent attention."""

    query_rank: int  # of the queries' latent; 0: queries come from the hidden states
    kv_rank: int  # of the latent of keys and values
    nope: int  # part of a head's queries and keys without positions
    rope: int  # rotated part
    value: int  # of a head's values


class LatentHeads(nn.Module):
    """The heads, which tensor parallelism splits. Rows of ``q`` and ``kv`` are ordered by head."""

    def __init__(
        self, hidden_size: int, num_heads: int, sizes: LatentSizes, core: AttentionCore, *, bias: bool
    ) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.nope + sizes.rope
        self.q = nn.Linear(sizes.query_rank or hidden_size, num_heads * width, bias=False)
        self.kv = nn.Linear(sizes.kv_rank, num_heads * (sizes.nope + sizes.value), bias=False)
        self.core = core
        self.proj = nn.Linear(num_heads * sizes.value, hidden_size, bias=bias)

    def forward(self, latents: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, seq, query_rank or hidden + kv_rank + rope] → [batch, seq, hidden].

        ``latents`` are what queries come from, the latent of keys and values, and the key that all heads share.
        """
        sizes = self.sizes
        for_q, for_kv, key = latents.split([self.q.in_features, sizes.kv_rank, sizes.rope], 2)
        q, turned = self.q(for_q).unflatten(2, (-1, sizes.nope + sizes.rope)).split([sizes.nope, sizes.rope], 3)
        k, v = self.kv(for_kv).unflatten(2, (-1, sizes.nope + sizes.value)).split([sizes.nope, sizes.value], 3)
        key = key[:, :, None]
        if context.rope is not None:
            turned, key = apply_rope(turned, *context.rope), apply_rope(key, *context.rope)
        q, k = torch.cat((q, turned), 3), torch.cat((k, key.expand(*k.shape[:3], -1)), 3)
        attended = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), context.document_mask)
        return self.proj(attended.transpose(1, 2).flatten(2, 3))


class LatentAttention(nn.Module):
    """Latents of hidden states, and heads that attend with them.

    The latents are computed outside of the heads, on every tensor rank alike or, with sequence parallelism, each of its
    part of the sequence.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, sizes: LatentSizes, core: AttentionCore, *, bias: bool = False
    ) -> None:
        """``bias`` adds one to all matrices that read or write hidden states, except to ``q`` of the heads."""
        super().__init__()
        self.sizes = sizes
        self.q_a: nn.Module = nn.Identity()
        self.q_norm: nn.Module = nn.Identity()
        if sizes.query_rank:
            self.q_a = nn.Linear(hidden_size, sizes.query_rank, bias=bias)
            self.q_norm = nn.RMSNorm(sizes.query_rank, LATENT_EPS)
        self.kv_a = nn.Linear(hidden_size, sizes.kv_rank + sizes.rope, bias=bias)
        self.kv_norm = nn.RMSNorm(sizes.kv_rank, LATENT_EPS)
        self.heads = LatentHeads(hidden_size, num_heads, sizes, core, bias=bias)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]. It reads ``rope`` and ``document_mask``."""
        latent, key = self.kv_a(x).split([self.sizes.kv_rank, self.sizes.rope], 2)
        return self.heads(torch.cat((self.q_norm(self.q_a(x)), self.kv_norm(latent), key), 2), context)


LATENT_PLAN = {
    "q_a": "replicated_linear",
    "q_norm": "norm",
    "kv_a": "replicated_linear",
    "kv_norm": "norm",
    "heads": "region",
    "heads.q": "column_linear",
    "heads.kv": "column_linear",
    "heads.core": "split_heads",
    "heads.proj": "row_linear",
}
"""How tensor parallelism splits a `LatentAttention`: module name → style."""


def latent_scale(head_size: int, scaling: RopeScaling | None) -> float:
    """What DeepSeek multiplies scores by: with yarn's ``mscale_all_dim``, more than 1 / √head_size."""
    if scaling is None or scaling.type != "yarn":
        return 1 / math.sqrt(head_size)
    return (1 + 0.1 * scaling.mscale_all_dim * math.log(max(scaling.factor, 1.0))) ** 2 / math.sqrt(head_size)
