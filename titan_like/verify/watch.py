"""Watch what a trainer does in each step, through its hooks. The reference and all layouts are watched in one way."""

import hashlib
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from titan_like.data.batch import Batch, map_tensors
from titan_like.metrics.record import StepRecord
from titan_like.models.layers.experts import Router
from titan_like.models.layers.init import ADAPTER_NAMES, local_part, local_parts
from titan_like.models.transformer import Transformer
from titan_like.train.observer import Observer
from titan_like.train.pending_step import PendingStep
from titan_like.train.trainer import Trainer
from titan_like.verify.compare import Key, Reference, Report, Row
from titan_like.verify.places import Outputs
from titan_like.verify.shrink import Small

FLOAT16_SCALE = 1024.0  # loss scale: raises small gradients without any overflow
LARGE = 1e4  # multiplies the last norm's weights; the exponential of a logit then exceeds the range of float64
_COPY_SECONDS = 0.3  # for which a background save waits for an update that waits for it
_FEWEST, _MOST_CHOSEN = 5, 2  # experts of a layer, and of a token, where one can be starved

Note = Callable[[Key, torch.Tensor | float], object]  # takes what a run computed: a number, or this process's part


class Watch(Observer):
    """Keeps the samples of a trainer's latest step, and the gradients before clipping."""

    def __init__(self, indices: Mapping[str, int] = {}) -> None:
        """``indices``: indices of samples by their digests; every other sample has the index -1."""
        self.indices = indices
        self.drawn: list[list[int]] = []  # sample indices of each microbatch of this process
        self.gradients: list[tuple[str, torch.Tensor]] = []  # this process's, by parameter; DTensors if sharded

    def attach(self, trainer: Trainer) -> None:
        """Let saves in the background copy late."""
        super().attach(trainer)
        trainer.state.saver.before_copy = self._copy_late

    def _copy_late(self, is_awaited: threading.Event) -> None:
        """Wait until the next update has waited for the copies for a while, or has happened.

        A small model's tensors would otherwise be copied before their next update, whether or not that waits for it.
        """
        last = self.trainer.state.step + 2  # one of them may have been skipped
        while self.trainer.state.step < last:
            if is_awaited.wait(0.01):
                time.sleep(_COPY_SECONDS)
                return

    def begin_step(self, step: int) -> None:
        """Forget the samples of the step before."""
        self.drawn = []

    def take_batch(self, batch: Batch) -> None:
        """Note which samples of training these are."""
        if self.indices and self.trainer.model.stages[0].module.training:
            self.drawn.append([self.indices.get(digest(sample), -1) for sample in samples_of(batch)])

    def complete_gradients(self) -> None:
        """Copy the gradients, without any loss scale."""
        scale, named = self.trainer.state.loss_scale, self.trainer.model.named_parameters()
        gradients = [(name, parameter.grad.detach()) for name, parameter in named if parameter.grad is not None]
        # Operations on DTensors are slow.
        is_scaled = self.trainer.state.scaler is not None
        self.gradients = [(name, gradient / scale if is_scaled else gradient.clone()) for name, gradient in gradients]


class StepWatch(Watch):
    """Notes everything that the steps of a small run compute, makes its bad steps bad, and ends it."""

    names: list[str]  # the model's parameters, in the order of the forward pass

    def __init__(self, small: Small, note: Note, indices: Mapping[str, int] = {}, last_step: int | None = None) -> None:
        """The loop ends after ``last_step``, by default the small run's last."""
        super().__init__(indices)
        self.small, self.note, self.last_step = small, note, last_step or small.num_steps
        self.validation = Row.VALIDATION  # what validations are noted as
        self.at_step = 0  # the step that is being taken, or was taken last
        self.outputs: Outputs | None = None  # what modules compute in the last step, if it is to be recorded

    def attach(self, trainer: Trainer) -> None:
        """Note the initial weights, or change them for the step with large logits."""
        super().attach(trainer)
        if trainer.state.scaler is not None:
            trainer.state.scaler.scale.fill_(FLOAT16_SCALE)
            trainer.state.scaler.good_steps.fill_(trainer.state.scaler.growth_interval - 1)  # it grows after a step
        if self.small.num_steps == 0:
            for stage in trainer.model.stages:
                enlarge(stage.module)
        elif trainer.state.step == 0:
            for name, parameter in trainer.model.named_parameters():
                self.note(Key(0, Row.INITIAL, name), parameter)

    def begin_step(self, step: int) -> None:
        """Note how many steps in a row have been skipped, where the host has read the one before."""
        super().begin_step(step)
        self.at_step = step
        if self.outputs is not None and step == max(self.small.num_steps, 1):
            for stage in self.trainer.model.stages:
                self.outputs.follow(stage.module)
        if (step - 1) % self.trainer.config.metrics.log_interval == 0 and step <= self.small.num_steps:
            self.note(Key(step, Row.SKIPPED, "steps in a row before"), self.trainer.state.losses.consecutive_skips)

    def complete_gradients(self) -> None:
        """Spoil a bad step's gradients, and note a good step's."""
        is_last_element = self.small.bad_steps.get(self.at_step)
        if is_last_element is not None:
            self._spoil(is_last_element)
        super().complete_gradients()
        row = Row.GRADIENT if self.at_step <= self.small.num_steps else Row.LARGE_GRADIENT
        for name, gradient in self.gradients if is_last_element is None else ():
            self.note(Key(self.at_step, row, name), gradient)

    @torch.no_grad()
    def _spoil(self, is_last_element: bool) -> None:
        """Make one gradient element infinite or NaN on every process that holds it."""
        matrices = [name for name in self.names if "norm" not in name and name.endswith(("weight", *ADAPTER_NAMES))]
        target = matrices[-1 if is_last_element else 0]
        for name, parameter in self.trainer.model.named_parameters():
            if name == target and parameter.grad is not None:
                shard, offset = local_part(parameter.grad)
                corner = [size - 1 if is_last_element else 0 for size in parameter.shape]
                at = tuple(index - start for index, start in zip(corner, offset, strict=True))
                if all(0 <= index < size for index, size in zip(at, shard.shape, strict=True)):
                    shard[at] = math.inf if is_last_element else math.nan

    def end_step(self, issued: PendingStep) -> None:
        """Note the weights."""
        for name, parameter in self.trainer.model.named_parameters() if issued.step <= self.small.num_steps else ():
            self.note(Key(issued.step, Row.WEIGHT, name), parameter)

    def read_step(self, record: StepRecord) -> None:
        """Note a step's numbers. If the step is not logged, they are read after the next one."""
        step, is_good = record.step, record.step not in self.small.bad_steps
        if step > self.small.num_steps:
            self.note(Key(step, Row.LARGE_LOSS), record.loss)
            self.note(Key(step, Row.LARGE_NORM), record.grad_norm)
            return
        self.note(Key(step, Row.BATCH, "batch size"), record.global_batch_size)
        self.note(Key(step, Row.BATCH, "samples"), record.consumed_samples)
        self.note(Key(step, Row.BATCH, "tokens"), record.consumed_tokens)
        self.note(Key(step, Row.RATE), record.lr)
        for name, loss in {"": record.loss, **record.losses}.items():
            self.note(Key(step, Row.LOSS, name), loss)
        self.note(Key(step, Row.SKIPPED), record.skipped + record.nan)
        self.note(Key(step, Row.SKIPPED, "steps so far"), self.trainer.state.skipped_steps)
        if is_good:
            self.note(Key(step, Row.NORM), record.grad_norm)
            if record.num_zeros is not None:
                self.note(Key(step, Row.ZEROS), record.num_zeros)
            for name, value in record.experts.items():
                self.note(Key(step, Row.FIGURES, name), value)
        if self.trainer.state.scaler is not None and record.loss_scale is not None:
            self.note(Key(step, Row.LOSS_SCALE), record.loss_scale)
        if step == self.last_step:
            self.trainer.signals.agreed = signal.SIGTERM

    def end_validation(self, losses: Mapping[str, float]) -> None:
        """Note the loss and its terms."""
        for name, value in losses.items():
            self.note(Key(self.trainer.state.step, self.validation, "" if name == "loss" else name), value)
        if self.trainer.state.step == self.last_step:
            self.trainer.signals.agreed = signal.SIGTERM


class LayoutWatch(StepWatch):
    """Compares each step of a layout with the reference."""

    def __init__(self, reference: Reference, report: Report, last_step: int | None = None) -> None:
        """The loop ends after ``last_step``, by default the reference's last."""
        super().__init__(reference.small, partial(report.compare, reference), reference.indices, last_step)
        self.report, self.names = report, reference.names

    def attach(self, trainer: Trainer) -> None:
        """Share the initial weights."""
        self.report.data_rank, self.dtype = trainer.dp_rank, trainer.config.training.dtype
        super().attach(trainer)
        self._share_copies(0)

    def _share_copies(self, step: int) -> None:
        """Share digests of the weights, to be compared among processes that hold the same weights."""
        for name, parameter in self.trainer.model.named_parameters():
            shard, (_, offset) = local_part(parameter)[0], local_parts(parameter)[0]
            self.report.share(Key(step, Row.REPLICAS, f"{name} @ {offset} {list(shard.shape)}"), digest(shard))

    def begin_step(self, step: int) -> None:
        """Check that no validation has left a module in evaluation mode."""
        super().begin_step(step)
        modules = (named for stage in self.trainer.model.stages for named in stage.module.named_modules())
        still = next((name for name, module in modules if not module.training), None)
        self.report.require(still is None, Key(step, Row.MODE, still or ""), "it is in evaluation mode")

    def end_step(self, issued: PendingStep) -> None:
        """Share the weights, and keep the indices of the samples."""
        super().end_step(issued)
        step = issued.step
        if step <= self.small.num_steps:
            self.report.samples[step] = [index for microbatch in self.drawn for index in microbatch]
            self.report.share(Key(step, Row.SAMPLES, f"of data rank {self.report.data_rank}"), str(self.drawn))
            self._share_copies(step)


@torch.no_grad()
def enlarge(model: Transformer) -> None:
    """Multiply the last norm's weights, and change all routers so that no token is sent to expert 1.

    Its logit becomes the mean of the logits of experts 0 and 2, and also of 3 and 4, so that two of them are above.
    """
    for parameter in model.last_norm.parameters() if model.is_last else []:
        local_part(parameter)[0].mul_(LARGE)
    for router in model.modules():
        if not isinstance(router, Router):
            continue
        if router.config.num_experts < _FEWEST or router.config.experts_per_token > _MOST_CHOSEN:
            continue
        weight = router.weight
        rows = (weight.full_tensor() if isinstance(weight, DTensor) else weight).clone()
        rows[1], rows[4] = (rows[0] + rows[2]) / 2, rows[0] + rows[2] - rows[3]
        part, offset = local_part(weight)
        part.copy_(rows[tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))])


def steps_alone(trainer: Trainer, steps: int) -> list[StepRecord]:
    """Take some steps without logging, validating or saving."""
    data = trainer.load_data()
    records = [trainer.read_step(trainer.train_step(data)) for _ in range(steps)]
    data.close()
    return records


def samples_of(batch: Batch) -> list[Batch]:
    """The samples that a loader has collated."""
    return [map_tensors(itemgetter(number), batch) for number in range(len(batch.tokens))]


def digest(value: Any) -> str:
    """A hash of a tensor's bytes, or of a sample's fields: equal exactly for values that are equal bit for bit."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    else:
        data = repr(tuple(map(digest, value)) if isinstance(value, tuple) else value).encode()
    return hashlib.blake2b(data, digest_size=16).hexdigest()
