"""Dequantisation of tensors in safetensors files, for any range of rows.

FP8: `NAME` in float8 and `NAME_scale_inv`, float32, one number for each block of rows and columns, or one for all.
MXFP4: `NAME_blocks` and `NAME_scales`, of which `NAME` is the transpose, as in transformers' GPT-OSS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from titan_like.models.hugging_face import Fields, RefusedError


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a safetensors file, as the file's header describes it."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # safetensors' name; of a quantised tensor the dtype of its export
    scales: FileTensor | None = None  # of a quantised tensor
    block: tuple[int, ...] = ()  # of FP8: its rows and columns that share a scale


# (name in a file, a slice for each dimension) → that part
Read = Callable[[FileTensor, tuple[slice, ...]], torch.Tensor]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4_BLOCK = 32  # numbers with one scale
_DTYPE = "BF16"  # in which such weights go out again
_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"


def check_quantization(fields: Fields) -> tuple[int, int] | None:
    """Refuse a `quantization_config` that cannot be read; returns the rows and columns of a block of FP8, if any."""
    table = fields.table("quantization_config")
    if table is None:
        return None
    table.must_be("quant_method", "fp8", "mxfp4")
    table.must_be("fmt", "e4m3", None)
    block = table.get("weight_block_size")
    if block is None:
        return None
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        table.refuse("weight_block_size", "which must be two positive whole numbers")
    return block[0], block[1]


def with_scales(tensors: dict[str, FileTensor], block: tuple[int, int] | None) -> dict[str, FileTensor]:
    """The dequantised tensors of the files, by name. Quantised ones refer to their scales."""
    dequantized = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(_BLOCKS)
        scaled = tensors.get(name.removesuffix(_SCALE)) if name.endswith(_SCALE) else None
        if scaled is not None and scaled.dtype == "F8_E4M3":
            continue  # read with the scaled tensor
        if name.endswith((".activation_scale", ".input_scale")):
            continue  # of inputs, which are not quantised here
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in tensors:
            continue
        if tensor.dtype == "F8_E4M3" and (scales := tensors.get(name + _SCALE)) is not None:
            shape = tuple(-(-size // step) for size, step in zip(tensor.shape, block or tensor.shape, strict=False))
            is_one = block is None and all(size == 1 for size in scales.shape)
            _require(is_one or scales.shape == shape, name, scales, shape if block else ())
            tensor = replace(tensor, dtype=_DTYPE, scales=scales, block=block or tensor.shape)
        elif name != stem and tensor.dtype == "U8" and (scales := tensors.get(stem + _SCALES)) is not None:
            _require(scales.shape == tensor.shape[:3] and scales.dtype == "U8", name, scales, tensor.shape[:3])
            _require(len(tensor.shape) == 4 and tensor.shape[3] == 16, name, tensor, (*tensor.shape[:3], 16))
            experts, rows, blocks, _ = tensor.shape
            shape = (experts, blocks * _MXFP4_BLOCK, rows)
            tensor, name = replace(tensor, dtype=_DTYPE, scales=scales, shape=shape), stem
        dequantized[name] = tensor
    return dequantized


def _require(condition: bool, name: str, tensor: FileTensor, shape: tuple[int, ...]) -> None:
    if not condition:
        reason = f"the tensor {tensor.name} has the shape {list(tensor.shape)} and the type {tensor.dtype}"
        raise RefusedError(f"{reason}, but {name} needs {list(shape)}")


def read_quantized(tensor: FileTensor, index: tuple[slice, ...], read: Read) -> torch.Tensor:
    """A slice of a quantised tensor: float32. Only what it needs is read."""
    assert tensor.scales is not None
    if tensor.block:  # FP8
        values, scales = read(tensor, index).float(), tensor.scales
        if not any(size > 1 for size in scales.shape):
            return values * read(scales, (slice(None),) * len(scales.shape)).float().reshape(())
        of_axes = zip(index, tensor.shape, tensor.block, strict=True)
        blocks = [torch.arange(*part.indices(size)) // step for part, size, step in of_axes]
        factors = read(scales, tuple(slice(int(numbers[0]), int(numbers[-1]) + 1) for numbers in blocks)).float()
        of_rows, of_columns = (numbers - numbers[0] for numbers in blocks)
        return values * factors[of_rows][:, of_columns]
    experts, columns, rows = index
    begin, end, _ = columns.indices(tensor.shape[1])
    groups = slice(begin // _MXFP4_BLOCK, -(-end // _MXFP4_BLOCK))
    packed = read(tensor, (experts, rows, groups, slice(None)))  # [experts, rows, groups, 16]
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(3).long()  # the low half of a byte comes first
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    exponents = read(tensor.scales, (experts, rows, groups)).int() - 127
    values = torch.ldexp(table[codes], exponents[..., None]).flatten(2)
    first = groups.start * _MXFP4_BLOCK
    return values[..., begin - first : end - first].transpose(1, 2)
