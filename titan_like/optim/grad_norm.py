"""One gradient norm over all parameters and all ranks, each parameter counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """This rank's part of every gradient, as plain tensors that share its memory."""
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def global_grad_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Euclidean norm of all gradients, a scalar of their dtype that is equal on every rank."""
    return _sum_over_shards(parameters, _sum_of_squares).sqrt()


def count_zeros(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Number of gradient elements that are exactly zero, over all ranks."""
    return _sum_over_shards(parameters, lambda gradients: torch.stack([(g == 0).sum() for g in gradients]).sum())


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(gradients)).square().sum()


def _sum_over_shards(
    parameters: Iterable[torch.nn.Parameter], reduce_local: Callable[[list[torch.Tensor]], torch.Tensor]
) -> torch.Tensor:
    """Reduce the local gradients, then sum over exactly those process groups that they are sharded over."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            groups = tuple(mesh.get_group(i) for i, p in enumerate(gradient.placements) if not p.is_replicate())
            gradient = gradient.to_local()
        by_groups.setdefault(groups, []).append(gradient)
    total = None
    for groups, gradients in by_groups.items():
        part = reduce_local(gradients)
        for group in groups:
            dist.all_reduce(part, group=group)
        total = part if total is None else total + part
    assert total is not None, "no parameter has a gradient"
    return total
