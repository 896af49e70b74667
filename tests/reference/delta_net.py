"""The gated delta net (arXiv 2412.06464, equation 10) and Kimi's (arXiv 2510.26692) by definition, in loops.

It imports nothing of the product. Weights have the product's names and order of rows.
"""

import math
from collections.abc import Callable, Mapping

import torch


def delta_net(
    options: Mapping[str, int],
    weights: Mapping[str, torch.Tensor],
    linear: Callable[[str, torch.Tensor], torch.Tensor],
    eps: float,
    x: torch.Tensor,
    documents: torch.Tensor,
) -> torch.Tensor:
    """x [batch, seq, hidden] of packed documents → the same. ``weights`` and ``linear`` take names in the layer."""
    key, value = options["key_head_size"], options["value_head_size"]
    per_key = options["value_heads"] // options["key_heads"]
    widths = [key, key, per_key * value, per_key * value]
    rows, gates, heads = linear("qkvz", x), linear("ba", x), []
    conv = weights["core.conv"].split(sum(widths[:3]))
    for number in range(options["key_heads"]):
        q, k, v, z = rows[..., number * sum(widths) :][..., : sum(widths)].split(widths, -1)
        mixed = _convolved(torch.cat((q, k, v), -1), conv[number], documents)
        q, k, v = mixed.split(widths[:3], -1)
        b, a = gates[..., 2 * per_key * number :][..., : 2 * per_key].split(per_key, -1)
        for i in range(per_key):
            head = per_key * number + i
            step = (1 + (a[..., i] + weights["core.dt_bias"][head]).exp()).log()
            decay = (-weights["core.a_log"][head].exp() * step).exp()
            y = _recurrence(_unit(q), _unit(k), v.split(value, -1)[i], decay, b[..., i].sigmoid(), documents)
            y = y / ((y**2).mean(-1, keepdim=True) + eps).sqrt() * weights["norm.weight"]
            gate = z.split(value, -1)[i]
            heads.append(y * gate * gate.sigmoid())
    return linear("proj", torch.cat(heads, -1))


def kimi_delta(
    options: Mapping[str, int],
    weights: Mapping[str, torch.Tensor],
    linear: Callable[[str, torch.Tensor], torch.Tensor],
    eps: float,
    x: torch.Tensor,
    documents: torch.Tensor,
) -> torch.Tensor:
    """As `delta_net`: each row of a head's state has a decay of its own."""
    count, size, heads = options["heads"], options["head_size"], []
    for_step, for_gate = linear("latents", x).split(size, -1)
    rows, strength = linear("heads.qkv", x), linear("heads.beta", x).sigmoid()
    steps, gates = linear("heads.step", for_step) + weights["heads.core.dt_bias"], linear("heads.gate", for_gate)
    for number in range(count):
        mixed = rows.split(3 * size, -1)[number]
        filters = weights["heads.core.conv"].split(3 * size)[number]
        q, k, v = _convolved(mixed, filters, documents).split(size, -1)
        step = (1 + steps.split(size, -1)[number].exp()).log()
        decay = (-weights["heads.core.a_log"][number].exp() * step).exp()
        y = _recurrence(_unit(q), _unit(k), v, decay, strength[..., number], documents)
        y = y / ((y**2).mean(-1, keepdim=True) + eps).sqrt() * weights["heads.norm.weight"]
        heads.append(y * gates.split(size, -1)[number].sigmoid())
    return linear("heads.proj", torch.cat(heads, -1))


def _convolved(x: torch.Tensor, weight: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """SiLU of the causal convolution of each channel: x [batch, seq, channels], weight [channels, 1, taps]."""
    positions = []
    for t in range(x.shape[1]):
        total = torch.zeros_like(x[:, 0])
        for lag in range(min(t + 1, weight.shape[2])):
            is_same = (documents[:, t - lag] == documents[:, t])[:, None]
            total = total + torch.where(is_same, x[:, t - lag] * weight[:, 0, -1 - lag], 0)
        positions.append(total * total.sigmoid())
    return torch.stack(positions, 1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / ((x**2).sum(-1, keepdim=True) + 1e-6).sqrt()


def _recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, documents: torch.Tensor
) -> torch.Tensor:
    """One head: q and k [batch, seq, key size], v [batch, seq, value size], beta [batch, seq], decay too or of rows."""
    decay = decay if decay.ndim == 3 else decay[..., None]
    state, outputs = q.new_zeros(len(q), q.shape[2], v.shape[2]), []
    for t in range(q.shape[1]):
        goes_on = documents[:, t] == documents[:, t - 1] if t else torch.zeros(len(q), dtype=torch.bool)
        state = torch.where(goes_on[:, None, None], decay[:, t, :, None] * state, 0)
        recalled = (k[:, t, None] @ state)[:, 0]
        state = state + k[:, t, :, None] * (beta[:, t, None] * (v[:, t] - recalled))[:, None]
        outputs.append((q[:, t, None] @ state)[:, 0] / math.sqrt(q.shape[2]))
    return torch.stack(outputs, 1)
