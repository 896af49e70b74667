"""The built-in update rules, building an optimizer and applying its updates without waiting for the device.

A rule is a function from parameter groups to an optimizer. The groups have the form that torch's optimizers take, each
with its ``weight_decay`` and the ``names`` of its parameters. docs/optimizers.md shows how to add a rule.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_like.config.entry_points import find_entry, load_entry
from titan_like.config.errors import require
from titan_like.config.schema import Optimizer as OptimizerSection
from titan_like.optim.adamw import FusedAdamW
from titan_like.optim.muon import Muon
from titan_like.optim.shards import ShardedOptimizer, is_table, sharded_dimensions, widen
from titan_like.torch_private import multiply_all_, norms_of

_COUNTED_AT_ONCE = 1 << 24  # elements


class Gradients:
    """The gradients of some parameters, which stay the same tensors in groups made once.

    A step then calls no Python function for each parameter, except for DTensors.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *meshes: DeviceMesh | None) -> None:
        """``meshes``: the meshes of all parameters; the first has the pipeline's stages."""
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

        Raises an `AssertionError` if a parameter has no gradient, or one that is split in another way.
        """
        by_dimensions = {}
        for dimensions, parameters in self._by_dimensions.items():
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            assert len(gradients) == len(parameters), "a parameter received no gradient"
            if dimensions in self._of_dtensors:
                gradients = [_part(p, gradient) for p, gradient in zip(parameters, gradients, strict=True)]
            by_dimensions[dimensions] = gradients
        return by_dimensions

    def norm(self) -> torch.Tensor:
        """Euclidean norm of all gradients: a scalar, at least float32, equal on every rank of the mesh.

        Over all pipeline stages together, there must be each parameter of the model exactly once.
        """
        return self._sum_over_shards(_sum_of_squares).sqrt()

    def count_zeros(self) -> torch.Tensor:
        """Number of gradient elements that are exactly zero: an integer scalar, summed over all ranks of the mesh."""
        return self._sum_over_shards(lambda gradients: torch.stack(list(map(_zeros_in, gradients))).sum())

    def widen(self) -> None:
        """Convert gradients in a 16-bit dtype to the dtype of their weights."""
        for parameters in self._by_dimensions.values():
            widen(parameters)

    def multiply(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a scalar, in place."""
        for gradients in self.local().values():
            for dtype, members in _by_dtype(gradients).items():
                multiply_all_(members, factor.to(dtype))

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


def _by_dtype(tensors: list[torch.Tensor]) -> dict[torch.dtype, list[torch.Tensor]]:
    return {dtype: [x for x in tensors if x.dtype == dtype] for dtype in {x.dtype for x in tensors}}


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    # 16-bit gradients are read as they are, and added up in float32.
    if len({gradient.dtype for gradient in gradients}) > 1:
        return torch.stack([_sum_of_squares(alike) for alike in _by_dtype(gradients).values()]).sum()
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    return torch.stack(norms_of(gradients, 2, wide)).square().sum()


def _zeros_in(gradient: torch.Tensor) -> torch.Tensor:
    """Number of elements that are zero. A GPU counts with a temporary of each part's size."""
    parts = gradient.reshape(-1).split(_COUNTED_AT_ONCE)
    return gradient.numel() - torch.stack([torch.count_nonzero(part) for part in parts]).sum()


def _part(parameter: torch.nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, DTensor):
        return gradient
    is_split_alike = isinstance(parameter.data, DTensor) and gradient.placements == parameter.data.placements
    assert is_split_alike, "a gradient is split unlike its parameter"
    return gradient.to_local()


def adamw(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101), fused in one pass or with torch's foreach or for-loop implementation."""
    if section.implementation == "fused":
        return FusedAdamW(groups, section.lr, betas=section.betas, eps=section.eps)
    foreach = section.implementation == "foreach"
    return torch.optim.AdamW(groups, section.lr, section.betas, section.eps, foreach=foreach)


def sgd(groups: list[dict[str, Any]], section: OptimizerSection) -> torch.optim.Optimizer:
    """Plain gradient descent. It never uses torch's fused kernel, which does not support sharded parameters."""
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

    Raises a `ConfigError` if there is no such optimizer, or its function does not return one.
    """
    # Foreach kernels do not mix plain tensors and DTensors, so these are separate groups.
    by_kind: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, parameter in named_parameters:
        is_vector = parameter.ndim < 2
        decay = 0.0 if is_vector else section.weight_decay
        group = by_kind.setdefault(
            (is_vector, isinstance(parameter.data, DTensor)), {"params": [], "names": [], "weight_decay": decay}
        )
        group["params"].append(parameter)
        group["names"].append(name)
    groups = list(by_kind.values())
    rule = find_entry("optimizer.name", section.name)
    optimizer = load_entry("optimizer.name", rule)(groups, section)
    reason = f"it returns a {type(optimizer).__name__}, not a torch.optim.Optimizer"
    require(isinstance(optimizer, torch.optim.Optimizer), "optimizer.name", section.name, reason)
    return optimizer


@torch.no_grad()
def update(
    optimizer: torch.optim.Optimizer, gradients: Gradients, lr: float, factor: torch.Tensor | None, skip: torch.Tensor
) -> None:
    """Apply one update at learning rate ``lr``, unless ``skip``. The gradients cannot be used afterwards.

    ``skip`` is a bool scalar on the device. Fused kernels read it themselves; for other implementations the host has to
    wait for it. ``factor``, a float64 scalar, multiplies the gradients first.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    if isinstance(optimizer, ShardedOptimizer) and optimizer.takes_factor:
        optimizer.factor = factor
    else:
        gradients.widen()
        if factor is not None:
            gradients.multiply(factor)
    if optimizer.defaults.get("fused"):
        optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]  # as torch.amp.GradScaler sets it
        optimizer.step()
    elif not skip:
        optimizer.step()
