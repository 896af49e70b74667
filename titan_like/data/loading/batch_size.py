"""The global batch size of each step and the length of a run, as pure functions."""

from collections.abc import Iterator

from titan_like.config.errors import require
from titan_like.config.schema import Training

NO_EPOCHS = "the length of a stream is not known; set training.steps, training.samples or training.tokens instead"


def check_rampup(training: Training) -> None:
    """Raise a `ConfigError` unless the ramp-up, if there is one, ends at the global batch size in whole increments."""
    key = "training.batch_size_rampup"
    rampup = training.batch_size_rampup
    size = training.global_batch_size
    if rampup is None:
        return
    is_triple = len(rampup) == 3 and min(rampup) > 0
    require(is_triple, key, rampup, "must be three positive integers [start, increment, samples]")
    increments, remainder = divmod(size - rampup[0], rampup[1])
    fits = increments >= 0 and remainder == 0
    require(fits, key, rampup, f"start plus whole increments must end at global_batch_size ({size})")


def check_length(training: Training) -> None:
    """Raise a `ConfigError` unless exactly one length is set, of at least a global batch."""
    keys = ("steps", "samples", "tokens", "epochs")
    lengths = {key: x for key in keys if (x := getattr(training, key)) is not None}
    require(len(lengths) == 1, f"training.{' | '.join(keys)}", lengths or None, "set exactly one of the four")
    steps, (key, value) = total_steps(training), next(iter(lengths.items()))
    unit = rampup_batch_sizes(training)[0] * (training.seq_len if key == "tokens" else 1)
    require(steps > 0, f"training.{key}", value, f"less than one global batch; give at least {unit}")


def in_samples(training: Training, epoch: int) -> Training:
    """Replace ``epochs`` by ``samples``, at least one, given the samples of an ``epoch`` (0: unknown).

    As in Hugging Face's Trainer, the next epoch's first samples fill up the last batch.
    """
    if training.epochs is None or not epoch:
        return training
    return training.model_copy(update={"samples": max(1, round(training.epochs * epoch))})


def global_batch_size_at(training: Training, consumed_samples: int) -> int:
    """Number of samples in the step that starts after ``consumed_samples``.

    With a ramp-up [start, increment, samples], the batch grows by ``increment`` at equal intervals until it reaches
    ``global_batch_size``, as with Megatron-LM's ``--rampup-batch-size``.
    """
    return next(_rampup(training, consumed_samples))[0]


def rampup_batch_sizes(training: Training) -> list[int]:
    """Every global batch size of the ramp-up, ascending."""
    start, increment, _ = training.batch_size_rampup or (training.global_batch_size, 1, 0)
    return [*range(start, training.global_batch_size, increment), training.global_batch_size]


def _rampup(training: Training, consumed: int) -> Iterator[tuple[int, int | None]]:
    """Yield each batch size after ``consumed`` samples, ascending, with its number of steps; None is without end.

    The batch grows to start + k · increment once ⌈k · samples / increments⌉ samples are consumed. A step that begins
    earlier still has the previous size, and may consume enough samples to skip a size.
    """
    start, increment, ramp_samples = training.batch_size_rampup or (training.global_batch_size, 1, 0)
    increments = (training.global_batch_size - start) // increment
    while increments and consumed < ramp_samples:
        number = consumed * increments // ramp_samples
        size = start + increment * number
        until = -(-(number + 1) * ramp_samples // increments)  # consumed samples at which the batch grows
        steps = -(-(until - consumed) // size)
        yield size, steps
        consumed += steps * size
    yield training.global_batch_size, None


def _walk(training: Training, consumed: int, steps: int | None, samples: int | None) -> tuple[int, int]:
    """(steps, samples) after ``consumed``: ``steps``, or the batches that ``samples`` fill (with epochs: begin)."""
    total_steps = total_samples = 0
    for size, length in _rampup(training, consumed):
        remaining = (samples or 0) - total_samples
        num_batches = remaining // size if training.epochs is None else -(-remaining // size)
        needed = num_batches if steps is None else steps - total_steps
        taken = needed if length is None else min(needed, length)
        total_steps, total_samples = total_steps + taken, total_samples + taken * size
        if taken == needed:
            break
    return total_steps, total_samples


def total_steps(training: Training, step: int = 0, consumed: int = 0) -> int:
    """Number of optimizer steps in the whole run, after ``step`` steps and ``consumed`` samples.

    It is ``steps``, or ``step`` and the full batches that ``samples`` or ``tokens`` still allow.
    """
    if training.steps is not None:
        return training.steps
    if training.epochs is not None and training.samples is None:
        return step + 1  # or more: the data is not open yet
    total = training.samples if training.samples is not None else (training.tokens or 0) // training.seq_len
    return step + _walk(training, consumed, None, max(0, total - consumed))[0]


def total_samples(training: Training, step: int = 0, consumed: int = 0) -> int:
    """Number of samples in the whole run, given as in `total_steps`."""
    remaining = max(0, total_steps(training, step, consumed) - step)
    return consumed + _walk(training, consumed, remaining, None)[1]
