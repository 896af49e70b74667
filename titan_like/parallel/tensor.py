"""Tensor parallelism: several processes share each layer (arXiv 1909.08053; sequence parallelism: arXiv 2205.05198).

Which modules are split, and how, is data beside each model: its family's module `sharding`.

| | between layers | forward, per layer | backward, per layer |
|---|---|---|---|
| | whole activations | 2 all-reduces | 2 all-reduces |
| sequence parallelism | 1/tp of the sequence | 2 all-gathers, 2 reduce-scatters | 2 reduce-scatters, 2 all-gathers |
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from titan_like.models.transformer import Transformer
from titan_like.parallel.tensor_styles import STYLES, StyleKind, kind_of
from titan_like.torch_private import coalesced, overlap_tensor_parallelism

Plan = Mapping[str, str | ParallelStyle]  # by module name; `*` stands for one part of it between dots


def apply_tensor_parallel(
    model: Transformer, mesh: DeviceMesh, sequence_parallel: bool, plan: Plan | None = None
) -> None:
    """Split a model, or a pipeline stage of it, over a one-dimensional mesh, by its family's plan unless one is given.

    Every parameter becomes a DTensor. Comes before activation checkpointing, compilation and data parallelism, on the
    meta device or with equal weights on all ranks. Logits are then DTensors split by the vocabulary.

    Raises:
        ValueError: the plan and the model do not fit each other, or sizes do not divide.
    """
    config = model.config
    for name in ("num_kv_heads", "ffn_hidden_size"):
        if getattr(config, name) % mesh.size():
            raise ValueError(f"{name} {getattr(config, name)} is not divisible by {mesh.size()} processes")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Parallelize plan key")  # torch only warns of one that matches nothing
        try:
            styles = styles_of(family_plan(model) if plan is None else plan, model, sequence_parallel)
            parallelize_module(model, mesh, styles, src_data_rank=None)
        except UserWarning as warning:
            named = str(warning).partition(" in module ")[0]
            raise ValueError(f"the tensor-parallel plan and {type(model).__name__} do not fit: {named}") from None
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise ValueError(f"the tensor-parallel plan of {type(model).__name__} leaves out the parameter {name}")
    model.sequence_shards = mesh.size() if sequence_parallel else 1


def family_plan(model: Transformer) -> Plan:
    """The plan beside the model."""
    return model.config.family_module("sharding").TENSOR_PARALLEL_PLAN


def styles_by_module(model: Transformer) -> dict[str, StyleKind]:
    """What the family's plan says of each module that it names, as `parallelize_module` reads its patterns.

    Raises:
        ValueError: there is no style of a name.
    """
    found: dict[str, StyleKind] = {}
    for pattern, style in styles_of(family_plan(model), model, sequence_parallel=False).items():
        parts = pattern.split(".")
        for name, module in model.named_modules():
            names = name.split(".")
            if len(names) == len(parts) and all(map(fnmatchcase, names, parts)):
                found[name] = kind_of(style, module)
    return found


def styles_of(plan: Plan, model: Transformer, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """The styles that a plan names, without those of modules that another pipeline stage has in this one's place.

    Raises:
        ValueError: there is no style of a name.
    """
    styles: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        if isinstance(style, str) and style not in STYLES:
            raise ValueError(
                f'the tensor-parallel plan\'s {pattern} has the style "{style}"; there are {", ".join(STYLES)}'
            )
        if pattern not in absent_modules(model):
            styles[pattern] = STYLES[style](sequence_parallel) if isinstance(style, str) else style
    return styles


def absent_modules(model: Transformer) -> set[str]:
    """Modules that another pipeline stage has in this one's place."""
    absent = set() if model.is_first else set(model.entry)
    absent |= set() if model.is_last else {"norm", "output", "mask_padding"}
    return absent - {name for name, _ in model.named_children()}


@torch.no_grad()
def sum_partial_gradients(model: Transformer) -> None:
    """Complete the gradients that sequence parallelism leaves partial: of norms, positions and biases after a sum.

    After a step's last backward pass and before gradients are read. Sums commute: over data-parallel ranks they may
    have been summed before.
    """
    gradients, group = [], None
    for module in model.modules():
        for name in getattr(module, "partial_gradients", ()):
            parameter = getattr(module, name, None)
            if parameter is None or parameter.grad is None:
                continue
            group = parameter.device_mesh.get_group("tp")
            gradients.append(parameter.grad.to_local())
    if group is None:
        return
    with coalesced(group):
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)


def full_logits(logits: torch.Tensor, positions: slice | torch.Tensor) -> torch.Tensor:
    """Logits [batch, positions, padded vocab] at some positions of the sequence, whole on every rank.

    For generation: training never has them. Without tensor parallelism this only takes the positions.
    """
    if not isinstance(logits, DTensor):
        return logits[:, positions]
    part = logits.to_local()[:, positions]
    batch, seq, vocab = *part.shape[:2], logits.shape[2]
    shape, stride = torch.Size((batch, seq, vocab)), (seq * vocab, vocab, 1)
    return DTensor.from_local(
        part.contiguous(), logits.device_mesh, [Shard(2)], run_check=False, shape=shape, stride=stride
    ).full_tensor()


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let the compiler overlap matrix products with the collectives beside them, piece by piece. CUDA only.

    Takes effect with sequence parallelism, where the pairs are all-gather then product, product then reduce-scatter.
    """
    if mesh.device_type != "cuda":
        return
    with warnings.catch_warnings():  # later versions call it deprecated, and their compiler asks for it still
        warnings.simplefilter("ignore", FutureWarning)
        overlap_tensor_parallelism(mesh.get_group().group_name)
