"""Multi-head latent attention (MLA, arXiv 2405.04434, section 2.1): keys and values come from a narrow latent.

A head's queries and keys have a part without positions, then a rotated part, whose key all heads share.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from titan_like.models.batch import Context
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.positions import apply_rope
from titan_like.models.rope_scaling import RopeScaling

if TYPE_CHECKING:
    from titan_like.models.decoder.config import DecoderConfig

LATENT_EPS = 1e-6  # epsilon of the latents' norms, in every model


class LatentHeads(nn.Module):
    """The heads, which tensor parallelism splits. Rows of ``q`` and ``kv`` are ordered by head."""

    def __init__(self, config: DecoderConfig, core: AttentionCore) -> None:
        super().__init__()
        self.config = config
        heads, value = config.num_attention_heads, config.value_head_size
        self.q = nn.Linear(config.q_lora_rank or config.hidden_size, heads * config.head_dim, bias=False)
        self.kv = nn.Linear(config.kv_lora_rank, heads * (config.nope_head_size + value), bias=False)
        self.core = core
        self.proj = nn.Linear(heads * value, config.hidden_size, bias=config.attention_bias == "all")

    def forward(self, latents: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, seq, (q_lora_rank or hidden) + kv_lora_rank + rope_head_size] → [batch, seq, hidden].

        ``latents`` are what queries come from, the latent of keys and values, and the key that all heads share.
        """
        nope, rope, value = self.config.nope_head_size, self.config.rope_head_size, self.config.value_head_size
        for_q, for_kv, key = latents.split([self.q.in_features, self.kv.in_features, rope], 2)
        q, turned = self.q(for_q).unflatten(2, (-1, nope + rope)).split([nope, rope], 3)
        k, v = self.kv(for_kv).unflatten(2, (-1, nope + value)).split([nope, value], 3)
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

    def __init__(self, config: DecoderConfig, core: AttentionCore) -> None:
        """With the attention bias "all" the matrices that read or write hidden states have biases, except heads.q."""
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias == "all"
        self.latent_sizes = config.kv_lora_rank, config.rope_head_size  # rope: of the key that all heads share
        has_latent = config.q_lora_rank > 0
        self.q_a = nn.Linear(hidden, config.q_lora_rank, bias=bias) if has_latent else nn.Identity()
        self.q_norm = nn.RMSNorm(config.q_lora_rank, LATENT_EPS) if has_latent else nn.Identity()
        self.kv_a = nn.Linear(hidden, sum(self.latent_sizes), bias=bias)
        self.kv_norm = nn.RMSNorm(config.kv_lora_rank, LATENT_EPS)
        self.heads = LatentHeads(config, core)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]. It reads ``rope`` and ``document_mask``."""
        latent, key = self.kv_a(x).split(self.latent_sizes, 2)
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
    """DeepSeek's factor on the scores: with yarn's ``mscale_all_dim``, more than 1 / √head_size."""
    if scaling is None or scaling.type != "yarn":
        return 1 / math.sqrt(head_size)
    return (1 + 0.1 * scaling.mscale_all_dim * math.log(max(scaling.factor, 1.0))) ** 2 / math.sqrt(head_size)
