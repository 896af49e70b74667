"""Kimi's delta attention (arXiv 2510.26692): a gated delta net whose states decay by rows."""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.batch import Context
from titan_like.models.layers.delta_net import DeltaCore, uniform
from titan_like.models.layers.key_ranges import KeyRanges


class KimiDeltaCore(DeltaCore):
    """All between the projections that mixes positions. Channels are ordered by head, and there q, k, v."""

    initial_values: ClassVar[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = DeltaCore.initial_values | {
        "a_log": lambda normal: (1 + 15 * uniform(normal)).log(),
    }

    def __init__(self, heads: int, head_size: int, taps: int, chunk: int) -> None:
        super().__init__(heads, heads, head_size, head_size, taps, chunk)
        self.dt_bias = nn.Parameter(torch.empty(heads * head_size))

    def forward(  # type: ignore[override]
        self, mixed: torch.Tensor, strength: torch.Tensor, step: torch.Tensor, mask: KeyRanges | None
    ) -> torch.Tensor:
        """``mixed`` [batch, seq, heads, q, k and v], of corrections the strength, without size, and the decays' step.

        → like ``step``, [batch, seq, heads, head size].
        """
        _, a_log, dt_bias = self.weights()
        dtype = torch.promote_types(step.dtype, torch.float32)
        g = -a_log.to(dtype).exp()[:, None] * F.softplus(step.to(dtype) + dt_bias.view(step.shape[2:]))
        return self.recall(mixed, g, strength.sigmoid(), mask)


class KimiDeltaHeads(nn.Module):
    """The heads, which tensor parallelism splits. Rows of ``qkv`` are ordered by head, and there q, k, v."""

    def __init__(self, hidden_size: int, core: KimiDeltaCore, eps: float) -> None:
        super().__init__()
        heads, _, self.head_size, _ = core.sizes
        width = heads * self.head_size
        self.qkv = nn.Linear(hidden_size, 3 * width, bias=False)
        self.beta = nn.Linear(hidden_size, heads, bias=False)
        self.step = nn.Linear(self.head_size, width, bias=False)
        self.gate = nn.Linear(self.head_size, width, bias=False)
        self.core = core
        self.norm = nn.RMSNorm(self.head_size, eps)
        self.proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, latents: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, seq, hidden + 2 · head size] → [batch, seq, hidden].

        ``latents`` are hidden states, what the decays' steps come from, and what the gates come from.
        """
        size = self.head_size
        x, for_step, for_gate = latents.split([self.qkv.in_features, size, size], 2)
        mixed, step = self.qkv(x).unflatten(2, (-1, 3 * size)), self.step(for_step).unflatten(2, (-1, size))
        y = self.norm(self.core(mixed, self.beta(x), step, context.document_mask))
        return self.proj((y * self.gate(for_gate).view(y.shape).sigmoid()).flatten(2))


class KimiDeltaAttention(nn.Module):
    """What steps and gates of all heads come from, and the heads; as `LatentAttention` under tensor parallelism."""

    def __init__(self, hidden_size: int, core: KimiDeltaCore, eps: float) -> None:
        super().__init__()
        self.latents = nn.Linear(hidden_size, 2 * core.sizes[2], bias=False)
        self.heads = KimiDeltaHeads(hidden_size, core, eps)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]. It reads ``document_mask``."""
        return self.heads(torch.cat((x, self.latents(x)), 2), context)


KIMI_DELTA_PLAN = {
    "latents": "replicated_linear",
    "heads": "region",
    **{f"heads.{name}": "column_linear" for name in ("qkv", "beta", "step", "gate")},
    "heads.core": "split_channels",
    "heads.norm": "head_norm",
    "heads.proj": "row_linear",
}
"""How tensor parallelism splits a `KimiDeltaAttention`: module name → style."""
