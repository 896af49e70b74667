"""Gated delta net (arXiv 2412.06464) as Qwen3-Next has it: a short convolution, the delta rule and a gated norm."""

import math
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.batch import Context
from titan_like.models.layers.delta_rule import chunk_products, gated_delta_rule, short_convolution
from titan_like.models.layers.key_ranges import KeyRanges


def uniform(normal: torch.Tensor) -> torch.Tensor:
    """N(0, 1) → uniform between 0 and 1."""
    return torch.special.ndtr(normal)


def initial_steps(normal: torch.Tensor) -> torch.Tensor:
    """The inverse softplus of steps of 0.001 to 0.1, uniform in their logarithm, as in Mamba (arXiv 2312.00752)."""
    steps = (math.log(1e-3) + math.log(100) * uniform(normal)).exp()
    return steps + (-(-steps).expm1()).log()


class DeltaCore(nn.Module):
    """All between the projections that mixes positions. Channels are ordered by key head, and there q, k, v."""

    # What initial weights become that are drawn from N(0, 1).
    initial_values: ClassVar[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "conv": lambda normal: (2 * uniform(normal) - 1) / math.sqrt(normal.shape[2]),
        "a_log": lambda normal: (16 * uniform(normal)).clamp(min=0.01).log(),
        "dt_bias": initial_steps,
    }

    def __init__(self, key_heads: int, value_heads: int, key_size: int, value_size: int, taps: int, chunk: int) -> None:
        super().__init__()
        self.sizes = key_heads, value_heads, key_size, value_size
        self.chunk = chunk
        self.conv = nn.Parameter(torch.empty(2 * key_heads * key_size + value_heads * value_size, 1, taps))
        self.a_log = nn.Parameter(torch.empty(value_heads))
        self.dt_bias = nn.Parameter(torch.empty(value_heads))

    def products(self, seq_len: int) -> int:
        """Multiplications of a sequence."""
        return chunk_products(seq_len, *self.sizes, self.chunk)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The convolution, log of the decay's rate and bias of its step, of the heads that this process computes."""
        return self.conv, self.a_log, self.dt_bias

    def forward(self, mixed: torch.Tensor, gates: torch.Tensor, mask: KeyRanges | None) -> torch.Tensor:
        """Projections, [batch, seq, key heads, …] → [batch, seq, value heads, value size].

        ``mixed`` has a key head's query, its key and the values of its heads; ``gates`` what becomes the strengths of
        their corrections, then their steps.
        """
        _, a_log, dt_bias = self.weights()
        # Not `chunk`: its gradient's strides are not those that torch 2.11 traces.
        strength, step = gates.unflatten(3, (2, -1)).movedim(3, 0).flatten(3).unbind()
        dtype = torch.promote_types(step.dtype, torch.float32)
        g = -a_log.to(dtype).exp() * F.softplus(step.to(dtype) + dt_bias)
        return self.recall(mixed, g, strength.sigmoid(), mask)

    def recall(self, mixed: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, mask: KeyRanges | None) -> torch.Tensor:
        """The convolution and `gated_delta_rule`; ``mixed`` and the result are those of `forward`."""
        starts, key_size = None if mask is None else mask.first, self.sizes[2]
        mixed = F.silu(short_convolution(mixed.flatten(2), self.weights()[0], starts)).view(mixed.shape)
        q, k, v = mixed.split([key_size, key_size, mixed.shape[3] - 2 * key_size], 3)
        v = v.unflatten(3, (-1, self.sizes[3])).flatten(2, 3)
        return gated_delta_rule(q, k, v, g, beta, starts, self.chunk)


class GatedDeltaNet(nn.Module):
    """Projections, `DeltaCore`, and a norm of each head whose result a gate multiplies.

    Rows of ``qkvz`` and ``ba`` are ordered by key head, so that each tensor rank gets whole heads.
    """

    def __init__(self, hidden_size: int, core: DeltaCore, eps: float) -> None:
        super().__init__()
        key_heads, value_heads, key_size, self.value_size = core.sizes
        self.values_per_key_head = value_heads // key_heads
        width = value_heads * self.value_size
        self.qkvz = nn.Linear(hidden_size, 2 * (key_heads * key_size + width), bias=False)
        self.ba = nn.Linear(hidden_size, 2 * value_heads, bias=False)
        self.core = core
        self.norm = nn.RMSNorm(self.value_size, eps)
        self.proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]. It reads ``document_mask``."""
        gates = self.ba(x).unflatten(2, (-1, 2 * self.values_per_key_head))
        width = self.values_per_key_head * self.value_size
        projected = self.qkvz(x).unflatten(2, (gates.shape[2], -1))
        mixed, z = projected.split([projected.shape[3] - width, width], 3)
        y = self.norm(self.core(mixed, gates, context.document_mask))
        return self.proj((y * F.silu(z.reshape(y.shape))).flatten(2))


DELTA_PLAN = {
    "": "region",
    "qkvz": "column_linear",
    "ba": "column_linear",
    "core": "split_channels",
    "norm": "head_norm",
    "proj": "row_linear",
}
"""How tensor parallelism splits a `GatedDeltaNet`: module name → style."""
