"""Which random numbers a device draws."""

from __future__ import annotations

import torch


def generator_of(device: torch.device) -> torch.Generator:
    """The generator that operations on this device draw from unless they are given another."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index]
