"""Muon (https://kellerjordan.github.io/posts/muon, arXiv 2502.16982) on sharded parameters, with AdamW for the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from titan_like.config.schema import Optimizer as OptimizerSection
from titan_like.models.layers.init import local_part
from titan_like.optim.adamw import FusedAdamW, adamw_state
from titan_like.optim.shards import UpdateTraffic, local, mesh_over, sharded_dimensions

_Member = tuple[torch.nn.Parameter, dict[str, Any]]  # a matrix and its parameter group
Block = tuple[tuple[int, ...], tuple[int, ...]]  # a process's part of a matrix: (offset, shape)


class MatrixExchange:
    """Spreads sharded matrices over the ranks of a group, so that each rank works on some whole ones.

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
    """An owner for each matrix that balances the work. Equal on all ranks.

    A matrix's work is its Newton-Schulz matmuls. The largest goes first, to the least busy rank.
    """
    owners, work = [0] * len(shapes), [0] * size
    costs = [prod(shape) * min(shape) for shape in shapes]
    for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
        owner = min(range(size), key=lambda rank: work[rank])
        owners[index] = owner
        work[owner] += costs[index]
    return owners


# Of the quintic polynomial (https://kellerjordan.github.io/posts/muon), chosen for a steep slope at 0.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7  # the least norm by which a matrix is divided


class Muon(FusedAdamW):
    """Moves matrices along their orthogonalised momentum, and all other parameters as AdamW does.

    A sharded matrix is gathered on one rank, which orthogonalises it and sends the shards back. Each rank owns about as
    much of this work as the others. Ranks with equal copies all do the same work.

    `match_rms_adamw` of `optimizer.adjust_lr` gives a matrix's update the root mean square that AdamW's have (arXiv
    2502.16982, section 2.2).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], section: OptimizerSection) -> None:
        """Each of the ``groups`` has its ``weight_decay``; those with ``orthogonal`` set hold the matrices."""
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
        """Two all-to-alls for each set of mesh dimensions. The second sends about as many bytes as the first."""
        sizes: Counter[tuple[str, ...]] = Counter()
        for group, _, parameter in self.members():
            if group.get("orthogonal"):
                sizes[sharded_dimensions(parameter)] += local(parameter).numel() * self._dtype(parameter).itemsize
        return [
            UpdateTraffic(dimensions, "all_to_all", 2, 2 * size) for dimensions, size in sizes.items() if dimensions
        ]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # there is no closure
        """Update every parameter."""
        self.begin_step()
        if self._sets is None:
            found: dict[tuple[str, ...], list[_Member]] = {}
            for group, _, parameter in self.members():
                if group.get("orthogonal"):
                    found.setdefault(sharded_dimensions(parameter), []).append((parameter, group))
            self._sets = [(members, _exchange_of(members, dimensions)) for dimensions, members in found.items()]
        for members, exchange in self._sets:
            self._update_matrices(members, exchange)
        super().step()

    def _update_matrices(self, members: list[_Member], exchange: MatrixExchange | None) -> None:
        """Update the momenta and the matrices of one set."""
        if exchange is None:
            for parameter, group in members:
                self._apply(
                    parameter, group, orthogonalise(self._direction(parameter), self.section.newton_schulz_steps)
                )
            return
        directions = [self._direction(parameter) for parameter, _ in members]
        wholes = exchange.gather(directions)
        wholes = {index: orthogonalise(whole, self.section.newton_schulz_steps) for index, whole in wholes.items()}
        parts = exchange.scatter(wholes, like=directions[0])
        for (parameter, group), part in zip(members, parts, strict=True):
            self._apply(parameter, group, part)

    def _direction(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Update a matrix's momentum. Returns this process's part of what is to be orthogonalised."""
        assert parameter.grad is not None, "a matrix received no gradient"
        gradient, momentum = local(parameter.grad), local(self.state[parameter]["momentum_buffer"])
        gradient = gradient.to(momentum.dtype) if self.factor is None else gradient * self.factor.to(momentum.dtype)
        self.assign(momentum, momentum.lerp(gradient, 1 - self.section.momentum))
        # Rounded before it is sent: the iteration would round it first thing.
        return gradient.lerp(momentum, self.section.momentum).to(self._dtype(parameter))

    def _dtype(self, parameter: torch.Tensor) -> torch.dtype:
        if parameter.dtype == torch.float64:
            return torch.float64
        default = "float32" if parameter.device.type == "cpu" else "bfloat16"
        return getattr(torch, self.section.newton_schulz_dtype or default)

    def _apply(self, parameter: torch.nn.Parameter, group: dict[str, Any], update: torch.Tensor) -> None:
        """Subtract this process's part of the orthogonal matrix, and decay, from its part of the weights."""
        rows, columns = parameter.shape
        lr = group["lr"] * (1.0 if self.section.matrix_lr is None else self.section.matrix_lr / self.section.lr)
        factor = 0.2 * math.sqrt(max(rows, columns))
        if self.section.adjust_lr == "original":
            factor = math.sqrt(max(1, rows / columns))
        weight = local(parameter)
        self.assign(weight, (weight * (1 - lr * group["weight_decay"])).add_(update, alpha=-lr * factor))


def _exchange_of(members: list[_Member], dimensions: tuple[str, ...]) -> MatrixExchange | None:
    if not dimensions:
        return None
    parameters = [parameter for parameter, _ in members]
    return MatrixExchange(parameters, mesh_over(parameters[0], dimensions).get_group())


def orthogonalise(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Bring a matrix's singular values close to 1 by Newton-Schulz iterations, in its own dtype. [m, n] → [m, n].

    A step is x ← a·x + (b·g + c·g²)·x with g = x·xᵀ, which applies the polynomial a·s + b·s³ + c·s⁵ to every singular
    value s. In bfloat16 this is what torch.optim.Muon computes.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_EPS)  # no singular value is above the norm
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
