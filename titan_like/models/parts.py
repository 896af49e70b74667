"""Sizes of a model's parts, counted in its own modules: the two ends and one layer of each kind, on the meta device.

All layers of a kind are alike, so counting one is enough. Each shape is built only once. Importing this module imports
torch, so `TransformerConfig` imports it only when something is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from titan_like.models.config import TransformerConfig
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.experts import ExpertLinear, SparseMLP
from titan_like.models.transformer import Transformer, replace_forward

Lengths = tuple[int, int]
"""Positions of a sample in the encoder, or in the only stack, and in the decoder, or 0."""

Stacks = Mapping[str, tuple[int, ...]]
"""Name of a module in a layer → the stack whose positions it gets. An attention core has three numbers: the stacks of
its queries and of its keys, and 1 if it gets a bias."""


class Core(NamedTuple):
    """One attention core. Queries and keys are positions of the first stack (0) or of a decoder (1)."""

    queries: int
    keys: int
    is_causal: bool
    is_biased: bool = False  # with a bias that has a gradient


class LayerParts(NamedTuple):
    """One layer. All layers of a kind are alike."""

    parameters: int
    matrices: Lengths  # elements of matrices with which each position of the first stack, of a decoder is multiplied
    cores: tuple[Core, ...]
    experts: int = 0  # of the first stack's matrices, those of routers and experts

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
    head_matrices: int  # elements of the matrices among them that are applied to every token, not once a sequence
    token: int  # parameters that each token of the vocabulary has in the two ends


def one_of_each(config: TransformerConfig) -> Transformer:
    """The family's model with one layer of each kind, on the meta device.

    All depths share this object, so do not change it.
    """
    return _shared(config.one_of_each())


def new_one_of_each(config: TransformerConfig) -> Transformer:
    """Like `one_of_each`, but a new object that may be changed."""
    with torch.device("meta"), WithoutInit():
        return config.family_module("model").build(config.one_of_each())


_shared = lru_cache(maxsize=256)(new_one_of_each)


@lru_cache(maxsize=4096)
def parts_of(config: TransformerConfig) -> Parts:
    """Count the sizes of a model's parts."""
    model = one_of_each(config)
    return Parts(
        tuple(map(_layer_parts, layers_of(model), stacks_of(config))),
        sum(parameter.numel() for _, parameter in shared_parameters(model)),
        sum(p.numel() for name, p in entry_parameters(model) if not (config.tied_embeddings and is_table(name))),
        sum(parameter.numel() for _, parameter in head_parameters(model)),
        sum(p.numel() for name, p in head_parameters(model) if p.ndim == 2 and name.split(".")[0] not in model.pooled),
        sum(p[0].numel() for m in (model.embedding, model.output, model.output_bias) for p in m.parameters()),
    )


def _layer_parts(layer: nn.Module, stacks: Stacks) -> LayerParts:
    matrices, experts = [0, 0], 0
    sparse = tuple(f"{name}." for name, module in layer.named_modules() if isinstance(module, SparseMLP))
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 2:
            owner = name.rpartition(".")[0]
            module = layer.get_submodule(owner)
            (stack,) = stacks.get(owner, (0,))
            # Of stacked matrices each position uses a few.
            elements = module.elements_per_token if isinstance(module, ExpertLinear) else parameter.numel()
            matrices[stack] += elements
            experts += elements if name.startswith(sparse) else 0
    size = sum(parameter.numel() for parameter in layer.parameters())
    return LayerParts(size, (matrices[0], matrices[1]), tuple(cores_of(layer, stacks)), experts)


def cores_of(module: nn.Module, stacks: Stacks, prefix: str = "") -> Iterator[Core]:
    """The attention cores in a layer, or in the module of it that is called ``prefix``."""
    for name, core in module.named_modules(prefix=prefix):
        if isinstance(core, AttentionCore):
            queries, keys, biases = stacks.get(name, (0, 0, 0))
            yield Core(queries, keys, core.is_causal, biases > 0)


@lru_cache(maxsize=256)
def stacks_of(config: TransformerConfig) -> tuple[Stacks, ...]:
    """Which positions the modules of a layer get, for each kind of layers. Modules left out get those of stack 0.

    Without a decoder there is only stack 0. With one, each layer runs on 2 positions of the encoder and 3 of the
    decoder, which tell the stacks apart. Modules are listed in the order of their use. Nothing is computed: stand-ins
    for all modules with parameters return tensors of the right shapes.
    """
    if not config.has_decoder:
        return tuple({} for _ in config.layer_counts)
    model, found = new_one_of_each(config).eval(), []
    for name in model.shared:
        replace_forward(model.get_submodule(name), lambda *_: True)
    x = torch.zeros(1, sum(_TRIED), config.hidden_size)
    inputs: Any = model.layer_inputs(torch.arange(sum(_TRIED)), _TRIED[0])  # type: ignore[call-arg]
    for layer in layers_of(model):
        stacks: dict[str, tuple[int, ...]] = {}
        for name, module in layer.named_modules():
            if isinstance(module, AttentionCore) or next(module.parameters(recurse=False), None) is not None:
                replace_forward(module, partial(_stand_in, stacks, name, module))
        layer(x, *inputs)
        found.append(stacks)
    return tuple(found)


_TRIED = (2, 3)  # positions of the encoder and of the decoder


def _stand_in(
    stacks: dict[str, tuple[int, ...]], name: str, module: nn.Module, x: torch.Tensor, *others: Any, **named: Any
) -> torch.Tensor:
    """Note which stacks a module gets, and return a tensor of the shape of its result."""
    if isinstance(module, AttentionCore):  # queries, and after them keys, values, a document mask and a bias
        bias = named.get("bias", (*others, None, None)[3])
        stacks[name] = _TRIED.index(x.shape[2]), _TRIED.index(others[0].shape[2]), bias is not None
        return x
    stacks[name] = (_TRIED.index(x.shape[1]),)
    return x.new_zeros(1).expand(*x.shape[:-1], module.out_features) if isinstance(module, nn.Linear) else x


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


class WithoutInit(TorchFunctionMode):
    """Skips torch.nn.init, which does nothing on the meta device but take time."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
