"""The feed-forward networks of transformer layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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


class ReluMLP(nn.Module):
    """down(relu(up(x))) without biases, as in the original T5 (arXiv 1910.10683)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        return self.down(F.relu(self.up(x)))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, elementwise (arXiv 2002.05202)."""
    return F.silu(gate) * up


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's: gate · σ(1.702 · gate) · (up + 1), elementwise, of gate up to 7 and up from -7 to 7."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


GATED_ACTIVATIONS = {"silu": swiglu, "clamped_swiglu": clamped_swiglu}
"""Of gate and up, by name."""


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)) without biases (arXiv 2002.05202)."""

    activation: Callable[[torch.Tensor], torch.Tensor]  # elementwise; of the class

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.up = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] → [batch, seq, hidden]."""
        return self.down(self.activation(self.gate(x)) * self.up(x))


class SwiGLUMLP(GatedMLP):
    """A gated MLP with SiLU, as in Llama."""

    activation = staticmethod(F.silu)


class GeGLUMLP(GatedMLP):
    """A gated MLP with GELU in its tanh approximation, as in T5 v1.1."""

    activation = staticmethod(partial(F.gelu, approximate="tanh"))
