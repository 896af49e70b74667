"""The global batch size of each step and the length of a run, as pure functions."""

from __future__ import annotations

from collections.abc import Iterator

from titan_like.config.schema import Training


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


def batch_sizes_to_check(training: Training) -> list[int]:
    """The first two batch sizes and the last. A number that divides these divides all of `rampup_batch_sizes`."""
    if training.batch_size_rampup is None:
        return [training.global_batch_size]
    start, increment, _ = training.batch_size_rampup
    return [size for size in (start, start + increment) if size < training.global_batch_size] + [
        training.global_batch_size
    ]


def _rampup(training: Training) -> Iterator[tuple[int, int]]:
    """Yield each batch size of the ramp-up, ascending, with the number of steps that have it.

    The batch grows to start + k · increment once ⌈k · samples / increments⌉ samples are consumed. A step that begins
    earlier still has the previous size, and may consume enough samples to skip a size.
    """
    if training.batch_size_rampup is None:
        return
    start, increment, ramp_samples = training.batch_size_rampup
    increments = (training.global_batch_size - start) // increment
    consumed = 0
    while increments and consumed < ramp_samples:
        number = consumed * increments // ramp_samples
        size = start + increment * number
        until = -(-(number + 1) * ramp_samples // increments)  # consumed samples at which the batch grows
        steps = -(-(until - consumed) // size)
        yield size, steps
        consumed += steps * size


def total_steps(training: Training) -> int:
    """Number of optimizer steps in the run: ``steps``, or as many full batches as ``samples`` or ``tokens`` allow."""
    if training.steps is not None:
        return training.steps
    left = training.samples if training.samples is not None else (training.tokens or 0) // training.seq_len
    done = 0
    for size, steps in _rampup(training):
        if steps * size > left:
            return done + left // size
        left -= steps * size
        done += steps
    return done + left // training.global_batch_size


def total_samples(training: Training) -> int:
    """Number of samples that the run consumes."""
    left, consumed = total_steps(training), 0
    for size, steps in _rampup(training):
        if steps >= left:
            return consumed + left * size
        left -= steps
        consumed += steps * size
    return consumed + left * training.global_batch_size
