"""The private names of torch that this project depends on, in one place, checked against torch 2.11 to 2.15.

The whole test suite has run on 2.11, 2.13 and 2.15. Of 2.12 and 2.14 the sources were read.

| name | used for | versions |
|---|---|---|
| `distributed.tensor._utils.compute_local_shape_and_global_offset` | finding which elements a rank holds | all |
| `distributed.tensor.placement_types._StridedShard` | a rank's rows of every expert of a stack | all |
| `distributed.tensor._shards_wrapper.LocalShardsWrapper` | these rows in a checkpoint | all |
| `ops._c10d_functional` | collectives that can be compiled and recomputed | all |
| `ops.aten._scaled_mm` | float8 products that selective recomputation keeps | all |
| `distributed._coalescing_manager` | several collectives as one | all |
| `distributed.distributed_c10d._get_default_store` | the watchdog's heartbeats | all |
| `distributed._composable.replicate_with_fsdp` | ZeRO 0 in a lower precision than float32 | all |
| `FSDPState._fsdp_param_groups` and its groups' parameters | reducing gradients after a split backward pass | a list from 2.12 on; from 2.15 on autograd accumulates in the reduction's dtype |
| `FSDPParam._extensions_data`, `.sharded_param`, `._sharded_param_data` | gathering weights in float8 | all |
| `FSDPCommContext.reduce_scatter_states` | freeing the input of the last reduction | `reduce_scatter_state` in 2.11 |
| `FSDPParamGroup._fsdp_params_with_wider_grad_dtype` | the dtype of gradients until they are added up or reduced | from 2.15 on |
| `_dynamo`, `_dynamo.mark_dynamic` | importing it early, in the server that forks processes; graphs for any number of rows | all |
| `_dynamo.lookup_backend`, `_functorch.config` | compiling within a budget of activations | all |
| `distributed.distributed_c10d._resolve_process_group` | the group of an operator that can be compiled | all |
| `ops.aten._scaled_dot_product_flash_attention`, `…_for_cpu` and their backward passes | attention with the denominators of its softmax | all |
| `DeviceMesh._flatten` | one group of ranks over several dimensions of the mesh | all |
| `ParallelStyle._apply` | overridden by the styles of `parallel/tensor_base.py` | all |
| `FileSystemReader._slice_file`, `._get_metadata_path` | overridden and called by `checkpoint/reader.py` | all |
| `_C._current_graph_task_id` | telling a recomputation from a forward pass | all |
| `testing._internal.distributed.fake_pg` | running one process as if it were part of a large job | all |
| `DefaultSavePlanner._cached_plans_key` | plans of checkpoints that are made once for all saves of a run | all |
| `distributed.checkpoint.filesystem._StorageInfo` | finding a checkpoint's tensors in its files | all |
| `DTensor._local_tensor` | a process's part of any kind and on any device, without an operator | all |
| `Tensor._version` | finding weights that have changed | all |
| `_foreach_mul_`, `_foreach_norm`, `_foreach_copy_` | all gradients in one kernel | all |
| `_subclasses.fake_tensor.FakeTensorMode` | running the recipe without computing anything | all |
| `utils._python_dispatch.TorchDispatchMode`, `OpOverload._schema` | recording the operators of a run | all |
| `utils._pytree.tree_leaves` | the tensors in what a module returns | all |
| `ops.aten._scaled_dot_product_attention_math` | attention in elementary operators | all |
| `_scaled_grouped_mm`, `ops.aten._scaled_grouped_mm` | the same in float8, which selective recomputation keeps | all |
| `ops.aten._grouped_mm` | products of experts' rows with their matrices, which selective recomputation keeps | all |
| `_fused_adamw_` | an update without Python work for every parameter | all |
| `cuda.memory._record_memory_history`, `._dump_snapshot` | snapshots of a GPU's memory | all |

Functions import what they need when they are called: planning must not load what only training uses.
"""  # noqa: E501

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape_and_offset
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LocalShardsWrapper", "StridedShard", "TorchDispatchMode", "local_shape_and_offset", "tree_leaves"]

functional_collectives = torch.ops._c10d_functional

float8_product = torch.ops.aten._scaled_mm.default
grouped_product_operator = torch.ops.aten._grouped_mm.default
grouped_float8_operator = torch.ops.aten._scaled_grouped_mm.default
attention_by_elementary_operators = torch.ops.aten._scaled_dot_product_attention_math


# On lists of tensors: multiply all by a scalar tensor of their dtype; copy to tensors that may have another dtype;
# the Euclidean norm of each.
multiply_all_, copy_all_, norms_of = torch._foreach_mul_, torch._foreach_copy_, torch._foreach_norm

schema_of = attrgetter("_schema")  # of an operator: a `torch.FunctionSchema`

# A context manager that merges the group's collectives issued inside it into one. With ``async_ops``, call `wait` on
# the object that it yields.
coalesced = dist._coalescing_manager
# (mesh, name) → a mesh of one dimension over all ranks of the mesh. All processes of the job call it.
flattened = DeviceMesh._flatten
default_store: Any = dist.distributed_c10d._get_default_store  # through which the default process group was set up


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_local_tensor(tensor: DTensor, part: torch.Tensor) -> torch.Tensor:
    """A DTensor like ``tensor`` whose part here is ``part``, on whichever device that is."""
    whole = tensor.detach()
    whole._local_tensor = part  # type: ignore[attr-defined]
    return whole


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """How often each has been changed in place. Kernels of our own, and changes of a DTensor's part, do not count."""
    return [tensor._version for tensor in tensors]


def fake_tensor_mode() -> Any:
    """A mode in which tensors have shapes and no content."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def grouped_float8_product(
    a: tuple[torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor],
    offsets: torch.Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> torch.Tensor:
    """Products of e4m3 matrices, which have been multiplied by their scales. Of NVIDIA's GPUs, Hopper has the kernel.

    Args:
        a: [rows, in] and a scale for each row, [rows]; or [out, rows] and [groups · out].
        b: [groups, in, out] and a scale for each column, [groups, out]; or [rows, in] and [groups · in]. Its columns
            are contiguous.
        offsets: ends of the groups' rows, int32 [groups]. Multiples of 16 if ``a`` is [out, rows].
        dtype: of the result, bfloat16.
        fast: adds up in less than float32.

    Returns:
        [rows, out] or [groups, out, in].
    """
    scales = a[1].reciprocal(), b[1].reciprocal()
    return grouped_float8_operator(a[0], b[0], *scales, offsets, out_dtype=dtype, use_fast_accum=fast)


def fused_adamw_(
    tensors: tuple[list[torch.Tensor], ...],
    gradients: list[torch.Tensor],
    settings: dict[str, Any],
    found_inf: torch.Tensor | None,
) -> None:
    """One update of AdamW in place, unless the scalar ``found_inf`` is above 0.

    Args:
        tensors: weights, first moments, second moments and numbers of updates, this one included (scalars).
        gradients: of the same shapes as the weights.
        settings: lr, betas, eps and weight_decay, as torch.optim.AdamW has them in a parameter group.
    """
    weights, first_moments, second_moments, steps = tensors
    torch._fused_adamw_(
        weights, gradients, first_moments, second_moments, [], steps,
        lr=settings["lr"], beta1=settings["betas"][0], beta2=settings["betas"][1],
        weight_decay=settings["weight_decay"], eps=settings["eps"], amsgrad=False, maximize=False,
        grad_scale=None, found_inf=found_inf,
    )  # fmt: skip


def process_group(name: str) -> dist.ProcessGroup:
    """The process group with torch's name ``name``."""
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    return group


def flash_attention(
    q: torch.Tensor, keys: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the attention, the logarithm of the softmax's denominators [batch, heads, queries]).

    q is [batch, heads, queries, head_dim], keys and values [2, batch, kv_heads, keys, head_dim]. On GPUs in half types
    only.
    """
    aten, (k, v) = torch.ops.aten, _for_each_head(keys, q)
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)


def flash_attention_gradients(
    parts: Sequence[torch.Tensor], keys: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, keys and values.

    ``parts`` are the gradient of the output, q, the output and the denominators. The latter two may be results of
    attention to further keys too.
    """
    (gradient, q, output, denominator), kv_heads = parts, keys.shape[2]
    aten, (k, v) = torch.ops.aten, _for_each_head(keys, q)
    tensors = gradient, q, k, v, output, denominator.contiguous()
    if q.is_cuda:
        unused = torch.zeros((), dtype=torch.int64, device=q.device)  # seeds of dropout
        lengths = None, None, q.shape[2], k.shape[2]
        gradients = aten._scaled_dot_product_flash_attention_backward(
            *tensors, *lengths, 0.0, is_causal, unused, unused, scale=scale
        )
    else:
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal, scale=scale)
    of_q, *of_keys = gradients
    return of_q, *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in of_keys)


def _for_each_head(keys: torch.Tensor, q: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values, each repeated for the query heads that share it."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in keys]


def fake_store() -> dist.Store:
    """A store for the backend "fake". Importing its module registers that backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def save_planner(key: str) -> Any:
    """A planner of checkpoints, all of which share one plan as long as they have the same ``key`` and tensors.

    torch's own key is the name of the class, for all process groups and models of a process, and in torch 2.11 a plan
    that failed is taken for one that was made. The metadata that a planner returns may be changed.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Planner(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[Any]) -> tuple[list[Any], Any]:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata)  # the plan's own stays for later saves

    planner = Planner(enable_plan_caching=True)
    planner._cached_plans_key = key
    return planner


def is_in_backward_pass() -> bool:
    """Whether autograd is running a backward pass, so that a forward pass inside it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def import_compiler() -> None:
    """Import what `torch.compile`, and much else in torch, would import when it is first used."""
    import torch._dynamo  # noqa: F401


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Let graphs that are compiled for a tensor take any size of ``dim``, of at least 2."""
    torch._dynamo.mark_dynamic(tensor, dim)


@cache
def inductor_within(budget: float) -> Callable[..., Any]:
    """A backend of `torch.compile` whose backward passes recompute so much that ``budget`` of the activations stays.

    The partitioner reads the setting while it compiles, so it is set for that time. Caches of compiled code have it in
    their keys. One object for all layers, because the compiler makes a graph for each backend.
    """

    def compile_graph(*args: Any, **options: Any) -> Any:
        import torch._functorch.config as settings
        from torch._dynamo import lookup_backend

        changes: dict[str, Any] = {"activation_memory_budget": budget}
        if hasattr(settings, "unsafe_treat_script_objects_as_zero_size"):
            changes["unsafe_treat_script_objects_as_zero_size"] = True  # meshes and process groups hold no tensors
        with settings.patch(changes):
            return lookup_backend("inductor")(*args, **options)

    return compile_graph


def record_memory_history(enable: bool) -> None:
    """Start to record the memory that this process takes on its GPU, with the lines of Python that do, or stop it."""
    torch.cuda.memory._record_memory_history("all" if enable else None, stacks="python", max_entries=100_000)


def dump_memory_snapshot(path: Path) -> None:
    """Write the memory that this process holds on its GPU, and the recorded history, for pytorch.org/memory_viz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._dump_snapshot(str(path))


def storage_info() -> type[Any]:
    """The class in which torch.distributed.checkpoint records a stored tensor's file, offset and length."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo
