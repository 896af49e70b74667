"""Access to each device's random generator."""

from __future__ import annotations

import torch


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator from which operations on this device draw."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index]
