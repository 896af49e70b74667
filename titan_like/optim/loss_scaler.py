"""Dynamic loss scaling for float16 (arXiv 1710.03740)."""

from __future__ import annotations

import torch


class LossScaler:
    """Scales the loss so that small gradients survive float16; halves on overflow, doubles after a quiet interval.

    Its state stays on the device, so that no step waits to learn how the one before it ended.
    """

    def __init__(
        self, device: torch.device | str, scale: float = 2.0**16, growth_interval: int = 1000, good_steps: int = 0
    ) -> None:
        self.scale = torch.full((), scale, dtype=torch.float64, device=device)
        self.good_steps = torch.full((), good_steps, dtype=torch.int64, device=device)  # since the scale last changed
        self.growth_interval = growth_interval

    def update(self, overflowed: torch.Tensor) -> None:
        """Adjust after a step; ``overflowed``, a bool scalar, means that its gradient norm was not finite."""
        good_steps = torch.where(overflowed, 0, self.good_steps + 1)
        grows = good_steps == self.growth_interval
        halved = (self.scale / 2).clamp(min=1.0)
        self.scale = torch.where(overflowed, halved, torch.where(grows, self.scale * 2, self.scale))
        self.good_steps = torch.where(grows, 0, good_steps)
