"""What optimizers that look at whole matrices need to know of shards, and an optimizer that never waits for the device.

A process holds one rectangle of a parameter, which tensor parallelism and ZeRO have cut out along its two dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_like.models.layers.init import local_parts
from titan_like.torch_private import StridedShard, flattened


class UpdateTraffic(NamedTuple):
    """Collectives of one kind that one process takes part in during an update."""

    dimensions: tuple[str, ...]  # of the mesh; together they are the group
    kind: str
    calls: int
    bytes: int  # that this process hands over, in all of them


class ShardedOptimizer(torch.optim.Optimizer):
    """Base of optimizers that work on shards and decide on the device whether a step is skipped.

    Its groups may have ``names``, the names of their parameters.
    """

    found_inf: torch.Tensor | None = None  # scalar; a step is skipped if it is above 0, as in torch's fused optimizers
    factor: torch.Tensor | None = None  # float64 scalar, by which a step multiplies the gradients first
    _skip: torch.Tensor | None = None

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "fused": True})  # "fused": `step` reads `found_inf` itself

    def begin_step(self) -> None:
        """Create missing state, and look at `found_inf`."""
        self.init_state()
        self._skip = None if self.found_inf is None else self.found_inf > 0

    def init_state(self) -> None:
        """Create the state of parameters that have none. It needs no other process."""
        for group, _, parameter in self.members():
            if not self.state[parameter]:
                self.state[parameter] = self.new_state(parameter, group)

    def new_state(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The state of one parameter, of any shape, before its first update."""
        raise NotImplementedError

    def traffic(self) -> list[UpdateTraffic]:
        """The collectives of an update; none where every element is updated by itself."""
        return []

    def members(self) -> Iterator[tuple[dict[str, Any], str, torch.nn.Parameter]]:
        """(group, name, parameter) of every parameter. Without names in the group, the name is empty."""
        for group in self.param_groups:
            names = group.get("names") or [""] * len(group["params"])
            yield from ((group, name, parameter) for name, parameter in zip(names, group["params"], strict=True))

    def assign(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Write ``new`` to ``old``, of the same shape, unless the step is skipped. For use after `begin_step`."""
        if self._skip is None:
            old.copy_(new)
        else:
            torch.where(self._skip, old, new, out=old)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor of any shape. Writing to it writes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, on every rank that holds a part of it. All of them call this."""
    if not isinstance(tensor, DTensor) or not isinstance(tensor.placements[-1], StridedShard):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    result = local(tensor).new_zeros(tensor.shape)  # torch does not know where ZeRO's shards of such rows are
    for part, (start, *_) in local_parts(tensor):
        result[start : start + len(part)] = part
    for group in shard_groups(tensor):
        dist.all_reduce(result, group=group)
    return result


def local_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Size of this process's parts of tensors, in bytes."""
    return sum(local(tensor).nbytes for tensor in tensors)


@torch.no_grad()
def widen(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Convert gradients in a 16-bit dtype to the dtype of their parameters, one after the other."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)


def is_table(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is a matrix outside the layers: an embedding table, or the output matrix."""
    return parameter.ndim >= 2 and not name.startswith("layers.")


def sharded_dimensions(parameter: torch.Tensor, dim: int | None = None) -> tuple[str, ...]:
    """Names of the mesh dimensions that split a parameter, or its dimension ``dim``, among several processes."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    return tuple(
        names[index]
        for index, placement in enumerate(parameter.placements)
        if not placement.is_replicate() and mesh.size(index) > 1 and dim in (None, _dim(placement))
    )


def _dim(placement: Any) -> int:
    return placement.dim  # Shard has it, and so have rows that ZeRO splits after tensor parallelism has


def shard_groups(parameter: torch.Tensor, dim: int | None = None) -> tuple[dist.ProcessGroup, ...]:
    """The process groups of `sharded_dimensions`."""
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(parameter.device_mesh.get_group(name) for name in sharded_dimensions(parameter, dim))


def mesh_over(parameter: torch.Tensor, dimensions: tuple[str, ...]) -> DeviceMesh:
    """One-dimensional mesh over several dimensions of a parameter's mesh. All processes of the job call it."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    if len(dimensions) == 1:
        return mesh[dimensions[0]]
    return flattened(mesh[dimensions], "_".join(dimensions))


def zeros_along(parameter: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros for one number per index of a matrix's dimension: [rows] or [columns], split over processes as that is."""
    shape = local(parameter).shape
    part = torch.zeros(shape[dim], dtype=parameter.dtype, device=parameter.device)
    if not isinstance(parameter, DTensor):
        return part
    placements = []
    for placement in parameter.placements:
        kept = not placement.is_replicate() and _dim(placement) == dim
        placements.append((placement if dim == 0 else Shard(0)) if kept else Replicate())
    size = torch.Size((parameter.shape[dim],))
    return DTensor.from_local(part, parameter.device_mesh, placements, run_check=False, shape=size, stride=(1,))


class Partial(NamedTuple):
    """A tensor to be summed in place over some process groups."""

    tensor: torch.Tensor
    groups: tuple[dist.ProcessGroup, ...]
    bucket: int  # tensors of one bucket and group are summed by one all-reduce


def sum_partials(partials: Iterable[Partial]) -> None:
    """Sum tensors over their groups. Processes of a group give tensors of the same sizes in the same order."""
    together: dict[tuple[int, dist.ProcessGroup], list[torch.Tensor]] = {}
    for tensor, groups, bucket in partials:
        for group in groups:
            together.setdefault((bucket, group), []).append(tensor)
    for (_, group), tensors in together.items():
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        sums = flat.split([tensor.numel() for tensor in tensors])
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(total.view_as(tensor))
