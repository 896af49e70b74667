"""The global batch size of each step and the length of a run, as pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from titan_like.config.errors import ConfigError
from titan_like.config.schema import Training

_MOST_INCREMENTS = 10_000  # in a ramp-up, whose steps are counted one increment at a time


def check_rampup(training: Training) -> None:
    """Check that the ramp-up, if there is one, reaches the global batch size in whole increments.

    Raises:
        ConfigError: it does not.
    """
    rampup = training.batch_size_rampup
    if rampup is None:
        return
    if len(rampup) != 3 or min(rampup) <= 0:
        problem = "must be three positive integers [start, increment, samples]"
        raise ConfigError("training.batch_size_rampup", rampup, problem)
    start, increment, _ = rampup
    if start > training.global_batch_size or (training.global_batch_size - start) % increment:
        problem = f"start plus whole increments must reach global_batch_size ({training.global_batch_size})"
        raise ConfigError("training.batch_size_rampup", rampup, problem)
    increments = (training.global_batch_size - start) // increment
    if increments > _MOST_INCREMENTS:
        problem = f"{increments:,} increments are more than {_MOST_INCREMENTS:,}; use larger ones"
        raise ConfigError("training.batch_size_rampup", rampup, problem)


def check_length(training: Training) -> int:
    """Number of optimizer steps in the run, at least one.

    Raises:
        ConfigError: not exactly one length is set, or it is less than a global batch.
    """
    given = [key for key in ("steps", "samples", "tokens") if getattr(training, key) is not None]
    if len(given) != 1:
        shown = {key: getattr(training, key) for key in given} or None
        raise ConfigError("training.steps | samples | tokens", shown, "set exactly one of the three")
    steps = total_steps(training)
    if steps == 0:
        unit = rampup_batch_sizes(training)[0] * (training.seq_len if given[0] == "tokens" else 1)
        problem = f"less than one global batch; give at least {unit}"
        raise ConfigError(f"training.{given[0]}", getattr(training, given[0]), problem)
    return steps


def global_batch_size_at(training: Training, consumed_samples: int) -> int:
    """Number of samples in the step that starts after ``consumed_samples``.

    With a ramp-up [start, increment, samples], the batch grows by ``increment`` at equal intervals until it reaches
    ``global_batch_size``, as with Megatron-LM's ``--rampup-batch-size``.
    """
    if training.batch_size_rampup is None:
        return training.global_batch_size
    start, increment, ramp_samples = training.batch_size_rampup
    increments = (training.global_batch_size - start) // increment
    if increments == 0 or consumed_samples >= ramp_samples:
        return training.global_batch_size
    return start + increment * (consumed_samples * increments // ramp_samples)


def rampup_batch_sizes(training: Training) -> list[int]:
    """Every global batch size of the ramp-up, ascending."""
    if training.batch_size_rampup is None:
        return [training.global_batch_size]
    start, increment, _ = training.batch_size_rampup
    return [*range(start, training.global_batch_size, increment), training.global_batch_size]


def _rampup(training: Training, consumed: int) -> Iterator[tuple[int, int]]:
    """Yield each batch size that the ramp-up has after ``consumed`` samples, ascending, with its number of steps.

    The batch grows to start + k · increment once ⌈k · samples / increments⌉ samples are consumed. A step that begins
    earlier still has the previous size, and may consume enough samples to skip a size.
    """
    if training.batch_size_rampup is None:
        return
    start, increment, ramp_samples = training.batch_size_rampup
    increments = (training.global_batch_size - start) // increment
    while increments and consumed < ramp_samples:
        number = consumed * increments // ramp_samples
        size = start + increment * number
        until = -(-(number + 1) * ramp_samples // increments)  # consumed samples at which the batch grows
        steps = -(-(until - consumed) // size)
        yield size, steps
        consumed += steps * size


def total_steps(training: Training, step: int = 0, consumed: int = 0) -> int:
    """Number of optimizer steps in the whole run, which has taken ``step`` steps and ``consumed`` samples so far.

    It is ``steps``, or as many full batches more as ``samples`` or ``tokens`` allow, whatever batches came before.
    """
    if training.steps is not None:
        return training.steps
    total = training.samples if training.samples is not None else (training.tokens or 0) // training.seq_len
    left = max(0, total - consumed)
    for size, steps in _rampup(training, consumed):
        if steps * size > left:
            return step + left // size
        left -= steps * size
        step += steps
    return step + left // training.global_batch_size


def total_samples(training: Training, step: int = 0, consumed: int = 0) -> int:
    """Number of samples in the whole run, given as in `total_steps`."""
    left = max(0, total_steps(training, step, consumed) - step)
    for size, steps in _rampup(training, consumed):
        if steps >= left:
            return consumed + left * size
        left -= steps
        consumed += steps * size
    return consumed + left * training.global_batch_size
