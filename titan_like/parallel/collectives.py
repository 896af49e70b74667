"""Collectives of a tensor-parallel group, and the two operators at the borders of a parallel region.

The two operators are conjugate: the forward pass of one is the backward pass of the other. They are f and g of
Megatron-LM (arXiv 1909.08053, section 3), and with sequence parallelism g and ḡ of arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

# Unlike torch.distributed's functions, these operators can be compiled, and they leave no wrapper tensor behind.
from titan_like.torch_private import functional_collectives as _operations

_SEQUENCE = 1  # dimension of [batch, seq, hidden]


@dataclass(frozen=True)
class Group:
    """A tensor-parallel process group, as far as compiled code needs to know it."""

    name: str  # torch's name of the process group
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        """The group of a one-dimensional mesh."""
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())

    def vocabulary(self, size: int) -> range:
        """Tokens whose embedding rows and logits this rank holds, of a padded vocabulary split as by `torch.chunk`."""
        largest = -(-size // self.size)
        return range(min(self.rank * largest, size), min((self.rank + 1) * largest, size))


def all_reduce(x: torch.Tensor, group: Group, operation: str = "sum") -> torch.Tensor:
    """Sum over the group, or its "max"; x and the result have the same shape."""
    return _operations.wait_tensor(_operations.all_reduce(x.contiguous(), operation, group.name))


def all_gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Concatenate the ranks' tensors, all of one shape, along ``dim``: [n, …] → [n · ranks, …] for dim 0."""
    gathered = _operations.all_gather_into_tensor(x.contiguous(), group.size, group.name)
    gathered = _operations.wait_tensor(gathered)
    return torch.cat(gathered.chunk(group.size), dim) if dim else gathered


def reduce_scatter(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Sum over the group and keep this rank's chunk along ``dim``: [n, …] → [n / ranks, …] for dim 0."""
    if dim:
        x = torch.cat(x.chunk(group.size, dim))
    return _operations.wait_tensor(_operations.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name))


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return all_gather(x[None], 0, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter(gradient, 0, ctx.group)[0], None


def gathered(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The tensors of all ranks, all of one shape: […] → [ranks, …]. Their gradients are summed where they are from."""
    return _Gathered.apply(x, group)


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inputs: list[int], outputs: list[int], group: Group) -> torch.Tensor:
        ctx.splits = outputs, inputs, group
        return _operations.wait_tensor(_operations.all_to_all_single(x.contiguous(), outputs, inputs, group.name))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _AllToAllRows.apply(gradient, *ctx.splits), None, None, None


def all_to_all_rows(x: torch.Tensor, input_splits: list[int], output_splits: list[int], group: Group) -> torch.Tensor:
    """Send the first input_splits[0] rows to rank 0, and so on.

    [rows, …] → output_splits[0] rows of rank 0, and so on.
    """
    return x if group.size == 1 else _AllToAllRows.apply(x, input_splits, output_splits, group)


def gather_rows(x: torch.Tensor, sizes: list[int], group: Group) -> torch.Tensor:
    """Gather what ranks have numbers of rows of their own of: [sizes[rank], …] → [sum of sizes, …].

    The gradients are summed where the rows are from.
    """
    return all_to_all_rows(x.repeat(group.size, 1), [len(x)] * group.size, sizes, group)


def reduce_scatter_rows(x: torch.Tensor, sizes: list[int], group: Group) -> torch.Tensor:
    """Sum over the group and keep what `gather_rows` took from this rank: [sum of sizes, …] → [sizes[rank], …]."""
    rows = sizes[group.rank]
    return all_to_all_rows(x, sizes, [rows] * group.size, group).unflatten(0, (group.size, rows)).sum(0)


def all_to_all(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Send x[r] to rank r of the group: [ranks, …] → [ranks, …], of which [r] is from rank r."""
    return all_to_all_rows(x, [1] * group.size, [1] * group.size, group)


def _spread(x: torch.Tensor, sequence_parallel: bool, group: Group) -> torch.Tensor:
    """Activation between layers → full activation [batch, seq, hidden], equal on every rank."""
    return all_gather(x, _SEQUENCE, group) if sequence_parallel else x


def _sum(x: torch.Tensor, sequence_parallel: bool, group: Group) -> torch.Tensor:
    """Partial sums [batch, seq, hidden] → activation between layers."""
    return reduce_scatter(x, _SEQUENCE, group) if sequence_parallel else all_reduce(x, group)


class CopyToTensorRegion(torch.autograd.Function):
    """Goes before column-split matrices: every rank gets the full activation [batch, seq, hidden]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sequence_parallel: bool, group: Group) -> torch.Tensor:
        """[batch, seq here, hidden] → [batch, seq, hidden]; without sequence parallelism x is full already."""
        ctx.sequence_parallel, ctx.group = sequence_parallel, group
        return _spread(x, sequence_parallel, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The reverse: sum the gradient over the ranks, because every rank's columns contribute to it.

        [batch, seq, hidden] → the shape of x.
        """
        return _sum(gradient, ctx.sequence_parallel, ctx.group), None, None


class ReduceFromTensorRegion(torch.autograd.Function):
    """Goes after row-split matrices: adds up the ranks' partial sums [batch, seq, hidden]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sequence_parallel: bool, group: Group) -> torch.Tensor:
        """[batch, seq, hidden] → the sum, or with sequence parallelism this rank's part, [batch, seq here, hidden]."""
        ctx.sequence_parallel, ctx.group = sequence_parallel, group
        return _sum(x, sequence_parallel, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The reverse: give every rank the full gradient, because a sum passes its gradient to each term.

        The shape of the result → [batch, seq, hidden].
        """
        return _spread(gradient, ctx.sequence_parallel, ctx.group), None, None


class SumOfRanks(torch.autograd.Function):
    """Every rank gets the sum of what the ranks have, and the sum of its gradients on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """x and the sum have the same shape."""
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Each rank's result depends on the x of all."""
        return all_reduce(gradient, ctx.group), None


class CopyFromFirstRank(torch.autograd.Function):
    """Gives every rank the first one's tensor, from which all compute the same result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        """x, of one shape on all ranks → the first rank's x."""
        ctx.is_first = group.rank == 0
        return all_gather(x[None], 0, group)[0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient has the shape of x and is complete on each rank, so only the first rank passes it on."""
        return gradient if ctx.is_first else torch.zeros_like(gradient), None
