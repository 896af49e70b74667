"""Dynamic loss scaling for float16 (arXiv 1710.03740)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScaler:
    """Scales the loss so that small gradients survive float16; halves on overflow, doubles after a quiet interval."""

    scale: float = 2.0**16
    growth_interval: int = 1000
    good_steps: int = 0

    def update(self, overflowed: bool) -> None:
        """Adjust after a step; ``overflowed`` means that its gradient norm was not finite."""
        if overflowed:
            self.scale = max(self.scale / 2, 1.0)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= 2
            self.good_steps = 0
