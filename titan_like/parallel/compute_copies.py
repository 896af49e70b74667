"""A half-type copy of the weights on a process that shares its weights with no other.

Nothing is gathered or reduced there, so FSDP2's work for every unit would be wasted, and on a GPU it takes longer than
a small model's kernels. Both compute the same: the forward pass uses weights in the half type, and gradients add up
over microbatches in float32.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.torch_private import add_all_, copy_all_, views_of


class ComputeCopies:
    """Copies of a module's weights, which its forward pass uses in place of the float32 master weights.

    A copy is an attribute of the instance, which Python finds before the module's registered parameter of the same
    name. So the optimizer, checkpoints and the gradient norm see master weights alone, and nothing is swapped in a
    step. Weights are cast once a step, however many microbatches it has.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        """The module's parameters must be allocated."""
        self._masters, self._copies = list[nn.Parameter](), list[nn.Parameter]()
        known: dict[nn.Parameter, nn.Parameter] = {}
        for owner in module.modules():
            for name, master in owner.named_parameters(recurse=False):
                if master not in known:
                    known[master] = nn.Parameter(torch.empty_like(master, dtype=dtype))
                vars(owner)[name] = known[master]
        self._masters, self._copies = list(known), list(known.values())
        self._of_masters, self._of_copies = _local(self._masters), _local(self._copies)
        self._is_sharded = any(isinstance(master, DTensor) for master in self._masters)
        self._size = sum(part.numel() for part in self._of_masters)
        self._sums: list[torch.Tensor] = []  # float32, of this process's part of each gradient
        self._received: set[int] = set()  # numbers of the weights that have a gradient

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the master weights, which may have changed."""
        copy_all_(self._of_copies, self._of_masters)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradients of a backward pass to their sums, and free them."""
        gradients = [copy.grad for copy in self._copies]
        here = [number for number, gradient in enumerate(gradients) if gradient is not None]
        found = [gradient for gradient in gradients if gradient is not None]
        found = _local(found) if self._is_sharded else found
        if not self._sums and len(here) == len(gradients):
            self._sums = views_of(self._of_masters[0].new_empty(self._size), self._of_masters)
            copy_all_(self._sums, found)
        elif here:
            self._sums = self._sums or views_of(self._of_masters[0].new_zeros(self._size), self._of_masters)
            add_all_([self._sums[number] for number in here], found)
        self._received.update(here)
        for copy in self._copies:
            copy.grad = None

    @torch.no_grad()
    def hand_over(self) -> None:
        """Make the sums the gradients of the master weights, after a step's last backward pass."""
        for number in self._received:
            master, gradient = self._masters[number], self._sums[number]
            master.grad = _like(gradient, master) if self._is_sharded else gradient
        self._sums = []
        self._received.clear()


def _local(tensors: list) -> list[torch.Tensor]:
    """This process's parts, which share their memory with the tensors."""
    return [one.to_local() if isinstance(one, DTensor) else one.detach() for one in tensors]


def _like(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """This process's part of a gradient as a tensor that is split as a weight is."""
    if not isinstance(whole.data, DTensor):
        return part
    mesh, placements = whole.data.device_mesh, whole.data.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
