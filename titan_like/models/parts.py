"""Sizes of a model's parts, counted in its own modules: the two ends and one layer, built on the meta device.

All layers of a model are alike, so counting one is enough. Each shape is built only once. Importing this module imports
torch, so `TransformerConfig` imports it only when something is counted.
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
    """Sizes in elements, except ``attention_cores``, which is a count."""

    layer: int  # parameters of one layer
    matrices: int  # of these, the elements of matrices, each of which is multiplied once per token
    attention_cores: int  # attention cores in one layer
    entry: int  # parameters before the layers, without a table that is also the output matrix
    head: int  # parameters after the layers, with a table that is also the output matrix
    head_matrices: int  # of these, the elements of matrices, each of which is multiplied once per token, not sequence
    token: int  # parameters that each token of the vocabulary has in the two ends


def one_layer(config: TransformerConfig) -> Transformer:
    """The family's model with one layer, on the meta device. All depths share this object, so do not change it."""
    return _shared(config.model_copy(update={"num_layers": 1}))


def new_one_layer(config: TransformerConfig) -> Transformer:
    """Like `one_layer`, but a new object that may be changed."""
    return _build_on_meta(config.model_copy(update={"num_layers": 1}))


@lru_cache(maxsize=256)
def _shared(config: TransformerConfig) -> Transformer:
    return _build_on_meta(config)


def _build_on_meta(config: TransformerConfig) -> Transformer:
    with torch.device("meta"), _WithoutInit():
        return config.family_module("model").build(config)


@lru_cache(maxsize=4096)
def parts_of(config: TransformerConfig) -> Parts:
    """Count the sizes of a model's parts."""
    model = one_layer(config)
    layer = list(only_layer(model).parameters())
    return Parts(
        sum(parameter.numel() for parameter in layer),
        sum(parameter.numel() for parameter in layer if parameter.ndim == 2),
        sum(isinstance(module, AttentionCore) for module in only_layer(model).modules()),
        sum(p.numel() for name, p in entry_parameters(model) if not (config.tied_embeddings and is_table(name))),
        sum(parameter.numel() for _, parameter in head_parameters(model)),
        sum(p.numel() for name, p in head_parameters(model) if p.ndim == 2 and name.split(".")[0] not in model.pooled),
        sum(p[0].numel() for m in (model.embedding, model.output, model.output_bias) for p in m.parameters()),
    )


def only_layer(model: Transformer) -> nn.Module:
    """The single layer of a model from `one_layer`."""
    (layer,) = model.layers.values()
    return layer


def entry_parameters(model: Transformer) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters of the modules before the layers."""
    for name in model.entry:
        yield from model.get_submodule(name).named_parameters(prefix=name)


def head_parameters(model: Transformer) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters of the modules after the layers, with the embedding table if it is the output matrix."""
    for name in (*model.head, "output", "output_bias"):
        yield from model.get_submodule(name).named_parameters(prefix=name)
    if model.config.tied_embeddings:
        yield "embedding.weight", model.embedding.weight


def is_table(name: str) -> bool:
    """Whether this is the name of the embedding table."""
    return name == "embedding.weight"


class _WithoutInit(TorchFunctionMode):
    """Skips torch.nn.init, which does nothing on the meta device but take time."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
