"""Shards for optimizers that are not elementwise, and the base of optimizers that never wait for the device.

A process holds one rectangle of a parameter, which tensor parallelism and ZeRO have cut out along its two dimensions.
A layer's experts are one parameter, a stack of matrices [matrices · rows, columns]; a process holds one rectangle of
each matrix that it has a part of.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from titan_like.models.layers.init import local_parts
from titan_like.torch_private import StridedShard, flattened


class UpdateTraffic(NamedTuple):
    """Collectives of one kind that one process issues during an update."""

    dimensions: tuple[str, ...]  # mesh dimensions; together they are the group
    kind: str
    calls: int
    bytes: int  # sent by this process, in all of them


class ShardedOptimizer(torch.optim.Optimizer):
    """Base of optimizers that work on shards and decide on the device whether a step is skipped.

    Its groups may have ``names``, the names of their parameters.
    """

    found_inf: torch.Tensor | None = None  # scalar; a step is skipped if it is above 0, as in torch's fused optimizers
    takes_factor = False  # whether a step multiplies gradients, which may be in a 16-bit dtype, by `factor` itself
    factor: torch.Tensor | None = None  # float64 scalar
    _skip: torch.Tensor  # bool scalar

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr, "fused": True})  # "fused": `step` reads `found_inf` itself

    def begin_step(self) -> None:
        """Create missing state, and read `found_inf`."""
        self.init_state()
        device = next(parameter.device for *_, parameter in self.members())
        self._skip = torch.zeros((), device=device) > 0 if self.found_inf is None else self.found_inf > 0

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
        torch.where(self._skip, old, new, out=old)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor of any shape. Writing to it writes to the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, on every rank that has a shard of it. All of them call this."""
    if not isinstance(tensor, DTensor) or not isinstance(tensor.placements[-1], StridedShard):
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    result = local(tensor).new_zeros(tensor.shape)  # torch's full_tensor() does not support such shards
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


def sharded_dimensions(parameter: torch.Tensor, dim: int | None = None, in_matrix: bool = False) -> tuple[str, ...]:
    """Names of the mesh dimensions that split a parameter, or its dimension ``dim``, among several processes.

    With ``in_matrix``, only the dimensions that cut single matrices of a stack.
    """
    names = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
    left_out = _between_matrices(parameter) if in_matrix else ()
    return tuple(
        names[index]
        for index, _, placement in _shards(parameter)
        if dim in (None, placement.dim) and index not in left_out
    )


def _shards(parameter: torch.Tensor) -> Iterator[tuple[int, int, Any]]:
    """(number, size, placement) of the mesh dimensions that split a parameter.

    A placement with a ``dim`` is torch's Shard, or a strided one: rows that ZeRO splits after tensor parallelism has.
    """
    if isinstance(parameter, DTensor):
        sizes = parameter.device_mesh.shape
        for index, (size, placement) in enumerate(zip(sizes, parameter.placements, strict=True)):
            if not placement.is_replicate() and size > 1:
                yield index, size, placement


def num_matrices(parameter: torch.Tensor) -> int:
    """Number of matrices stacked in a parameter, as set by `titan_like.models.layers.experts.mark_stacks`."""
    return getattr(parameter, "num_matrices", 1)


def matrices_here(parameter: torch.Tensor) -> int:
    """Number of matrices of a stack of which a process has a part."""
    return num_matrices(parameter) // prod(_between_matrices(parameter).values())


def _between_matrices(parameter: torch.Tensor) -> dict[int, int]:
    """Sizes of the mesh dimensions that split a stack only between its matrices, by their number."""
    matrices, sizes = num_matrices(parameter), dict[int, int]()
    for index, size, placement in _shards(parameter):
        # A strided shard is a part of each of ``split_factor`` equal parts.
        if placement.dim == 0 and matrices % (size * getattr(placement, "split_factor", 1)) == 0:
            matrices, sizes[index] = matrices // size, size
    return sizes


class Block(NamedTuple):
    """Consecutive matrices of a stack; a process holds the same rows of each."""

    matrices: slice  # their numbers among the `matrices_here`
    rows: slice  # within the process's part of the stack
    offset: int  # first of these rows in each matrix

    def of(self, part: torch.Tensor) -> torch.Tensor:
        """A view of a process's part of a stack: [rows of all, …] → [matrices, rows of each, …]."""
        return part[self.rows].unflatten(0, (self.matrices.stop - self.matrices.start, -1))


def blocks_of(parameter: torch.Tensor) -> list[Block]:
    """A process's part of a stack of matrices, in the order of its rows. Other parameters are stacks of one."""
    if parameter.ndim != 2:
        return [Block(slice(0, 1), slice(None), 0)] if local(parameter).numel() else []
    height, num_local = len(parameter) // num_matrices(parameter), matrices_here(parameter)
    runs = [(first, first + len(part)) for part, (first, *_) in local_parts(parameter) if len(part)]
    starts = [
        (row, end) for first, end in runs for row in (first, *range(first - first % height + height, end, height))
    ]
    blocks: list[Block] = []
    alike, start = None, 0  # what rows of matrices in one block have in common
    for row, end in starts:  # one for each run of rows within a matrix
        number, offset = row // height % num_local, row % height
        count = min(height - offset, end - row)
        block = Block(slice(number, number + 1), slice(start, start + count), offset)
        if alike == (number, count, offset):
            last = blocks.pop()
            block = Block(slice(last.matrices.start, number + 1), slice(last.rows.start, start + count), offset)
        blocks.append(block)
        alike, start = (number + 1, count, offset), start + count
    return blocks


def shard_groups(
    parameter: torch.Tensor, dim: int | None = None, in_matrix: bool = False
) -> tuple[dist.ProcessGroup, ...]:
    """The process groups of `sharded_dimensions`."""
    if not isinstance(parameter, DTensor):
        return ()
    return tuple(parameter.device_mesh.get_group(name) for name in sharded_dimensions(parameter, dim, in_matrix))


def mesh_over(parameter: torch.Tensor, dimensions: tuple[str, ...]) -> DeviceMesh:
    """One-dimensional mesh over several dimensions of a parameter's mesh. All processes of the job call it."""
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    if len(dimensions) == 1:
        return mesh[dimensions[0]]
    return flattened(mesh[dimensions], "_".join(dimensions))


def zeros_along(parameter: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Zeros for each row of a parameter (``dim`` 0), each column of each matrix (1), or each matrix (None).

    They are split over processes likewise. Shapes: [rows]; [columns] and [] of a single matrix, [matrices, columns]
    and [matrices] of a stack.
    """
    full, part = ([], []) if dim is None else ([parameter.shape[dim]], [local(parameter).shape[dim]])
    if num_matrices(parameter) > 1 and dim != 0:
        full.insert(0, num_matrices(parameter))
        part.insert(0, matrices_here(parameter))
    shape = torch.Size(full)
    zeros = torch.zeros(part, dtype=parameter.dtype, device=parameter.device)
    if not isinstance(parameter, DTensor) or not shape:
        return zeros
    placed: Any = parameter.placements  # over mesh dimensions of size 1 too
    as_rows = [Replicate() if p.is_replicate() or p.dim else p for p in placed]
    placements: list[Any] = as_rows if dim == 0 else [Replicate()] * len(as_rows)
    splits = _between_matrices(parameter) if dim != 0 else {}
    for index, _, placement in _shards(parameter):
        if index in splits:
            finer = prod(size for later, size in splits.items() if later > index)
            placements[index] = Shard(0) if finer == 1 else StridedShard(0, split_factor=finer)
        elif placement.dim == dim == 1:
            placements[index] = Shard(len(shape) - 1)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(zeros, parameter.device_mesh, placements, run_check=False, shape=shape, stride=stride)


class Partial(NamedTuple):
    """A tensor to be summed in place over some process groups."""

    tensor: torch.Tensor
    groups: tuple[dist.ProcessGroup, ...]
    bucket: int  # tensors of one bucket and group are summed by one all-reduce


def sum_partials(partials: Iterable[Partial]) -> None:
    """Sum tensors over their groups. Processes of a group give tensors of the same sizes in the same order."""
    buckets: dict[tuple[int, dist.ProcessGroup], list[torch.Tensor]] = {}
    for tensor, groups, bucket in partials:
        for group in groups:
            buckets.setdefault((bucket, group), []).append(tensor)
    for (_, group), tensors in buckets.items():
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat, group=group)
        sums = flat.split([tensor.numel() for tensor in tensors])
        for tensor, total in zip(tensors, sums, strict=True):
            tensor.copy_(total.view_as(tensor))
