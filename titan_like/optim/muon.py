"""Muon (https://kellerjordan.github.io/posts/muon, arXiv 2502.16982) on sharded parameters, with AdamW for the rest."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapreplace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from titan_like.config.schema import Optimizer as OptimizerSection
from titan_like.models.layers.init import local_part
from titan_like.optim.adamw import FusedAdamW, adamw_state
from titan_like.optim.shards import (
    UpdateTraffic,
    blocks_of,
    local,
    matrices_here,
    mesh_over,
    num_matrices,
    sharded_dimensions,
)
from titan_like.optim.update_work import Exchange, MatrixParts, UpdateWork
from titan_like.torch_private import copy_all_

_Member = tuple[torch.nn.Parameter, dict[str, Any]]  # a matrix, or a stack of them, and its parameter group
_Matrix = tuple[int, int]  # number of a parameter, and of a matrix in its stack
Place = tuple[tuple[int, int], tuple[int, int]]  # a process's part of a matrix: (offset, shape)
_NOWHERE: Place = ((0, 0), (0, 0))


class MatrixExchange:
    """Spreads sharded matrices over the ranks of a group, so that each rank works on some whole ones.

    Gathering and scattering are one all-to-all each. The constructor runs a collective too.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """``parameters`` are matrices [rows, columns], or stacks of them [matrices · rows, columns]."""
        self.group = group
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.shapes = [(len(stack) // num_matrices(stack), stack.shape[1]) for stack in parameters]
        self.rows: dict[_Matrix, slice] = {}  # within this process's part of the parameter
        local_places: dict[_Matrix, Place] = {}
        for number, parameter in enumerate(parameters):
            part, (_, column) = local_part(parameter)
            for block in blocks_of(parameter):
                height, width = block.of(part).shape[1:]
                for count, matrix in enumerate(range(block.matrices.start, block.matrices.stop)):
                    first = block.rows.start + count * height
                    self.rows[number, matrix] = slice(first, first + height)
                    local_places[number, matrix] = (block.offset, column), (height, width)
        places: list[dict[_Matrix, Place]] = [local_places] * size  # by process
        dist.all_gather_object(places, local_places, group=group)
        matrices = sorted(set().union(*places))
        owned = owned_matrices(matrices, self.shapes, size)
        self.counts = Counter(number for number, _ in owned[rank])  # matrices that this process owns, by parameter
        self.owned_parts = [[of_process.get(matrix, _NOWHERE) for matrix in owned[rank]] for of_process in places]
        self.sent = [matrix for of_owner in owned for matrix in of_owner if matrix in local_places]
        self.sizes_owned = [sum(prod(shape) for _, shape in of_process) for of_process in self.owned_parts]
        self.sizes_sent = [sum(prod(local_places.get(m, _NOWHERE)[1]) for m in of_owner) for of_owner in owned]

    def gather(self, parts: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Send this process's parts of the parameters, [local rows, local columns], to the matrices' owners.

        Returns the whole matrices that this process owns, [matrices, rows, columns], by the number of their parameter.
        """
        received = self._exchange(self._pieces(parts), self.sizes_sent, self.sizes_owned, parts[0])
        wholes = {number: parts[0].new_empty(count, *self.shapes[number]) for number, count in self.counts.items()}
        arrived = iter(received.split([prod(shape) for of_process in self.owned_parts for _, shape in of_process]))
        for matrix, place in self._places(wholes):
            rectangle(matrix, place).copy_(next(arrived).view(place[1]))
        return wholes

    def scatter(self, wholes: Mapping[int, torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        """Send the matrices that `gather` returned back, to be written over the ``parts`` that it was given."""
        sent = [rectangle(matrix, place) for matrix, place in self._places(wholes)]
        received, pieces = self._exchange(sent, self.sizes_owned, self.sizes_sent, parts[0]), self._pieces(parts)
        views = received.split([piece.numel() for piece in pieces])
        if pieces:
            copy_all_(pieces, [view.view_as(piece) for view, piece in zip(views, pieces, strict=True)])

    def _pieces(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This process's part of each matrix, in the order of their owners."""
        return [parts[number][self.rows[number, matrix]] for number, matrix in self.sent]

    def _places(self, wholes: Mapping[int, torch.Tensor]) -> Iterator[tuple[torch.Tensor, Place]]:
        """Each matrix that this process owns, with the part that each process in turn holds."""
        matrices = [matrix for stack in wholes.values() for matrix in stack]
        for of_process in self.owned_parts:
            yield from zip(matrices, of_process, strict=True)

    def _exchange(
        self, sent: list[torch.Tensor], send_sizes: list[int], receive_sizes: list[int], like: torch.Tensor
    ) -> torch.Tensor:
        """All-to-all of tensors ordered by their receiver. Returns all elements, ordered by their sender."""
        outgoing, incoming = like.new_empty(sum(send_sizes)), like.new_empty(sum(receive_sizes))
        pieces = outgoing.split([tensor.numel() for tensor in sent])
        if sent:
            copy_all_([piece.view_as(tensor) for piece, tensor in zip(pieces, sent, strict=True)], sent)
        dist.all_to_all_single(incoming, outgoing, receive_sizes, send_sizes, group=self.group)
        return incoming


def rectangle(matrix: torch.Tensor, place: Place) -> torch.Tensor:
    """A view of a process's part of a matrix: [rows, columns] → [local rows, local columns]."""
    for dim, (start, length) in enumerate(zip(*place, strict=True)):
        matrix = matrix.narrow(dim, min(start, matrix.shape[dim]), length)  # an empty part may begin past the end
    return matrix


def owned_matrices(matrices: Sequence[_Matrix], shapes: Sequence[tuple[int, ...]], size: int) -> list[list[_Matrix]]:
    """The matrices that each rank owns, in their order: a balance of the work that is equal on all ranks.

    ``shapes``: of the matrices of each parameter. A matrix's work is its Newton-Schulz matmuls. The largest goes first,
    to the least busy rank.
    """
    owners, heap = [0] * len(matrices), [(0, rank) for rank in range(size)]  # work of each rank
    costs = [prod(shapes[number]) * min(shapes[number]) for number, _ in matrices]
    for index in sorted(range(len(matrices)), key=lambda index: -costs[index]):
        work, owners[index] = heap[0]
        heapreplace(heap, (work + costs[index], owners[index]))
    return [[matrix for matrix, owner in zip(matrices, owners, strict=True) if owner == rank] for rank in range(size)]


def exchange_workspace(work: UpdateWork, parts: Sequence[MatrixParts], size: int) -> float:
    """Bytes of a `MatrixExchange` of these parts, or, on a single rank, of updates one after the other."""
    matrices = [(number, matrix) for number, part in enumerate(parts) for matrix in range(part.matrices)]
    counts = Counter(number for number, _ in owned_matrices(matrices, [part.shape for part in parts], size)[0])
    updates = {number: count * work.workspace_of_matrix(*parts[number].shape) for number, count in counts.items()}
    if size == 1:
        return max(updates.values(), default=0)
    element = getattr(torch, work.gemm_dtype).itemsize
    wholes = {number: element * count * prod(parts[number].shape) for number, count in counts.items()}
    # Parts and whole matrices exist, and either copies to be sent or the workspace of an update.
    held = sum(wholes.values()) + element * sum(part.elements for part in parts)
    return max(2 * held, *(held + workspace - wholes[number] for number, workspace in updates.items()))


# Coefficients of the quintic polynomial (https://kellerjordan.github.io/posts/muon), chosen for a steep slope at 0.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7  # the least norm by which a matrix is divided


class Muon(FusedAdamW):
    """Moves matrices along their orthogonalised momentum, and all other parameters as AdamW does.

    A sharded matrix is gathered on one rank, which orthogonalises it and sends the shards back. Each rank owns about as
    much of this work as the others. Ranks with equal copies all do the same work. Each matrix of a stack counts
    by itself.

    `match_rms_adamw` of `optimizer.adjust_lr` gives a matrix's update the root mean square of AdamW updates (arXiv
    2502.16982, section 2.2).
    """

    exchange = Exchange(all_to_alls=2, workspace=exchange_workspace)

    def __init__(self, groups: Iterable[dict[str, Any]], section: OptimizerSection) -> None:
        """Each of the ``groups`` has its ``weight_decay``; groups with ``orthogonal`` set have the matrices."""
        super().__init__(groups, section.lr, betas=section.betas, eps=section.eps)
        self.section = section
        # Matrices sharded over the same mesh dimensions, and how their ranks exchange them.
        self._sets: list[tuple[list[_Member], MatrixExchange | None]] | None = None

    def new_state(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """A matrix's momentum, or AdamW's moments, each of the parameter's shape, and the number of updates."""
        if group.get("orthogonal"):
            return {"momentum_buffer": torch.zeros_like(parameter)}
        return adamw_state(parameter)

    def traffic(self) -> list[UpdateTraffic]:
        """All-to-alls for each set of mesh dimensions. The second sends about as many bytes as the first."""
        sizes: Counter[tuple[str, ...]] = Counter()
        for group, _, parameter in self.members():
            if group.get("orthogonal"):
                dimensions = sharded_dimensions(parameter, in_matrix=True)
                sizes[dimensions] += local(parameter).numel() * self._dtype(parameter).itemsize
        calls = self.exchange.all_to_alls
        return [
            UpdateTraffic(dimensions, "all_to_all", calls, calls * size)
            for dimensions, size in sizes.items()
            if dimensions
        ]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # there is no closure
        """Update every parameter."""
        self.begin_step()
        self._take_factors()
        if self._sets is None:
            sets: dict[tuple[str, ...], list[_Member]] = {}
            for group, _, parameter in self.members():
                if group.get("orthogonal"):
                    sets.setdefault(sharded_dimensions(parameter, in_matrix=True), []).append((parameter, group))
            self._sets = [(members, _exchange_of(members, dimensions)) for dimensions, members in sets.items()]
        for members, exchange in self._sets:
            self._update_matrices(members, exchange)
        super().step()

    def _take_factors(self) -> None:
        """Set the coefficients of this step's running means, with which a skipped step changes nothing.

        With the factor f on gradients g, a momentum m becomes β·m + f·(1 - β)·g, a multiple of a mean of m and g.
        """
        beta, self._kept = self.section.momentum, 1 - self._skip.double()
        new = self._kept * (1 - beta) if self.factor is None else torch.where(self._skip, 0, self.factor * (1 - beta))
        self._total = 1 - self._kept * (1 - beta) + new
        self._share = new / self._total
        # Gradients before a small factor are large, so their share is what must be exact. A direction comes out longer
        # by 1 / (β + f·(1 - β)), and so must be the least norm that it is divided by. A skipped step's must be 0.
        self._share_of_direction = torch.where(self._skip, 1, new / (beta + new))
        self._least_norm = _EPS / (beta + new)

    def _update_matrices(self, members: list[_Member], exchange: MatrixExchange | None) -> None:
        """Update the momenta and the matrices of one set."""
        if exchange is None:
            for parameter, group in members:
                shape = matrices_here(parameter), -1  # what follows has no name, which would keep it for too long
                self._apply(
                    parameter, group, self._orthogonalise(self._direction(parameter).unflatten(0, shape)).flatten(0, 1)
                )
            return
        directions = [self._direction(parameter) for parameter, _ in members]
        wholes = exchange.gather(directions)
        for stack in wholes.values():
            stack.copy_(self._orthogonalise(stack))
        exchange.scatter(wholes, directions)
        for (parameter, group), direction in zip(members, directions, strict=True):
            self._apply(parameter, group, direction)

    def _orthogonalise(self, stack: torch.Tensor) -> torch.Tensor:
        # Kernels for one matrix and for a batch may differ in the last bits.
        matrices = stack if len(stack) > 1 else stack[0]
        return orthogonalise(matrices, self.section.newton_schulz_steps, self._least_norm).view_as(stack)

    def _direction(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Update a matrix's momentum. Returns this process's part of what is to be orthogonalised, 0 if it is skipped.

        A skipped step's gradients may not be finite, so they are replaced in the one pass that may also cast them.
        """
        assert parameter.grad is not None, "a matrix received no gradient"
        momentum = local(self.state[parameter]["momentum_buffer"])
        gradient = torch.where(self._skip, momentum.new_zeros(1, 1), local(parameter.grad))
        momentum.lerp_(gradient, self._share.to(momentum.dtype))
        share = self._share_of_direction.to(momentum.dtype)
        if self.factor is None:
            share = 1 - (1 - share)  # rounded as in torch.optim.Muon
        else:
            momentum.mul_(self._total)
        direction = torch.lerp(momentum, gradient, share, out=gradient)
        return direction.to(self._dtype(parameter))  # the iteration would round it first thing, so before it is sent

    def _dtype(self, parameter: torch.Tensor) -> torch.dtype:
        if parameter.dtype == torch.float64:
            return torch.float64
        default = "float32" if parameter.device.type == "cpu" else "bfloat16"
        return getattr(torch, self.section.newton_schulz_dtype or default)

    def _apply(self, parameter: torch.nn.Parameter, group: dict[str, Any], update: torch.Tensor) -> None:
        """Subtract this process's part of the orthogonal matrix, and decay, from its part of the weights."""
        rows, columns = len(parameter) // num_matrices(parameter), parameter.shape[1]
        lr = group["lr"] * (1.0 if self.section.matrix_lr is None else self.section.matrix_lr / self.section.lr)
        factor = 0.2 * math.sqrt(max(rows, columns))
        if self.section.adjust_lr == "original":
            factor = math.sqrt(max(1, rows / columns))
        local(parameter).mul_(1 - self._kept * (lr * group["weight_decay"])).add_(update, alpha=-lr * factor)


def _exchange_of(members: list[_Member], dimensions: tuple[str, ...]) -> MatrixExchange | None:
    parameters = [parameter for parameter, _ in members]
    if not dimensions:
        shares = [num_matrices(p) * local(p).numel() == matrices_here(p) * p.numel() for p in parameters]
        assert all(shares), "a process holds a part of a matrix that it takes for a whole one"
        return None
    return MatrixExchange(parameters, mesh_over(parameters[0], dimensions).get_group())


def orthogonalise(matrices: torch.Tensor, steps: int, least_norm: torch.Tensor | float = _EPS) -> torch.Tensor:
    """Bring singular values of matrices close to 1 by Newton-Schulz iterations, in their own dtype.

    A step is x ← a·x + (b·g + c·g²)·x with g = x·xᵀ, which applies the polynomial a·s + b·s³ + c·s⁵ to every singular
    value s. In bfloat16 this is what torch.optim.Muon computes. Shapes: [m, n] or [batch, m, n], as is the result.
    """
    a, b, c = _COEFFICIENTS
    multiply_add = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=torch.as_tensor(least_norm, dtype=x.dtype))  # no singular value is above the norm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
