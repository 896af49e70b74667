"""One process of a layout: the real trainer runs its own loop, and all that it does is compared with the reference."""

from __future__ import annotations

import hashlib
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_like.config.schema import JobConfig
from titan_like.data.batch_size import total_steps
from titan_like.data.loader import BackgroundLoader
from titan_like.data.source import Source
from titan_like.metrics.record import StepRecord
from titan_like.models.layers.init import local_part
from titan_like.models.registry import model_config
from titan_like.optim.schedule import lr_factor
from titan_like.parallel.layout import resolve_layout
from titan_like.train.setup import Run
from titan_like.train.trainer import Trainer
from titan_like.verify import record
from titan_like.verify.places import PlaceWatch
from titan_like.verify.processes import Member
from titan_like.verify.record import EXACT, HALF, Comparison, Key, Seen, Truth, bad_steps, num_steps
from titan_like.verify.reference import (
    EPS,
    FLOAT16_SCALE,
    LARGE,
    SAME_TYPE_SHARE,
    learning_rate,
    norm,
)
from titan_like.verify.samples import sample_digest, training_samples, validation_samples
from titan_like.verify.shrink import Small, edit
from titan_like.verify.updates import UpdateWatch

_SCHEDULE_POINTS = 1000  # steps of the original run at which learning rates are compared


class Watched:
    """Passes microbatches on and notes which samples they are of."""

    def __init__(self, loader: BackgroundLoader, known: dict[bytes, int], drawn: list[list[int]]) -> None:
        self.loader, self.known, self.drawn = loader, known, drawn
        self.close = loader.close

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        batch = next(self.loader)
        self.drawn.append([self.known.get(sample_digest(sample), -1) for sample in batch])
        return batch


class ObservedTrainer(Trainer):
    """Compares each of its steps with the reference, has gradients that are not finite in some, and ends when told."""

    def __init__(self, run: Run, truth: Truth, seen: Seen, good_steps: int, last_step: int) -> None:
        """``last_step`` is the one after which a signal ends the loop."""
        super().__init__(run)
        kind = run.config.training.dtype
        self.seen, self.kind, self.last_step = seen, kind, last_step
        self.truth, self.compared = truth, Comparison(truth, seen, kind)
        self.bad_steps, self.num_steps = bad_steps(good_steps), num_steps(good_steps)
        self.updates = UpdateWatch(self, seen)
        self.places: PlaceWatch | None = None
        self.drawn: list[list[int]] = []
        batch = run.config.training.global_batch_size
        samples = run.datasets["train"]
        self.known = {sample_digest(samples[index]): index for index in range((self.num_steps + 2) * batch)}
        seen.coordinates = {name: self.mesh[name].get_local_rank() for name in self.mesh.mesh_dim_names or ()}
        if kind == "float16":
            told = f"training begins with a loss scale of {self.scaler.scale}, which raises no gradient"
            seen.wrong(Key(0, record.LOSS_SCALE), None if self.scaler.scale > 1 else told)
            self.scaler.scale = FLOAT16_SCALE

    def _load_data(self) -> BackgroundLoader:
        return cast(BackgroundLoader, Watched(super()._load_data(), self.known, self.drawn))

    def train_step(self, data: Iterator[torch.Tensor]) -> StepRecord:
        """One step, and what it did to the weights."""
        step = self.step + 1
        self.updates.begin()
        skips, wanted_skips = self.losses.consecutive_skips, int(step - 1 in self.bad_steps)
        told = f"{skips} steps in a row count as skipped before step {step}, not {wanted_skips}"
        self.seen.wrong(Key(step, record.BATCH), None if skips == wanted_skips else told)
        if step == self.last_step:
            self.signals.received = signal.SIGTERM
        if self.places is not None:
            self.places.begin(step, self.drawn)
        seen = super().train_step(data)
        if self.places is not None:
            self.places.end()
        compared, is_good = self.compared, step not in self.bad_steps
        if step > self.num_steps:
            compared.scalar(Key(step, record.LARGE_LOSS), seen.loss)
            compared.scalar(Key(step, record.LARGE_NORM), seen.grad_norm)
            return seen
        self.seen.samples[step] = list(self.drawn)
        self.drawn.clear()
        compared.fact(Key(step, record.BATCH), (seen.global_batch_size, seen.consumed_samples, seen.consumed_tokens))
        compared.scalar(Key(step, record.RATE), seen.lr)
        compared.scalar(Key(step, record.LOSS), seen.loss)
        overflows = self.kind == "float16"  # what is not finite is then called an overflow
        so_far = sum(bad <= step for bad in self.bad_steps)
        wanted = (int(not is_good and overflows), int(not is_good and not overflows), so_far)
        found = (seen.skipped, seen.nan, self.skipped_steps)
        told = f"(overflow, not finite, skipped so far) are {found}, not {wanted}"
        self.seen.wrong(Key(step, record.SKIPPED), None if found == wanted else told)
        self.seen.scalars[Key(step, record.NORM)] = seen.grad_norm
        if is_good:
            compared.scalar(Key(step, record.NORM), seen.grad_norm)
            if self.kind == EXACT:
                compared.scalar(Key(step, record.ZEROS), math.nan if seen.num_zeros is None else seen.num_zeros)
        if self.kind == "float16":
            compared.fact(Key(step, record.LOSS_SCALE), seen.loss_scale)
        self.updates.end(step, is_good, seen.grad_norm)
        if self.kind not in HALF:
            self._compare_parameters(step, record.WEIGHT)
        return seen

    def _complete_gradients(self) -> None:
        self._spoil()
        super()._complete_gradients()

    @torch.no_grad()
    def _spoil(self) -> None:
        """In a bad step, make one element of all gradients infinite or NaN, on every process that holds it."""
        at_end = self.bad_steps.get(self.step + 1)
        if at_end is None:
            return
        matrices = [name for name in self.truth.names if "norm" not in name and name.endswith("weight")]
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

    def _update(self, grad_norm: float, lr: float) -> None:
        step, scale = self.step + 1, self.scaler.scale
        for name, parameter in self.model.named_parameters():
            missing = parameter.grad is None
            self.seen.wrong(Key(step, record.MISSING, name), "it has no gradient" if missing else None)
            if parameter.grad is None:
                continue
            local, offset = local_part(parameter.grad)
            gradient = local / scale
            self.updates.unclipped(parameter, gradient)
            row = record.GRADIENT if step <= self.num_steps else record.LARGE_GRADIENT
            if (key := Key(step, row, name)) in self.truth.sizes:
                self.compared.tensor(key, gradient, offset)
            if step == 1 and self.kind in HALF and self._rounds_as_one_process(name) and gradient.numel():
                key = Key(1, f"{record.SAME_TYPE} {self.kind}", name)
                expected = self.compared.part(key, offset, gradient.shape).to(gradient.device)
                difference = norm(gradient.double() - expected) / self.truth.sizes[key]
                measure = record.Measure(difference, SAME_TYPE_SHARE * EPS[self.kind])
                self.seen.add(Key(1, record.SAME_TYPE, name), measure)
        self.updates.clipped_at(grad_norm)
        if step <= self.num_steps:
            super()._update(grad_norm, lr)

    def _rounds_as_one_process(self, name: str) -> bool:
        """Whether the layout rounds the same numbers to a half type as one process does with the same microbatches."""
        section, training = self.config.parallelism, self.config.training
        if name == "embedding.weight" and self.mesh["pp"].size() > 1:  # each stage rounds its part of a tied table's
            return False
        sums_differently = section.tensor_parallel_degree > 1 or training.reduce_dtype != "float32"
        other_pieces = training.micro_batch_size != self.truth.micro_batch_size
        return not (sums_differently or other_pieces or self.config.compile.enable)

    def validate(self) -> float:
        """The validation loss, compared; no training sample may go into it."""
        loss = super().validate()
        key = Key(self.step, record.VALIDATION)
        if key in self.truth.facts:
            self.compared.scalar(key, loss)
        return loss

    def _compare_parameters(self, step: int, row: str) -> None:
        for name, parameter in self.model.named_parameters():
            if (key := Key(step, row, name)) in self.truth.sizes:
                self.compared.tensor(key, *local_part(parameter))

    def compare_initial_weights(self) -> None:
        """Every element must be the reference's."""
        for name, parameter in self.model.named_parameters():
            local, offset = local_part(parameter)
            key = Key(0, record.INITIAL, name)
            if key not in self.truth.sizes:
                self.seen.wrong(key, "the reference has no such parameter")
                continue
            differ = int((local.double().cpu() != self.compared.part(key, offset, local.shape)).sum())
            self.seen.wrong(key, f"{differ} of {local.numel()} elements differ" if differ else None)

    def note_copies(self, step: int) -> None:
        """Digests of what is held here, for comparison with processes that hold the same."""
        for name, parameter in self.model.named_parameters():
            local, offset = local_part(parameter)
            self._note(Key(step, record.REPLICAS, f"{name} {list(offset)} {list(local.shape)}"), local)

    def _note(self, key: Key, tensor: torch.Tensor) -> None:
        known = self.seen.digests.setdefault(key, digest(tensor))
        if known != digest(tensor):  # a tied table that is held twice
            self.seen.wrong(key, "two copies on one process differ")

    def compare_large_logits(self) -> None:
        """One more step, without its update, with logits that only a stable softmax can take."""
        for stage in self.model.stages:
            if stage.module.is_last:
                for parameter in stage.module.norm.parameters():
                    local_part(parameter)[0].mul_(LARGE)
        data = self._load_data()
        self.train_step(data)
        data.close()


def observe_training(trainer: ObservedTrainer, small: Small) -> None:
    """Everything that is compared in one run from its start."""
    trainer.compare_initial_weights()
    trainer.note_copies(0)
    if dist.get_rank() == 0 and trainer.kind == EXACT:
        problem = wrong_learning_rate(small.original)
        trainer.seen.wrong(Key(0, record.SCHEDULE), problem)
    trainer.train()
    trainer.note_copies(num_steps(small.steps))
    section = trainer.config.evaluation.model_copy(update={"steps": 2})
    trainer.config = trainer.config.model_copy(update={"evaluation": section})
    loss = Trainer.validate(trainer)
    trainer.compared.scalar(Key(num_steps(small.steps), record.WHOLE_VALIDATION), loss)
    if trainer.kind == EXACT:
        trainer.compare_large_logits()


def in_type(config: JobConfig, dtype: str) -> JobConfig:
    """The configuration in another type."""
    return edit(config, {"training.dtype": dtype, **({} if dtype in HALF else {"training.reduce_dtype": "float32"})})


def prepare_run(place: Member, small: Small, config: JobConfig, truth: Truth, folder: Path) -> Run:
    """A run on the verification's own data."""
    config = edit(config, {"job.dump_folder": str(folder), "training.max_norm": truth.max_norm})
    train = training_samples(small.config, truth.micro_batch_size, truth.data_parallel)
    folder.mkdir(parents=True, exist_ok=True)
    return Run(
        config=config,
        model=model_config(config.model),
        layout=resolve_layout(config.parallelism, place.world_size),
        total_steps=total_steps(config.training),
        device=torch.device(place.device),
        datasets={
            "train": cast(Source, train),
            "validation": cast(Source, validation_samples(small.config)),
        },
        checkpoint_folder=folder / "checkpoint",
    )


def wrong_learning_rate(config: JobConfig) -> str | None:
    """Where the schedule of the run that is asked for, in its full length, is not the reference's."""
    training, total = config.training, total_steps(config.training)
    if training.batch_size_rampup is None:
        samples = training.samples or (training.tokens or 0) // training.seq_len
        wanted_total = training.steps or samples // training.global_batch_size
        if total != wanted_total:
            return f"the run has {total} steps, not {wanted_total}"
    for number in range(_SCHEDULE_POINTS):
        step = 1 + number * (total - 1) // (_SCHEDULE_POINTS - 1)
        wanted = learning_rate(config, step, total)
        found = config.optimizer.lr * lr_factor(config.lr_scheduler, step, total)
        if not math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-12 * config.optimizer.lr):
            return f"in step {step} of {total} it is {found:.6g}, not {wanted:.6g}"
    return None


def digest(tensor: torch.Tensor) -> str:
    """Equal for tensors that are equal to the bit."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu().contiguous()
    return hashlib.blake2b(local.flatten().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
