"""Which steps are bad, and when there have been too many. Pure, so that every rank decides alike."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

from titan_like.config.errors import RunError
from titan_like.config.schema import Health

_NORMAL = 1.4826  # standard deviations in a median absolute deviation of normally distributed numbers
_LEAST_DEVIATION = 0.01  # of the median: losses that hardly differ are no reason to call the next one a spike


def robust_z(value: float, others: Iterable[float]) -> float:
    """How many standard deviations a value is above the median of others, estimated from their median deviation."""
    others = list(others)
    middle = median(others)
    deviation = _NORMAL * median(abs(other - middle) for other in others)
    return (value - middle) / max(deviation, _LEAST_DEVIATION * abs(middle), 1e-30)


class LossWatch:
    """Tells spikes of the loss from its usual course, and counts steps without an update."""

    def __init__(self, section: Health, recent: Iterable[float] = (), consecutive_skips: int = 0) -> None:
        self.section = section
        self.recent = deque(recent, maxlen=section.loss_spike_window)  # losses of the last steps that were no spikes
        self.consecutive_skips = consecutive_skips

    def is_spike(self, loss: float) -> bool:
        """Whether a loss is `health.loss_spike_factor` robust deviations above the recent ones.

        Nothing is until half a window of losses is known.
        """
        factor = self.section.loss_spike_factor
        if not factor or not math.isfinite(loss) or 2 * len(self.recent) < self.section.loss_spike_window:
            return False
        return robust_z(loss, self.recent) > factor

    def add(self, step: int, loss: float, skipped: bool) -> None:
        """Note how a step ended.

        Raises:
            RunError: it is one too many without an update in a row.
        """
        if not skipped:
            self.recent.append(loss)
            self.consecutive_skips = 0
            return
        self.consecutive_skips += 1
        most = self.section.max_consecutive_skips
        if self.consecutive_skips >= most:
            raise RunError(
                f"{most} steps in a row up to step {step} had no usable gradients (last loss {loss:.6g}) and "
                "health.max_consecutive_skips allows no more; lower optimizer.lr or look at the data"
            )
