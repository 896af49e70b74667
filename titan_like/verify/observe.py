"""One process of a layout: the trainer runs its own loop, and everything it does is compared with the reference."""

import math
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from titan_like.checkpoint.step_folders import checkpoint_path, complete_steps
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.models.layers.init import local_part
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import DROPOUT, EXACT, HALF, RESUME, SINGLE, Key, Reference, Report, Row, distance
from titan_like.verify.dropout import NOTHING, RATE, check_draws, recorded_draws
from titan_like.verify.narrow import HalfWatch, NarrowWatch
from titan_like.verify.places import Outputs, compare_outputs
from titan_like.verify.processes import Member
from titan_like.verify.reference import in_type, norm, run_of, run_through
from titan_like.verify.routers import Choices, Note, replays
from titan_like.verify.shrink import Small
from titan_like.verify.watch import LayoutWatch, StepWatch, steps_alone

_NEVER = 1_000_000  # steps
_EAGER = {"compile.enable": False, "compile.cudagraphs": False}  # else no module and no function is called
_OTHER_MASKS = 0.1  # rounding changes gradients by less than this share, other masks of dropout by more


def observe(member: Member, reference: Reference, config: JobConfig, kind: str) -> Report:
    """Run in a dtype and compare it with the reference."""
    report, small = Report(kind, member.rank), reference.small
    config = in_type(config, kind)
    if kind == SINGLE:  # logs the last step alone
        config = edit(config, {"metrics.log_interval": small.num_steps})
    if kind in HALF:
        half = HalfWatch(reference, report)
        saves_at_end = {"checkpoint.enable": True, "checkpoint.interval": _NEVER, "compile.cudagraphs": False}
        config = edit(config, saves_at_end)
        trainer = Trainer(run_of(member, small, config, member.folder), observer=half)
        with half.watched_sums(), replayed_choices(half, reference, half.note_routers):
            run_through(trainer, half)
        half.check_run()
    else:
        watch = LayoutWatch(reference, report) if kind == EXACT else NarrowWatch(reference, report)
        run_through(Trainer(run_of(member, small, config, member.folder), observer=watch), watch)
    if kind == EXACT:
        large = StepWatch(small.large, partial(report.compare, reference))
        run = run_of(member, large.small, edit(config, small.longer), member.folder)
        run_through(Trainer(run, observer=large), large)
    dist.barrier()
    return report


def replayed_choices(watch: StepWatch, reference: Reference, note: Note) -> AbstractContextManager[object]:
    """The context in which routers replay the reference's choice, where runs in a 16-bit dtype do."""
    return Choices(watch, note, reference.whole) if replays(reference.small) else nullcontext()


def observe_places(member: Member, reference: Reference, config: JobConfig, kind: str) -> Report:
    """Compare what every module computes in the last step of the reference."""
    report, small, outputs = Report(kind, member.rank), reference.small, Outputs()
    config = in_type(edit(config, _EAGER), kind)
    watch = StepWatch(small, lambda *_: None, reference.indices)
    watch.names, watch.outputs = reference.names, outputs
    trainer = Trainer(run_of(member, small, config, member.folder), observer=watch)
    with replayed_choices(watch, reference, lambda *_: None) if kind in HALF else nullcontext():
        run_through(trainer, watch)
    compare_outputs(watch, outputs, reference, report)
    return report


def observe_dropout(member: Member, reference: Reference, config: JobConfig, _: str) -> Report:
    """Check the masks of two steps, and validate between them, which must leave the next step's random numbers alone.

    Another run with the same seed, compiled if the configuration compiles, must compute about the same gradients.
    """
    report, small = Report(DROPOUT, member.rank), replace(reference.small, bad_steps={})
    rate = max(RATE, *small.dropout.values())
    config = small.dropping(config, rate)
    watch, rerun = (StepWatch(small, lambda *_: None) for _ in range(2))
    plain = edit(config, _EAGER)
    trainer = Trainer(run_of(member, small, plain, member.folder), observer=watch)
    with recorded_draws(trainer) as draws:
        steps_alone(trainer, 1)
        gradients = watch.gradients
        number = len(draws)
        trainer.validator.validate()
        for draw in draws[number:]:
            report.require(False, Key(1, Row.KEPT, draw.site), "it drops in validation")
        del draws[number:]
        steps_alone(trainer, 1)
    # Compiled layers draw the same random numbers as eager ones if they run one operation at a time.
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        steps_alone(Trainer(run_of(member, small, config, member.folder), observer=rerun), 1)
    check_draws(report, draws, trainer.run.layout, rate)
    total = math.hypot(*(norm(local_part(gradient)[0]) for _, gradient in gradients))
    for (name, gradient), (_, redone) in zip(gradients, rerun.gradients, strict=True):
        shard, redone_shard = local_part(gradient)[0], local_part(redone)[0]
        off = distance(shard, redone_shard) / max(norm(shard), 0.1 * total)
        report.add(Key(1, Row.DROPOUT_AGAIN, name), off, _OTHER_MASKS)
    return report


@dataclass(frozen=True)
class ResumedRun:
    """One run of a resume sequence."""

    folder: Path  # of the whole sequence
    start: int  # the step that it resumes from; 0: it is new
    last_step: int
    keep: int  # `checkpoint.keep_latest`
    loads_start: bool = False  # by `checkpoint.load_step`; else it resumes there because later checkpoints are removed


def observe_resumed(member: Member, reference: Reference, config: JobConfig, resumed: ResumedRun) -> Report:
    """Resume, and save after every step up to the last. The sequence's last run also resumes with dropout."""
    small, report = reference.small, Report(RESUME, member.rank)
    start, last_step, keep = resumed.start, resumed.last_step, resumed.keep
    load_step = start if resumed.loads_start else None
    saves = {"enable": True, "interval": 1, "load_step": load_step, "keep_latest": keep}
    changed = edit(in_type(config, EXACT), {f"checkpoint.{key}": value for key, value in saves.items()})
    if any(small.dropout.values()):  # dropout takes other kernels
        changed = small.dropping(changed, NOTHING)
    run = run_of(member, small, changed, resumed.folder)
    present = complete_steps(run.checkpoint_folder)
    if member.rank == 0 and load_step is None:
        for step in [step for step in present if step > start]:
            shutil.rmtree(checkpoint_path(run.checkpoint_folder, step))
            present.remove(step)
    if start and load_step is None and small.dropout:  # the last run
        check_resumed_dropout(member, report, small, changed, resumed.folder)
    trainer = Trainer(run, observer=LayoutWatch(reference, report, last_step))
    reason = f"resumed from step {trainer.state.step}, not {start}"
    report.require(trainer.state.step == start, Key(0, Row.CHECKPOINTS), reason)
    trainer.train()
    if member.rank == 0:  # after a skipped step nothing is saved, except at the end, and nothing removed
        saved = [step for step in range(start + 1, last_step + 1) if step == last_step or step not in small.bad_steps]
        kept = sorted({*present, *saved})[-keep if last_step not in small.bad_steps else 0 :]
        steps = complete_steps(run.checkpoint_folder)
        report.require(steps == kept, Key(0, Row.CHECKPOINTS), f"steps {steps} are kept, not {kept}")
    return report


def check_resumed_dropout(member: Member, report: Report, small: Small, config: JobConfig, folder: Path) -> None:
    """Resume with dropout for a step, from a checkpoint of another layout. A run without a stop must drop the same."""
    config = small.dropping(edit(config, _EAGER), RATE)
    resumed = Trainer(run_of(member, small, config, folder))
    straight = Trainer(run_of(member, small, edit(config, {"checkpoint.enable": False}), folder))
    steps_alone(straight, resumed.state.step)
    with recorded_draws(resumed) as draws:
        steps_alone(resumed, 1)
    with recorded_draws(straight) as expected_draws:
        steps_alone(straight, 1)
    for draw, expected in zip_longest(draws, expected_draws):
        is_same = bool(draw and expected and draw.place == expected.place and torch.equal(draw.kept, expected.kept))
        key = Key(resumed.state.step, Row.DROPOUT_RESUMED, (draw or expected).site)
        report.require(is_same, key, "a run that never stopped drops other elements")
