"""The learning rate as a pure function of a run's progress.

The schedule of a run whose length is in steps counts its steps. If the length is in samples, tokens or epochs, it
counts samples, as Megatron-LM's does, in batches of the `global_batch_size` with which the run began: so neither
another one nor a ramp-up changes where the run is in its schedule or what `warmup_steps` and `decay_steps` mean.
"""

from __future__ import annotations

import math

from titan_like.config.errors import require
from titan_like.config.schema import JobConfig, LRScheduler, Training
from titan_like.config.section import Section
from titan_like.data.loading.batch_size import total_samples, total_steps


class Schedule(Section):
    """The learning rate of a run as a function of its progress. It is saved in checkpoints."""

    shape: LRScheduler
    lr: float  # its peak
    matrix_lr: float | None  # for muon's matrices
    length: float  # in steps of the schedule
    batch_size: int | None  # samples in a step of the schedule; None: it counts the run's steps

    @classmethod
    def of(cls, config: JobConfig, step: int = 0, consumed: int = 0, batch_size: int | None = None) -> Schedule:
        """The schedule that the settings ask for; the numbers are as in `schedule_length`."""
        size = None if config.training.steps is not None else batch_size or config.training.global_batch_size
        length, rates = schedule_length(config.training, step, consumed, batch_size), config.optimizer
        return cls(shape=config.lr_scheduler, lr=rates.lr, matrix_lr=rates.matrix_lr, length=length, batch_size=size)

    def lr_at(self, step: int, samples: int) -> float:
        """Learning rate of the step with number ``step``, at whose end ``samples`` are consumed."""
        reached = step if self.batch_size is None else samples / self.batch_size
        return self.lr * lr_factor(self.shape, reached, self.length)


def schedule_length(training: Training, step: int = 0, consumed: int = 0, batch_size: int | None = None) -> float:
    """The schedule's step with which a run ends that has taken ``step`` steps and ``consumed`` samples so far.

    It began with ``batch_size``, by default the current one.
    """
    if training.steps is not None:
        return total_steps(training, step, consumed)
    return total_samples(training, step, consumed) / (batch_size or training.global_batch_size)


def check_decay(section: LRScheduler, total_steps: float) -> None:
    """Raise a `ConfigError` if the decay does not fit a schedule of ``total_steps``."""
    warmup = warmup_steps(section, total_steps)
    key, steps = "lr_scheduler.decay_steps", section.decay_steps
    reason = f"the decay ends before the warm-up of {warmup:.12g} steps; use a larger number"
    require(section.decay not in ("cosine", "linear") or (steps or total_steps) >= warmup, key, steps, reason)
    reason = f"the final decay is longer than the run of {total_steps:.12g} steps; use at most {int(total_steps)}"
    require(section.decay != "wsd" or (steps or 0) <= total_steps, key, steps, reason)


def lr_factor(section: LRScheduler, step: float, total_steps: float) -> float:
    """Learning rate at a step of the schedule, counted from 1, as a fraction of the peak.

    Warm-up rises linearly and reaches 1 at its last step. Then:

    - constant stays at 1.
    - cosine (arXiv 1608.03983) and linear fall to ``min_lr_ratio`` at ``decay_steps``.
    - inverse_sqrt falls as √(warmup/step) (arXiv 1706.03762, section 5.3), but not below ``min_lr_ratio``.
    - wsd stays at 1 and falls linearly over the last ``decay_steps`` steps (arXiv 2404.06395, section 4).
    """
    warmup = warmup_steps(section, total_steps)
    if step <= warmup:
        return step / warmup
    floor = section.min_lr_ratio
    if section.decay == "constant":
        return 1.0
    if section.decay == "inverse_sqrt":
        return max(floor, math.sqrt(min(1.0, max(warmup, 1) / step)))
    if section.decay == "wsd":
        length = wsd_decay_steps(section, total_steps)
        progress = (step - (total_steps - length)) / length
    else:
        end = section.decay_steps or total_steps
        progress = (step - warmup) / max(1, end - warmup)
    progress = min(max(progress, 0.0), 1.0)
    falling = 0.5 * (1 + math.cos(math.pi * progress)) if section.decay == "cosine" else 1 - progress
    return floor + (1 - floor) * falling


def warmup_steps(section: LRScheduler, total_steps: float) -> float:
    """Number of steps in the warm-up: as configured, but at most the run, without wsd's final decay."""
    decay = wsd_decay_steps(section, total_steps) if section.decay == "wsd" else 0
    return min(section.warmup_steps, max(0, total_steps - decay))


def describe_warmup(section: LRScheduler, total_steps: float) -> str | None:
    """A line for the log if the run is too short for the configured warm-up."""
    warmup = warmup_steps(section, total_steps)
    if warmup == section.warmup_steps:
        return None
    message = f"lr_scheduler.warmup_steps = {section.warmup_steps} is too long for this run"
    return f"{message}; the warm-up takes {warmup:.12g}"


def wsd_decay_steps(section: LRScheduler, total_steps: float) -> float:
    """Number of steps in wsd's final decay: as configured, or a tenth of the run."""
    return section.decay_steps or max(1, total_steps // 10)
