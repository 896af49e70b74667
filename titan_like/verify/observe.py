"""One process of a layout: the trainer runs its own loop, and all that it does is compared with the reference."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from titan_like.checkpoint.step_folders import checkpoint_path, complete_steps
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch
from titan_like.metrics.record import StepRecord
from titan_like.models.layers import cross_entropy
from titan_like.models.layers.init import local_part
from titan_like.train.pending_step import PendingStep
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import DROPOUT, EXACT, HALF, RESUME, SINGLE, Key, Reference, Report, Row, distance
from titan_like.verify.dropout import NOTHING, RATE, Recorder, check_draws, with_dropout
from titan_like.verify.half import (
    MERGED,
    TRAVELLING,
    check_resumed,
    checked_loss,
    finer,
    watched_sums,
)
from titan_like.verify.places import Outputs, compare_outputs
from titan_like.verify.processes import Member
from titan_like.verify.reference import FEW, norm
from titan_like.verify.runs import in_type, run_of, run_through
from titan_like.verify.shrink import Small
from titan_like.verify.updates import UpdateCheck
from titan_like.verify.watch import StepWatch, digest, steps_alone

_NEVER = 1_000_000  # steps
_OTHER_MASKS = 0.1  # rounding changes gradients by less than this share, other masks of dropout by more


class LayoutWatch(StepWatch):
    """Compares each step of a layout with the reference."""

    def __init__(self, reference: Reference, report: Report, last_step: int | None = None) -> None:
        """The loop ends after ``last_step``, by default the reference's last."""
        super().__init__(reference.small, partial(report.compare, reference), reference.known, last_step)
        self.reference, self.report, self.names = reference, report, reference.names
        self.is_in_passes = False
        self.finer = {"loss": 0, "gradient norm": 0}  # good steps in which it has more digits than the half type
        self.types_of_sums = set[str]()  # of gradients between processes

    def attach(self, trainer: Trainer) -> None:
        """Begin to repeat updates."""
        self.report.data_rank, self.dtype = trainer.dp_rank, trainer.config.training.dtype
        super().attach(trainer)
        self.updates = None if self.dtype == EXACT else UpdateCheck(trainer, self.report)
        self._share_copies(0)

    def _share_copies(self, step: int) -> None:
        """Share digests of the weights, to be compared with those of processes that hold the same weights."""
        for name, parameter in self.trainer.model.named_parameters():
            local, offset = local_part(parameter)
            self.report.share(Key(step, Row.REPLICAS, f"{name} @ {offset} {list(local.shape)}"), digest(local))

    def take_batch(self, batch: Batch) -> None:
        """From here on sums are those of passes."""
        super().take_batch(batch)
        self.is_in_passes = True

    def note_sum(self, name: str, dtype: torch.dtype) -> None:
        """Check that a sum is computed in float32, or if it is of gradients between processes in their type."""
        if self.is_in_passes and name == "batch_isend_irecv":  # a ring passes keys and values on
            return
        of_weights = self.is_in_passes and name not in (TRAVELLING, MERGED)
        allowed = {self.trainer.config.training.reduce_dtype} if of_weights else set()
        dtype_name = str(dtype).removeprefix("torch.")
        self.types_of_sums |= {dtype_name} if of_weights else set()
        is_wrong = dtype_name in HALF and dtype_name not in allowed
        self.report.exact(Key(self.at_step or 1, Row.SUMS, name), f"it is in {dtype_name}" if is_wrong else None)

    def check_loss(self, original: Callable[..., torch.Tensor], *chunk: Any) -> torch.Tensor:
        """The loss of a chunk, in place of ``original``."""
        group = self.trainer.mesh.get_group("tp")
        return checked_loss(self.report, min(self.at_step, self.small.num_steps) or 1, group, original, *chunk)

    def complete_gradients(self) -> None:
        """Check that every parameter has a gradient, with the digits of a sum."""
        self.is_in_passes = False
        super().complete_gradients()
        if self.at_step in self.small.bad_steps:
            return
        held = {name for name, _ in self.gradients}
        for name, _ in self.trainer.model.named_parameters():
            self.report.exact(Key(self.at_step, Row.MISSING, name), None if name in held else "it has no gradient")
        training = self.trainer.config.training
        several = len(self.drawn) * self.trainer.dp_size > 1
        several &= self.dtype in HALF and training.reduce_dtype not in HALF
        if self.at_step == 1 and several:
            # A few parameters may have gradients in one microbatch alone, such as those of an expert or of pairs.
            parts = [(name, local_part(gradient)[0]) for name, gradient in self.gradients]
            parts = [(name, part) for name, part in parts if int((part != 0).sum()) >= FEW]
            rounded = [name for name, part in parts if not finer(part, self.dtype)]
            message = f"it is rounded to {self.dtype}" if 2 * len(rounded) > len(parts) else None
            self.report.exact(Key(1, Row.SUMS, rounded[0] if rounded else ""), message)

    def end_step(self, issued: PendingStep) -> None:
        """Check the update."""
        super().end_step(issued)
        step = issued.step
        if step <= self.small.num_steps:
            self.report.samples[step] = [index for microbatch in self.drawn for index in microbatch]
            self.report.share(Key(step, Row.SAMPLES, f"of data rank {self.report.data_rank}"), str(self.drawn))
            if self.updates is not None:
                is_good, grad_norm = step not in self.small.bad_steps, issued.read()[0].grad_norm
                self.updates.check(step, is_good, issued.lr, grad_norm, self.gradients)
            self._share_copies(step)

    def read_step(self, record: StepRecord) -> None:
        """Count the digits of the loss and the norm."""
        super().read_step(record)
        is_good = record.step not in self.small.bad_steps and record.step <= self.small.num_steps
        for name, number in {"loss": record.loss, "gradient norm": record.grad_norm}.items():
            self.finer[name] += is_good and self.dtype in HALF and finer(torch.tensor(number), self.dtype)

    def check_sums(self) -> None:
        """Check, at the end, that numbers have more digits than the half type, and the type that sums are to have."""
        for name, steps in self.finer.items():
            self.report.exact(Key(1, Row.SUMS, name), None if steps else f"it is rounded to {self.dtype}")
        wanted = self.trainer.config.training.reduce_dtype
        is_missing = self.trainer.token_group.size() > 1 and wanted in HALF and wanted not in self.types_of_sums
        message = f"they are in {', '.join(sorted(self.types_of_sums))}, not {wanted}" if is_missing else None
        self.report.exact(Key(1, Row.SUMS, "gradients"), message)


def observe(member: Member, reference: Reference, config: JobConfig, kind: str) -> Report:
    """Run in a type and compare it with the reference."""
    report, small = Report(kind, member.rank), reference.small
    config = in_type(config, kind)
    if kind in HALF:  # saves at the end
        config = edit(config, {"checkpoint.enable": True, "checkpoint.interval": _NEVER})
    if kind == SINGLE:  # logs the last step alone
        config = edit(config, {"metrics.log_interval": small.num_steps})
    watch = LayoutWatch(reference, report)
    with ExitStack() as stack:
        trainer = Trainer(run_of(member, small, config, member.folder), observer=watch)
        if kind in HALF:
            stack.enter_context(watched_sums(kind, watch.note_sum))
            checked = partial(watch.check_loss, cross_entropy._loss)
            stack.enter_context(patch.object(cross_entropy, "_loss", checked))
        run_through(trainer, watch)
    if kind == EXACT:
        large = StepWatch(small.large, partial(report.compare, reference))
        run = run_of(member, large.small, edit(config, small.longer), member.folder)
        run_through(Trainer(run, observer=large), large)
    if kind in HALF:
        watch.check_sums()
        check_resumed(report, watch)
    dist.barrier()
    return report


def observe_places(member: Member, reference: Reference, config: JobConfig, kind: str) -> Report:
    """Compare what every module computes in the last step of the reference."""
    report, small, outputs = Report(kind, member.rank), reference.small, Outputs()
    config = in_type(edit(config, {"compile.enable": False}), kind)  # compiled layers call no modules
    watch = StepWatch(small, lambda *_: None, reference.known)
    watch.names, watch.outputs = reference.names, outputs
    run_through(Trainer(run_of(member, small, config, member.folder), observer=watch), watch)
    compare_outputs(watch, outputs, reference, report)
    return report


def observe_dropout(member: Member, reference: Reference, config: JobConfig, _: str) -> Report:
    """Check the masks of two steps, and validate between them, which must leave the next step's random numbers alone.

    Another run with the same seed, compiled if the configuration compiles, must compute about the same gradients.
    """
    report, small = Report(DROPOUT, member.rank), replace(reference.small, bad_steps={})
    rate = max(small.dropout or 0.0, RATE)
    config = with_dropout(config, rate)
    watch, again = (StepWatch(small, lambda *_: None) for _ in range(2))
    plain = edit(config, {"compile.enable": False})  # functions are watched
    trainer = Trainer(run_of(member, small, plain, member.folder), observer=watch)
    recorder, data = Recorder(trainer), trainer._load_data()
    with recorder.installed():
        trainer.read_step(trainer.train_step(data))
        gradients = watch.gradients
        trainer.validate()
        recorder.step = 2
        trainer.train_step(data)
    data.close()
    # Run one operation at a time, compiled layers draw the same random numbers as others.
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        steps_alone(Trainer(run_of(member, small, config, member.folder), observer=again), 1)
    check_draws(report, recorder.draws, trainer.run.layout, rate)
    whole = math.hypot(*(norm(local_part(gradient)[0]) for _, gradient in gradients))
    for (name, gradient), (_, other) in zip(gradients, again.gradients, strict=True):
        here, there = local_part(gradient)[0], local_part(other)[0]
        report.add(Key(1, Row.DROPOUT_AGAIN, name), distance(here, there) / max(norm(here), 0.1 * whole), _OTHER_MASKS)
    return report


def observe_leg(
    member: Member, reference: Reference, config: JobConfig, load_step: int | None, start: int, last_step: int,
    most: int, folder: Path,
) -> Report:  # fmt: skip
    """One leg of a relay: resume, and save after every step up to ``last_step``.

    The relay's last leg also goes on with dropout.

    It resumes from ``start`` because that is ``load_step``, or without one because no later checkpoint is left. It
    removes checkpoints before its latest ``most`` unless those legs that follow need them.
    """
    small, report = reference.small, Report(RESUME, member.rank)
    is_last_good = last_step not in small.bad_steps
    keep = 0 if load_step and is_last_good else most
    saves = {"enable": True, "interval": 1, "load_step": load_step, "keep_latest": keep}
    changed = edit(in_type(config, EXACT), {f"checkpoint.{key}": value for key, value in saves.items()})
    if small.dropout:  # kernels for dropout are others
        changed = with_dropout(changed, NOTHING)
    run = run_of(member, small, changed, folder)
    there = complete_steps(run.checkpoint_folder)
    for step in [*there] if member.rank == 0 and load_step is None else []:
        if step > start:
            shutil.rmtree(checkpoint_path(run.checkpoint_folder, step))
            there.remove(step)
    if start and load_step is None and small.dropout is not None:  # the last leg
        check_resumed_dropout(member, report, small, changed, folder)
    trainer = Trainer(run, observer=LayoutWatch(reference, report, last_step))
    message = f"resumed from step {trainer.step}, not {start}"
    report.exact(Key(0, Row.CHECKPOINTS), None if trainer.step == start else message)
    trainer.train()
    if member.rank == 0:  # after a skipped step nothing is saved, except at the end, and nothing removed
        saved = [step for step in range(start + 1, last_step + 1) if step == last_step or step not in small.bad_steps]
        kept = sorted({*there, *saved})[-keep if is_last_good else 0 :]
        found = complete_steps(run.checkpoint_folder)
        report.exact(Key(0, Row.CHECKPOINTS), None if found == kept else f"steps {found} are kept, not {kept}")
    return report


def check_resumed_dropout(member: Member, report: Report, small: Small, config: JobConfig, folder: Path) -> None:
    """Resume with dropout for a step, from a checkpoint of another layout. A run without a stop must drop the same."""
    config = edit(with_dropout(config, RATE), {"compile.enable": False})  # functions are watched
    configs = config, edit(config, {"checkpoint.enable": False})
    resumed, straight = (Trainer(run_of(member, small, one, folder)) for one in configs)
    steps_alone(straight, resumed.step)
    recorders = Recorder(resumed), Recorder(straight)
    for recorder, trainer in zip(recorders, (resumed, straight), strict=True):
        with recorder.installed():
            steps_alone(trainer, 1)
    for draw, other in zip_longest(*(recorder.draws for recorder in recorders)):
        same = draw and other and draw.where == other.where and torch.equal(draw.kept, other.kept)
        key = Key(resumed.step, Row.DROPOUT_RESUMED, (draw or other).where.site)
        report.exact(key, None if same else "a run that never stopped drops others")
