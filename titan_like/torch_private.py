"""Every private name of torch that this project uses, in one place, with what was seen of it in torch 2.11 to 2.15.

The tests have run with 2.13; of other versions the sources were read.

| name | for | versions |
|---|---|---|
| `distributed.tensor._utils.compute_local_shape_and_global_offset` | which elements a rank holds | all |
| `ops._c10d_functional` | collectives that can be compiled and recomputed | all |
| `distributed._coalescing_manager` | several collectives as one | all |
| `distributed.distributed_c10d._get_default_store` | the watchdog's heartbeats | all |
| `distributed._composable.replicate_with_fsdp` | ZeRO 0 below float32 | all |
| `FSDPState._fsdp_param_groups` and its groups' parameters | gradients of backward passes in two parts | from 2.12 a list; from 2.15 autograd accumulates in the type of the sum |
| `_inductor.config._micro_pipeline_tp`, `distributed._symmetric_memory` | asynchronous tensor parallelism | all |
| `_C._current_graph_task_id` | whether a forward pass is a recomputation | all |
| `testing._internal.distributed.fake_pg` | one process of many that do not exist | all |
| `distributed.checkpoint.filesystem._StorageInfo` | where a checkpoint's tensors lie | all |
| `_foreach_mul_`, `_foreach_norm` | all gradients in one kernel | all |

Names load when they are asked for: what only trains must not be loaded to plan.
"""  # noqa: E501

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape_and_offset

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["local_shape_and_offset"]

functional_collectives = torch.ops._c10d_functional


def multiply_all_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Scale tensors in place by a scalar of their type."""
    torch._foreach_mul_(tensors, factor)


def norms_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Euclidean norm of each tensor."""
    return list(torch._foreach_norm(tensors))


def coalesced(group: dist.ProcessGroup, asynchronous: bool = False) -> AbstractContextManager[Any]:
    """Within it collectives of the group become one; asynchronous ones are waited for by what it gives."""
    return dist._coalescing_manager(group, async_ops=asynchronous)


def default_store() -> Any:
    """What the default process group's processes met at."""
    return dist.distributed_c10d._get_default_store()


def fake_store() -> dist.Store:
    """For the backend "fake", which importing it makes known."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def is_in_backward_pass() -> bool:
    """Whether autograd goes back at the moment: a forward pass is then a recomputation."""
    return torch._C._current_graph_task_id() != -1


def overlap_tensor_parallelism(group_name: Any) -> None:
    """Let the compiler overlap matrix products with the collectives of a group beside them. CUDA only."""
    import torch._inductor.config
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group_name)


def reduce_fsdp_gradients(module: nn.Module, every_parameter: bool) -> None:
    """What FSDP2 does at the end of a backward pass, done later: sum the gradients that earlier passes have left.

    ``module`` is the root of what FSDP2 has wrapped; what is summed and freed is what `set_requires_gradient_sync` and
    its like say. With ``every_parameter`` those without a gradient take part with zeros.
    """
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
    from torch.distributed.fsdp import fully_shard

    composable: Any = replicate if isinstance(module, ReplicateModule) else fully_shard
    root = composable.state(module)
    for state in root._state_ctx.all_states:
        for group in _parameter_groups(state):
            for parameter in group.fsdp_params:
                if every_parameter:
                    _fill_missing_gradient(parameter)
                _convert_fresh_gradient(parameter)
            group.post_backward()
    root._root_post_backward_final_callback()


def replicate_module(module: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    """Keep a module's weights whole on every rank as FSDP2 keeps shards: master weights, and a copy to compute with."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, mesh=mesh, mp_policy=policy)


def storage_info() -> type[Any]:
    """The class of what torch.distributed.checkpoint knows of a stored tensor: file, offset, length."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def _parameter_groups(state: Any) -> list[Any]:
    """The groups of one unit: torch 2.11 has at most one, later versions a list."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _fill_missing_gradient(parameter: Any) -> None:
    """Let a unit's flat gradient have every parameter each time.

    Of several microbatches' first parts, which give the gradients of norms and biases, the first second part takes all.
    """
    whole = parameter.unsharded_param
    if parameter.unsharded_accumulated_grad is None and whole.grad is None:
        whole.grad = torch.zeros_like(whole, dtype=getattr(whole, "grad_dtype", None))


def _convert_fresh_gradient(parameter: Any) -> None:
    """Let all of a unit's gradients have the type that they are summed in.

    FSDP2 has converted those of a split pass's first part, since it did not reduce them then. From 2.15 on autograd
    does so itself.
    """
    if hasattr(parameter, "to_accumulated_grad_if_needed") and parameter.unsharded_accumulated_grad is None:
        parameter.to_accumulated_grad_if_needed()
