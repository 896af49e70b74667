"""The device of this process: name, peak rate, memory used."""

import resource
import sys

import torch

from titan_like.metrics.devices import known_device


def peak_tflops(gpu: str, dtype: str) -> float | None:
    """Dense peak of a GPU in TFLOP/s for "float16", "bfloat16" or "float32"; None if it is unknown."""
    device = known_device(gpu)
    return None if device is None or dtype not in device.peak else device.peak[dtype] / 1e12


def device_name(device: torch.device) -> str:
    """The GPU's name in devices.toml's patterns; "" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def memory_bytes(device: torch.device) -> int | None:
    """Memory of a GPU; None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated memory on a GPU, the resident set of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
