"""Compiling the whole model, or layers: one graph for all layers of a kind. Communication hooks stay outside of it.

Where ranks exchange rows of experts, there are a few: before, between and after, of which that between takes any number
of rows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from titan_like.config.schema import ActivationCheckpoint
from titan_like.models.transformer import Transformer
from titan_like.parallel.experts import SplitExperts
from titan_like.parallel.extend import extend
from titan_like.torch_private import inductor_within, mark_dynamic


class Compiled(nn.Module):
    """Extends a layer, or a whole model, whose forward pass is compiled."""

    compiled: Callable[..., Any]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As the module itself."""
        return self.compiled(*inputs, **named)


def compile_layers(model: Transformer, section: ActivationCheckpoint, fullgraph: bool) -> None:
    """Compile each layer of a model, or of one pipeline stage, when it first runs; every n-th within a budget."""
    for name, layer in model.layers.items():
        is_within = section.budget is not None and int(name) % section.every_n_layers == 0
        backend: dict[str, Any] = {"backend": inductor_within(section.budget)} if is_within else {}
        for module in layer.modules():
            if isinstance(module, SplitExperts):
                module.compute = _for_any_rows(module.compute, backend)  # type: ignore[method-assign]
        extend(layer, Compiled, compiled=torch.compile(layer.forward, fullgraph=fullgraph, **backend))


def compile_whole(model: Transformer) -> None:
    """Compile a whole model, from the embedding to the loss, as one graph when it first runs.

    Gradients then come all together, at the end of the backward pass.
    """
    model.find_cores()
    extend(model, Compiled, compiled=torch.compile(model.forward, fullgraph=True))


def _for_any_rows(function: Callable[..., torch.Tensor], backend: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """Compile a function of rows, whose number depends on the router, in one graph."""
    compiled = torch.compile(function, fullgraph=True, **backend)

    def run(rows: torch.Tensor, *inputs: Any) -> torch.Tensor:
        if len(rows) < 2:  # a compiler makes graphs of their own for these numbers
            return function(rows, *inputs)
        mark_dynamic(rows, 0)
        return compiled(rows, *inputs)

    return run
