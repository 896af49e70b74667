"""The tensors of a run by their names in a checkpoint."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from titan_like.optim.fused_adamw import FusedAdamW
from titan_like.optim.shards import ShardedOptimizer
from titan_like.parallel.model import ParallelModel


def model_tensors(model: ParallelModel | nn.Module) -> dict[str, torch.Tensor]:
    """Weights by name; a sharded weight is a DTensor, which knows its place in the full tensor."""
    return {f"model.{name}": parameter.detach() for name, parameter in _by_name(model).items()}


def optimizer_tensors(model: ParallelModel | nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Optimizer state by the name of its parameter."""
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in _by_name(model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def rng_tensors() -> dict[str, torch.Tensor]:
    """State of this rank's random generators."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    states = {f"rng.cpu.rank{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.cuda.rank{rank}"] = torch.cuda.get_rng_state()
    return states


def restore_rng(tensors: dict[str, torch.Tensor]) -> None:
    """Restore this rank's random generators from the states in ``tensors``."""
    for name, state in tensors.items():
        if name.startswith("rng.cpu."):
            torch.set_rng_state(state)
        elif name.startswith("rng.cuda."):
            torch.cuda.set_rng_state(state)


def _by_name(model: ParallelModel | nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name; only the first copy of a tied table."""
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        parameters.setdefault(name, parameter)
    return parameters


def forget_state(optimizer: torch.optim.Optimizer) -> None:
    """Free an optimizer's state."""
    if isinstance(optimizer, FusedAdamW):
        optimizer.forget_state()
    else:
        optimizer.state.clear()


def materialise_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that the first step would create, with a step of learning rate 0 that changes no weight."""
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.init_state()  # without the collectives of a step
        return
    learning_rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, lr in zip(optimizer.param_groups, learning_rates, strict=True):
        group["lr"] = lr
