"""Initial weights as a function of (seed, parameter name), equal in every layout and on every device."""

import hashlib
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_like.torch_private import StridedShard, local_shape_and_offset


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator from which operations on this device draw."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index]


ADAPTER_NAMES = ("lora_a", "lora_b")  # endings of the names of LoRA's parameters

# Elements drawn from one generator. A rank draws only the blocks that overlap its shard.
BLOCK_ELEMENTS = 1 << 20


def _uniform(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(*shape, generator=generator).mul_(2).sub_(1)


def standard_rows(seed: int, name: str, shape: torch.Size, rows: range, block: int = BLOCK_ELEMENTS) -> torch.Tensor:
    """Some rows of a parameter of this shape, drawn from N(0, 1): float32 [rows, …] on the CPU.

    LoRA's A is drawn uniformly between -1 and 1. ``block`` is the number of elements that one generator draws.
    """
    draw = _uniform if name.endswith(ADAPTER_NAMES) else torch.randn
    columns = shape[1:].numel()
    rows_per_block = max(1, block // max(columns, 1))
    pieces = []
    for number in range(rows.start // rows_per_block, -(-rows.stop // rows_per_block)):
        first = number * rows_per_block
        digest = hashlib.sha256(f"{seed}/{name}/{number}".encode()).digest()
        block_seed = int.from_bytes(digest[:8], "little") >> 1  # torch's generators take seeds of 63 bits
        generator = torch.Generator().manual_seed(block_seed)
        drawn = draw(min(rows_per_block, shape[0] - first), *shape[1:], generator=generator)
        pieces.append(drawn[max(rows.start - first, 0) : rows.stop - first])
    return torch.cat(pieces) if pieces else torch.empty(0, *shape[1:])


@torch.no_grad()
def fill_normal(
    parameter: nn.Parameter,
    seed: int,
    name: str,
    std: float | torch.Tensor,
    block: int = BLOCK_ELEMENTS,
    function: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Write the initial value into a parameter, or into this rank's shard of it. ``std`` may be a tensor [rows].

    ``function`` is applied to each element.
    """
    for local, offset in local_parts(parameter):
        if local.numel() == 0:
            continue
        start, stop = offset[0], offset[0] + local.shape[0]
        value = standard_rows(seed, name, parameter.shape, range(start, stop), block)
        value *= std[start:stop, None] if isinstance(std, torch.Tensor) else std
        for dim in range(1, parameter.ndim):
            value = value.narrow(dim, offset[dim], local.shape[dim])
        local.copy_(value if function is None else function(value))


def local_part(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's shard of a parameter, [rows here, …], and its offset in the full one, or its first row's.

    Writing to the shard writes to the parameter.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach(), (0,) * parameter.ndim
    _, offset = local_shape_and_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return parameter.to_local().detach(), tuple(offset)


def local_parts(parameter: torch.Tensor) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """This rank's shard as consecutive parts, [rows, …], each with its offset in the full parameter.

    There is one, unless tensor ranks split the rows of every matrix of a stack. Of [E · out, in] a rank then holds
    out / ranks rows of each of some experts, or what ZeRO leaves it of all these rows.
    """
    if not isinstance(parameter, DTensor) or not isinstance(parameter.placements[-1], StridedShard):
        return [local_part(parameter)]
    mesh, coordinates = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinates is not None
    # Among the rows of this tensor rank alone, experts and ZeRO's shards are consecutive.
    *replicas, (ranks, rank) = zip(mesh.shape, coordinates, strict=True)
    rows = parameter.shape[0] // ranks
    start = width = 0
    for placement, (size, index) in zip(parameter.placements[-2::-1], replicas[::-1], strict=True):
        if not placement.is_replicate():
            rows = -(-rows // size)
            start += index * rows
            width = width or rows // parameter.placements[-1].split_factor
    shard = parameter.to_local().detach()
    parts, stop = [], start + len(shard)
    for expert in range(start // width, -(-stop // width)):
        first, last = max(start, expert * width), min(stop, (expert + 1) * width)
        offset = first + expert * width * (ranks - 1) + rank * width
        parts.append((shard[first - start : last - start], (offset, *[0] * (shard.ndim - 1))))
    return parts or [(shard, (parameter.shape[0], *[0] * (shard.ndim - 1)))]
