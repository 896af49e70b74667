"""GPUs by name: peak rates, memory, links.

The figures are in devices.toml, the one table that MFU, the planner and the dry run read. A stack profile may bring a
device of its own.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from titan_like.config.errors import ConfigError

# Slices (MIG; vGPU, as "GRID V100D-8Q" or "NVIDIA A10-24Q") and notebook variants: fewer units, lower clocks.
_NO_WHOLE_DEVICE = re.compile(r"\bMIG\b|\bGRID\b|-\d+[ABCQ]$|\bLaptop\b|\bMobile\b|with Max-Q", re.IGNORECASE)
_ENTRIES = ("memory_gib", "memory_bandwidth", "nvlink", "multiprocessors", "tensor_element")


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
    is_cpu: bool = False  # computes while the host waits, and keeps what PyTorch's CPU kernels keep

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
    text = resources.files("titan_like.metrics").joinpath("devices.toml").read_text(encoding="utf-8")
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
        table.get("is_cpu", False),
    )


def check_device_table(key: str, table: Any) -> None:
    """Refuse a device that a user's file describes, unless it says everything and in numbers above 0.

    Raises:
        ConfigError: the first entry that is missing, unknown or not such a number.
    """
    if not isinstance(table, dict):
        raise ConfigError(key, table, f"must be a table with {', '.join(_ENTRIES)} and peak")
    for name in (*_ENTRIES, "peak"):
        if name not in table:
            raise ConfigError(f"{key}.{name}", None, "a device must say it")
    for name, value in table.items():
        if name not in (*_ENTRIES, "peak", "is_cpu"):
            raise ConfigError(f"{key}.{name}", value, f"unknown; there are {', '.join(_ENTRIES)}, peak and is_cpu")
    if not isinstance(table.get("is_cpu", False), bool):
        raise ConfigError(f"{key}.is_cpu", table["is_cpu"], "must be true or false")
    if not isinstance(table["peak"], dict) or not table["peak"]:
        raise ConfigError(
            f"{key}.peak", table["peak"], "must be a table of TFLOP/s by type, such as { bfloat16 = 312 }"
        )
    numbers = {name: table[name] for name in _ENTRIES} | {f"peak.{name}": x for name, x in table["peak"].items()}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-6 <= value <= 1e12:
            raise ConfigError(f"{key}.{name}", value, "must be a number of at least 1e-06 and at most 1e+12")


def device_to_table(device: Device) -> dict[str, Any]:
    """The inverse of `device_from`."""
    return {
        "memory_gib": device.memory_bytes / 2**30,
        "memory_bandwidth": device.memory_bandwidth / 1e9,
        "nvlink": device.nvlink_bandwidth / 1e9,
        "multiprocessors": device.multiprocessors,
        "tensor_element": device.tensor_element,
        "is_cpu": device.is_cpu,
        "peak": {dtype: rate / 1e12 for dtype, rate in device.peak.items()},
    }


@cache
def known_device(name: str) -> Device | None:
    """The device of a name such as "A100-80GB" or "NVIDIA H100 80GB HBM3"; None where the table has no such product."""
    if _NO_WHOLE_DEVICE.search(name):
        return None
    devices = builtin_devices()
    if name in devices:  # as profiles name it
        return devices[name]
    patterns = ((known, table["pattern"]) for known, table in _tables().items())
    return next((devices[known] for known, pattern in patterns if re.search(pattern, name, re.IGNORECASE)), None)


def find_device(name: str) -> Device:
    """Like `known_device`, for a name that the user gives.

    Raises:
        ConfigError: no device of the table matches.
    """
    device = known_device(name)
    if device is None:
        raise ConfigError("cluster.gpu", name, f"no such GPU is known; known are {', '.join(_tables())}")
    return device
