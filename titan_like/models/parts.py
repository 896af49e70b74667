"""Sizes of a model's parts, counted in its own modules: the two ends and one layer of each kind, on the meta device.

All layers of a kind are alike, so counting one is enough. Each shape is built only once. Importing this module imports
torch, so `TransformerConfig` imports it only when something is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from titan_like.models.config import TransformerConfig
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.transformer import Transformer

Lengths = tuple[int, int]
"""Positions of a sample: those of an encoder, or of the only stack, and those of a decoder, or 0."""


class Core(NamedTuple):
    """One attention core. Queries and keys are positions of the first stack (0) or of a decoder (1)."""

    queries: int
    keys: int
    is_causal: bool


class LayerParts(NamedTuple):
    """One layer. All layers of a kind are alike."""

    parameters: int
    matrices: Lengths  # elements of matrices with which each position of the first stack, of a decoder is multiplied
    cores: tuple[Core, ...]

    def products(self, lengths: Lengths) -> int:
        """Multiplications of a sample's positions with matrices."""
        return self.matrices[0] * lengths[0] + self.matrices[1] * lengths[1]

    def scores(self, lengths: Lengths, causal: bool = False) -> int:
        """Elements of a sample's attention matrices in one head. ``causal`` counts half of those with a causal mask."""
        halves = [2 - (causal and core.is_causal) for core in self.cores]
        full = (lengths[core.queries] * lengths[core.keys] for core in self.cores)
        return sum(number * elements // 2 for number, elements in zip(halves, full, strict=True))


class Parts(NamedTuple):
    """Sizes in elements."""

    kinds: tuple[LayerParts, ...]  # one layer of each kind, in the order of `TransformerConfig.layer_counts`
    shared: int  # parameters of modules that layers share
    entry: int  # parameters before the layers, without a table that is also the output matrix
    head: int  # parameters after the layers, with a table that is also the output matrix
    head_matrices: int  # of these, the elements of matrices, each of which is multiplied once per token
    token: int  # parameters that each token of the vocabulary has in the two ends


def one_of_each(config: TransformerConfig) -> Transformer:
    """The family's model with one layer of each kind, on the meta device.

    All depths share this object, so do not change it.
    """
    return _shared(config.one_of_each())


def new_one_of_each(config: TransformerConfig) -> Transformer:
    """Like `one_of_each`, but a new object that may be changed."""
    return _build_on_meta(config.one_of_each())


@lru_cache(maxsize=256)
def _shared(config: TransformerConfig) -> Transformer:
    return _build_on_meta(config)


def _build_on_meta(config: TransformerConfig) -> Transformer:
    with torch.device("meta"), _WithoutInit():
        return config.family_module("model").build(config)


@lru_cache(maxsize=4096)
def parts_of(config: TransformerConfig) -> Parts:
    """Count the sizes of a model's parts."""
    model = one_of_each(config)
    count = _layers_of_two_stacks if config.has_decoder else _layers_of_one_stack
    return Parts(
        count(config),
        sum(parameter.numel() for _, parameter in shared_parameters(model)),
        sum(p.numel() for name, p in entry_parameters(model) if not (config.tied_embeddings and is_table(name))),
        sum(parameter.numel() for _, parameter in head_parameters(model)),
        sum(parameter.numel() for _, parameter in head_parameters(model) if parameter.ndim == 2),
        sum(p[0].numel() for m in (model.embedding, model.output, model.output_bias) for p in m.parameters()),
    )


def _layers_of_one_stack(config: TransformerConfig) -> tuple[LayerParts, ...]:
    """Every matrix is multiplied with every position, and every core is as the model's objective says."""
    found = []
    for layer in layers_of(one_of_each(config)):
        sizes = [parameter.numel() for parameter in layer.parameters() if parameter.ndim == 2]
        cores = sum(isinstance(module, AttentionCore) for module in layer.modules())
        found.append(LayerParts(_size(layer), (sum(sizes), 0), (Core(0, 0, config.is_causal),) * cores))
    return tuple(found)


def _layers_of_two_stacks(config: TransformerConfig) -> tuple[LayerParts, ...]:
    """Run each layer on 2 positions of the encoder and 3 of the decoder, and see which of them its modules get.

    Nothing is computed: stand-ins for all modules with parameters return tensors of the right shapes.
    """
    model, lengths = new_one_of_each(config).eval(), (2, 3)
    x, found = torch.zeros(1, sum(lengths), config.hidden_size), []
    for name in model.shared:
        _replace(model.get_submodule(name), lambda *_: None)
    inputs = model.layer_inputs(torch.arange(sum(lengths)), lengths[0])
    for layer in layers_of(model):
        matrices, cores = [0, 0], []

        def product(module: nn.Linear, x: torch.Tensor, matrices: list[int] = matrices) -> torch.Tensor:
            matrices[lengths.index(x.shape[1])] += module.weight.numel()
            return x.new_zeros(1).expand(*x.shape[:-1], module.out_features)

        def attend(
            module: AttentionCore, q: torch.Tensor, k: torch.Tensor, *_: Any, cores: list[Core] = cores
        ) -> torch.Tensor:
            cores.append(Core(lengths.index(q.shape[2]), lengths.index(k.shape[2]), module.is_causal))
            return q

        for module in layer.modules():
            if isinstance(module, nn.Linear | AttentionCore):
                _replace(module, partial(product if isinstance(module, nn.Linear) else attend, module))
            elif next(module.parameters(recurse=False), None) is not None:
                _replace(module, lambda x: x)
        layer(x, *inputs)
        found.append(LayerParts(_size(layer), (matrices[0], matrices[1]), tuple(cores)))
    return tuple(found)


def _replace(module: nn.Module, forward: Callable) -> None:
    setattr(module, "forward", forward)  # noqa: B010


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def layers_of(model: Transformer) -> list[nn.Module]:
    """The layers of a model from `one_of_each`: one of each kind, in the order of `TransformerConfig.layer_counts`."""
    return list(model.layers.values())


def entry_parameters(model: Transformer) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters of the modules before the layers."""
    for name in model.entry:
        yield from model.get_submodule(name).named_parameters(prefix=name)


def shared_parameters(model: Transformer) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters of the modules that layers share."""
    for name in model.shared:
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
