"""The gradients of all parameters: their norm over all ranks, with each parameter counted once, and their zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_like.torch_private import multiply_all_, norms_of


class Gradients:
    """The gradients of some parameters, which stay the same tensors in groups made once.

    A step then calls no Python function for each parameter, except for DTensors.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], mesh: DeviceMesh) -> None:
        self._mesh = mesh
        # A gradient that is replicated over a group must not be summed over it, so gradients are grouped by the mesh
        # dimensions that shard them.
        self._by_dimensions: dict[tuple[str, ...], list[torch.nn.Parameter]] = {}
        self._of_dtensors: set[tuple[str, ...]] = set()
        for parameter in parameters:
            dimensions: tuple[str, ...] = ()
            if isinstance(parameter.data, DTensor):
                names = parameter.data.device_mesh.mesh_dim_names or ()
                placed = zip(names, parameter.data.placements, strict=True)
                dimensions = tuple(name for name, placement in placed if not placement.is_replicate())
                self._of_dtensors.add(dimensions)
            self._by_dimensions.setdefault(dimensions, []).append(parameter)

    def local(self) -> dict[tuple[str, ...], list[torch.Tensor]]:
        """This rank's part of every gradient, as plain tensors that share its memory, by the dimensions that shard it.

        Raises:
            AssertionError: a parameter has no gradient, or one that is split in another way than it is.
        """
        found = {}
        for dimensions, parameters in self._by_dimensions.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            assert len(gradients) == len(parameters), "a parameter received no gradient"
            if dimensions in self._of_dtensors:
                gradients = [_part(parameter, one) for parameter, one in zip(parameters, gradients, strict=True)]
            found[dimensions] = gradients
        return found

    def norm(self) -> torch.Tensor:
        """Euclidean norm of all gradients: a scalar of their dtype, equal on every rank of the mesh.

        Over all pipeline stages together, there must be each parameter of the model exactly once.
        """
        return self._sum_over_shards(lambda gradients: torch.stack(norms_of(gradients)).square().sum()).sqrt()

    def count_zeros(self) -> torch.Tensor:
        """Number of gradient elements that are exactly zero: an integer scalar, summed over all ranks of the mesh."""
        return self._sum_over_shards(
            lambda gradients: torch.stack([one.numel() - torch.count_nonzero(one) for one in gradients]).sum()
        )

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a scalar, in place."""
        for gradients in self.local().values():
            multiply_all_(gradients, factor.to(gradients[0].dtype))

    def _sum_over_shards(self, reduce_local: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        """Reduce the local gradients, then sum over the process groups that shard them, then over the stages.

        All ranks sum in the same order. Groups are looked up in the mesh by name, because a gradient's own mesh may be
        an equal one of an earlier model: torch caches the results of sharding propagation for DTensors.
        """
        total = None
        for dimensions, gradients in self.local().items():
            part = reduce_local(gradients)
            for name in dimensions:
                dist.all_reduce(part, group=self._mesh.get_group(name))
            total = part if total is None else total + part
        assert total is not None, "there are no parameters"
        stages = self._mesh.get_group("pp")
        if stages.size() > 1:
            dist.all_reduce(total, group=stages)
        return total


def _part(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter.data, DTensor) and gradient.placements == parameter.data.placements, (
        "a gradient is split unlike its parameter"
    )
    return gradient.to_local()
