"""Mamba-2 (arXiv 2405.21060, sections 3 and 7) by definition: loops over positions and heads.

It imports nothing of the product. Weights have the product's names and order of rows.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch


def mamba2(
    options: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    linear: Callable[[str, torch.Tensor], torch.Tensor],
    eps: float,
    x: torch.Tensor,
    documents: torch.Tensor,
) -> torch.Tensor:
    """x [batch, seq, hidden] of packed documents → the same. ``weights`` and ``linear`` take names in the layer."""
    size, states, groups = options["head_size"], options["state_size"], options.get("groups", 1)
    per_group, normed = options["heads"] // groups, []
    rows, steps = linear("zx", x), linear("dt", x)
    gates, inputs = rows.unflatten(-1, (-1, 2, size)).unbind(-2)
    inputs = _convolved(inputs.flatten(2), "x_conv", weights, documents).split(size, -1)
    shared = _convolved(linear("bc", x), "bc_conv", weights, documents).split(states, -1)
    for group in range(groups):
        heads = []
        for head in range(group * per_group, (group + 1) * per_group):
            step = (1 + (steps[..., head] + weights["core.dt_bias"][head]).exp()).log()
            step = step.clamp(min=options.get("min_step", 0.0))
            decay = (-weights["core.a_log"][head].exp() * step).exp()
            b, c = shared[2 * group], shared[2 * group + 1]
            y = recurrence(step[..., None] * inputs[head], b, c, decay, documents)
            y = y + weights["core.skip"][head] * inputs[head]
            gate = gates[:, :, head]
            heads.append(y * gate / (1 + (-gate).exp()))
        y = torch.cat(heads, -1)
        normed.append(y / ((y**2).mean(-1, keepdim=True) + eps).sqrt())
    return linear("proj", torch.cat(normed, -1) * weights["norm.weight"])


def _convolved(
    x: torch.Tensor, name: str, weights: Mapping[str, torch.Tensor], documents: torch.Tensor
) -> torch.Tensor:
    """SiLU of the causal convolution of each channel: x [batch, seq, channels], weight [channels, 1, taps]."""
    weight, positions = weights[f"{name}.weight"], []
    for t in range(x.shape[1]):
        total = torch.zeros_like(x[:, 0]) + weights.get(f"{name}.bias", 0)
        for lag in range(min(t + 1, weight.shape[2])):
            is_same = (documents[:, t - lag] == documents[:, t])[:, None]
            total = total + torch.where(is_same, x[:, t - lag] * weight[:, 0, -1 - lag], 0)
        positions.append(total / (1 + (-total).exp()))
    return torch.stack(positions, 1)


def recurrence(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, decay: torch.Tensor, documents: torch.Tensor
) -> torch.Tensor:
    """One head: x [batch, seq, head size], b and c [batch, seq, state size], decay and documents [batch, seq]."""
    state, outputs = x.new_zeros(len(x), b.shape[2], x.shape[2]), []
    for t in range(x.shape[1]):
        goes_on = documents[:, t] == documents[:, t - 1] if t else torch.zeros(len(x), dtype=torch.bool)
        state = torch.where(goes_on[:, None, None], decay[:, t, None, None] * state, 0)
        state = state + b[:, t, :, None] * x[:, t, None]
        outputs.append((c[:, t, None] @ state)[:, 0])
    return torch.stack(outputs, 1)
