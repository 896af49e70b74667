"""Shapes of every parameter, in the whole model and on one process.

They are read from one layer and the ends of the model on the meta device, and from the family's tensor-parallel plan,
once per model. `stage_units` and `joined` repeat how `titan_like.parallel.data` groups parameters; tests compare them
with the built modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from titan_like.config.errors import ConfigError
from titan_like.models.config import TransformerConfig
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.experts import ExpertLinear, SparseMLP
from titan_like.models.parts import (
    Core,
    Lengths,
    Stacks,
    cores_of,
    entry_parameters,
    head_parameters,
    is_table,
    one_of_each,
    shared_parameters,
    stacks_of,
)
from titan_like.models.transformer import shared_modules
from titan_like.parallel.split import StageLayers, kinds_of_layers, units_of_layers
from titan_like.planner.style_kinds import StyleKind, styles_by_module
from titan_like.planner.workload import Counts

OF_EXPERTS = " experts"  # ends the name of a unit of experts
_WHOLE = StyleKind({}, (), enters=0, leaves=0)  # for modules that the plan does not name


@dataclass(frozen=True)
class ParameterShape:
    """One parameter of the model."""

    name: str  # within the whole model
    shape: tuple[int, ...]
    tensor_dim: int | None = None  # dimension that tensor parallelism splits; None if every process has all of it
    partial: bool = False  # with sequence parallelism, its gradient must still be summed over the processes
    at_entry: bool = False  # used before the layers, so its gradient is complete last
    of_experts: bool = False  # stacked matrices of experts, which expert parallelism shares and nothing else splits
    after_experts: bool = False  # used before the layer's experts, so its gradient is complete after theirs

    @property
    def is_deferrable(self) -> bool:
        """Whether a split backward pass defers its gradient, as it does for the matrices of linear layers.

        The loss computes that of the output matrix, or the tied table, in the forward pass.
        """
        of_loss = self.name in ("output.weight", "embedding.weight")
        return len(self.shape) == 2 and not self.at_entry and not of_loss


@dataclass(frozen=True)
class Unit:
    """Parameters that data parallelism always gathers and reduces together. The root's name is empty."""

    name: str
    parameters: tuple[ParameterShape, ...]


class Region(NamedTuple):
    """A part of a layer that tensor parallelism splits inside: attention or an MLP. Sizes are elements per token."""

    name: str  # within the layer
    inputs: int  # width of the inputs of its first products
    columns: int  # total width of the results of its column-split matrices, which come first
    rows: int  # total width of the inputs of its row-split matrices, which come last
    outputs: int
    cores: int  # number of softmax attentions
    enters: int  # how often activations enter the split part
    leaves: int
    stack: int = 0  # whose positions it works on: 0, or 1 for a decoder's
    memory: int = 0  # cross attention: width of the results of matrices that work on the encoder's positions


class ExpertPart(NamedTuple):
    """The experts of a layer, and their router."""

    name: str  # of the module with both and the shared experts, within the layer
    num_experts: int
    per_token: int
    hidden: int
    inner: int  # width of one expert
    parameters: int  # elements of all experts' matrices
    has_shared: bool


class LayerDescription(NamedTuple):
    """One layer of a kind."""

    parameters: tuple[ParameterShape, ...]  # named within the layer
    regions: tuple[Region, ...]
    norms: tuple[str, ...]  # modules that have parameters and are in no region
    norm_stacks: tuple[int, ...]  # the stack whose positions each of them gets
    enters: Lengths  # how often activations of each stack enter the split part of some region
    leaves: Lengths
    cores: tuple[Core | None, ...]  # of each region, if it has any; several in one region are alike
    uses: tuple[str, ...]  # modules that it shares with other layers
    # Whether the backward pass needs the last sum over processes, which recomputation then repeats.
    ends_with_norm: bool
    experts: ExpertPart | None = None  # positions of the first stack go to them


class Description(NamedTuple):
    """A model as its modules and its family's tensor-parallel plan describe it."""

    entry: tuple[ParameterShape, ...]
    shared: tuple[ParameterShape, ...]  # of modules that layers share
    kinds: tuple[LayerDescription, ...]  # in the order of `TransformerConfig.layer_counts`
    head: tuple[ParameterShape, ...]  # without a tied table
    entry_leaves: int
    head_enters: int


@lru_cache(maxsize=4096)
def description(model: TransformerConfig) -> Description:
    """What a model is made of, read from its ends and one layer of each kind on the meta device.

    Raises:
        ConfigError: the family's plan has an unknown style.
    """
    whole = one_of_each(model)
    try:
        kinds = styles_by_module(whole)
    except ValueError as error:
        raise ConfigError("model.family", type(whole).__name__, f"{error}; correct its sharding module") from None
    layers = [
        _layer(layer, prefix, kinds, stacks)
        for (prefix, layer), stacks in zip(whole.layers.items(), stacks_of(model), strict=True)
    ]
    head = ((name, parameter) for name, parameter in head_parameters(whole) if not is_table(name))
    return Description(
        tuple(_shape(name, parameter, kinds, at_entry=True) for name, parameter in entry_parameters(whole)),
        tuple(_shape(name, parameter, kinds, at_entry=True) for name, parameter in shared_parameters(whole)),
        tuple(layers),
        tuple(_shape(name, parameter, kinds) for name, parameter in head),
        sum(kinds[name].leaves for name in whole.entry if name in kinds),
        sum(kinds[name].enters for name in (*whole.head, "token_loss") if name in kinds),
    )


def _layer(layer: nn.Module, number: str, kinds: Mapping[str, StyleKind], stacks: Stacks) -> LayerDescription:
    prefix = f"layers.{number}."
    experts = next((_experts(name, one) for name, one in layer.named_modules() if isinstance(one, SparseMLP)), None)
    in_layer = {name.removeprefix(prefix): kind for name, kind in kinds.items() if name.startswith(prefix)}
    regions = _regions(layer, in_layer, stacks)
    owners = dict.fromkeys(name.rpartition(".")[0] for name, _ in layer.named_parameters())
    others = [region.name for region in regions] + ([experts.name] if experts else [])
    norms = tuple(name for name in owners if not any(_is_inside(name, other) for other in others))
    enters, leaves = [0, 0], [0, 0]
    for region in regions:
        of_memory = min(1, region.memory) if region.enters > 1 else 0
        enters[region.stack] += region.enters - of_memory
        enters[1 - region.stack] += of_memory
        leaves[region.stack] += region.leaves
    parameters = tuple(_shape(name, parameter, in_layer) for name, parameter in layer.named_parameters())
    if experts:
        parameters = tuple(_around_experts(parameter, layer, experts.name) for parameter in parameters)
    return LayerDescription(
        parameters,
        regions,
        norms,
        tuple(stacks.get(name, (0,))[0] for name in norms),
        (enters[0], enters[1]),
        (leaves[0], leaves[1]),
        tuple(next(iter(cores_of(layer.get_submodule(region.name), stacks, region.name)), None) for region in regions),
        shared_modules(layer),
        bool(stacks) and list(stacks)[-1] in norms,
        experts,
    )


def _experts(name: str, module: SparseMLP) -> ExpertPart:
    config, size = module.router.config, sum(parameter.numel() for parameter in module.experts.parameters())
    sizes = config.num_experts, config.experts_per_token, config.hidden_size, config.expert_ffn_hidden_size
    return ExpertPart(name, *sizes, size, module.shared is not None)


def _around_experts(parameter: ParameterShape, layer: nn.Module, name: str) -> ParameterShape:
    """The parameter with its place before, in or after the experts. Shared experts run after the others."""
    owner = layer.get_submodule(parameter.name.rpartition(".")[0])
    if isinstance(owner, ExpertLinear):
        return replace(parameter, of_experts=True)
    return replace(parameter, after_experts=not _is_inside(parameter.name, f"{name}.shared"))


def _shape(
    name: str, parameter: torch.Tensor, kinds: Mapping[str, StyleKind], at_entry: bool = False
) -> ParameterShape:
    module, _, own_name = name.rpartition(".")
    kind = kinds.get(module, _WHOLE)
    partial = own_name in kind.partial_gradients
    return ParameterShape(name, tuple(parameter.shape), kind.split.get(own_name), partial, at_entry)


def _regions(layer: nn.Module, kinds: Mapping[str, StyleKind], stacks: Stacks) -> tuple[Region, ...]:
    """The modules around linear layers, in the order of the layer's modules.

    Each linear layer belongs to the nearest enclosing module that activations enter, or, if the plan names none, to its
    parent module.
    """
    members: dict[str, list[tuple[nn.Linear, StyleKind, int]]] = {}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            around = _around(name)
            region = next((outer for outer in around if kinds.get(outer, _WHOLE).enters), around[0])
            stack = stacks.get(name, (0,))[0]
            members.setdefault(region, []).append((module, kinds.get(name, _WHOLE), stack))
    found = []
    for region, linears in members.items():
        # The plan splits the first products by columns, dimension 0 of their weights, and the last by rows, dimension
        # 1. The last ones work on the region's own positions, and so do the first ones except those for a memory.
        last = [linear for linear, kind, _ in linears if kind.split.get("weight") == 1]
        own = next((stack for _, kind, stack in reversed(linears) if kind.split.get("weight") == 1), linears[0][2])
        columns = [(linear, stack) for linear, kind, stack in linears if kind.split.get("weight") != 1]
        first = [linear for linear, stack in columns if stack == own]
        inside = [kind for name, kind in kinds.items() if _is_inside(name, region)]
        found.append(
            Region(
                region,
                inputs=max((linear.in_features for linear in first), default=0),
                columns=sum(linear.out_features for linear in first),
                rows=sum(linear.in_features for linear in last),
                outputs=max((linear.out_features for linear in last), default=0),
                cores=sum(isinstance(module, AttentionCore) for module in layer.get_submodule(region).modules()),
                enters=sum(kind.enters for kind in inside),
                leaves=sum(kind.leaves for kind in inside),
                stack=own,
                memory=sum(linear.out_features for linear, stack in columns if stack != own),
            )
        )
    return tuple(found)


def _around(name: str) -> list[str]:
    """Names of the enclosing modules, innermost first; "" for the layer itself, only if it is the parent."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)] or [""]


def _is_inside(name: str, region: str) -> bool:
    return f"{name}.".startswith(f"{region}.")


def stage_units(model: TransformerConfig, split: StageLayers) -> list[Unit]:
    """The smallest units of a pipeline stage in the order of its forward pass: layers that `joined` has not joined.

    The root, which may be empty, comes last. An untied embedding table is a unit of its own; a tied one belongs to the
    root.
    """
    kinds = kinds_of_layers(model)
    return _units(model, {number: kinds[number] for number in split.layers}, split.is_first, split.is_last)


def units_of_counts(model: TransformerConfig, counts: Counts, is_first: bool, is_last: bool) -> list[tuple[Unit, int]]:
    """`stage_units` of a stage with ``counts`` layers of each kind: each unit once, with how often it occurs."""
    times = {f"layers.{kind}": count for kind, count in enumerate(counts) if count}
    units = _units(model, {kind: kind for kind, count in enumerate(counts) if count}, is_first, is_last)
    return [(unit, times.get(unit.name, 1)) for unit in units]


def _units(model: TransformerConfig, kinds: Mapping[int, int], is_first: bool, is_last: bool) -> list[Unit]:
    """``kinds`` is the kind of each layer by its number."""
    parts = description(model)
    units, root = [], []
    for parameter in parts.entry if is_first else ():
        if is_table(parameter.name) and not model.tied_embeddings:
            units.append(Unit("embedding", (parameter,)))
        else:
            root.append(parameter)
    for layer, kind in kinds.items():
        prefix, own = f"layers.{layer}", parts.kinds[kind].parameters
        units.append(Unit(prefix, tuple(replace(p, name=f"{prefix}.{p.name}") for p in own)))
    used = {name for kind in kinds.values() for name in parts.kinds[kind].uses}
    root += [parameter for parameter in parts.shared if parameter.name.partition(".")[0] in used]
    if is_last:
        root += parts.head
        if model.tied_embeddings and not is_first:
            root += [replace(parameter, at_entry=False) for parameter in parts.entry if is_table(parameter.name)]
    return [*units, Unit("", tuple(root))]


@dataclass(frozen=True)
class ShardOf:
    """One of ``size`` processes that share a dimension in equal parts, rounded up until nothing is left."""

    size: int = 1
    index: int = 0

    def of(self, length: int) -> int:
        """The length of this process's part of a dimension."""
        largest = -(-length // self.size)
        return largest if self.index == 0 else min(largest, max(0, length - self.index * largest))


@dataclass(frozen=True)
class ParameterSplit:
    """How one process's part of every parameter is cut out: by tensor or expert parallelism, then by rows through ZeRO.

    If ``expert`` is set, it says how experts are shared, and ``expert_shard`` how ZeRO then splits them. Otherwise they
    are split as the rest of a layer is.
    """

    tensor: ShardOf = ShardOf()
    shard: ShardOf = ShardOf()  # of one process if nothing is sharded
    expert: ShardOf | None = None
    expert_shard: ShardOf = ShardOf()

    def shard_of(self, of_experts: bool) -> ShardOf:
        """How ZeRO splits the parameters of experts, or all others."""
        return self.expert_shard if of_experts and self.expert else self.shard

    def before_sharding(self, parameter: ParameterShape) -> tuple[int, ...]:
        """The shape that the processes of a ZeRO group share."""
        dim, shape = parameter.tensor_dim, parameter.shape
        if parameter.of_experts and self.expert:
            return (self.expert.of(shape[0]), *shape[1:])
        if dim is None or self.tensor.size == 1:
            return shape
        return (*shape[:dim], self.tensor.of(shape[dim]), *shape[dim + 1 :])

    def here(self, parameter: ParameterShape) -> tuple[int, ...]:
        """The shape on this process."""
        shape, shard = self.before_sharding(parameter), self.shard_of(parameter.of_experts)
        return shape if shard.size == 1 else (shard.of(shape[0]), *shape[1:])

    def padded(self, parameter: ParameterShape) -> int:
        """Elements of each process's shard in a collective, where every shard is padded to the size of the first."""
        rows, *columns = self.before_sharding(parameter)
        return -(-rows // self.shard_of(parameter.of_experts).size) * prod(columns)


def joined(units: Sequence[Unit], split: ParameterSplit, element: int) -> list[Unit]:
    """A stage's units of communication: layers share one until it is full. ``element``: bytes in the compute type.

    Experts that other processes share than the rest of their layers are a unit of their own, before these.
    """
    layers = [unit for unit in units if unit.name.startswith("layers.")]
    sizes = [element * sum(prod(split.before_sharding(p)) for p in layer.parameters) for layer in layers]
    left, start = iter(layers), units.index(layers[0])
    parts = [list(islice(left, count)) for count in units_of_layers(sizes)]
    full = [Unit(part[0].name, tuple(p for layer in part for p in layer.parameters)) for part in parts]
    if split.expert:
        full = [unit for one in full for unit in _without_experts(one) if unit.parameters]
    return [*units[:start], *full, *units[start + len(layers) :]]


def _without_experts(unit: Unit) -> tuple[Unit, Unit]:
    """The experts in a unit of layers, and the rest of it."""
    own = tuple(parameter for parameter in unit.parameters if parameter.of_experts)
    rest = tuple(parameter for parameter in unit.parameters if not parameter.of_experts)
    return Unit(f"{unit.name}{OF_EXPERTS}", own), Unit(unit.name, rest)
