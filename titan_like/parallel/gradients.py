"""Gradients without FSDP2: ZeRO 0 in float32, and a 16-bit dtype on a process that shares its weights with no other.

There nothing is gathered or reduced, so FSDP2's work for every unit would be wasted, and on a GPU it takes longer than
a small model's kernels. Both compute the same: the forward pass uses weights in that dtype, and gradients add up
over microbatches in float32.
"""

from collections.abc import Iterable
from functools import partial
from itertools import compress

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.optim.shards import local
from titan_like.parallel.split import GRADIENT_UNIT_BYTES
from titan_like.torch_private import coalesced, copy_all_, versions_of


class ComputeCopies:
    """Copies of a module's weights, which its forward pass uses in place of the float32 master weights.

    A copy is an attribute of the instance, which Python finds before the module's registered parameter of the same
    name. So the optimizer, checkpoints and the gradient norm see master weights alone, and nothing is swapped in a
    step. Weights are cast once a step, however many microbatches it has: by the update that changes them, or before the
    first forward pass.

    Gradients of the first microbatch stay in the copies' dtype; later microbatches are added to them in float32.
    A step of one microbatch hands them over as they are. If there are several units, a step's last backward pass frees
    the copies of each unit that it leaves.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        uncopied: Iterable[nn.Parameter] = (),
        unit_bytes: int = GRADIENT_UNIT_BYTES,
    ) -> None:
        """The module's parameters must be allocated. Weights in ``uncopied`` are used as they are."""
        unchanged = set(uncopied)
        known: dict[nn.Parameter, nn.Parameter] = {}
        for owner in module.modules():
            for name, master in owner.named_parameters(recurse=False):
                if not master.requires_grad:  # frozen, and in the copies' dtype already
                    continue
                if master not in known:
                    master.grad_dtype = None  # any
                    has_copy = master not in unchanged
                    known[master] = nn.Parameter(torch.empty_like(master, dtype=dtype)) if has_copy else master
                if known[master] is not master:
                    vars(owner)[name] = known[master]
        self.units = [CopiedUnit(members) for members in _in_units(list(known.items()), unit_bytes)]
        self.frees = len(self.units) > 1  # may be turned off, which keeps the copies where they are
        self._is_last = False
        # A backward pass reaches a unit's first weight last. What is missing then is taken up later.
        for number, unit in enumerate(self.units[1:], 1):
            unit.copies[0].register_post_accumulate_grad_hook(partial(self._on_gradient, number))

    def refresh(self) -> None:
        """Cast the master weights into the copies, unless the last update has."""
        for unit in self.units:
            unit.refresh()

    def before_backward(self, is_last: bool) -> None:
        """``is_last``: no pass of this step follows the backward pass that begins."""
        self._is_last = is_last

    def _on_gradient(self, number: int, _copy: torch.Tensor) -> None:
        for unit in self.units[number:]:
            unit.add_gradients(self._is_last and self.frees)

    def add_gradients(self) -> None:
        """Take up the gradients of a backward pass."""
        self._on_gradient(0, torch.empty(0))

    def hand_over(self) -> None:
        """Make the sums the gradients of the master weights, after a step's last backward pass."""
        for unit in self.units:
            unit.hand_over()


class CopiedUnit:
    """Weights whose gradients are added up together: master weights and their copies."""

    def __init__(self, members: list[tuple[nn.Parameter, nn.Parameter]]) -> None:
        self.masters, self.copies = [master for master, _ in members], [copy for _, copy in members]
        self._versions = list[int]()  # of the master weights when an update has written the copies
        self._has_copy = [copy is not master for master, copy in members]
        # This process's parts, which share their memory with the tensors.
        self._of_masters, self._of_copies = ([local(x.detach()) for x in xs] for xs in (self.masters, self.copies))
        self._freed: list[torch.Tensor] = []  # of these copies
        self._one = self._of_masters[0].new_ones(1)
        self._is_sharded = any(isinstance(master.data, DTensor) for master in self.masters)
        # By a weight's number: its gradient of the first microbatch, and the float32 sum of all as soon as there are
        # several.
        self._gradients: dict[int, torch.Tensor] = {}

    def add_gradients(self, frees: bool) -> None:
        """Take up the gradients that there are. With ``frees``, their copies are not needed any more in this step."""
        for number, copy in enumerate(self.copies):
            if copy.grad is None:
                continue
            new = local(copy.grad) if self._is_sharded else copy.grad
            copy.grad = None
            if number not in self._gradients:
                self._gradients[number] = new
            elif (known := self._gradients[number]).dtype == self._of_masters[number].dtype:
                known.add_(new)
            else:  # times 1, which makes it a sum in the dtype of master weights
                self._gradients[number] = torch.addcmul(known, new, self._one)
            if frees and self._has_copy[number]:
                self._of_copies[number].untyped_storage().resize_(0)
                self._freed.append(self._of_copies[number])
                self.mark_changed()

    def hand_over(self) -> None:
        """Give the gradients to the master weights."""
        for number, gradient in self._gradients.items():
            master = self.masters[number]
            master.grad = split_as(gradient, master) if self._is_sharded else gradient
        self._gradients = {}

    def allocate(self) -> None:
        """Make room for the copies that have been freed."""
        for copy in self._freed:
            copy.untyped_storage().resize_(copy.nbytes)
        self._freed = []

    def refresh(self) -> None:
        """Copy the master weights, unless an update has and they are the same since."""
        if versions_of(self.masters) != self._versions:
            self.allocate()
            if any(self._has_copy):
                tensors = self._of_copies, self._of_masters
                copies, masters = (list(compress(parts, self._has_copy)) for parts in tensors)
                copy_all_(copies, masters)

    def note_written(self) -> None:
        """The copies equal the master weights, until these change."""
        self._versions = versions_of(self.masters)

    def mark_changed(self) -> None:
        """The copies no longer equal the master weights."""
        self._versions = []


def _in_units(
    members: list[tuple[nn.Parameter, nn.Parameter]], unit_bytes: int
) -> list[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Divide weights, in the order of the forward pass, so that a unit's copies take at least ``unit_bytes``."""
    units: list[list[tuple[nn.Parameter, nn.Parameter]]] = [[]]
    size = 0
    for member in reversed(members):
        if size >= unit_bytes:
            units.insert(0, [])
            size = 0
        units[0].insert(0, member)
        size += local(member[1].data).nbytes
    return units


def split_as(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This process's part of a gradient as a tensor that is split as a weight is."""
    if not isinstance(whole, DTensor):
        return part
    mesh, placements = whole.device_mesh, whole.placements
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
        with coalesced(self._group, async_ops=True) as unit_in_flight:
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
