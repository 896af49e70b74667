"""The gradient norm over all parameters and all ranks, with each parameter counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_like.torch_private import norms_of


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's shard of every gradient, as plain tensors of the shards' shapes that share their memory."""
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def global_grad_norm(parameters: Iterable[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """Euclidean norm of all gradients: a scalar of their dtype, equal on every rank of ``mesh``.

    Over all pipeline stages together, ``parameters`` must contain each parameter of the model exactly once.
    """
    return _sum_over_shards(parameters, mesh, _sum_of_squares).sqrt()


def count_zeros(parameters: Iterable[torch.Tensor], mesh: DeviceMesh) -> torch.Tensor:
    """Number of gradient elements that are exactly zero: an integer scalar, summed over all ranks of ``mesh``."""

    def zeros(gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([gradient.numel() - torch.count_nonzero(gradient) for gradient in gradients]).sum()

    return _sum_over_shards(parameters, mesh, zeros)


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(norms_of(gradients)).square().sum()


def _sum_over_shards(
    parameters: Iterable[torch.Tensor],
    mesh: DeviceMesh,
    reduce_local: Callable[[list[torch.Tensor]], torch.Tensor],
) -> torch.Tensor:
    """Reduce the local gradients, then sum over the process groups that they are sharded over, then over the stages.

    All ranks sum in the same order. Groups are looked up in ``mesh`` by name, because a gradient's own mesh may be an
    equal one of an earlier model: torch caches the results of sharding propagation for DTensors.
    """
    # A gradient that is replicated over a group must not be summed over it, so gradients are grouped by the mesh
    # dimensions that shard them.
    by_dimensions: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None, "a parameter received no gradient"
        dimensions: tuple[str, ...] = ()
        if isinstance(gradient, DTensor):
            assert isinstance(parameter.data, DTensor) and gradient.placements == parameter.data.placements, (
                "a gradient is split unlike its parameter"
            )
            names = gradient.device_mesh.mesh_dim_names or ()
            placed = zip(names, gradient.placements, strict=True)
            dimensions = tuple(name for name, placement in placed if not placement.is_replicate())
            gradient = gradient.to_local()
        by_dimensions.setdefault(dimensions, []).append(gradient)
    total = None
    for dimensions, gradients in by_dimensions.items():
        part = reduce_local(gradients)
        for name in dimensions:
            dist.all_reduce(part, group=mesh.get_group(name))
        total = part if total is None else total + part
    assert total is not None, "no parameter has a gradient"
    stages = mesh.get_group("pp")
    if stages.size() > 1:
        dist.all_reduce(total, group=stages)
    return total
