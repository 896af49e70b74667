"""AdamW without Python work for every parameter: on a GPU, torch's own takes longer to issue than to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from titan_like.optim.shards import local
from titan_like.torch_private import fused_adamw_


class _Group(NamedTuple):
    """The tensors of a parameter group, as this process's parts."""

    settings: dict[str, Any]  # of the group
    parameters: list[torch.nn.Parameter]
    is_sharded: bool
    tensors: tuple[list[torch.Tensor], ...]  # weights, first moments, second moments and numbers of updates


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` with ``fused=True``, whose steps after the first only pass lists to the fused kernel."""

    found_inf: torch.Tensor | None = None  # scalar; a step is skipped if it is above 0, as torch.amp.GradScaler sets it
    _groups: tuple[_Group, ...] = ()
    _known: Any = None  # the state of the first parameter for which the groups were made

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:  # type: ignore[override]  # there is no closure
        """Update every parameter. The first step creates the state, and so does the first one after it was cleared."""
        groups = self._prepared()
        gradients = [[p.grad for p in group.parameters if p.grad is not None] for group in groups]
        if not groups or [len(one) for one in gradients] != [len(group.parameters) for group in groups]:
            super().step()
            return
        for group, found in zip(groups, gradients, strict=True):
            parts = [local(one) for one in found] if group.is_sharded else found
            fused_adamw_(group.tensors, parts, group.settings, self.found_inf)

    def forget_state(self) -> None:
        """Free the state, to be loaded or created again."""
        self.state.clear()
        self._groups, self._known = (), None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in the base class."""
        super().add_param_group(param_group)
        self._groups, self._known = (), None

    def _prepared(self) -> tuple[_Group, ...]:
        """The groups, or none while a parameter has no state."""
        known = next((self.state.get(group["params"][0]) for group in self.param_groups if group["params"]), None)
        if known is not None and known is self._known:
            return self._groups
        groups = []
        for settings in self.param_groups:
            parameters = settings["params"]
            if not all(self.state.get(parameter) for parameter in parameters):
                return ()
            if parameters:
                weights, keys = [local(parameter) for parameter in parameters], ("exp_avg", "exp_avg_sq", "step")
                states = [[local(self.state[parameter][key]) for parameter in parameters] for key in keys]
                is_sharded = any(isinstance(parameter.data, DTensor) for parameter in parameters)
                groups.append(_Group(settings, parameters, is_sharded, (weights, *states)))
        self._groups, self._known = tuple(groups), known
        return self._groups
