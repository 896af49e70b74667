"""Which steps are bad, and when there have been too many.

Whether a step is bad is decided on the device, from numbers that are equal on every rank. The host reads the outcome
later and counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from titan_like.config.errors import RunError
from titan_like.config.schema import Health

_NORMAL = 1.4826  # standard deviations in a median absolute deviation of normally distributed numbers
_LEAST_DEVIATION = 0.01  # of the median: losses that hardly differ are no reason to call the next one a spike


def median(values: torch.Tensor) -> torch.Tensor:
    """Median of those of ``values`` [n] that are not NaN, the mean of the middle two where their number is even."""
    known = ~values.isnan()
    count = known.sum()
    ordered = values.where(known, torch.inf).sort().values
    middle = torch.stack(((count - 1).clamp(min=0) // 2, count // 2)).clamp(max=len(values) - 1)
    return ordered.gather(0, middle).sum() / 2


def robust_z(value: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """How many standard deviations a scalar is above the median of others, estimated from their median deviation.

    ``others`` [n] may hold NaN, which does not count.
    """
    middle = median(others)
    deviation = _NORMAL * median((others - middle).abs())
    least = (_LEAST_DEVIATION * middle.abs()).clamp(min=1e-30)
    return (value - middle) / torch.maximum(deviation, least)


class LossWatch:
    """Tells spikes of the loss from its usual course, and counts steps without an update."""

    def __init__(
        self, section: Health, device: torch.device | str, recent: Sequence[float] = (), consecutive_skips: int = 0
    ) -> None:
        self.section = section
        self.consecutive_skips = consecutive_skips
        window = section.loss_spike_window
        known = list(recent)[-window:]
        # Losses of the last steps that were updates, oldest first; NaN at the start until there are enough of them.
        self._recent = torch.tensor([math.nan] * (window - len(known)) + known, dtype=torch.float64).to(device)

    @property
    def recent(self) -> list[float]:
        """Losses that the next one is compared with. Waits for the device."""
        return [loss for loss in self._recent.tolist() if not math.isnan(loss)]

    def is_spike(self, loss: torch.Tensor) -> torch.Tensor:
        """Whether a loss is `health.loss_spike_factor` robust deviations above the recent ones, a bool scalar.

        Nothing is until half a window of losses is known.
        """
        factor, window = self.section.loss_spike_factor, self.section.loss_spike_window
        if not factor:
            return torch.zeros((), dtype=torch.bool, device=loss.device)
        has_enough = 2 * (~self._recent.isnan()).sum() >= window
        return loss.isfinite() & has_enough & (robust_z(loss.double(), self._recent) > factor)

    def add(self, loss: torch.Tensor, skipped: torch.Tensor) -> None:
        """Remember a step's loss unless its update was skipped."""
        appended = torch.cat((self._recent[1:], loss.double().reshape(1)))
        self._recent = torch.where(skipped, self._recent, appended)

    def count(self, step: int, loss: float, skipped: bool) -> None:
        """Note on the host how a step ended.

        Raises:
            RunError: it is one too many without an update in a row.
        """
        self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
        most = self.section.max_consecutive_skips
        if self.consecutive_skips >= most:
            raise RunError(
                f"{most} steps in a row up to step {step} had no usable gradients (last loss {loss:.6g}) and "
                "health.max_consecutive_skips allows no more; lower optimizer.lr or look at the data"
            )
