"""Compiling layers: one graph for all layers of a kind. Communication hooks stay outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from titan_like.config.schema import ActivationCheckpoint
from titan_like.models.transformer import Transformer
from titan_like.parallel.extend import extend
from titan_like.torch_private import inductor_within


class Compiled(nn.Module):
    """Extends a layer whose forward pass is compiled."""

    compiled: Callable[..., Any]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As the layer itself."""
        return self.compiled(*inputs, **named)


def compile_layers(model: Transformer, section: ActivationCheckpoint, fullgraph: bool) -> None:
    """Compile each layer of a model, or of one pipeline stage, when it first runs; every n-th within a budget."""
    for name, layer in model.layers.items():
        is_within = section.budget is not None and int(name) % section.every_n_layers == 0
        backend = inductor_within(section.budget) if is_within else "inductor"
        extend(layer, Compiled, compiled=torch.compile(layer.forward, backend=backend, fullgraph=fullgraph))
