"""Whole matrices from the shards of a process group, each on the one process that owns it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist

from titan_like.models.layers.init import local_part

Block = tuple[tuple[int, ...], tuple[int, ...]]  # a process's part of a matrix: (offset, shape)


class MatrixExchange:
    """Spreads matrices over the processes that share them, so that each process works on some whole ones.

    Gathering and scattering take one all-to-all each. Making it takes a collective too.
    """

    def __init__(self, matrices: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        self.group, self.rank, size = group, dist.get_rank(group), dist.get_world_size(group)
        self.shapes = [tuple(matrix.shape) for matrix in matrices]
        mine: list[Block] = [(offset, tuple(part.shape)) for part, offset in map(local_part, matrices)]
        self.blocks: list[list[Block]] = [mine] * size  # by process and matrix
        dist.all_gather_object(self.blocks, mine, group=group)
        owners = assign_owners(self.shapes, size)
        self.owned = [[index for index, owner in enumerate(owners) if owner == rank] for rank in range(size)]

    def gather(self, parts: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Send this process's parts, [rows here, columns here], to their owners.

        Returns:
            The whole matrices, [rows, columns], that this process owns, by index.
        """
        sent = [parts[index] for indices in self.owned for index in indices]
        send_sizes = [sum(parts[index].numel() for index in indices) for indices in self.owned]
        received = self._exchange(sent, send_sizes, self._sizes_here(), like=parts[0])
        wholes = {index: parts[0].new_empty(self.shapes[index]) for index in self.owned[self.rank]}
        pieces = iter(received.split([prod(blocks[index][1]) for blocks in self.blocks for index in wholes]))
        for blocks in self.blocks:
            for index, whole in wholes.items():
                rectangle(whole, blocks[index]).copy_(next(pieces).view(blocks[index][1]))
        return wholes

    def scatter(self, wholes: Mapping[int, torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
        """Send each process its part of the matrices, [rows, columns], that this process owns.

        ``like`` has the parts' device and type.

        Returns:
            This process's parts of all matrices, [rows here, columns here].
        """
        sent = [rectangle(wholes[index], blocks[index]) for blocks in self.blocks for index in self.owned[self.rank]]
        mine = self.blocks[self.rank]
        receive_sizes = [sum(prod(mine[index][1]) for index in indices) for indices in self.owned]
        received = self._exchange(sent, self._sizes_here(), receive_sizes, like)
        order = [index for indices in self.owned for index in indices]
        pieces = received.split([prod(mine[index][1]) for index in order])
        parts = {index: piece.view(mine[index][1]) for index, piece in zip(order, pieces, strict=True)}
        return [parts[index] for index in range(len(self.shapes))]

    def _sizes_here(self) -> list[int]:
        """Elements that each process holds of the matrices that this process owns."""
        return [sum(prod(blocks[index][1]) for index in self.owned[self.rank]) for blocks in self.blocks]

    def _exchange(
        self, sent: list[torch.Tensor], send_sizes: list[int], receive_sizes: list[int], like: torch.Tensor
    ) -> torch.Tensor:
        """All-to-all of tensors ordered by their receiver. Returns all elements, ordered by their sender."""
        outgoing = torch.cat([tensor.flatten() for tensor in sent]) if sent else like.new_empty(0)
        incoming = like.new_empty(sum(receive_sizes))
        dist.all_to_all_single(incoming, outgoing, receive_sizes, send_sizes, group=self.group)
        return incoming


def rectangle(whole: torch.Tensor, block: Block) -> torch.Tensor:
    """A view of a process's part of a matrix: [rows, columns] → [rows there, columns there]."""
    for dim, (start, length) in enumerate(zip(*block, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), length)  # an empty part may begin past the end
    return whole


def assign_owners(shapes: Sequence[tuple[int, ...]], size: int) -> list[int]:
    """An owner for each matrix, such that the most work of any process is small. Equal on all processes.

    The work of a matrix is that of its Newton-Schulz products. The largest comes first, to the least busy process.
    """
    owners, work = [0] * len(shapes), [0] * size
    costs = [prod(shape) * min(shape) for shape in shapes]
    for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
        owner = min(range(size), key=lambda rank: work[rank])
        owners[index] = owner
        work[owner] += costs[index]
    return owners
