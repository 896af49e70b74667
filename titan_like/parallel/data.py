"""Data parallelism with ZeRO stages 0 to 3 (arXiv 1910.02054), mostly by FSDP2.

A transformer layer, or several small ones (`units_of_layers`), are one unit of communication. Parameters outside the
layers belong to the root unit.

A process whose weights no other shares needs none of this: in float32 its model stays as it is, and in a lower
precision it computes with `ComputeCopies`.

| stage | a rank keeps | per microbatch | per step |
|---|---|---|---|
| 0 | everything | | all-reduce gradients (float32: in place; lower precision: `replicate`, which keeps a master copy) |
| 1 | shards of parameters and optimizer state | | all-gather parameters, reduce-scatter gradients |
| 2 | the same | reduce-scatter gradients | all-gather parameters |
| 3 | the same | all-gather parameters twice, reduce-scatter gradients | |
"""

from itertools import islice
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_like.config.schema import JobConfig
from titan_like.models.layers.experts import Experts
from titan_like.models.transformer import Transformer
from titan_like.optim.shards import local
from titan_like.parallel.compile import Compiled
from titan_like.parallel.gradients import ComputeCopies, GradientAllReduce
from titan_like.parallel.mesh import one_dimension
from titan_like.parallel.split import units_of_layers
from titan_like.parallel.tuning import DEFAULT_TUNING, Tuning
from titan_like.parallel.weight_gradients import LinearGemms
from titan_like.torch_private.fsdp import (
    fsdp_state,
    keep_gradient_dtypes,
    reduce_fsdp_gradients,
    release_reduced,
    replicate_modules,
)


class DataParallel:
    """Sums the gradients of a model, or of one stage, over data-parallel ranks. Changes the model in place.

    In a lower precision than float32, master weights stay float32 and gradients are summed in `training.reduce_dtype`.
    """

    def __init__(
        self,
        model: Transformer,
        mesh: DeviceMesh,
        expert_mesh: DeviceMesh | None,
        config: JobConfig,
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        """``expert_mesh`` groups the ranks with the same experts. None: the ranks with the same dense weights."""
        dtype, zero_stage = getattr(torch, config.training.dtype), config.parallelism.zero_stage
        self.model, self.zero_stage = model, zero_stage
        # Until the all-reduce over replicas, FSDP2 keeps the sum over microbatches as one flat tensor.
        self._keeps_flat_sums = zero_stage >= 2 and mesh["dp_replicate"].size() > 1
        self._all_reduces: list[GradientAllReduce] = []
        self.copies: ComputeCopies | None = None
        of_dense, of_experts = groups_of(mesh, expert_mesh)
        full_precision = dtype in (torch.float32, torch.float64)
        if shares_nothing(mesh, expert_mesh):
            # What modules cast to float8 needs no copy in another dtype.
            to_float8 = [m.weight for m in model.modules() if isinstance(m, LinearGemms) and m.float8 is not None]
            self.copies = None if full_precision else ComputeCopies(model, dtype, to_float8, tuning.gradient_bytes)
        elif not full_precision or zero_stage > 0:
            policy = MixedPrecisionPolicy(
                param_dtype=None if full_precision else dtype,
                reduce_dtype=None if full_precision else getattr(torch, config.training.reduce_dtype),
                cast_forward_inputs=False,  # rotary tables and masks are float32 on purpose
            )
            wrapped = units_of(model, of_dense, of_experts, dtype, tuning.layer_bytes)
            # Where one graph has all layers, no hook runs between them: the model is one unit.
            _wrap(model, wrapped[-1:] if isinstance(model, Compiled) else wrapped, zero_stage, policy)
        else:  # full precision needs no master copy, so gradients can be summed in place
            layers = _layer_units(model, dtype, tuning.layer_bytes)
            experts = [_parameters(_experts_in(unit)) if of_experts else [] for unit in layers]
            assigned = {id(parameter) for unit in experts for parameter in unit}
            dense = [[p for p in _parameters(unit) if id(p) not in assigned] for unit in layers]
            assigned |= {id(parameter) for unit in dense for parameter in unit}
            dense.append([parameter for parameter in _parameters([model]) if id(parameter) not in assigned])
            for units, group in ((dense, of_dense), (experts, of_experts)):
                if group is not None and group.fsdp_mesh().size() > 1:
                    self._all_reduces.append(GradientAllReduce(list(filter(None, units)), group.flat().get_group()))

    def before_forward(self) -> None:
        """Prepare for passes with the weights as they are now. Call it once for all microbatches of a step."""
        if self.copies is not None:
            self.copies.refresh()

    def before_backward(self, is_last: bool, is_split: bool = False) -> None:
        """Set what a microbatch's backward pass will communicate and free. ``is_last``: it is the step's last one.

        If the pass ``is_split``, it defers the weights' gradients, so FSDP2 must not reduce at its end.
        """
        for all_reduce in self._all_reduces:
            all_reduce.enabled = is_last
        if self.copies is not None:
            self.copies.before_backward(is_last)
        if not isinstance(self.model, FSDPModule):
            return
        keep_gradient_dtypes(self.model)
        release_reduced(self.model)  # now, because a forward pass has hidden that reduction
        self.model.set_is_last_backward(is_last)
        self.model.set_requires_gradient_sync(is_last or (self.zero_stage >= 2 and not is_split))
        self.model.set_requires_all_reduce(is_last)  # the sum over replicas is needed only once per step
        self.model.set_reshard_after_backward(is_last or self.zero_stage == 3)

    def after_backward(self) -> None:
        """Take up the gradients of one backward pass, or of a part of it."""
        if self.copies is not None:
            self.copies.add_gradients()

    def reduce_gradients(self, is_last: bool) -> None:
        """Reduce gradients once the second part of a split backward pass has completed them. ``is_last`` as above."""
        self.after_backward()
        for all_reduce in self._all_reduces if is_last else ():
            all_reduce.start_all()
        if not isinstance(self.model, FSDPModule):
            return
        self.before_backward(is_last)
        reduce_fsdp_gradients(self.model, every_parameter=self._keeps_flat_sums)

    def finish(self) -> None:
        """Wait, after a step's last backward pass, until its gradients are complete."""
        for all_reduce in self._all_reduces:
            all_reduce.wait()
        if self.copies is not None:
            self.copies.hand_over()

    def free_gathered_parameters(self) -> None:
        """Keep only the shards, after forward passes that no backward pass follows."""
        for module in sharded_modules(self.model):
            module.reshard()


def _layer_units(model: Transformer, dtype: torch.dtype, most: int | None) -> list[list[nn.Module]]:
    sizes = [dtype.itemsize * sum(local(p).numel() for p in layer.parameters()) for layer in model.layers.values()]
    layers = iter(model.layers.values())
    return [list(islice(layers, count)) for count in units_of_layers(sizes, most)]


def _experts_in(unit: list[nn.Module]) -> list[nn.Module]:
    return [module for layer in unit for module in layer.modules() if isinstance(module, Experts)]


def _parameters(modules: list[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]


class DataParallelGroup(NamedTuple):
    """The ranks that hold the same parameters: replicas, and a dimension of a mesh that ZeRO shards over."""

    mesh: DeviceMesh
    dimension: str

    def flat(self) -> DeviceMesh:
        """One-dimensional mesh of all of them."""
        return one_dimension(self.mesh, "dp", "dp_replicate", self.dimension)

    def fsdp_mesh(self) -> DeviceMesh:
        """What FSDP2 takes: a mesh of replicas and shards, or of shards alone."""
        is_replicated = self.mesh["dp_replicate"].size() > 1
        return self.mesh["dp_replicate", self.dimension] if is_replicated else self.mesh[self.dimension]


def groups_of(mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> tuple[DataParallelGroup, DataParallelGroup | None]:
    """The data-parallel groups of the dense parameters and of the experts, if the latter have their own."""
    experts = None if expert_mesh is None else DataParallelGroup(expert_mesh, "expert_shard")
    return DataParallelGroup(mesh, "dp_shard"), experts


def shares_nothing(mesh: DeviceMesh, expert_mesh: DeviceMesh | None) -> bool:
    """Whether no other rank has any of this one's weights."""
    return all(group is None or group.fsdp_mesh().size() == 1 for group in groups_of(mesh, expert_mesh))


def units_of(
    model: Transformer,
    of_dense: DataParallelGroup,
    of_experts: DataParallelGroup | None,
    dtype: torch.dtype,
    most: int | None = None,
) -> list[tuple[list[nn.Module], DataParallelGroup]]:
    """FSDP2's units of communication and the ranks that hold each. A parameter is in the first unit with its module."""
    units: list[tuple[list[nn.Module], DataParallelGroup]] = []
    # A table that only the first layer's input needs is freed right after use, as a unit of its own.
    if model.is_first and not model.config.uses_table_last:
        units.append(([model.embedding], of_dense))
    for layers in _layer_units(model, dtype, most):
        if of_experts is not None and (experts := _experts_in(layers)):
            units.append((experts, of_experts))
        units.append((layers, of_dense))
    units.append(([model], of_dense))
    return units


def _wrap(
    model: Transformer,
    units: list[tuple[list[nn.Module], DataParallelGroup]],
    zero_stage: int,
    policy: MixedPrecisionPolicy,
) -> None:
    # Frozen weights are whole below ZeRO 3, as they need no gradients or optimizer state.
    ignored = {p for p in model.parameters() if not p.requires_grad and zero_stage < 3}
    for unit, group in units:
        if unit[0] is not model and all(parameter in ignored for module in unit for parameter in module.parameters()):
            continue
        if zero_stage == 0:
            replicate_modules(unit, group.flat(), policy, ignored)
        else:
            # The backward pass needs the root's parameters first, so freeing them after the forward pass gains nothing.
            reshard = zero_stage == 3 and unit is not units[-1][0]
            mesh = group.fsdp_mesh()
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, ignored_params=ignored)
    for module in sharded_modules(model):
        # The loss is divided by the global number of tokens, so gradients are summed, never averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """One module of each FSDP unit of a wrapped model, root first."""
    wrapped = (module for module in model.modules() if isinstance(module, FSDPModule))
    return list({fsdp_state(module): module for module in wrapped}.values())
