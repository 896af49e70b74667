"""The feed-forward networks of transformer layers."""

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

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


class XIELU(nn.Module):
    """xIELU (arXiv 2411.13010), elementwise: a parabola with a slope at 0, and below 0 a scaled expm1 in its place."""

    beta: torch.Tensor  # [1], the slope at 0
    eps: torch.Tensor  # [1], the largest argument of expm1
    # Trained are the inverse softplus of the parabola's factor, and of what the other factor exceeds beta by.
    initial_values: ClassVar = {
        name: partial(torch.full_like, fill_value=math.log(math.expm1(start)))
        for name, start in (("alpha_p", 0.8), ("alpha_n", 0.3))
    }

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        self.register_buffer("beta", torch.empty(1))
        self.register_buffer("eps", torch.empty(1))
        self.reset()

    def reset(self) -> None:
        """Give the constants their values."""
        self.beta.fill_(0.5)
        self.eps.fill_(-1e-6)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both parameters, [1] each."""
        return self.alpha_p, self.alpha_n

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result have the same shape and dtype."""
        above, below, beta, eps = (number.to(x.dtype) for number in (*self.weights(), self.beta, self.eps))
        above, below = F.softplus(above), beta + F.softplus(below)
        return torch.where(x > 0, above * x * x, (torch.expm1(torch.minimum(x, eps)) - x) * below) + beta * x


class PlainMLP(nn.Module):
    """down(activation(up(x))), as in the original T5 (arXiv 1910.10683)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, activation: str, bias: bool = False) -> None:
        """``activation`` is one of `ACTIVATIONS`, or xielu."""
        super().__init__()
        self.activation: _OfOne = XIELU() if activation == "xielu" else ACTIVATIONS[activation]
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
