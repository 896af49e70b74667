"""ZeRO 0 in float32: full weights on every rank, gradients all-reduced in place during the backward pass."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.torch_private import coalesced


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
                dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self._group)
        self._in_flight.append(unit_in_flight)

    def wait(self) -> None:
        """Wait, after the last backward pass, until all gradients are summed."""
        for work in self._in_flight:
            work.wait()
        unfinished = sum(self._missing)
        assert unfinished == 0, f"{unfinished} parameters received no gradient, so their sums never started"
        self._in_flight.clear()
        self._missing = [len(unit) for unit in self._units]
