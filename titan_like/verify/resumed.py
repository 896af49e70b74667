"""Check a run that goes on with dropout and other batches, in another layout than the one that saved its checkpoint."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.optim.schedule import lr_factor
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import Key, Report, Row
from titan_like.verify.dropout import Recorder, with_dropout
from titan_like.verify.processes import Member
from titan_like.verify.runs import run_of
from titan_like.verify.samples import batches
from titan_like.verify.shrink import Small
from titan_like.verify.watch import Watch, first_samples, steps_alone


def check_other_batches(
    report: Report, member: Member, small: Small, config: JobConfig, folder: Path, start: int
) -> None:
    """Resume from step ``start`` with twice the batch and without a ramp-up, and take a step.

    The length, the samples and the learning rate must follow from the samples consumed, whatever their batches were.
    Dropout must be what this layout drops in that step without a stop.
    """
    training, micro_batch = config.training, config.training.micro_batch_size
    began, size = training.global_batch_size, 2 * training.global_batch_size
    consumed, steps, step = batches(small.config, start)[start].stop, 4, start + 1
    length = {"samples": consumed + steps * size + size // 2}  # a length in steps would not change with the batch
    if training.tokens is not None:
        length = {"tokens": length["samples"] * training.seq_len}
    values: dict[str, Any] = {"training.global_batch_size": size, "training.batch_size_rampup": None}
    values |= {f"training.{key}": length.get(key) for key in ("steps", "samples", "tokens")}
    values |= {"compile.enable": False}  # compiled layers do not call what is watched
    config = edit(config if small.dropout is None else with_dropout(config, small.dropout), values)
    run = run_of(member, small, config, folder)
    watch = Watch(first_samples(run.masks.over(run.datasets["train"]), (start + 2) * size))
    resumed = Trainer(run, observer=watch)
    told = (resumed.total_steps, resumed.consumed_samples)
    report.equal(Key(step, Row.OTHER_BATCHES, "last step, samples so far"), told, (start + steps, consumed))
    recorder = Recorder(resumed)
    with recorder.installed():
        (record,) = steps_alone(resumed, 1)
    own = range(consumed + resumed.dp_rank * micro_batch, consumed + size, resumed.dp_size * micro_batch)
    samples = [[*range(first, first + micro_batch)] for first in own]
    report.equal(Key(step, Row.OTHER_BATCHES, "samples"), watch.drawn, samples)
    counts = (record.global_batch_size, record.consumed_samples)
    report.equal(Key(step, Row.OTHER_BATCHES, "batch size, samples"), counts, (size, consumed + size))
    come, end = (consumed + size) / began, (consumed + steps * size) / began
    rate = config.optimizer.lr * lr_factor(config.lr_scheduler, come, end)
    difference = abs(record.lr - rate) / config.optimizer.lr
    report.add(Key(step, Row.OTHER_BATCHES, "rate"), difference, 1e-9, f"{record.lr:.9g}, not {rate:.9g}")
    if small.dropout is None:
        return
    straight = Trainer(run_of(member, small, edit(config, {"checkpoint.enable": False}), folder))
    steps_alone(straight, start)
    wanted = Recorder(straight)
    with wanted.installed():
        steps_alone(straight, 1)
    for draw, other in zip_longest(recorder.draws, wanted.draws):
        site, same = (draw or other).where.site, draw and other and draw.where == other.where
        same = same and np.array_equal(draw.kept, other.kept)
        report.exact(Key(step, Row.DROPOUT_RESUMED, site), None if same else "a run that never stopped drops others")
