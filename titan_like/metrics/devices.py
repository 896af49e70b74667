"""Devices by name: peak rates, memory, links.

MFU, the planner and the dry run use the figures of devices.toml, which names their sources. A stack profile may define
its own device.
"""

import difflib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any

import tomli
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from titan_like.config.errors import ConfigError, all_of, field_errors, require

# Slices (MIG; vGPU such as "GRID V100D-8Q" or "NVIDIA A10-24Q") and laptop GPUs have fewer units or lower clocks than
# the device they are named after.
_PARTIAL_DEVICE = re.compile(r"\bMIG\b|\bGRID\b|-\d+[ABCQ]$|\bLaptop\b|\bMobile\b|with Max-Q", re.IGNORECASE)
_VENDORS = re.compile(r"NVIDIA|GeForce|AMD|Instinct|Laptop|Mobile|with Max-Q|GPU", re.IGNORECASE)
_Number = Annotated[float, Field(ge=1e-6, le=1e12)]


class _Table(BaseModel):
    """A device in a user's file: bandwidths in GB/s, memory in GiB, peaks in TFLOP/s by dtype."""

    model_config = ConfigDict(extra="forbid", strict=True)

    memory_gib: _Number
    memory_bandwidth: _Number
    nvlink: _Number
    multiprocessors: _Number
    tensor_element: _Number
    peak: dict[str, _Number] = Field(min_length=1)
    is_cpu: bool = False


@dataclass(frozen=True, eq=False)
class Device:
    """One GPU, or a CPU that a profile describes."""

    name: str
    memory_bytes: float
    memory_bandwidth: float  # bytes/s
    nvlink_bandwidth: float  # bytes/s in one direction
    multiprocessors: int
    tensor_element: int  # tensor cores need matrix sizes that are multiples of this
    peak: dict[str, float]  # dense FLOP/s by dtype
    is_cpu: bool = False  # the host computes, and PyTorch's CPU kernels decide which activations are saved

    def peak_flops(self, dtype: str) -> float:
        """Dense peak in FLOP/s. Raises a `ConfigError` if the device has no rate for this dtype."""
        require(dtype in self.peak, "training.dtype", dtype, f"{self.name} has {', '.join(self.peak)}")
        return self.peak[dtype]


@cache
def builtin_devices() -> dict[str, Device]:
    """Every device in devices.toml, in the file's order, in which patterns are tried."""
    return {name: device_from(name, table) for name, table in _tables().items()}


@cache
def _tables() -> dict[str, dict[str, Any]]:
    text = resources.files("titan_like.metrics").joinpath("devices.toml").read_text(encoding="utf-8")
    return tomli.loads(text)


_SCALES = {"memory_gib": 2**30, "memory_bandwidth": 1e9, "nvlink": 1e9, "multiprocessors": 1, "tensor_element": 1}


def device_from(name: str, table: dict[str, Any]) -> Device:
    """A device from its table in TOML, where bandwidths are in GB/s, memory in GiB and peaks in TFLOP/s."""
    values: list[Any] = [table[key] * scale for key, scale in _SCALES.items()]
    values += [{dtype: rate * 1e12 for dtype, rate in table["peak"].items()}, table.get("is_cpu", False)]
    return Device(name, *values)


def check_device_table(key: str, table: Any) -> None:
    """Refuse a device table of a user's file with a missing, unknown or wrong entry."""
    require(isinstance(table, dict), key, table, f"must be a table with {', '.join(_Table.model_fields)}")
    try:
        _Table.model_validate(table)
    except ValidationError as error:
        raise all_of(field_errors(error.errors(), f"{key}.".__add__, _Table)) from None


def device_to_table(device: Device) -> dict[str, Any]:
    """The inverse of `device_from`."""
    _, *values, peak, is_cpu = vars(device).values()
    scaled = zip(_SCALES.items(), values, strict=True)
    table = {key: value if scale == 1 else value / scale for (key, scale), value in scaled}
    return table | {"is_cpu": is_cpu, "peak": {dtype: rate / 1e12 for dtype, rate in peak.items()}}


@cache
def known_device(name: str) -> Device | None:
    """The device with a name such as "A100-80GB" or "NVIDIA H100 80GB HBM3"; None if it is not in the table."""
    if _PARTIAL_DEVICE.search(name):
        return None
    devices = builtin_devices()
    if name in devices:  # the name that profiles use
        return devices[name]
    patterns = ((label, table["pattern"]) for label, table in _tables().items())
    return next((devices[label] for label, pattern in patterns if re.search(pattern, name, re.IGNORECASE)), None)


def find_device(name: str) -> Device:
    """Like `known_device`. Raises a `ConfigError` for an unknown name, with the nearest known ones."""
    device = known_device(name)
    if device is None:
        product = re.sub(_VENDORS, "", name).strip().replace(" ", "-").upper()
        near = ", ".join(difflib.get_close_matches(product, _tables(), 3, 0.4)) or "none"
        of_part = "laptop, virtual and partitioned GPUs are slower than their namesakes and not listed; "
        raise ConfigError(
            "cluster.gpu",
            name,
            f"{of_part * bool(_PARTIAL_DEVICE.search(name))}no such GPU is known; the nearest are {near}; describe "
            "yours in [device_table] of a profile (docs/planner.md, Calibrate), or measure it with scripts/plan.py "
            f"microbenchmark, and name the profile; known are {', '.join(_tables())}",
        )
    return device
