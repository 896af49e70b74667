"""Collectives over the processes that share each layer, and the pair through which a layer enters and leaves them.

The two regions are conjugate: the forward pass of one is the backward pass of the other. They are f and g of
Megatron-LM (arXiv 1909.08053, section 3), and with sequence parallelism g and ḡ of arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_like.torch_private import functional_collectives

_SEQUENCE = 1  # of [batch, seq, hidden]

# These operations, unlike torch.distributed's functions, can be compiled, and no wrapper tensor is left over.
_operations = functional_collectives


@dataclass(frozen=True)
class Group:
    """Processes that hold parts of the same tensors."""

    name: str  # by which torch knows the process group
    size: int
    rank: int

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Group:
        """The processes of a one-dimensional mesh that this one is in."""
        return cls(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())

    def vocabulary(self, size: int) -> range:
        """Tokens of a padded vocabulary whose table rows and logits this rank has, split as `torch.chunk` does."""
        largest = -(-size // self.size)
        return range(min(self.rank * largest, size), min((self.rank + 1) * largest, size))


def all_reduce(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum over the group."""
    return _operations.wait_tensor(_operations.all_reduce(x.contiguous(), "sum", group.name))


def all_gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """Concatenation of the group's tensors, which have one shape, along a dimension."""
    gathered = _operations.all_gather_into_tensor(x.contiguous(), group.size, group.name)
    gathered = _operations.wait_tensor(gathered)
    return torch.cat(gathered.chunk(group.size), dim) if dim else gathered


def reduce_scatter(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This rank's chunk, along a dimension, of the sum over the group."""
    if dim:
        x = torch.cat(x.chunk(group.size, dim))
    return _operations.wait_tensor(_operations.reduce_scatter_tensor(x.contiguous(), "sum", group.size, group.name))


def _spread(x: torch.Tensor, sequence_parallel: bool, group: Group) -> torch.Tensor:
    """What lies between layers → the whole activation [batch, seq, hidden], equal on every rank."""
    return all_gather(x, _SEQUENCE, group) if sequence_parallel else x


def _sum(x: torch.Tensor, sequence_parallel: bool, group: Group) -> torch.Tensor:
    """Partial sums [batch, seq, hidden] → what lies between layers."""
    return reduce_scatter(x, _SEQUENCE, group) if sequence_parallel else all_reduce(x, group)


class CopyToTensorRegion(torch.autograd.Function):
    """Before matrices that are split by columns: every rank takes the whole activation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sequence_parallel: bool, group: Group) -> torch.Tensor:
        """Without sequence parallelism the activation is whole already."""
        ctx.sequence_parallel, ctx.group = sequence_parallel, group
        return _spread(x, sequence_parallel, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Each rank's columns contribute to the gradient."""
        return _sum(gradient, ctx.sequence_parallel, ctx.group), None, None


class ReduceFromTensorRegion(torch.autograd.Function):
    """After matrices that are split by rows: the ranks' partial sums are added up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sequence_parallel: bool, group: Group) -> torch.Tensor:
        """With sequence parallelism each rank keeps its part of the sequence."""
        ctx.sequence_parallel, ctx.group = sequence_parallel, group
        return _sum(x, sequence_parallel, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """A sum passes its gradient on to each of its terms."""
        return _spread(gradient, ctx.sequence_parallel, ctx.group), None, None
