"""Data parallelism with ZeRO stages 0 to 3 (arXiv 1910.02054), for the most part from FSDP2.

Each transformer layer is one unit of communication; what is outside the layers belongs to the root.

| stage | a rank keeps | per microbatch | per step |
|---|---|---|---|
| 0 | everything | | all-reduce gradients (in place in float32; through `replicate` below, which keeps a master copy) |
| 1 | shards of parameters and optimizer state | | all-gather parameters, reduce-scatter gradients |
| 2 | the same | reduce-scatter gradients | all-gather parameters |
| 3 | the same | all-gather parameters twice, reduce-scatter gradients | |
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_like.models.transformer import Transformer
from titan_like.parallel.mesh import data_parallel_mesh
from titan_like.parallel.replicate import GradientAllReduce


class DataParallel:
    """A model whose gradients become sums over the data-parallel ranks. Changes the model in place.

    With more than one rank or a compute type below float32, master weights stay float32 and gradients are summed in
    ``reduce_dtype``. One process in float32 needs nothing and is left as it is.
    """

    def __init__(
        self, model: Transformer, mesh: DeviceMesh, zero_stage: int, dtype: torch.dtype, reduce_dtype: torch.dtype
    ) -> None:
        self.model = model
        self.zero_stage = zero_stage
        self._all_reduce: GradientAllReduce | None = None
        if dtype != torch.float32 or (zero_stage > 0 and mesh.size() > 1):
            _wrap(model, mesh, zero_stage, dtype, reduce_dtype)
        elif mesh.size() > 1:
            units = [list(unit.parameters()) for unit in model.layers.values()]
            in_layers = {id(parameter) for unit in units for parameter in unit}
            units.append([parameter for parameter in model.parameters() if id(parameter) not in in_layers])
            self._all_reduce = GradientAllReduce(units, data_parallel_mesh(mesh).get_group())

    def before_microbatch(self, is_last: bool) -> None:
        """Say, before a microbatch's forward pass, what its backward pass communicates and frees."""
        if self._all_reduce is not None:
            self._all_reduce.enabled = is_last
        if isinstance(self.model, FSDPModule):
            self.model.set_is_last_backward(is_last)
            self.model.set_requires_gradient_sync(is_last or self.zero_stage >= 2)
            self.model.set_requires_all_reduce(is_last)  # replicas are summed once per step
            self.model.set_reshard_after_backward(is_last or self.zero_stage == 3)

    def after_backward(self) -> None:
        """After the last microbatch: gradients are complete when this returns."""
        if self._all_reduce is not None:
            self._all_reduce.wait()

    def free_gathered_parameters(self) -> None:
        """After forward passes that no backward pass follows: keep only the shards."""
        for module in sharded_modules(self.model):
            module.reshard()


def _wrap(model: Transformer, mesh: DeviceMesh, zero_stage: int, dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    # Inputs are not cast: a rotary table or a mask is float32 on purpose.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    shard_mesh = mesh if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]
    units: list[nn.Module] = list(model.layers.values())
    if not model.config.tied_embeddings and model.is_first:  # a table that only the first layer needs is freed after it
        units.insert(0, model.embedding)
    for unit in (*units, model):
        if zero_stage == 0:
            replicate(unit, mesh=data_parallel_mesh(mesh), mp_policy=policy)
        else:
            # The root's parameters are needed first in the backward pass: never free them in between.
            reshard = zero_stage == 3 and unit is not model
            fully_shard(unit, mesh=shard_mesh, mp_policy=policy, reshard_after_forward=reshard)
    for module in sharded_modules(model):
        # The loss is divided by the global number of tokens, so gradients are summed, never averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The units of communication of a wrapped model, root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
