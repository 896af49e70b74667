"""Gradients without FSDP2: ZeRO 0 in float32, and a 16-bit dtype on a process that shares its weights with no other.

There nothing is gathered or reduced, so FSDP2's work for every unit would be wasted, and on a GPU it takes longer than
a small model's kernels. Both compute the same: the forward pass uses weights in that dtype, and gradients add up
over microbatches in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.optim.shards import local
from titan_like.parallel.split import GRADIENT_UNIT_BYTES
from titan_like.torch_private import add_all_, coalesced, copy_all_, views_of


class ComputeCopies:
    """Copies of a module's weights, which its forward pass uses in place of the float32 master weights.

    A copy is an attribute of the instance, which Python finds before the module's registered parameter of the same
    name. So the optimizer, checkpoints and the gradient norm see master weights alone, and nothing is swapped in a
    step. Weights are cast once a step, however many microbatches it has.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        used_twice: Iterable[nn.Parameter] = (),
        unit_bytes: int = GRADIENT_UNIT_BYTES,
    ) -> None:
        """The module's parameters must be allocated. The gradients of uses of ``used_twice`` add up in float32 too."""
        known: dict[nn.Parameter, nn.Parameter] = {}
        for owner in module.modules():
            for name, master in owner.named_parameters(recurse=False):
                if master not in known:
                    known[master] = nn.Parameter(torch.empty_like(master, dtype=dtype))
                vars(owner)[name] = known[master]
        for master in used_twice:
            known[master].grad_dtype = master.dtype
        self._of_masters, self._of_copies = _local(known), _local(known.values())
        self._units = [_Unit(members) for members in _in_units(list(known.items()), unit_bytes)]
        # A backward pass reaches a unit's first weight last. What is missing then is taken up later.
        for number, unit in enumerate(self._units[1:], 1):
            unit.copies[0].register_post_accumulate_grad_hook(partial(self._on_gradient, number))

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the master weights, which may have changed."""
        copy_all_(self._of_copies, self._of_masters)

    def _on_gradient(self, number: int, _copy: torch.Tensor) -> None:
        for unit in self._units[number:]:
            unit.add_gradients()

    def add_gradients(self) -> None:
        """Add the gradients of a backward pass to their sums, and free them."""
        for unit in self._units:
            unit.add_gradients()

    def hand_over(self) -> None:
        """Make the sums the gradients of the master weights, after a step's last backward pass."""
        for unit in self._units:
            unit.hand_over()


class _Unit:
    """Weights whose gradients are added up together: master weights and their copies."""

    def __init__(self, members: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        self.masters, self.copies = [master for master, _ in members], [copy for _, copy in members]
        self._like = _local(self.masters)
        self._size = sum(part.numel() for part in self._like)
        self._is_sharded = any(isinstance(master.data, DTensor) for master in self.masters)
        self._sums: list[torch.Tensor] = []  # float32, of this process's part of each gradient
        self._received: set[int] = set()  # numbers of the weights that have a gradient

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the copies' gradients, as far as there are any, to their sums, and free them."""
        here = [number for number, copy in enumerate(self.copies) if copy.grad is not None]
        if not here:
            return
        found = [copy.grad for copy in self.copies if copy.grad is not None]
        found = _local(found) if self._is_sharded else found
        if self._sums or len(here) < len(self.copies):
            self._sums = self._sums or views_of(self._like[0].new_zeros(self._size), self._like)
            add_all_([self._sums[number] for number in here], found)
        else:
            self._sums = views_of(self._like[0].new_empty(self._size), self._like)
            copy_all_(self._sums, found)
        self._received.update(here)
        for copy in self.copies:
            copy.grad = None

    @torch.no_grad()
    def hand_over(self) -> None:
        """Make the sums the gradients of the master weights."""
        for number in self._received:
            master, gradient = self.masters[number], self._sums[number]
            master.grad = split_as(gradient, master) if self._is_sharded else gradient
        self._sums = []
        self._received.clear()


def _in_units(
    members: list[tuple[nn.Parameter, nn.Parameter]], unit_bytes: int
) -> list[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Divide weights, in the order of the forward pass, so that a unit's copies take at least ``unit_bytes``.

    All gradients of a unit have one type.
    """
    units: list[list[tuple[nn.Parameter, nn.Parameter]]] = [[]]
    size = 0
    for member in reversed(members):
        if size >= unit_bytes or (units[0] and units[0][0][1].grad_dtype != member[1].grad_dtype):
            units.insert(0, [])
            size = 0
        units[0].insert(0, member)
        size += local(member[1].data).nbytes
    return units


def _local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This process's parts, which share their memory with the tensors."""
    return [local(tensor.detach()) for tensor in tensors]


def split_as(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This process's part of a gradient as a tensor that is split as a weight is."""
    if not isinstance(whole.data, DTensor):
        return part
    mesh, placements = whole.data.device_mesh, whole.data.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


class GradientAllReduce:
    """Sums each unit's gradients over a group as soon as the last of them has been computed.

    Nothing is copied: a rank holds one copy of weights, gradients and optimizer state at all times.
    """

    def __init__(self, units: list[list[nn.Parameter]], group: dist.ProcessGroup) -> None:
        self.enabled = False  # true during the backward pass of a step's last microbatch
        self._group = group
        self._units = units
        self._missing = [len(unit) for unit in units]
        self._in_flight: list[dist.Work] = []
        for number, unit in enumerate(units):
            for parameter in unit:
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, number))

    def _on_gradient(self, number: int, _parameter: torch.Tensor) -> None:
        if not self.enabled:
            return
        self._missing[number] -= 1
        if self._missing[number] == 0:
            self._start(number)

    def start_all(self) -> None:
        """Start the sums of all units, for gradients that did not come from a backward pass and so ran no hooks."""
        for number in reversed(range(len(self._units))):
            self._missing[number] = 0
            self._start(number)

    def _start(self, number: int) -> None:
        gradients = [parameter.grad for parameter in self._units[number]]
        with coalesced(self._group, asynchronous=True) as unit_in_flight:
            for gradient in gradients:
                assert gradient is not None
                dist.all_reduce(local(gradient), group=self._group)
        self._in_flight.append(unit_in_flight)

    def wait(self) -> None:
        """Wait, after the last backward pass, until all gradients are summed."""
        for work in self._in_flight:
            work.wait()
        unfinished = sum(self._missing)
        assert unfinished == 0, f"{unfinished} parameters received no gradient, so their sums never started"
        self._in_flight.clear()
        self._missing = [len(unit) for unit in self._units]
