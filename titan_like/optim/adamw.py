"""AdamW in one pass over the parameters: clipping, the update and the weights' 16-bit copies touch each number once.

For a weight with a 16-bit gradient and copy an update moves 28 bytes: it reads gradient, weight and moments, and writes
all but the gradient. To convert and multiply gradients, update and copy one after the other would take 48.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.tensor import DTensor

from titan_like.optim.shards import ShardedOptimizer, local
from titan_like.torch_private import copy_all_, fused_adamw_, multiply_all_

# Elements that torch's kernel updates at once. On a CPU they fit into its caches.
BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}

Update = Callable[[Sequence[torch.Tensor], torch.Tensor | None, torch.Tensor], None]
"""Updates some `Tensors` by (gradients, their factor, whether only copies are written: 1 or 0); both are scalars."""


class CopiedUnit(Protocol):
    """Weights that a model uses 16-bit copies of."""

    masters: list[torch.nn.Parameter]
    copies: list[torch.nn.Parameter]  # a weight without a copy is listed itself

    def allocate(self) -> None:
        """Make room for the copies' content."""

    def note_written(self) -> None:
        """The copies equal the updated weights."""


class Tensors(NamedTuple):
    """This process's parts of some parameters, which have the same order in each list."""

    settings: list[dict[str, Any]]  # each one's group: lr, betas, eps and weight_decay
    weights: list[torch.Tensor]
    copies: list[torch.Tensor | None]
    first_moments: list[torch.Tensor]
    second_moments: list[torch.Tensor]
    steps: torch.Tensor  # float32 [tensors]: numbers of updates, this one included


def adamw_state(parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """AdamW's state before the first update: the number of updates, and two moments of the parameter's shape."""
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


class AdamWUnit:
    """Parameters that are updated together."""

    def __init__(
        self,
        members: Sequence[tuple[dict[str, Any], torch.nn.Parameter]],
        state: Mapping[Any, Any],
        copied: CopiedUnit | None = None,
    ) -> None:
        """``members``: (group, parameter). ``state``: of the optimizer, as `adamw_state` begins it."""
        self.copied, self.parameters = copied, [parameter for _, parameter in members]
        self._is_sharded = any(isinstance(parameter.data, DTensor) for parameter in self.parameters)
        pairs = [] if copied is None else zip(copied.masters, copied.copies, strict=True)
        copies = {master: local(copy) for master, copy in pairs if copy is not master}
        first, second = ([local(state[p][key]) for p in self.parameters] for key in ("exp_avg", "exp_avg_sq"))
        self._steps = torch.stack([state[p]["step"] for p in self.parameters])
        for parameter, step in zip(self.parameters, self._steps.unbind(), strict=True):
            state[parameter]["step"] = step  # a view, so that one operator counts for all
        weights = [local(parameter) for parameter in self.parameters]
        of_copies, groups = [copies.get(p) for p in self.parameters], [group for group, _ in members]
        self._update = update_of(Tensors(groups, weights, of_copies, first, second, self._steps))

    def step(self, factor: torch.Tensor | None, found_inf: torch.Tensor) -> None:
        """Update the parameters by their gradients times ``factor``, and free these if there are copies."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        assert len(gradients) == len(self.parameters), "a parameter received no gradient"
        if self._is_sharded:
            gradients = [local(gradient) for gradient in gradients]
        self._steps.add_(1 - found_inf)
        if self.copied is None:
            self._update(gradients, factor, found_inf)
            return
        self.copied.allocate()
        self._update(gradients, factor, found_inf)
        self.copied.note_written()
        for parameter in self.parameters:
            parameter.grad = None


class FusedAdamW(ShardedOptimizer):
    """AdamW (arXiv 1711.05101). Gradients of float32 weights may be in a 16-bit dtype.

    `factor` multiplies them, and a step is skipped on the device if `found_inf` is 1 and not 0.
    """

    takes_factor = True
    _units: tuple[AdamWUnit, ...] = ()
    _prepared_for: Any = None  # the first parameter's state when the units were made
    _copied: tuple[CopiedUnit, ...] = ()

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, **settings: Any) -> None:
        """``settings``: betas, eps and weight_decay of groups that have none."""
        super().__init__([settings | group for group in groups], lr)

    def new_state(self, parameter: torch.nn.Parameter, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """See `adamw_state`."""
        return adamw_state(parameter)

    def write_copies(self, units: Iterable[CopiedUnit]) -> None:
        """Let updates write the copies of these weights, and free the gradients of each unit after it.

        A unit's copies exist before its gradients are freed, so the largest unit comes last.
        """
        self._copied = tuple(sorted(units, key=lambda unit: sum(local(weight).numel() for weight in unit.masters)))
        self._units, self._prepared_for = (), None

    def forget_state(self) -> None:
        """Free the state, to be loaded or created again."""
        self.state.clear()
        self._units, self._prepared_for = (), None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. The units are then made again."""
        super().add_param_group(param_group)
        self._units, self._prepared_for = (), None

    def step(self) -> None:  # type: ignore[override]  # there is no closure
        """Update every parameter."""
        found_inf = self.found_inf
        for unit in self._prepared():
            if found_inf is None:
                found_inf = torch.zeros((), device=unit.parameters[0].device)
            unit.step(self.factor, found_inf)

    def _prepared(self) -> tuple[AdamWUnit, ...]:
        """The units, which are made again when the state has been replaced."""
        state = next((self.state.get(group["params"][0]) for group in self.param_groups if group["params"]), None)
        if state is not None and state is self._prepared_for:
            return self._units
        self.init_state()
        groups = {parameter: group for group, _, parameter in self.members() if not group.get("orthogonal")}
        units = [AdamWUnit([(groups.pop(p), p) for p in unit.masters], self.state, unit) for unit in self._copied]
        if groups:
            units.append(AdamWUnit([(group, parameter) for parameter, group in groups.items()], self.state))
        self._units = tuple(units)
        self._prepared_for = next(self.state[group["params"][0]] for group in self.param_groups if group["params"])
        return self._units


def update_of(tensors: Tensors) -> Update:
    """The `Update` of some tensors on their device."""
    if tensors.weights[0].is_cuda and {weight.dtype for weight in tensors.weights} == {torch.float32}:
        from titan_like.optim.adamw_kernel import OneKernel  # imports Triton

        return OneKernel(tensors)
    return InBlocks(tensors, BLOCK[tensors.weights[0].device.type])


class _Piece(NamedTuple):
    """Elements of one tensor."""

    member: int
    start: int
    stop: int
    is_whole: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elements, as a view."""
        return tensor if self.is_whole else tensor.view(-1)[self.start : self.stop]


class _Block(NamedTuple):
    """Pieces of one group that are updated at once."""

    settings: dict[str, Any]
    pieces: list[_Piece]
    is_whole: bool  # whether all pieces are whole tensors
    tensors: tuple[list[torch.Tensor], ...]  # weights, moments and numbers of updates
    scaled: list[torch.Tensor]  # room for gradients in the weights' dtype
    copies: list[tuple[_Piece, torch.Tensor]]  # whole copies, which may be freed now, with their pieces
    copied: list[torch.Tensor]  # the weights that have copies


class InBlocks:
    """Updates blocks of elements by torch's fused kernel."""

    def __init__(self, tensors: Tensors, size: int) -> None:
        self._blocks: list[_Block] = []
        weights = tensors.weights
        room = torch.empty(min(size, max(sum(weight.numel() for weight in weights), 1)), dtype=weights[0].dtype)
        room, self._dtype = room.to(weights[0].device), weights[0].dtype
        order = sorted(range(len(weights)), key=lambda index: id(tensors.settings[index]))
        for _, members in groupby(order, key=lambda index: id(tensors.settings[index])):
            block, used = list[_Piece](), 0
            for index in members:
                start, end = 0, weights[index].numel()
                while start < end:
                    stop = min(end, start + size - used)
                    block.append(_Piece(index, start, stop, stop - start == end))
                    used, start = used + stop - start, stop
                    if used == size:
                        self._add(block, tensors, room)
                        block, used = [], 0
            if block:
                self._add(block, tensors, room)

    def _add(self, pieces: list[_Piece], tensors: Tensors, room: torch.Tensor) -> None:
        _, weights, copies, *moments, steps = tensors
        parts = [[piece.of(tensor[piece.member]) for piece in pieces] for tensor in (weights, *moments)]
        copied = [
            (piece, copy, part)
            for piece, part in zip(pieces, parts[0], strict=True)
            if (copy := copies[piece.member]) is not None
        ]
        sizes = [piece.stop - piece.start for piece in pieces]
        scaled = [space.view_as(part) for space, part in zip(room[: sum(sizes)].split(sizes), parts[0], strict=True)]
        numbers, settings = [steps[piece.member] for piece in pieces], tensors.settings[pieces[0].member]
        is_whole = all(piece.is_whole for piece in pieces)
        with_copies = [(piece, copy) for piece, copy, _ in copied], [part for *_, part in copied]
        self._blocks.append(_Block(settings, pieces, is_whole, (*parts, numbers), scaled, *with_copies))

    def __call__(self, gradients: Sequence[torch.Tensor], factor: torch.Tensor | None, found_inf: torch.Tensor) -> None:
        """See `Update`."""
        factor = None if factor is None else factor.to(self._dtype)
        for block in self._blocks:
            pieces = block.pieces  # whole ones are taken without a call for each
            parts = [gradients[p.member] if block.is_whole else p.of(gradients[p.member]) for p in pieces]
            if factor is not None or any(part.dtype != block.scaled[0].dtype for part in parts):
                copy_all_(block.scaled, parts)
                parts = block.scaled
            if factor is not None:
                multiply_all_(parts, factor)
            fused_adamw_(block.tensors, parts, block.settings, found_inf)
            if block.copies:
                copies = [copy if block.is_whole else piece.of(copy) for piece, copy in block.copies]
                copy_all_(copies, block.copied)
