"""Sizes of a model's parts, counted in its own modules: the two ends and one layer of each kind, on the meta device.

All layers of a kind are alike, so counting one is enough. Each shape is built only once. Importing this module imports
torch, so `TransformerConfig` imports it only when something is counted.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from titan_like.models.config import TransformerConfig
from titan_like.models.layers.attention import AttentionCore, CrossAttention
from titan_like.models.layers.experts import ExpertLinear, SparseMLP
from titan_like.models.transformer import Transformer

Lengths = tuple[int, int]
"""Positions of a sample in the encoder, or in the only stack, and in the decoder, or 0."""


class Core(NamedTuple):
    """One attention core. Queries and keys are positions of the first stack (0) or of a decoder (1)."""

    queries: int
    keys: int
    is_causal: bool
    window: int = 0  # most keys that a query sees; 0: all, or with a causal mask all up to its own
    has_softcap: bool = False
    has_chunks: bool = False  # the window is that of a chunk of positions, which see only each other

    def scores(self, lengths: Lengths, causal: bool) -> int:
        """Elements of a sample's attention matrix in one head that are within the window.

        ``causal`` leaves out those that a causal mask hides, to half an element for each query.
        """
        queries, keys = lengths[self.queries], lengths[self.keys]
        seen = min(self.window or keys, keys)
        if self.has_chunks and causal:
            return (queries // seen * seen**2 + (queries % seen) ** 2) // 2
        return queries * seen * (2 * keys - seen) // (2 * max(keys, 1)) if causal and self.is_causal else queries * seen


class LayerParts(NamedTuple):
    """One layer. All layers of a kind are alike."""

    parameters: int
    matrices: Lengths  # elements of matrices with which each position of the first stack, of a decoder is multiplied
    cores: tuple[Core, ...]
    experts: int = 0  # of the first stack's matrices, the ones of routers and experts
    mixing: tuple[Callable[[int], int], ...] = ()  # length of a sequence → multiplications between its positions

    def products(self, lengths: Lengths) -> int:
        """Multiplications of a sample's positions with matrices, and between them outside of attention cores."""
        return self.matrices[0] * lengths[0] + self.matrices[1] * lengths[1] + self.mixed(lengths)

    def mixed(self, lengths: Lengths) -> int:
        """Multiplications between a sample's positions outside of attention cores."""
        return sum(products(lengths[0]) for products in self.mixing)

    def scores(self, lengths: Lengths, causal: bool = False) -> int:
        """Elements of a sample's attention matrices in one head; arguments as of `Core.scores`."""
        return sum(core.scores(lengths, causal) for core in self.cores)


class Parts(NamedTuple):
    """Sizes in elements."""

    kinds: tuple[LayerParts, ...]  # one layer of each kind, in the order of `TransformerConfig.layer_counts`
    shared: int  # parameters of modules that layers share
    entry: int  # parameters before the layers, without a table that is also the output matrix
    head: int  # parameters after the layers, with a table that is also the output matrix
    # Elements of the matrices among them that are applied to every token, not once a sequence, for each time they are.
    head_matrices: int
    token: int  # parameters that each token of the vocabulary has in the two ends


def one_of_each(config: TransformerConfig) -> Transformer:
    """The family's model with one layer of each kind, on the meta device.

    All depths share this object, so do not change it.
    """
    return _shared(config.one_of_each())


@lru_cache(maxsize=256)
def _shared(config: TransformerConfig) -> Transformer:
    with torch.device("meta"), WithoutInit():
        return config.family_module("model").build(config)


@lru_cache(maxsize=4096)
def parts_of(config: TransformerConfig) -> Parts:
    """Count the sizes of a model's parts."""
    model, predicts_next = one_of_each(config), "mtp" in config.predictions
    # A tied table is the output matrix, and so is after the layers.
    head = dict(parameters_of(model, (*model.head, "output", "output_bias")))
    entry = dict(parameters_of(model, model.entry))
    if config.tied_embeddings:
        head["embedding.weight"] = entry.pop("embedding.weight", model.embedding.weight)
    head_matrices = 0
    for name, parameter in head.items():
        if parameter.ndim == 2 and name.split(".")[0] not in model.pooled:
            uses = 2 if predicts_next and name in ("output.weight", "embedding.weight") else 1
            head_matrices += uses * parameter.numel()
    return Parts(
        kinds=tuple(map(_layer_parts, model.layers.values())),
        shared=sum(parameter.numel() for _, parameter in parameters_of(model, model.shared)),
        entry=sum(parameter.numel() for parameter in entry.values()),
        head=sum(parameter.numel() for parameter in head.values()),
        head_matrices=head_matrices,
        token=sum(p[0].numel() for m in (model.embedding, model.output, model.output_bias) for p in m.parameters()),
    )


def _layer_parts(layer: nn.Module) -> LayerParts:
    stack = getattr(layer, "stack", 0)
    matrices, experts = [0, 0], 0
    cores = []
    crossing = [module for module in layer.modules() if isinstance(module, CrossAttention)]
    of_memory = {part for module in crossing for part in (module.kv, module.core)}  # which get the encoder's positions
    sparse = {part for module in layer.modules() if isinstance(module, SparseMLP) for part in module.modules()}
    for module in layer.modules():
        seen = 0 if module in of_memory else stack
        matrices[seen] += getattr(module, "products_per_position", 0)
        if isinstance(module, AttentionCore):
            cores.append(Core(stack, seen, module.is_causal, module.window, module.softcap > 0, module.has_chunks))
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 2:
                # Of stacked matrices each position uses a few.
                elements = module.elements_per_token if isinstance(module, ExpertLinear) else parameter.numel()
                matrices[seen] += elements
                experts += elements if module in sparse else 0
    size = sum(parameter.numel() for parameter in layer.parameters())
    mixing = tuple(cast(Any, module).products for module in layer.modules() if hasattr(module, "products"))
    return LayerParts(size, (matrices[0], matrices[1]), tuple(cores), experts, mixing)


def parameters_of(model: Transformer, modules: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters of a model's modules."""
    for name in modules:
        yield from model.get_submodule(name).named_parameters(prefix=name)


class WithoutInit(TorchFunctionMode):
    """Skips torch.nn.init, which is slow even on the meta device and draws random numbers."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
