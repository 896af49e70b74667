"""Detection of bad steps, and the decision when there have been too many.

The device decides whether a step is bad, from numbers that are equal on every rank. The host reads the outcome later
and counts.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from titan_like.config.errors import RunError
from titan_like.config.monitoring import Health

_NORMAL = 1.4826  # standard deviation over median absolute deviation (MAD) of a normal distribution
_LAST_STEPS, _LEAST_BAD = 20, 3  # by which a run has diverged; float16 may skip the first one or two
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
    """Detects spikes of the loss, and judges the run by its last steps.

    The run has diverged while more than half of its last 20 steps are bad: their update was skipped, or their loss is
    at least 1 nat and a third of what the run had learned above the lowest median of 20 losses, or above the first loss
    if that is lower. What it had learned counts from ``guess``, the loss of uniform guessing, or as long as the loss is
    above that, from the first loss. So neither fine-tuning nor harder data is a divergence.
    """

    def __init__(
        self,
        section: Health,
        device: torch.device | str,
        recent: Sequence[float] = (),
        consecutive_skips: int = 0,
        guess: float = math.inf,
        levels: Mapping[str, float] | None = None,
    ) -> None:
        """A run that resumes passes these values from its checkpoint."""
        self.section = section
        self.consecutive_skips = consecutive_skips
        # "since", the step from which the run has diverged, or 0, and the "first" and "lowest" loss as far as known.
        self.guess, self.levels = guess, {"since": 0.0, **(levels or {})}
        self._last: deque[tuple[int, float, bool]] = deque(maxlen=_LAST_STEPS)  # step, loss if there was an update, bad
        self._began: int | None = None  # the first step of this process, which may train a diverged run for a while
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
        """Count, on the host, skipped updates and bad steps; a `RunError` if [health] allows no more."""
        self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
        most = self.section.max_consecutive_skips
        if self.consecutive_skips >= most:
            cause = f"last loss {loss:.6g}" if has_labels else f"the batch of step {step} has no labels"
            hint = "lower optimizer.lr or look at the data" if has_labels else "look at the data"
            raise RunError(
                f"{most} steps in a row up to step {step} had no usable gradients ({cause}) and "
                f"health.max_consecutive_skips allows no more; {hint}"
            )
        if has_labels:
            self._judge(step, math.nan if skipped else loss)
            self._began = step if self._began is None else self._began
            began, most = max(self.levels["since"], self._began), self.section.max_diverged_steps
            if self.levels["since"] and self._last[-1][-1] and 0 < most <= step - began:
                raise RunError(f"{self.described()}; health.max_diverged_steps = {most} allows no more")

    def _judge(self, step: int, loss: float) -> None:
        """Add a step, whose ``loss`` is NaN if there was no update."""
        levels, is_finite = self.levels, math.isfinite(loss)
        if is_finite:
            levels.setdefault("first", loss)
        first = levels.get("first", self.guess)
        lowest = levels.get("lowest", first)
        start = self.guess if lowest < self.guess else first
        self._last.append((step, loss, not is_finite or loss > lowest + max(1.0, (start - lowest) / 3)))
        if len(self._last) == _LAST_STEPS and all(math.isfinite(loss) for _, loss, _ in self._last):
            levels["lowest"] = min(lowest, statistics.median(loss for _, loss, _ in self._last))
        bad = [step for step, _, is_bad in self._last if is_bad]
        if 2 * len(bad) <= len(self._last):
            levels["since"] = 0.0
        elif len(bad) >= _LEAST_BAD and not levels["since"]:
            levels["since"] = bad[0]

    def described(self) -> str | None:
        """One sentence with figures if the run has diverged, else None."""
        if not self.levels["since"]:
            return None
        losses = [loss for _, loss, _ in self._last if not math.isnan(loss)]
        known = {"at first": self.levels.get("first"), "at best": self.levels.get("lowest"), "by guessing": self.guess}
        numbers = ", ".join(f"{loss:.6g} {when}" for when, loss in known.items() if loss is not None)
        parts = [f"the last loss is {losses[-1]:.6g}"] if losses else []
        if skips := len(self._last) - len(losses):
            parts.append(f"{skips} of the last {len(self._last)} updates were skipped")
        hint = "lower optimizer.lr or look at the data, and start again or from an earlier checkpoint"
        return f"the run has diverged since step {self.levels['since']:.0f}: {' and '.join(parts)} ({numbers}); {hint}"
