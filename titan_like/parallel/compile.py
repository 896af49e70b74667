"""Compiling layers: one graph for all layers of a kind. Communication hooks stay outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from titan_like.models.transformer import Transformer
from titan_like.parallel.extend import extend


class Compiled(nn.Module):
    """Extends a layer whose forward pass is compiled."""

    compiled: Callable[..., Any]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As the layer itself."""
        return self.compiled(*inputs, **named)


def compile_layers(model: Transformer, fullgraph: bool) -> None:
    """Compile each layer of a model, or of one pipeline stage, when it first runs."""
    for layer in model.layers.values():
        extend(layer, Compiled, compiled=torch.compile(layer.forward, fullgraph=fullgraph))
