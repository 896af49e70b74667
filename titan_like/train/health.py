"""Detection of bad steps, and the decision when there have been too many.

The device decides whether a step is bad, from numbers that are equal on every rank. The host reads the outcome later
and counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from titan_like.config.errors import RunError
from titan_like.config.monitoring import Health

_NORMAL = 1.4826  # standard deviation over median absolute deviation (MAD) of a normal distribution
_LEAST_DEVIATION = 0.01  # relative to the median, so that after nearly equal losses a small rise is not a spike


def median(values: torch.Tensor) -> torch.Tensor:
    """Median of the ``values``, [n], that are not NaN: a scalar, the mean of the middle two if their number is even."""
    return (values.nanmedian() - (-values).nanmedian()) / 2  # torch's is the lower of the middle two


def robust_z(value: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
    """Robust z-score of the scalar ``value``: its distance from the median of ``history`` in standard deviations.

    The standard deviation is estimated from the median absolute deviation. NaN in ``history``, [n], is ignored.
    """
    middle = median(history)
    deviation = _NORMAL * median((history - middle).abs())
    least = (_LEAST_DEVIATION * middle.abs()).clamp(min=1e-30)
    return (value - middle) / torch.maximum(deviation, least)


class LossWatch:
    """Detects spikes of the loss, and counts consecutive steps without an update."""

    def __init__(
        self, section: Health, device: torch.device | str, recent: Sequence[float] = (), consecutive_skips: int = 0
    ) -> None:
        self.section = section
        self.consecutive_skips = consecutive_skips
        window = section.loss_spike_window
        known = list(recent)[-window:]
        # Losses of the last steps with an update, oldest first, padded with NaN at the start.
        self._recent = torch.tensor([math.nan] * (window - len(known)) + known, dtype=torch.float64).to(device)

    @property
    def recent(self) -> list[float]:
        """The losses with which the next one is compared. Waits for the device."""
        return [loss for loss in self._recent.tolist() if not math.isnan(loss)]

    def is_spike(self, loss: torch.Tensor) -> torch.Tensor:
        """Bool scalar: whether a loss is more than `health.loss_spike_factor` robust deviations above the recent ones.

        No loss is a spike until half a window of losses is known.
        """
        factor, window = self.section.loss_spike_factor, self.section.loss_spike_window
        if not factor:
            return torch.zeros((), dtype=torch.bool, device=loss.device)
        has_enough = 2 * (~self._recent.isnan()).sum() >= window
        return loss.isfinite() & has_enough & (robust_z(loss.double(), self._recent) > factor)

    def add(self, loss: torch.Tensor, skipped: torch.Tensor) -> None:
        """Remember a step's loss, unless its update was skipped. Both are scalars on the device."""
        appended = torch.cat((self._recent[1:], loss.double().reshape(1)))
        self._recent = torch.where(skipped, self._recent, appended)

    def count(self, step: int, loss: float, skipped: bool, has_labels: bool = True) -> None:
        """Count, on the host, consecutive steps without an update.

        Raises:
            RunError: there have been `health.max_consecutive_skips`.
        """
        self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
        most = self.section.max_consecutive_skips
        if self.consecutive_skips >= most:
            cause = f"last loss {loss:.6g}" if has_labels else f"the batch of step {step} has no labels"
            cure = "lower optimizer.lr or look at the data" if has_labels else "look at the data"
            raise RunError(
                f"{most} steps in a row up to step {step} had no usable gradients ({cause}) and "
                f"health.max_consecutive_skips allows no more; {cure}"
            )
