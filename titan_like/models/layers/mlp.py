"""The feed-forward networks of transformer layers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class GeluMLP(nn.Module):
    """fc2(gelu(fc1(x))) with biases, and GELU (arXiv 1606.08415) exact or, as in GPT-2, by its tanh approximation."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, approximate: str = "tanh") -> None:
        super().__init__()
        self.approximate = approximate
        self.fc1 = nn.Linear(hidden_size, ffn_hidden_size)
        self.fc2 = nn.Linear(ffn_hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's: gate · σ(1.702 · gate) · (up + 1), elementwise, of gate up to 7 and up from -7 to 7."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


_OfOne = Callable[[torch.Tensor], torch.Tensor]
_OfTwo = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, _OfOne] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),  # arXiv 2109.08668
}
"""Elementwise functions, by name."""


def _times_up(activation: _OfOne) -> _OfTwo:
    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return activation(gate) * up

    return gated


GATED_ACTIVATIONS: dict[str, _OfTwo] = {name: _times_up(function) for name, function in ACTIVATIONS.items()}
"""Elementwise functions of gate and up, by name (arXiv 2002.05202)."""
GATED_ACTIVATIONS["clamped_swiglu"] = clamped_swiglu


class PlainMLP(nn.Module):
    """down(activation(up(x))), as in the original T5 (arXiv 1910.10683)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, activation: str, bias: bool = False) -> None:
        """``activation`` is one of `ACTIVATIONS`."""
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up = nn.Linear(hidden_size, ffn_hidden_size, bias=bias)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        return self.down(self.activation(self.up(x)))


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)), with SiLU as in Llama (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, activation: str = "silu", bias: bool = False) -> None:
        """``activation`` is one of `GATED_ACTIVATIONS`."""
        super().__init__()
        self.gated = GATED_ACTIVATIONS[activation]
        self.gate = nn.Linear(hidden_size, ffn_hidden_size, bias=bias)
        self.up = nn.Linear(hidden_size, ffn_hidden_size, bias=bias)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        return self.down(self.gated(self.gate(x), self.up(x)))
