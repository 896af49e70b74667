"""Mamba-2 (state-space duality, arXiv 2405.21060): a short convolution, a decaying state and a gated norm.

For each head, with an input x [head size], a step, and b and c [state size] that the heads of a group share, the state
S [state size, head size] and the output y follow

    S = exp(-exp(a_log) · step) · S + b (step · x)        y = c S + skip · x

Within a chunk of a sequence this is attention with decays as its mask, and between chunks a recurrence (section 6). A
document of a packed sequence begins with a state of zeros.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from titan_like.models.batch import Context
from titan_like.models.layers.delta_net import initial_steps, uniform
from titan_like.models.layers.delta_rule import CHUNK, chunk_decays, in_chunks, short_convolution
from titan_like.models.layers.norms import GroupRMSNorm


def state_space_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    g: torch.Tensor,
    starts: torch.Tensor | None = None,
    chunk: int = CHUNK,
) -> torch.Tensor:
    """Inputs times their steps x [batch, seq, heads, head size] → c S of each, with the shape of x.

    b and c are [batch, seq, groups, state size], and each group serves equally many consecutive heads. ``g`` [batch,
    seq, heads] is the log of the decay. ``starts``, int64 [batch, seq], is where each position's document begins; None:
    at 0. All have the dtype of x, float32 at least.
    """
    batch, seq, heads, size = x.shape
    groups = b.shape[2]
    decay, since_chunk = chunk_decays(g, starts, groups, chunk)
    x = in_chunks(x, groups, chunk)  # [chunks, batch, groups, heads / groups, chunk, head size]
    b, c = (in_chunks(part, groups, chunk).squeeze(3) for part in (b, c))  # [chunks, batch, groups, chunk, state size]
    output = ((c @ b.mT).unsqueeze(3) * decay) @ x
    if len(x) > 1:
        # A group's heads side by side share a matmul.
        written = (decay[:-1, ..., -1:, :].mT * x[:-1]).transpose(3, 4).flatten(4)
        states = (b[:-1].mT @ written).unbind(0)
        kept = since_chunk[:, ..., -1:, :].expand(-1, -1, -1, -1, -1, size).transpose(3, 4).flatten(4).unbind(0)
        before = [states[0]]  # the states that the second chunk and those after it begin with
        for state, keep in zip(states[1:], kept[1:], strict=False):
            before.append(keep * before[-1] + state)
        read = (c[1:] @ torch.stack(before)).unflatten(4, (-1, size)).transpose(3, 4)
        output = torch.cat((output[:1], output[1:] + since_chunk[1:] * read))
    output = output.permute(1, 0, 4, 2, 3, 5)  # [batch, chunks, chunk, groups, heads / groups, head size]
    return output.reshape(batch, -1, heads, size)[:, :seq]


class Convolution(nn.Module):
    """SiLU of a causal convolution of each channel within its document."""

    def __init__(self, channels: int, taps: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.initial_values = dict.fromkeys(("weight", "bias"), partial(_initial_taps, taps))

    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight and the bias of the channels that this process computes."""
        return self.weight, self.bias

    def forward(self, x: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
        """[batch, seq, channels] → the same shape."""
        weight, bias = self.weights()
        return F.silu(short_convolution(x, weight, starts, bias))


def _initial_taps(taps: int, normal: torch.Tensor) -> torch.Tensor:
    return (2 * uniform(normal) - 1) / math.sqrt(taps)


class StateSpaceCore(nn.Module):
    """What mixes positions after the convolutions: steps, `state_space_scan`, and the gate."""

    # What initial weights become that are drawn from N(0, 1).
    initial_values: ClassVar[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "a_log": lambda normal: (1 + 15 * uniform(normal)).log(),
        "dt_bias": initial_steps,
    }

    def __init__(self, heads: int, groups: int, head_size: int, state_size: int, min_step: float, chunk: int) -> None:
        super().__init__()
        self.sizes = heads, groups, head_size, state_size
        self.min_step, self.chunk = min_step, chunk
        self.a_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.empty(heads))

    def products(self, seq_len: int) -> int:
        """Multiplications of a sequence."""
        heads, groups, size, state_size = self.sizes
        chunks, width = -(-seq_len // self.chunk), heads * size
        within = self.chunk**2 * (groups * state_size + width)
        return chunks * within + (chunks - 1) * self.chunk * 2 * width * state_size

    def weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log of the decay's rate, bias of the steps and factor of the input, of the heads that this process has."""
        return self.a_log, self.dt_bias, self.skip

    def forward(
        self, x: torch.Tensor, z: torch.Tensor, bc: torch.Tensor, dt: torch.Tensor, starts: torch.Tensor | None
    ) -> torch.Tensor:
        """Inputs and gates [batch, seq, heads, head size], bc [batch, seq, …], dt [batch, seq, heads] → like x."""
        a_log, dt_bias, skip = self.weights()
        dtype = torch.promote_types(x.dtype, torch.float32)
        inputs, (b, c) = x.to(dtype), bc.to(dtype).unflatten(2, (-1, 2, self.sizes[3])).unbind(3)
        step = F.softplus(dt.to(dtype) + dt_bias)
        step = step.clamp(min=self.min_step) if self.min_step else step
        y = state_space_scan(step[..., None] * inputs, b, c, -a_log.to(dtype).exp() * step, starts, self.chunk)
        return ((y + skip[:, None] * inputs) * F.silu(z.to(dtype))).to(x.dtype)


class Mamba2(nn.Module):
    """Projections, convolutions, `StateSpaceCore`, and a norm over the heads of each group.

    Rows of ``zx`` are ordered by head, and there gates, inputs; those of ``bc`` by group, and there b, c.
    """

    def __init__(
        self, hidden_size: int, core: StateSpaceCore, taps: int, eps: float, bias: bool, conv_bias: bool
    ) -> None:
        super().__init__()
        heads, groups, self.head_size, state_size = core.sizes
        width = heads * self.head_size
        self.zx = nn.Linear(hidden_size, 2 * width, bias)
        self.bc = nn.Linear(hidden_size, 2 * groups * state_size, bias)
        self.dt = nn.Linear(hidden_size, heads, bias)
        self.x_conv = Convolution(width, taps, conv_bias)
        self.bc_conv = Convolution(2 * groups * state_size, taps, conv_bias)
        self.core = core
        self.norm = nn.RMSNorm(width, eps) if groups == 1 else GroupRMSNorm(width, groups, eps)
        self.proj = nn.Linear(width, hidden_size, bias)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]. It reads ``document_mask``."""
        starts = None if context.document_mask is None else context.document_mask.first
        z, inputs = self.zx(x).unflatten(2, (-1, 2, self.head_size)).unbind(3)
        inputs = self.x_conv(inputs.flatten(2), starts).view(z.shape)
        y = self.core(inputs, z, self.bc_conv(self.bc(x), starts), self.dt(x), starts)
        return self.proj(self.norm(y.flatten(2)))


def mamba_plan(groups: int) -> dict[str, str]:
    """How tensor parallelism splits a `Mamba2`: module name → style. Of one group, each rank computes b and c."""
    is_shared = groups == 1
    return {
        "": "region",
        "zx": "column_linear",
        "bc": "shared_linear" if is_shared else "column_linear",
        "dt": "column_linear",
        "x_conv": "split_channels",
        "bc_conv": "shared_channels" if is_shared else "split_channels",
        "core": "split_channels",
        "norm": "split_norm" if is_shared else "split_channels",
        "proj": "row_linear",
    }
