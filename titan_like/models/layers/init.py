"""Initial weights as a function of (seed, parameter name), equal in every layout and on every device."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.torch_private import local_shape_and_offset


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator from which operations on this device draw."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index]


# Elements drawn from one generator. A rank draws only the blocks that overlap its shard.
BLOCK_ELEMENTS = 1 << 20


def normal_rows(
    seed: int, name: str, shape: torch.Size, std: float, start: int, stop: int, block: int = BLOCK_ELEMENTS
) -> torch.Tensor:
    """Rows [start, stop) of a parameter's initial value, drawn from N(0, std²): float32 [rows, …] on the CPU."""
    columns = shape[1:].numel()
    rows_per_block = max(1, block // max(columns, 1))
    pieces = []
    for number in range(start // rows_per_block, -(-stop // rows_per_block)):
        first = number * rows_per_block
        digest = hashlib.sha256(f"{seed}/{name}/{number}".encode()).digest()
        own_seed = int.from_bytes(digest[:8], "little") >> 1  # torch's generators take seeds of 63 bits
        generator = torch.Generator().manual_seed(own_seed)
        rows = torch.randn(min(rows_per_block, shape[0] - first), *shape[1:], generator=generator)
        pieces.append(rows[max(start - first, 0) : stop - first])
    return torch.cat(pieces).mul_(std) if pieces else torch.empty(0, *shape[1:])


@torch.no_grad()
def fill_normal(
    parameter: nn.Parameter, seed: int, name: str, std: float | torch.Tensor, block: int = BLOCK_ELEMENTS
) -> None:
    """Write the initial value into a parameter, or into this rank's shard of it. ``std`` may be a tensor [rows]."""
    local, offset = local_part(parameter)
    if local.numel() == 0:
        return
    start, stop = offset[0], offset[0] + local.shape[0]
    if isinstance(std, torch.Tensor):
        value = normal_rows(seed, name, parameter.shape, 1.0, start, stop, block) * std[start:stop, None]
    else:
        value = normal_rows(seed, name, parameter.shape, std, start, stop, block)
    for dim in range(1, parameter.ndim):
        value = value.narrow(dim, offset[dim], local.shape[dim])
    local.copy_(value)


def local_part(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's shard of a parameter, [rows here, …], and its offset in the full one.

    Writing to the shard writes to the parameter.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach(), (0,) * parameter.ndim
    _, offset = local_shape_and_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local().detach(), tuple(offset)
