"""Low-rank adapters (LoRA, arXiv 2106.09685): y = W x + alpha / rank · B A dropout(x), where A and B alone are trained.

The base's weights W are frozen: they stay in the compute dtype, without master copies, gradients or optimizer state.
An adapter is split as its base is. Where tensor parallelism splits W by rows, it splits B so, and A is whole; where it
splits W by columns, it splits A so, and B is whole. Either way each rank adds its own part of the adapter to its own
part of W x, nothing more is sent in a pass, and the gradient of what is whole is summed once a step.

A fused projection is several matrices in Hugging Face's files. Each of these has its own A and B, as with PEFT.
"""

import re
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.config.errors import ConfigError, require
from titan_like.config.schema import LoRA
from titan_like.models.config import TransformerConfig
from titan_like.models.hugging_face import RefusedError, Stored, family_of
from titan_like.models.layers.init import ADAPTER_NAMES
from titan_like.models.parts import one_of_each
from titan_like.models.transformer import Transformer
from titan_like.parallel.extend import extend
from titan_like.parallel.tensor import matches_name
from titan_like.parallel.weight_gradients import LinearGemms

NUMBERED = re.compile(r"^(.*\.)?\d+\.")


class Adapter(NamedTuple):
    """The adapter of one linear layer. Its rows are in the order of the base's."""

    rank: int
    scale: float  # alpha / rank
    dropout: float
    rows: tuple[int, ...]  # of the matrices that the layer consists of, in each group of its rows
    is_adapted: tuple[bool, ...]  # for each of these matrices

    @property
    def adapted_rows(self) -> list[int]:
        """Number of rows of each matrix with an adapter, in each group."""
        return [rows for rows, is_adapted in zip(self.rows, self.is_adapted, strict=True) if is_adapted]

    def shapes(self, linear: nn.Linear) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of A, [matrices · rank, in], and B, [rows of these matrices, rank]."""
        adapted = self.adapted_rows
        rows = linear.out_features // sum(self.rows) * sum(adapted)
        return (len(adapted) * self.rank, linear.in_features), (rows, self.rank)

    def matrices(self, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """B of each matrix that has an adapter, in groups: [groups, rows, rank]."""
        return b.view(-1, sum(self.adapted_rows), self.rank).split(self.adapted_rows, 1)

    def up(self, low: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """alpha / rank · B · low: [..., matrices · rank] → [..., out]. Rows of matrices without an adapter are 0."""
        low = low * self.scale
        if len(self.rows) == 1:
            return F.linear(low, b)
        pairs = iter(zip(low.split(self.rank, -1), self.matrices(b), strict=True))
        groups, parts = len(b) // sum(self.adapted_rows), []
        for rows, is_adapted in zip(self.rows, self.is_adapted, strict=True):
            if is_adapted:
                part, matrix = next(pairs)
                parts.append(F.linear(part, matrix.flatten(0, 1)).unflatten(-1, (groups, rows)))
            else:
                parts.append(low.new_zeros(*low.shape[:-1], groups, rows))
        return torch.cat(parts, -1).flatten(-2)


class AdaptedLinear(LinearGemms):
    """Extends a linear layer by an adapter. Tensor parallelism extends the result."""

    adapter: Adapter
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def gemm(
        self, x: torch.Tensor, weight: torch.Tensor, part: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As in the base class. If the layer is split by columns, the result is this rank's partial sum."""
        a, b = _local(self.lora_a), _local(self.lora_b)
        dropped = self.dropped(x, self.adapter.dropout) if self.training and self.adapter.dropout else x
        return super().gemm(x, weight, part, bias) + self.up(F.linear(dropped, a), b)

    def up(self, low: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """`Adapter.up` by what this process holds of B."""
        return self.adapter.up(low, b)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def add_adapters(model: Transformer, section: LoRA) -> None:
    """Add adapters to the layers of a model, or of one stage, in place. Apply it before tensor parallelism."""
    modules = dict(model.named_modules())
    for name, adapter in adapters_of(model, section).items():
        linear = modules[name]
        assert isinstance(linear, nn.Linear)
        extend(linear, AdaptedLinear, adapter=adapter)
        for parameter, shape in zip(ADAPTER_NAMES, adapter.shapes(linear), strict=True):
            linear.register_parameter(parameter, nn.Parameter(linear.weight.new_empty(shape)))


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Freeze everything but adapters, in ``dtype``. Apply it after tensor parallelism, which replaces parameters."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name not in ADAPTER_NAMES:  # replaced, because a DTensor keeps its shard if its data is assigned
                module.register_parameter(name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))


def adapters_of(model: Transformer, section: LoRA) -> dict[str, Adapter]:
    """The adapter of each linear layer that has one, by the layer's name. The model may be a stage."""
    stored = stored_linears(model.config)
    names = [name for name, module in model.layers.named_modules(prefix="layers") if isinstance(module, nn.Linear)]
    adapters = {name: _adapter_of(name, stored.get(name), section) for name in names}
    return {name: adapter for name, adapter in adapters.items() if any(adapter.is_adapted)}


def stored_linears(config: TransformerConfig, model_type: Any = None) -> dict[str, Stored]:
    """How Hugging Face's files store each layer's weights, by the module's name; empty if they cannot.

    Of several classes of this shape it is the one with ``model_type``, or else the first. Training takes the first.
    """
    try:
        family = family_of(config, model_type)
        return {weight.name.removesuffix(".weight"): weight for weight in family.stored_parameters(config)}
    except (ConfigError, RefusedError):
        return {}


def _adapter_of(name: str, stored: Stored | None, section: LoRA) -> Adapter:
    sources = [] if stored is None else [source.removesuffix(".weight") for source in stored.sources]
    parts = stored.parts if stored is not None and len(sources) > 1 else ()
    rows = tuple(part // stored.groups for part in parts) if stored is not None and parts else (1,)
    is_whole = _fits(section.modules, name)
    is_adapted: tuple[bool, ...] = (is_whole or any(_fits(section.modules, source) for source in sources),)
    if parts:
        is_adapted = tuple(is_whole or _fits(section.modules, source) for source in sources)
    return Adapter(section.rank, section.alpha / section.rank, section.dropout, rows, is_adapted)


def _fits(patterns: list[str], name: str) -> bool:
    """Whether the end of a name fits one of the patterns, or there are none."""
    return not patterns or any(_ends_as(pattern, name) for pattern in patterns)


def _ends_as(pattern: str, name: str) -> bool:
    return matches_name(pattern, ".".join(name.split(".")[-pattern.count(".") - 1 :]))


def check_adapters(config: TransformerConfig, section: LoRA, family: str) -> None:
    """Refuse modules that no layer has, or that leave out a kind of layers."""
    model = one_of_each(config)
    linears = {name for name, module in model.layers.named_modules() if isinstance(module, nn.Linear)}
    require(linears, "lora.rank", section.rank, f"the layers of {family} have no linear modules; set it to 0")
    weights = stored_linears(model.config).items()
    sources = (weight.sources for name, weight in weights if name.removeprefix("layers.") in linears)
    # Without the layers' numbers: all layers of a kind are alike.
    names = {NUMBERED.sub("", name) for name in linears}
    stored = {NUMBERED.sub("", name.removesuffix(".weight")) for tensors in sources for name in tensors}
    for pattern in section.modules:
        reason = f'"{pattern}" fits no linear module of the layers; there are {", ".join(sorted(stored or names))}'
        require(any(_ends_as(pattern, name) for name in names | stored), "lora.modules", section.modules, reason)
    adapted = {name.split(".")[1] for name in adapters_of(model, section)}
    reason = "leaves out all modules of some layers; name one of every kind of layer"
    require(adapted == model.layers.keys(), "lora.modules", section.modules, reason)


def adapter_parameters(config: TransformerConfig, section: LoRA) -> int:
    """Number of elements of all adapters of a model."""
    if not section.rank:
        return 0
    model, total = one_of_each(config), 0
    modules, numbers = dict(model.named_modules()), list(model.layers)
    for name, adapter in adapters_of(model, section).items():
        count = config.layer_counts[numbers.index(name.split(".")[1])]
        total += count * sum(rows * columns for rows, columns in adapter.shapes(modules[name]))
    return total
