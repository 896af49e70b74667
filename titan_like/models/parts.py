"""What a model is made of, read from its own modules: the ends and one layer, on the meta device, once for each shape.

All layers of a model are alike, so that one tells of all. Importing this module imports torch; `TransformerConfig`
does so only when something is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from titan_like.models.config import TransformerConfig
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.transformer import Transformer


class Parts(NamedTuple):
    """Numbers of elements."""

    layer: int  # parameters of one layer
    matrices: int  # those of its matrices alone; each is multiplied once for a token
    attention_cores: int  # of one layer
    entry: int  # parameters before the layers that nothing after them shares
    head: int  # parameters after the layers, with the embedding table where it is the output matrix


def one_layer(config: TransformerConfig) -> Transformer:
    """The family's model with a single layer on the meta device, the same object for all depths. Not to be changed."""
    return _shared(config.model_copy(update={"num_layers": 1}))


def new_one_layer(config: TransformerConfig) -> Transformer:
    """The same as a new object, which may be changed."""
    return _build_on_meta(config.model_copy(update={"num_layers": 1}))


@lru_cache(maxsize=256)
def _shared(config: TransformerConfig) -> Transformer:
    return _build_on_meta(config)


def _build_on_meta(config: TransformerConfig) -> Transformer:
    with torch.device("meta"), _WithoutInit():
        return config.family_module("model").build(config)


@lru_cache(maxsize=4096)
def parts_of(config: TransformerConfig) -> Parts:
    """The sizes of a model's parts."""
    model = one_layer(config)
    layer = list(only_layer(model).parameters())
    return Parts(
        sum(parameter.numel() for parameter in layer),
        sum(parameter.numel() for parameter in layer if parameter.ndim == 2),
        sum(isinstance(module, AttentionCore) for module in only_layer(model).modules()),
        sum(p.numel() for name, p in entry_parameters(model) if not (config.tied_embeddings and is_table(name))),
        sum(parameter.numel() for _, parameter in head_parameters(model)),
    )


def only_layer(model: Transformer) -> nn.Module:
    """The layer of `one_layer`."""
    (layer,) = model.layers.values()
    return layer


def entry_parameters(model: Transformer) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of the modules before the layers, by name."""
    for name in model.entry:
        yield from model.get_submodule(name).named_parameters(prefix=name)


def head_parameters(model: Transformer) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of the modules after the layers, by name, with the embedding table where it is the output matrix."""
    for name in ("norm", "output"):
        yield from model.get_submodule(name).named_parameters(prefix=name)
    if model.config.tied_embeddings:
        yield "embedding.weight", model.embedding.weight


def is_table(name: str) -> bool:
    """Whether a parameter is the embedding table."""
    return name == "embedding.weight"


class _WithoutInit(TorchFunctionMode):
    """Leaves parameters as they are allocated: on the meta device drawing them only takes time."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
