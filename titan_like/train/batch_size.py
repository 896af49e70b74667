"""How large each step's global batch is, and how many steps a run has. Pure functions of consumed samples."""

from __future__ import annotations

from titan_like.config.schema import Training


def global_batch_size_at(training: Training, consumed_samples: int) -> int:
    """Samples in the step that starts after ``consumed_samples``.

    With a ramp-up [start, increment, samples] the batch grows by ``increment`` at equal intervals until
    ``global_batch_size`` (Megatron-LM's ``--rampup-batch-size``).
    """
    if training.batch_size_rampup is None:
        return training.global_batch_size
    start, increment, ramp_samples = training.batch_size_rampup
    increments = (training.global_batch_size - start) // increment
    if increments == 0 or consumed_samples >= ramp_samples:
        return training.global_batch_size
    return start + increment * (consumed_samples * increments // ramp_samples)


def rampup_batch_sizes(training: Training) -> list[int]:
    """Every global batch size that the run uses, ascending."""
    if training.batch_size_rampup is None:
        return [training.global_batch_size]
    start, increment, _ = training.batch_size_rampup
    return [*range(start, training.global_batch_size, increment), training.global_batch_size]


def total_steps(training: Training) -> int:
    """Optimizer steps of the run: as many whole batches as ``samples`` or ``tokens`` allow."""
    if training.steps is not None:
        return training.steps
    samples = training.samples if training.samples is not None else (training.tokens or 0) // training.seq_len
    steps = consumed = 0
    ramp_samples = training.batch_size_rampup[2] if training.batch_size_rampup else 0
    while consumed < ramp_samples:
        batch = global_batch_size_at(training, consumed)
        if consumed + batch > samples:
            return steps
        consumed += batch
        steps += 1
    return steps + (samples - consumed) // training.global_batch_size


def total_samples(training: Training) -> int:
    """Samples that the run's steps train on."""
    steps, consumed = total_steps(training), 0
    ramp_samples = training.batch_size_rampup[2] if training.batch_size_rampup else 0
    while steps and consumed < ramp_samples:
        consumed += global_batch_size_at(training, consumed)
        steps -= 1
    return consumed + steps * training.global_batch_size
