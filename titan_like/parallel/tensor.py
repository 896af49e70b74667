"""Tensor parallelism: several processes share each layer (arXiv 1909.08053; sequence parallelism: arXiv 2205.05198).

Each family's module `sharding` lists, as plain data, which modules are split and how.

| | between layers | forward, per layer | backward, per layer |
|---|---|---|---|
| | full activations | 2 all-reduces | 2 all-reduces |
| sequence parallelism | 1/tp of the sequence | 2 all-gathers, 2 reduce-scatters | 2 reduce-scatters, 2 all-gathers |
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from titan_like.models.layers.cross_entropy import TokenLoss
from titan_like.models.packages import module_beside
from titan_like.models.transformer import Transformer
from titan_like.optim.shards import widen
from titan_like.parallel.tensor_base import Style, TensorParallel
from titan_like.parallel.tensor_styles import STYLES, Norm, Region, split_logits
from titan_like.torch_private import coalesced

Plan = Mapping[str, str | type[TensorParallel] | ParallelStyle]  # by module name; `*` is one part between dots


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split a model, or one pipeline stage, over a one-dimensional mesh, by its family's plan.

    Every parameter becomes a DTensor, and the logits become DTensors split over the vocabulary. Apply this before
    activation checkpointing, compilation and data parallelism, on the meta device or with equal weights on all ranks.
    Raises a `ValueError` if the plan does not fit the model. (Rules have checked that the mesh's size divides the
    model's.)
    """
    styles = styles_of(family_plan(model), model, sequence_parallel)
    if isinstance(getattr(model, "token_loss", None), TokenLoss) and "token_loss" not in styles:
        raise ValueError(f"the tensor-parallel plan of {type(model).__name__} leaves out token_loss")
    parallelize_module(model, mesh, styles, src_data_rank=None)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise ValueError(f"the tensor-parallel plan of {type(model).__name__} leaves out the parameter {name}")
    model.sequence_shards = mesh.size() if sequence_parallel else 1


def family_plan(model: Transformer) -> Plan:
    """The tensor-parallel plan beside the model's class, or beside the class that it extends: in the module `sharding`.

    It may be a function of the shape. Raises a `ValueError` if there is no such module.
    """
    module = module_beside(type(model), Transformer, "sharding")
    if module is None:
        raise ValueError(f"the package of {type(model).__name__} has no module sharding, which is needed here; add it")
    plan = module.TENSOR_PARALLEL_PLAN
    return plan(model.config) if callable(plan) else plan


def styles_of(plan: Plan, model: Transformer, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """Expand a plan's patterns and turn its names into styles: module name → style.

    Patterns for modules that only other pipeline stages hold, or that this shape leaves out, are left out. Raises a
    `ValueError` if the plan names a style that does not exist, or modules that the model does not have.
    """
    styles: dict[str, ParallelStyle] = {}
    left_out = {name for name, module in model.named_children() if isinstance(module, nn.Identity)}
    names = [name for name, module in model.named_modules() if not isinstance(module, nn.Identity)]
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in STYLES:
            raise ValueError(
                f'the tensor-parallel plan gives {pattern} an unknown style "{style}"; use one of {", ".join(STYLES)}'
            )
        matching = [name for name in names if matches_name(pattern, name)]
        # If the stage lacks a module as a whole, only another stage has the names of its parts.
        is_absent = pattern.partition(".")[0] in left_out | model.absent
        is_elsewhere = is_absent or any(matches_name(pattern, name) for name in model.absent)
        if not matching and not is_elsewhere:
            raise ValueError(f"the tensor-parallel plan does not fit {type(model).__name__}: it has no {pattern}")
        kind = STYLES[style] if isinstance(style, str) else style
        whole = Style(kind, sequence_parallel) if isinstance(kind, type) else kind
        styles.update(dict.fromkeys(matching, whole))
    kinds = {name: style.kind for name, style in styles.items() if isinstance(style, Style)}
    for name, kind in kinds.items():
        around = (kinds.get(name[:end], TensorParallel) for end, mark in enumerate(name) if mark == ".")
        if kind is Norm and any(issubclass(outer, Region) for outer in around):
            raise ValueError(f"the tensor-parallel plan makes {name}, which is in a region, a norm; use head_norm")
    return styles


def matches_name(pattern: str, name: str) -> bool:
    """Whether a plan's pattern is for the module of this name: `*` matches one part between dots."""
    patterns, names = pattern.split("."), name.split(".")
    return len(patterns) == len(names) and all(map(fnmatchcase, names, patterns))


def partial_parameters(model: Transformer) -> list[nn.Parameter]:
    """The parameters whose gradients are partial.

    With sequence parallelism these are norms, position embeddings, and biases that are added after a reduce-scatter.
    Norms of heads, and the half of an adapter that is not split, are partial in any case.
    """
    parameters = []
    for module in model.modules():
        if isinstance(module, TensorParallel):
            partial = {*module.always_partial, *(module.partial_gradients if module.sequence_parallel else ())}
            named = module.named_parameters(recurse=False)
            parameters += [p for name, p in named if name in partial and p.requires_grad]
    return parameters


@torch.no_grad()
def sum_partial_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients of `partial_parameters` over tensor-parallel ranks.

    Call it after a step's last backward pass and before gradients are read. Sums commute, so data parallelism may have
    summed them already.
    """
    widen(parameters)
    gradients = [parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)]
    if not gradients:
        return
    group = gradients[0].device_mesh.get_group("tp")
    with coalesced(group):
        for gradient in gradients:
            dist.all_reduce(gradient.to_local(), group=group)


def full_logits(logits: torch.Tensor, positions: slice | torch.Tensor) -> torch.Tensor:
    """Gather logits at some positions: [batch, seq, padded vocab] → [batch, positions, padded vocab] on every rank.

    Only generation needs this; training never gathers logits. Without tensor parallelism it only selects positions.
    """
    if not isinstance(logits, DTensor):
        return logits[:, positions]
    part = logits.to_local()[:, positions].contiguous()
    return split_logits(part, logits.device_mesh, logits.shape[2]).full_tensor()
