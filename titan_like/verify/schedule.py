"""Compare the length, the batch sizes and the learning rates of the whole, full-sized run with their definition."""

from __future__ import annotations

import math

from titan_like.config.schema import JobConfig
from titan_like.data.batch_size import global_batch_size_at, total_steps
from titan_like.optim.schedule import lr_factor, schedule_length
from titan_like.verify.plain_training import learning_rate
from titan_like.verify.samples import batch_size

_MOST_RAMPING = 100_000  # steps whose batch sizes are compared
_POINTS = 1000  # steps at which learning rates are compared


def schedule_problem(config: JobConfig) -> str | None:
    """How a run's length, batch sizes or learning rates differ from their definition; None if they do not."""
    training, total = config.training, total_steps(config.training)
    samples = training.samples or (training.tokens or 0) // training.seq_len
    consumed, steps = 0, 0
    while training.batch_size_rampup is not None and consumed < training.batch_size_rampup[2]:
        size, wanted = global_batch_size_at(training, consumed), batch_size(training, consumed)
        if size != wanted:
            return f"the batch after {consumed} samples has {size}, not {wanted}"
        if steps == min(training.steps or _MOST_RAMPING, _MOST_RAMPING) or (samples and consumed + size > samples):
            break
        consumed, steps = consumed + size, steps + 1
    wanted_total = training.steps or steps + (samples - consumed) // batch_size(training, consumed)
    if steps < _MOST_RAMPING and total != wanted_total:
        return f"the run has {total} steps, not {wanted_total}"
    end = schedule_length(training)  # the small run shows how far each step takes its schedule
    for number in range(_POINTS):
        step = 1 + number * max(0, end - 1) // (_POINTS - 1)
        rate = learning_rate(config, step, end)
        found = config.optimizer.lr * lr_factor(config.lr_scheduler, step, end)
        if not math.isclose(found, rate, rel_tol=1e-9, abs_tol=1e-12 * config.optimizer.lr):
            return f"in step {step:.12g} of {end:.12g} it is {found:.6g}, not {rate:.6g}"
    return None
