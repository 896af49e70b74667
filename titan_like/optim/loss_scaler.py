"""Dynamic loss scaling for float16 (arXiv 1710.03740, section 3.2)."""

from __future__ import annotations

import torch


class LossScaler:
    """Keeps the factor that multiplies the loss so that small gradients do not underflow in float16.

    The factor halves on overflow and doubles after ``growth_interval`` steps without one. Its state stays on the
    device, so that no step has to wait for the outcome of the previous one.
    """

    def __init__(
        self, device: torch.device | str, scale: float = 2.0**16, growth_interval: int = 1000, good_steps: int = 0
    ) -> None:
        self.scale = torch.full((), scale, dtype=torch.float64, device=device)
        self.good_steps = torch.full((), good_steps, dtype=torch.int64, device=device)  # since the scale last changed
        self.growth_interval = growth_interval

    def update(self, overflowed: torch.Tensor) -> None:
        """Adjust the factor after a step. ``overflowed``, a bool scalar: the gradient norm was not finite."""
        good_steps = torch.where(overflowed, 0, self.good_steps + 1)
        grows = good_steps == self.growth_interval
        halved = (self.scale / 2).clamp(min=1.0)
        self.scale = torch.where(overflowed, halved, torch.where(grows, self.scale * 2, self.scale))
        self.good_steps = torch.where(grows, 0, good_steps)
