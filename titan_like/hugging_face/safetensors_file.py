"""Writing safetensors files tensor by tensor, with only one of them in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return prod(self.shape) * self.dtype.itemsize


def plan_shards(specs: list[TensorSpec], most_bytes: int) -> list[list[TensorSpec]]:
    """Divide tensors, in order, into files of at most ``most_bytes``; a larger tensor gets its own file."""
    shards: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not shards or spec.num_bytes > room:
            shards.append([])
            room = most_bytes
        shards[-1].append(spec)
        room -= spec.num_bytes
    return shards


def write_safetensors(path: Path, specs: list[TensorSpec], values: Iterator[torch.Tensor]) -> None:
    """Write a file and flush it to disk. ``values`` yields one tensor for each spec, in order.

    The format (github.com/huggingface/safetensors): the length of the header (8 bytes, little-endian), the header
    (JSON), then the tensors without gaps.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):  # widest types first, so every tensor is aligned
        offsets[spec.name] = end
        end += spec.num_bytes
        place = [offsets[spec.name], end]
        header[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            value = next(values)
            assert tuple(value.shape) == spec.shape and value.dtype == spec.dtype, spec.name
            file.seek(8 + len(text) + offsets[spec.name])
            file.write(value.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
