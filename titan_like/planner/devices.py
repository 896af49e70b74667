"""GPUs by name: peak rates, memory, links. The figures are in devices.toml; a user's own file may add to them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from titan_like.config.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Device:
    """One GPU. Rates are per second."""

    name: str
    memory_bytes: float
    memory_bandwidth: float  # bytes
    nvlink_bandwidth: float  # bytes, one direction
    multiprocessors: int
    tensor_element: int  # matrix sizes must be multiples of it for the tensor cores
    peak: dict[str, float]  # FLOP, by type

    def peak_flops(self, dtype: str) -> float:
        """Dense peak in FLOP/s.

        Raises:
            ConfigError: the device lacks the type.
        """
        if dtype not in self.peak:
            raise ConfigError("training.dtype", dtype, f"{self.name} has {', '.join(self.peak)}")
        return self.peak[dtype]


@cache
def builtin_devices() -> dict[str, Device]:
    """All of devices.toml; a name's pattern is tried in the file's order."""
    return {name: device_from(name, table) for name, table in _tables().items()}


@cache
def _tables() -> dict[str, dict[str, Any]]:
    text = resources.files("titan_like.planner").joinpath("devices.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def device_from(name: str, table: dict[str, Any]) -> Device:
    """A device from its table in TOML, where bandwidths are in GB/s, memory in GiB and peaks in TFLOP/s."""
    return Device(
        name,
        table["memory_gib"] * 2**30,
        table["memory_bandwidth"] * 1e9,
        table["nvlink"] * 1e9,
        table["multiprocessors"],
        table["tensor_element"],
        {dtype: rate * 1e12 for dtype, rate in table["peak"].items()},
    )


@cache
def find_device(name: str) -> Device:
    """The device of a name such as "A100-80GB" or "NVIDIA H100 80GB HBM3".

    Raises:
        ConfigError: no device of the table matches.
    """
    for known, table in _tables().items():
        if re.search(table["pattern"], name, re.IGNORECASE):
            return builtin_devices()[known]
    raise ConfigError("cluster.gpu", name, f"unknown to the planner; known are {', '.join(_tables())}")
