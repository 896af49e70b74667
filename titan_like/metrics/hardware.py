"""Peak rates of GPUs, and this process's memory."""

from __future__ import annotations

import re
import resource
import sys
from dataclasses import dataclass

import torch

from titan_like.config.errors import ConfigError


@dataclass(frozen=True)
class Peak:
    """Dense peak of one device in TFLOP/s; None where the device lacks the type or no figure is published."""

    float16: float | None
    bfloat16: float | None
    float32: float | None


# Vendors' data sheets, without sparsity. The first pattern found in the device's name counts.
_PEAKS: list[tuple[str, Peak]] = [
    (r"\bV100\b.*PCI", Peak(112, None, 14)),
    (r"\bV100\b", Peak(125, None, 15.7)),
    (r"\bA[18]00\b", Peak(312, 312, 19.5)),
    (r"\bH[18]00\b.*PCI", Peak(756, 756, 51)),
    (r"\bH[12]00\b.*NVL", Peak(835, 835, 60)),
    (r"\b(H100|H800|H200|GH200)\b", Peak(989.4, 989.4, 67)),
    (r"\bB200\b", Peak(2250, 2250, None)),
    (r"\bGB[23]00\b", Peak(2500, 2500, 80)),
    (r"\bMI300X\b", Peak(1307.4, 1307.4, 163.4)),
]


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """Peak TFLOP/s of a device for "float16", "bfloat16" or "float32"; None where it is not known, as for "float64"."""
    if re.search(r"\bMIG\b", device_name):  # a slice of a device
        return None
    for pattern, peak in _PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return getattr(peak, dtype, None)
    return None


def check_gpu_name(name: str | None) -> None:
    """Refuse a `cluster.gpu` that no peak is known for.

    Raises:
        ConfigError: the name matches none of the table.
    """
    if name is not None and not any(re.search(pattern, name, re.IGNORECASE) for pattern, _ in _PEAKS):
        known = "V100, A100, H100, H200, B200, GB200, GB300, MI300X"
        raise ConfigError("cluster.gpu", name, f"no peak is known for it; known are {known}")


def device_name(device: torch.device) -> str:
    """Name to look the peak up by; the CPU has none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory so far: allocated on a GPU, resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
