"""Bytes of parameters, gradients and optimizer state that a rank really holds, by looking at the storages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Sizes of distinct storages by kind; a storage that two kinds share counts for the first."""
    kinds = {"parameters": _parameters(model), "gradients": _gradients(model), "optimizer": _optimizer(optimizer)}
    seen: set[int] = set()
    sizes = {}
    for kind, tensors in kinds.items():
        sizes[kind] = 0
        for tensor in tensors:
            storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
            if storage.data_ptr() not in seen and storage.nbytes():
                seen.add(storage.data_ptr())
                sizes[kind] += storage.nbytes()
    return sizes


def fsdp_groups(model: nn.Module) -> Iterator:
    states = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
    groups = (state._fsdp_param_group for state in dict.fromkeys(states))
    yield from (group for group in groups if group is not None)


def _parameters(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    for group in fsdp_groups(model):
        for fsdp_param in group.fsdp_params:
            yield fsdp_param._sharded_param_data
            yield from fsdp_param.all_gather_outputs
            if hasattr(fsdp_param, "_unsharded_param"):
                yield fsdp_param._unsharded_param


def _gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from (p.grad for p in model.parameters() if p.grad is not None)
    for group in fsdp_groups(model):
        for fsdp_param in group.fsdp_params:
            if fsdp_param.sharded_param.grad is not None:
                yield fsdp_param.sharded_param.grad
            if hasattr(fsdp_param, "_unsharded_param") and fsdp_param._unsharded_param.grad is not None:
                yield fsdp_param._unsharded_param.grad
            if fsdp_param.unsharded_accumulated_grad is not None:
                yield fsdp_param.unsharded_accumulated_grad


def _optimizer(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if value.numel() > 1)
