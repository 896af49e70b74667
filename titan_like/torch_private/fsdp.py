"""What this project needs of FSDP2's private names, which the table of `titan_like.torch_private` lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from inspect import getsource
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class HeldLonger(NamedTuple):
    """What FSDP2 holds longer than it needs it, depending on torch's version."""

    gather_buffer: bool  # in a forward pass: until the next unit's weights have been copied out of theirs
    last_gradient: bool  # a unit's: until the result of its reduction is allocated
    quotient: bool  # with one shard: gradients divided by a factor of 1, next to them and the result
    # Gradients next to their sums over microbatches, to which later versions let autograd add them in place. Of a
    # split backward pass: a unit's gradients in the reduction's dtype, which later versions convert on the way.
    fresh_gradients: bool


@cache
def held_longer() -> HeldLonger:
    """What this version holds longer: later ones have functions, and a comparison, that release it sooner."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

    return HeldLonger(
        gather_buffer=not hasattr(FSDPCommContext, "release_all_gather_state_for_comm_reuse"),
        last_gradient=not hasattr(_fsdp_collectives, "_default_reduce_scatter_input_fn"),
        quotient="gradient_divide_factor != 1" not in getsource(_fsdp_collectives.foreach_reduce),
        fresh_gradients=hasattr(FSDPParam, "to_accumulated_grad_if_needed"),
    )


def reduce_fsdp_gradients(module: nn.Module, every_parameter: bool) -> None:
    """Run FSDP2's end of a backward pass by hand: reduce the gradients that earlier passes have accumulated.

    ``module`` is FSDP2's root module. Its flags (`set_requires_gradient_sync` and the like) say what is reduced and
    freed. With ``every_parameter``, parameters without a gradient contribute zeros.
    """
    root = fsdp_state(module)
    for state in dict.fromkeys(root._state_ctx.all_states):  # torch 2.11 lists a unit once for each of its modules
        for group in _parameter_groups(state):
            for parameter in group.fsdp_params:
                if every_parameter:
                    _fill_missing_gradient(parameter)
                _convert_fresh_gradient(parameter)
            group.post_backward()
    root._root_post_backward_final_callback()


def release_reduced(module: nn.Module) -> None:
    """Free the input of FSDP2's last reduction, once that has ended, which FSDP2 would keep until the next one.

    ``module`` is FSDP2's root module.
    """
    state = fsdp_state(module)
    context = state._comm_ctx
    is_list = hasattr(context, "reduce_scatter_states")
    kept = context.reduce_scatter_states if is_list else [context.reduce_scatter_state]
    for last in filter(None, kept):
        if last.event is not None:
            state._device_handle.current_stream().wait_event(last.event)
    if is_list:
        kept.clear()
    else:
        context.reduce_scatter_state = None


def keep_gradient_dtypes(module: nn.Module) -> None:
    """Leave gradients in the dtype in which a backward pass computes them, until FSDP2 adds them up or reduces them.

    From torch 2.15 on, FSDP2 does so only in passes that reduce or that add to earlier gradients. In the others,
    autograd would convert every gradient first. A table that is used twice would take two gradients in the reduction's
    dtype and their sum at once, and that sum would be rounded in some microbatches and not in others.

    Call it before every backward pass: FSDP2 makes its list in the first forward pass. ``module`` is its root module.
    """
    for state in fsdp_state(module)._state_ctx.all_states:
        for group in _parameter_groups(state):
            for parameter in getattr(group, "_fsdp_params_with_wider_grad_dtype", ()):
                if hasattr(parameter, "_unsharded_param"):  # gathered before
                    parameter.unsharded_param.grad_dtype = None


def fsdp_state(module: nn.Module) -> Any:
    """What FSDP2 keeps for the unit to which it has wrapped a module; the modules of a unit share it."""
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
    from torch.distributed.fsdp import fully_shard

    composable: Any = replicate if isinstance(module, ReplicateModule) else fully_shard
    return composable.state(module)


def replicate_modules(
    unit: list[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy, ignored: set[nn.Parameter]
) -> None:
    """Keep a unit's full weights on every rank, as FSDP2 does for shards: master weights and a compute-dtype copy."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(unit, mesh=mesh, mp_policy=policy, ignored_params=ignored)


def convert_gathers(
    units: Iterable[Any],
    modules: Sequence[nn.Module],
    convert: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    restore: Callable[..., torch.Tensor],
) -> list[Callable[[], torch.Tensor]]:
    """Let FSDP2 all-gather the weights of some modules in another form.

    FSDP2 offers this for tensor subclasses that have its two hooks. Here the hooks are attributes of the plain shard,
    which optimizers, checkpoints and the initialisation then still see as any other.

    Args:
        units: one module of each unit of FSDP2; the parameters are allocated.
        modules: those whose ``weight`` is gathered in another form.
        convert: (index, shard) → (what is gathered, of the shard's shape; data that belongs to it on every rank). The
            shard is filled up with zeros, so that all ranks have the same shape.
        restore: (what was gathered, the data that belongs to it) → the whole parameter. If it gets the result of an
            earlier gather as third argument, it updates that.

    Returns:
        For each weight a function that returns this rank's shard. ``convert`` has the same indices as this list.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import ExtensionsData
    from torch.distributed.tensor import DTensor

    groups = [group for unit in units for group in _parameter_groups(fsdp_state(unit))]
    parameters = [p for group in groups for p in group.fsdp_params if p._module_info.param_name == "weight"]
    parameters = [p for p in parameters if p._module_info.module in modules]

    def whole_shard(parameter: Any) -> torch.Tensor:
        return parameter._sharded_param_data.view(parameter.padded_sharded_param_size)

    def before(index: int, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any) -> tuple[Any, Any]:
        data, metadata = convert(index, whole_shard(parameters[index]))
        return (data,), metadata

    def after(outputs: tuple[torch.Tensor], metadata: Any, dtype: Any, *, out: torch.Tensor | None = None) -> Any:
        if out is None:
            return restore(outputs[0], metadata), outputs
        restore(outputs[0], metadata, out._local_tensor if isinstance(out, DTensor) else out)
        return None

    for index, parameter in enumerate(parameters):
        shard = parameter.sharded_param._local_tensor
        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = partial(before, index), after
        parameter._extensions_data = ExtensionsData()
    return [partial(whole_shard, parameter) for parameter in parameters]


def _parameter_groups(state: Any) -> list[Any]:
    """The parameter groups of one FSDP unit: at most one in torch 2.11, a list in later versions."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _fill_missing_gradient(parameter: Any) -> None:
    """Use zeros for a missing gradient, so that a unit's flat gradient covers the same parameters in every reduction.

    The first part of a split backward pass computes the gradients of norms and biases. Several first parts may run
    before a second part. The reduction after that second part takes all of them and leaves none for the next one.
    """
    whole = parameter.unsharded_param
    if whole.requires_grad and parameter.unsharded_accumulated_grad is None and whole.grad is None:
        whole.grad = torch.zeros_like(whole, dtype=getattr(whole, "grad_dtype", None))


def _convert_fresh_gradient(parameter: Any) -> None:
    """Convert a gradient to the dtype in which its unit's gradients are summed.

    FSDP2 has already converted the gradients of a split pass's first part, because it did not reduce them then. From
    torch 2.15 on, autograd converts all of them itself.
    """
    if hasattr(parameter, "to_accumulated_grad_if_needed") and parameter.unsharded_accumulated_grad is None:
        parameter.to_accumulated_grad_if_needed()
