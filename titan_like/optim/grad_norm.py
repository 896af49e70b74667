"""One gradient norm over all parameters and all ranks, each parameter counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's part of every gradient, as plain tensors that share its memory."""
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def global_grad_norm(parameters: Iterable[torch.Tensor], pipeline: dist.ProcessGroup) -> torch.Tensor:
    """Euclidean norm of all gradients, a scalar of their dtype that is equal on every rank.

    ``parameters`` of all ranks of the ``pipeline`` group together have each parameter of the model once.
    """
    return _sum_over_shards(parameters, pipeline, _sum_of_squares).sqrt()


def count_zeros(parameters: Iterable[torch.Tensor], pipeline: dist.ProcessGroup) -> torch.Tensor:
    """Number of gradient elements that are exactly zero, over all ranks."""
    return _sum_over_shards(parameters, pipeline, lambda parts: torch.stack([(g == 0).sum() for g in parts]).sum())


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(gradients)).square().sum()


def _sum_over_shards(
    parameters: Iterable[torch.Tensor],
    pipeline: dist.ProcessGroup,
    reduce_local: Callable[[list[torch.Tensor]], torch.Tensor],
) -> torch.Tensor:
    """Reduce the local gradients, sum over exactly those process groups that they are sharded over, then over stages.

    The groups are summed in an order that is equal on all ranks.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None, "a parameter received no gradient"
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            assert isinstance(parameter.data, DTensor) and gradient.placements == parameter.data.placements, (
                "a gradient is split unlike its parameter"
            )
            # Not the gradient's: torch keeps results of earlier operations, whose mesh may be equal but another one.
            mesh = parameter.data.device_mesh
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
    if dist.get_world_size(pipeline) > 1:
        dist.all_reduce(total, group=pipeline)
    return total
