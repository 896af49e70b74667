"""The built-in update rules, building an optimizer and applying its updates without waiting for the device.

A rule is a function from parameter groups to an optimizer. The groups have the form that torch's optimizers take, each
with its ``weight_decay`` and the ``names`` of its parameters. docs/optimizers.md shows how to add a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_like.config.entry_points import load_entry
from titan_like.config.errors import require
from titan_like.config.schema import Optimizer as OptimizerSection
from titan_like.optim.muon import Muon
from titan_like.optim.registry import find_rule
from titan_like.optim.shards import ShardedOptimizer, is_table, local, sharded_dimensions
from titan_like.torch_private import fused_adamw_, multiply_all_, norms_of


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


class Gradients:
    """The gradients of some parameters, which stay the same tensors in groups made once.

    A step then calls no Python function for each parameter, except for DTensors.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *meshes: DeviceMesh | None) -> None:
        """``meshes`` are those of all parameters; the first has the pipeline's stages."""
        self._groups: dict[str, dist.ProcessGroup] = {}
        for mesh in meshes:
            if mesh is not None:
                self._groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()} | self._groups
        # A gradient that is replicated over a group must not be summed over it, so gradients are grouped by the mesh
        # dimensions that shard them.
        self._by_dimensions: dict[tuple[str, ...], list[torch.nn.Parameter]] = {}
        self._of_dtensors: set[tuple[str, ...]] = set()
        for parameter in parameters:
            dimensions = sharded_dimensions(parameter.data)
            if isinstance(parameter.data, DTensor):
                self._of_dtensors.add(dimensions)
            self._by_dimensions.setdefault(dimensions, []).append(parameter)

    def local(self) -> dict[tuple[str, ...], list[torch.Tensor]]:
        """This rank's part of every gradient, as plain tensors that share its memory, by the dimensions that shard it.

        Raises:
            AssertionError: a parameter has no gradient, or one that is split in another way than it is.
        """
        found = {}
        for dimensions, parameters in self._by_dimensions.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            assert len(gradients) == len(parameters), "a parameter received no gradient"
            if dimensions in self._of_dtensors:
                gradients = [_part(parameter, one) for parameter, one in zip(parameters, gradients, strict=True)]
            found[dimensions] = gradients
        return found

    def norm(self) -> torch.Tensor:
        """Euclidean norm of all gradients: a scalar of their dtype, equal on every rank of the mesh.

        Over all pipeline stages together, there must be each parameter of the model exactly once.
        """
        return self._sum_over_shards(lambda gradients: torch.stack(norms_of(gradients)).square().sum()).sqrt()

    def count_zeros(self) -> torch.Tensor:
        """Number of gradient elements that are exactly zero: an integer scalar, summed over all ranks of the mesh."""
        return self._sum_over_shards(
            lambda gradients: torch.stack([one.numel() - torch.count_nonzero(one) for one in gradients]).sum()
        )

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a scalar, in place."""
        for gradients in self.local().values():
            multiply_all_(gradients, factor.to(gradients[0].dtype))

    def _sum_over_shards(self, reduce_local: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        """Reduce the local gradients, then sum over the process groups that shard them, then over the stages.

        All ranks sum in the same order. Groups are looked up in the mesh by name, because a gradient's own mesh may be
        an equal one of an earlier model: torch caches the results of sharding propagation for DTensors.
        """
        total = None
        for dimensions, gradients in self.local().items():
            part = reduce_local(gradients)
            for name in dimensions:
                dist.all_reduce(part, group=self._groups[name])
            total = part if total is None else total + part
        assert total is not None, "there are no parameters"
        stages = self._groups["pp"]
        if stages.size() > 1:
            dist.all_reduce(total, group=stages)
        return total


def _part(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter.data, DTensor) and gradient.placements == parameter.data.placements, (
        "a gradient is split unlike its parameter"
    )
    return gradient.to_local()


def adamw(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) with torch's fused, foreach or for-loop implementation."""
    fused, foreach = section.implementation == "fused", section.implementation == "foreach"
    kind = FusedAdamW if fused else torch.optim.AdamW
    return kind(groups, section.lr, section.betas, section.eps, fused=fused or None, foreach=foreach or None)


def sgd(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """Plain gradient descent. It never uses torch's fused kernel, which does not take sharded parameters."""
    return torch.optim.SGD(groups, lr=section.lr, foreach=section.implementation != "for-loop")


def muon(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """Muon for the matrices inside layers, and AdamW for vectors, embedding tables and the output matrix."""
    split = []
    for group in groups:
        for orthogonal in (True, False):
            named = zip(group["names"], group["params"], strict=True)
            members = [(name, p) for name, p in named if (p.ndim == 2 and not is_table(name, p)) == orthogonal]
            names, parameters = [name for name, _ in members], [parameter for _, parameter in members]
            split.append({**group, "params": parameters, "names": names, "orthogonal": orthogonal})
    return Muon(split, section)


class LossScaler:
    """Keeps the factor that multiplies the loss so that small gradients do not underflow in float16 (arXiv 1710.03740).

    The factor halves on overflow and doubles after ``growth_interval`` steps without one. Its state stays on the
    device, so that no step has to wait for the outcome of the previous one.
    """

    def __init__(
        self, device: torch.device | str, scale: float = 2.0**16, growth_interval: int = 1000, good_steps: int = 0
    ) -> None:
        self.scale = torch.full((), scale, dtype=torch.float64, device=device)
        self.good_steps = torch.full((), good_steps, dtype=torch.int64, device=device)  # since the scale last changed
        self.growth_interval = growth_interval

    def update(self, overflowed: torch.Tensor) -> None:
        """Adjust the factor after a step. ``overflowed``, a bool scalar: the gradient norm was not finite."""
        good_steps = torch.where(overflowed, 0, self.good_steps + 1)
        grows = good_steps == self.growth_interval
        halved = (self.scale / 2).clamp(min=1.0)
        self.scale = torch.where(overflowed, halved, torch.where(grows, self.scale * 2, self.scale))
        self.good_steps = torch.where(grows, 0, good_steps)


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], section: OptimizerSection
) -> torch.optim.Optimizer:
    """Build the optimizer that `optimizer.name` chooses. Weight decay applies only to matrices and embeddings.

    Raises:
        ConfigError: there is no such optimizer, or its function does not return one.
    """
    # Kernels that take lists take no plain tensors together with DTensors, so those are groups of their own.
    found: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, parameter in named_parameters:
        is_vector = parameter.ndim < 2
        decay = 0.0 if is_vector else section.weight_decay
        group = found.setdefault(
            (is_vector, isinstance(parameter.data, DTensor)), {"params": [], "names": [], "weight_decay": decay}
        )
        group["params"].append(parameter)
        group["names"].append(name)
    groups = list(found.values())
    rule = find_rule(section)
    optimizer = load_entry("optimizer.name", rule)(groups, section)
    problem = f"it returns a {type(optimizer).__name__}, not a torch.optim.Optimizer"
    require(isinstance(optimizer, torch.optim.Optimizer), "optimizer.name", section.name, problem)
    return optimizer


@torch.no_grad()
def update(
    optimizer: torch.optim.Optimizer, gradients: Gradients, lr: float, factor: torch.Tensor | None, skip: torch.Tensor
) -> None:
    """Apply one update at learning rate ``lr``, unless ``skip``. The gradients cannot be used afterwards.

    ``skip`` is a bool scalar on the device. Fused kernels read it themselves; for other implementations the host has to
    wait for it. ``factor``, a float64 scalar, multiplies the gradients first.
    """
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.factor = factor
    elif factor is not None:
        gradients.multiply(factor)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]  # as torch.amp.GradScaler sets it
        optimizer.step()
    elif not skip:
        optimizer.step()
