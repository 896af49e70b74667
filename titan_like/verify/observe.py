"""One process of a layout: the real trainer runs its own loop, and all that it does is compared with the reference."""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from titan_like.checkpoint.step_folders import checkpoint_path, complete_steps
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch, collate
from titan_like.data.lengths import sample_length
from titan_like.metrics.record import StepRecord, named_losses
from titan_like.models.layers import cross_entropy, init, interval_attention
from titan_like.models.layers.init import local_part
from titan_like.models.registry import model_config
from titan_like.parallel import gradients, split
from titan_like.parallel.layout import resolve_layout
from titan_like.train.issued_step import IssuedStep
from titan_like.train.layout_rules import is_sparse
from titan_like.train.setup import Run
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import DROPOUT, EXACT, HALF, RESUME, SINGLE, Key, Reference, Report, Row
from titan_like.verify.dropout import observe_dropout
from titan_like.verify.experts import check_biases, starve_an_expert
from titan_like.verify.half import (
    MERGED,
    TRAVELLING,
    check_loss_scaler,
    check_resumed,
    check_validated,
    checked_loss,
    finer,
    scale_after,
    state_of,
    watched_sums,
)
from titan_like.verify.places import Cut, Outputs, Place, allowances, differing, up_to_the_loss
from titan_like.verify.plain_training import EPS, FLOAT16_SCALE, LARGE, rate_of, train
from titan_like.verify.processes import Member
from titan_like.verify.reference import BLOCK_ELEMENTS, FEW, MARGIN
from titan_like.verify.resumed import check_other_batches
from titan_like.verify.samples import batches, training_samples, validation_samples
from titan_like.verify.schedule import schedule_problem
from titan_like.verify.shrink import Small
from titan_like.verify.token_ids import masks_of_run
from titan_like.verify.updates import UpdateCheck
from titan_like.verify.watch import WatchedTrainer, digest, first_samples

_BLOCK_BYTES = 2048  # of work that a CPU does at a time: small samples then take many blocks, as large ones do
_LONG_BLOCK_BYTES = 64 * _BLOCK_BYTES  # of longer sequences, of which every query would be a block
_CHUNK_LOGITS = 1024  # of the loss at once, for the same reason
_UNIT_BYTES = 4096  # of gradients in a half type that wait to be added up, for the same reason


class ObservedTrainer(WatchedTrainer):
    """Compares each of its steps with the reference, and spoils the gradients of the bad steps."""

    def __init__(self, run: Run, reference: Reference, report: Report, last_step: int | None = None) -> None:
        """A signal ends the loop after ``last_step``, by default the reference's last."""
        small = reference.small
        super().__init__(run, reference.known)
        self.reference, self.report, self.dtype = reference, report, run.config.training.dtype
        self.small, self.bad_steps, self.num_steps = small, small.bad_steps, small.num_steps
        self.last_step = last_step or small.num_steps
        self.batches = batches(small.config, self.num_steps)
        self.updates = UpdateCheck(self, small, report)
        self._compare = partial(report.compare, reference, self.dtype)
        report.data_rank = run.layout.data_rank(report.rank)
        if self.dtype == "float16":
            told = f"training begins with a loss scale of {float(self.loss_scale)}, which raises no gradient"
            report.exact(Key(0, Row.LOSS_SCALE), None if self.loss_scale > 1 else told)
            assert self.scaler is not None
            self.scaler.scale.fill_(FLOAT16_SCALE)
            self.wanted_scale = state_of(self.scaler)
        self.is_in_passes = False
        for name in ("forward_backward", "forward"):
            setattr(self.pipeline, name, partial(self._run_passes, getattr(self.pipeline, name)))
        self.finer = {"loss": 0, "gradient norm": 0}  # good steps in which it has more digits than the half type
        self.types_of_sums = set[str]()  # of gradients between processes

    def train_step(self, data: Iterator[Batch]) -> IssuedStep:
        """Take one step and compare what it did to the weights."""
        step = self.step + 1
        if self._logs(step - 1):  # and it has been read
            skips = {"steps skipped in a row before this one": self.losses.consecutive_skips}
            self.report.equal(Key(step, Row.BATCH), skips, {name: int(step - 1 in self.bad_steps) for name in skips})
        if step == self.last_step:
            self.signals.received = signal.SIGTERM
        self.config = edit(self.config, {"training.max_norm": self.small.max_norm(step)})
        issued = super().train_step(data)
        if step <= self.num_steps:
            self.report.samples[step] = self.drawn
            grad_norm = issued.read()[0].grad_norm
            self.updates.check(step, step not in self.bad_steps, grad_norm, self.gradients)
            for name, parameter in self.model.named_parameters():
                self._compare(Key(step, Row.WEIGHT, name), parameter)
            self.note_copies(step)
        return issued

    def read_step(self, issued: IssuedStep) -> StepRecord:
        """Compare what the step reports. A step that is not logged is read after the next one."""
        found, step = super().read_step(issued), issued.step
        if step <= self.num_steps:
            self._compare_record(step, found)
        else:
            self._compare(Key(step, Row.LARGE_LOSS), found.loss)
            self._compare(Key(step, Row.LARGE_NORM), found.grad_norm)
        return found

    def _compare_record(self, step: int, found: StepRecord) -> None:
        """Compare a step's record: counters, learning rate, loss, gradient norm and whether it was skipped."""
        equal, is_good, overflows = self.report.equal, step not in self.bad_steps, self.dtype == "float16"
        batch, config = self.batches[step], self.config
        counted = (found.global_batch_size, found.consumed_samples, found.consumed_tokens)
        equal(Key(step, Row.BATCH), counted, (len(batch), batch.stop, batch.stop * config.training.seq_len))
        rate = rate_of(self.small, step)
        told = f"{found.lr:.9g}, not {rate:.9g}"
        self.report.add(Key(step, Row.RATE), abs(found.lr - rate) / config.optimizer.lr, 1e-9, told)
        self._compare_losses(step, Row.LOSS, found.loss, found.losses)
        bad_so_far = [bad for bad in self.bad_steps if bad <= step]
        skipped = {"overflow": found.skipped, "not finite": found.nan, "skipped so far": self.skipped_steps}
        wanted = (int(not is_good and overflows), int(not is_good and not overflows), len(bad_so_far))
        equal(Key(step, Row.SKIPPED), skipped, dict(zip(skipped, wanted, strict=True)))
        self.report.share(Key(step, Row.EQUAL, Row.NORM), repr(found.grad_norm))
        self._compare(Key(step, Row.NORM), found.grad_norm)
        if self._logs(step):
            self._compare(Key(step, Row.ZEROS), math.nan if found.num_zeros is None else found.num_zeros)
        for name, value in found.experts.items() if self.dtype not in HALF else ():  # rounding may move a token
            self._compare(Key(step, Row.FIGURES, name), value)
        if self.scaler is not None:
            equal(Key(step, Row.LOSS_SCALE), found.loss_scale, self.wanted_scale[0])
            self.wanted_scale = scale_after(*self.wanted_scale, overflowed=not is_good)
            equal(Key(step, Row.LOSS_SCALE, "after the step"), state_of(self.scaler), self.wanted_scale)
        if self.dtype in HALF and is_good:
            for name, number in zip(self.finer, (found.loss, found.grad_norm), strict=True):
                self.finer[name] += finer(torch.tensor(number), self.dtype)

    def _run_passes(self, run: Callable[..., None], batches: Sequence[Batch], *others: Any) -> None:
        factors = batches[0].loss_factors
        assert factors is not None
        self._note_sum("the factor of the loss", factors.dtype)
        self.is_in_passes = True
        run(batches, *others)

    def _note_sum(self, name: str, dtype: torch.dtype) -> None:
        """Check that a sum is computed in float32, or if it is of gradients between processes in their type."""
        if self.is_in_passes and name == "batch_isend_irecv":  # a ring passes keys and values on
            return
        of_weights = self.is_in_passes and name not in (TRAVELLING, MERGED)
        allowed = {self.config.training.reduce_dtype} if of_weights else set()
        told = str(dtype).removeprefix("torch.")
        self.types_of_sums |= {told} if of_weights else set()
        key = Key(self._last_begun, Row.SUMS, name)
        self.report.exact(key, f"it is in {told}" if told in HALF and told not in allowed else None)

    def _check_loss(self, *call: Any) -> torch.Tensor:
        return checked_loss(self.report, self._last_begun, self.mesh["tp"].get_group(), *call)

    @property
    def _last_begun(self) -> int:
        """The step that is being taken, or was taken last."""
        return min(self.step + 1, self.num_steps)

    def _check_digits(self, name: str, gradient: torch.Tensor) -> None:
        """Check that a sum over microbatches has more digits than the numbers in a half type that are summed."""
        part, expected = self.reference.part(Key(1, Row.SAME_TYPE, name), gradient)
        is_rounded = finer(expected, self.dtype) >= FEW and not finer(part, self.dtype)
        self.report.exact(Key(1, Row.SUMS, name), f"it is rounded to {self.dtype}" if is_rounded else None)

    def _complete_gradients(self) -> None:
        self.is_in_passes = False
        self._spoil()
        super()._complete_gradients()
        if self.scaler is not None:  # only then, because operations on DTensors are slow
            self.gradients = [(name, gradient / self.loss_scale) for name, gradient in self.gradients]
        step, held = self.step + 1, {name for name, _ in self.gradients}
        if step in self.bad_steps:
            return
        for name, _ in self.model.named_parameters():
            self.report.exact(Key(step, Row.MISSING, name), None if name in held else "it has no gradient")
        row = Row.GRADIENT if step <= self.num_steps else Row.LARGE_GRADIENT
        has_sums = len(self.drawn) * self.dp_size > 1 and self.config.training.reduce_dtype not in HALF
        for name, gradient in self.gradients:
            self._compare(Key(step, row, name), gradient)
            if step == 1 and self.dtype in HALF and has_sums:
                self._check_digits(name, gradient)
            if self._rounds_as_one_process(name):
                self._compare(Key(step, Row.SAME_TYPE, name), gradient)

    @torch.no_grad()
    def _spoil(self) -> None:
        """In a bad step, make one gradient element infinite or NaN on every process that holds it."""
        at_end = self.bad_steps.get(self.step + 1)
        if at_end is None:
            return
        matrices = [name for name in self.reference.names if "norm" not in name and name.endswith("weight")]
        wanted = matrices[-1 if at_end else 0]
        for name, parameter in self.model.named_parameters():
            if name != wanted or parameter.grad is None:
                continue
            local, offset = local_part(parameter.grad)
            ends = [start + length for start, length in zip(offset, local.shape, strict=True)]
            if local.numel() and at_end and ends == list(parameter.shape):
                local[-1, -1] = math.inf
            elif local.numel() and not at_end and not any(offset):
                local[0, 0] = math.nan

    def _rounds_as_one_process(self, name: str) -> bool:
        """Whether the layout rounds the same numbers to a half type as one process with the same microbatches does."""
        layout, training = self.run.layout, self.config.training
        # Each stage rounds its own part, and each chunk of the loss.
        has_table = name.startswith("output") or (name == "embedding.weight" and self.run.model.tied_embeddings)
        # One rounding for the tokens of the whole EP group.
        has_tokens_of_group = ".experts." in name and layout.expert > 1
        if name in self.model.copies_in or has_table or has_tokens_of_group:
            return False
        data = self.config.data
        has_ranges = data.reset_attention_mask or data.prefix_lm or self.run.model.predictions != ("tokens",)
        if has_ranges:  # the reference's attention takes a mask of all pairs
            return False
        sums_differently = layout.tensor > 1 or layout.context > 1
        sums_differently |= training.reduce_dtype != "float32"
        other_pieces = training.micro_batch_size != self.reference.small.config.training.micro_batch_size
        return not (sums_differently or other_pieces or self.config.compile.enable)

    def _save_if_due(self, is_last: bool) -> None:
        if self.dtype not in HALF:  # those save at the end
            super()._save_if_due(is_last)

    def _leave_if_stopped(self) -> None:
        pass  # the signal of the last step ends the loop alone

    def validate(self) -> float:
        """Validate and compare the loss."""
        loss = super().validate()
        terms = named_losses(self.run.model.predictions, self.validation_losses)
        self._compare_losses(self.step, Row.VALIDATION, loss, terms)
        return loss

    def _compare_losses(self, step: int, row: Row, loss: float, terms: dict[str, float]) -> None:
        """Compare a loss and its terms, by their names in metrics.jsonl, where the reference has that loss."""
        known = self.reference.sizes
        for name, value in {"": loss, **terms}.items():
            key = Key(step, row, name)
            self.report.exact(key, "no loss has this name" if Key(step, row) in known and key not in known else None)
            self._compare(key, value)

    def compare_initial_weights(self) -> None:
        """Compare the initial weights: every element must equal the reference's."""
        for name, parameter in self.model.named_parameters():
            key = Key(0, Row.INITIAL, name)
            self.report.exact(key, None if key in self.reference.sizes else "the reference has no such parameter")
            self._compare(key, parameter)

    def note_copies(self, step: int) -> None:
        """Share digests of the weights, to be compared with those of processes that hold the same weights."""
        for name, parameter in self.model.named_parameters():
            local, offset = local_part(parameter)
            self.report.share(Key(step, Row.REPLICAS, f"{name} @ {offset} {list(local.shape)}"), digest(local))

    def compare_run(self) -> None:
        """Train from the start and compare everything."""
        self.compare_initial_weights()
        self.note_copies(0)
        if self.dtype == EXACT:
            self.report.exact(Key(0, Row.SCHEDULE), schedule_problem(self.reference.small.original))
        with ExitStack() as stack:
            if self.dtype in HALF:
                stack.enter_context(watched_sums(self.dtype, self._note_sum))
                stack.enter_context(
                    patch.object(cross_entropy, "_loss", partial(self._check_loss, cross_entropy._loss))
                )
            self.train()
        self.config = edit(self.config, {"evaluation.steps": 2})  # covers all held-out samples
        self._compare(Key(self.num_steps, Row.WHOLE_VALIDATION), Trainer.validate(self))
        check_validated(self.report, self)
        if self.dtype == EXACT:  # one more step, with logits that only a stable softmax survives
            self.enlarge_logits()
            self.read_step(self.train_step(self._microbatches(self.num_steps + 1)))
            self._check_end()
            check_biases(self.report, self.experts)
        if self.dtype in HALF:
            for name, steps in self.finer.items():
                self.report.exact(Key(1, Row.SUMS, name), None if steps else f"it is rounded to {self.dtype}")
            wanted = self.config.training.reduce_dtype
            is_missing = self.token_group.size() > 1 and wanted in HALF and wanted not in self.types_of_sums
            told = f"they are in {', '.join(sorted(self.types_of_sums))}, not {wanted}" if is_missing else None
            self.report.exact(Key(1, Row.SUMS, "gradients"), told)
            if self.scaler is not None:
                check_loss_scaler(self.report, self.scaler)
            check_resumed(self.report, self, partial(self._microbatches, self.num_steps + 1))

    def enlarge_logits(self) -> None:
        """Multiply the last norm's weights, and send no token to one of the experts."""
        for stage in self.model.stages:
            starve_an_expert(stage.module)
            for parameter in stage.module.last_norm.parameters() if stage.module.is_last else []:
                local_part(parameter)[0].mul_(LARGE)

    def _check_end(self) -> None:
        """Let the loop end by itself, which a signal has done so far, and check that it takes the run's last step."""
        total = self.total_steps
        self.writers, self.step, self.stop_signal, self.signals.received = [], total - 1, 0, 0
        self.train()
        self.report.equal(Key(0, Row.SCHEDULE), f"it ends after step {self.step}", f"it ends after step {total}")

    def _microbatches(self, step: int) -> Iterator[Batch]:
        """This process's microbatches of a step, without a second loader, which would begin in mid-run."""
        masked, size = self.run.masks.over(self.run.datasets["train"]), self.config.training.micro_batch_size
        batch = batches(self.small.config, step)[step]
        for start in range(batch.start + self.dp_rank * size, batch.stop, self.dp_size * size):
            yield collate([masked[index] for index in range(start, start + size)])


def observe(member: Member, reference: Reference, config: JobConfig, kind: str) -> Report:
    """Run one kind (a type, or dropout) and compare it with the reference."""
    report, dtype = Report(kind, member.rank), EXACT if kind == DROPOUT else kind
    if kind in HALF:  # can save
        config = edit(config, {"checkpoint.enable": True})
    if kind == SINGLE:  # logs the last step alone
        config = edit(config, {"metrics.log_interval": reference.small.num_steps})
    run = prepare_run(member, reference, config, dtype, member.folder)
    if kind == DROPOUT:
        observe_dropout(run, report, reference.small)
    else:
        ObservedTrainer(run, reference, report).compare_run()
    if kind == EXACT and reference.small.longer:
        compare_longer(member, reference, config, report)
    dist.barrier()
    return report


def compare_longer(member: Member, reference: Reference, config: JobConfig, report: Report) -> None:
    """Compare the loss and the gradients of one batch of longer sequences."""
    trainer = WatchedTrainer(prepare_longer(member, reference, config)[1])
    (found,) = trainer.steps_alone(1)
    report.compare(reference, EXACT, Key(1, Row.LONG_LOSS), found.loss)
    report.compare(reference, EXACT, Key(1, Row.LONG_NORM), found.grad_norm)
    for name, gradient in trainer.gradients:
        report.compare(reference, EXACT, Key(1, Row.LONG_GRADIENT, name), gradient)


def observe_leg(
    member: Member, reference: Reference, config: JobConfig, load_step: int | None, start: int, last_step: int,
    most: int, folder: Path, is_last: bool = False,
) -> Report:  # fmt: skip
    """One leg of a relay: resume, and save after every step up to ``last_step``.

    The relay's last leg also goes on with other batches and with dropout.

    It resumes from ``start`` because that is ``load_step``, or without one because no later checkpoint is left. It
    removes checkpoints before its latest ``most`` unless those legs that follow need them.
    """
    is_last_good, report = last_step not in reference.small.bad_steps, Report(RESUME, member.rank)
    keep = 0 if load_step and is_last_good else most
    saves = {"enable": True, "interval": 1, "load_step": load_step, "keep_latest": keep}
    changed = edit(config, {f"checkpoint.{key}": value for key, value in saves.items()})
    run = prepare_run(member, reference, changed, EXACT, folder)
    there = complete_steps(run.checkpoint_folder)
    for step in [*there] if member.rank == 0 and load_step is None else []:
        if step > start:
            shutil.rmtree(checkpoint_path(run.checkpoint_folder, step))
            there.remove(step)
    if is_last:
        check_other_batches(report, run, reference.small, start)
    trainer = ObservedTrainer(run, reference, report, last_step)
    told = f"resumed from step {trainer.step}, not {start}"
    report.exact(Key(0, Row.CHECKPOINTS), None if trainer.step == start else told)
    trainer.train()
    if member.rank == 0:  # after a skipped step nothing is saved, except at the end, and nothing removed
        saved = [step for step in range(start + 1, last_step + 1) if step == last_step or step not in trainer.bad_steps]
        kept = sorted({*there, *saved})[-keep if is_last_good else 0 :]
        found = complete_steps(run.checkpoint_folder)
        report.exact(Key(0, Row.CHECKPOINTS), None if found == kept else f"steps {found} are kept, not {kept}")
    return report


def prepare_longer(member: Member, reference: Reference, config: JobConfig) -> tuple[Small, Run]:
    """A run of a single batch of longer sequences. Compiling its layers would take as long as all else."""
    small = replace(reference.small, config=edit(reference.small.config, reference.small.longer), num_steps=0)
    changed = edit(config, reference.small.longer | {"compile.enable": False})
    run = prepare_run(member, replace(reference, small=small), changed, EXACT, member.folder)
    interval_attention.BLOCK_BYTES = _LONG_BLOCK_BYTES
    return small, run


def compare_places(
    member: Member, reference: Reference, config: JobConfig, step: int, is_longer: bool, dtype: str
) -> tuple[list[Place], set[str], dict[Place, float]]:
    """The order of `Outputs`, the modules that feed the loss, and those that are wrong here in a step's two passes."""
    small, expected, found = reference.small, Outputs(), Outputs()
    config = edit(config, {"compile.enable": False})  # compiled layers call no modules
    if is_longer:
        small, run = prepare_longer(member, reference, config)
        known = first_samples(run.masks.over(run.datasets["train"]), small.config.training.global_batch_size)
        reference, config = replace(reference, small=small, known=known), run.config
    else:
        run = prepare_run(member, reference, config, dtype, member.folder)
    size, large = small.config.training.global_batch_size, 1.0 if is_longer else LARGE
    train(small, dtype, size, run.device, outputs=(step, expected), large=large)
    allowed = dict[Place, float]()
    if dtype in HALF:
        exact = Outputs()
        train(small, EXACT, size, run.device, outputs=(step, exact), large=large)
        allowed = allowances(expected, exact, MARGIN, EPS[dtype], is_sparse(run.model))
    trainer = ObservedTrainer(run, reference, Report(dtype, member.rank), step - 1)
    if step > 1:
        trainer.train()
    if step > small.num_steps and not is_longer:
        trainer.enlarge_logits()
    for stage in trainer.model.stages:
        found.follow(stage.module)
    trainer.steps_alone(1)
    lengths = sample_length(config, run.model)
    samples = [[index - batches(small.config, step)[step].start for index in indices] for indices in trainer.drawn]
    order, predictions = up_to_the_loss(expected.order, expected.predictions)
    cut = Cut(trainer.cp_shard, trainer.mesh["tp"].size(), trainer.mesh["tp"].get_local_rank(), lengths)
    return order, predictions, differing(found, expected, samples, cut, step, allowed)


def prepare_run(member: Member, reference: Reference, config: JobConfig, dtype: str, folder: Path) -> Run:
    """A run in this type on the verification's own data."""
    init.BLOCK_ELEMENTS, plain = BLOCK_ELEMENTS, reference.small.config
    split.LAYER_UNIT_BYTES = reference.small.unit_bytes
    cross_entropy.BLOCK_BYTES = interval_attention.BLOCK_BYTES = _BLOCK_BYTES
    cross_entropy.CHUNK_LOGITS = dict.fromkeys(cross_entropy.CHUNK_LOGITS, _CHUNK_LOGITS)
    cross_entropy.PRODUCT = gradients.UNIT_BYTES = _UNIT_BYTES
    settings = {"job.dump_folder": str(folder), "training.max_norm": plain.training.max_norm, "training.dtype": dtype}
    config = edit(config, settings | ({} if dtype in HALF else {"training.reduce_dtype": "float32"}))
    folder.mkdir(parents=True, exist_ok=True)
    return Run(
        config=config,
        model=model_config(config.model),
        layout=resolve_layout(config.parallelism, member.world_size),
        device=torch.device(member.device),
        datasets={"train": training_samples(plain), "validation": validation_samples(plain)},
        masks=masks_of_run(config),
    )
