"""Bugs in a run besides its steps: samples, validation, resuming, its end."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from titan_like.checkpoint import loader, saver
from titan_like.checkpoint.saver import Saver
from titan_like.checkpoint.step_folders import RunState, checkpoint_path, complete_steps
from titan_like.parallel.pipeline import Pipeline
from titan_like.train import training_state
from titan_like.train.trainer import Trainer


@contextmanager
def data_of_one_process_shifted() -> Iterator[None]:
    """One data-parallel process begins a sample late."""
    original = Trainer._load_data

    def load_data(self: Trainer) -> Any:
        if self.dp_rank:
            self.consumed_samples += 1
        data = original(self)
        if self.dp_rank:
            self.consumed_samples -= 1
        return data

    with patch.object(Trainer, "_load_data", load_data):
        yield


@contextmanager
def validation_without_last_microbatch() -> Iterator[None]:
    """A pipeline validates on all microbatches of a batch but the last."""
    original = Pipeline.forward

    def forward(self: Pipeline, inputs: list[torch.Tensor], add_loss: Any) -> None:
        last = len(inputs) - 1

        def add_loss_but_of_last(logits: torch.Tensor, microbatch: int) -> torch.Tensor:
            is_counted = microbatch != last or self.shape.degree == 1
            return add_loss(logits, microbatch) if is_counted else logits.sum()

        original(self, inputs, add_loss_but_of_last)

    with patch.object(Pipeline, "forward", forward):
        yield


@contextmanager
def crash_at_the_end() -> Iterator[None]:
    """One data-parallel process fails when all is computed."""

    def destroy() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("too late")

    with patch.object(dist, "destroy_process_group", destroy):
        yield


@contextmanager
def validation_takes_training_samples() -> Iterator[None]:
    """Each validation takes a microbatch from the training stream."""
    load_data, validate = Trainer._load_data, Trainer.validate

    def keep(self: Trainer) -> Any:
        self.stream = load_data(self)  # type: ignore[attr-defined]
        return self.stream  # type: ignore[attr-defined]

    def validate_and_take(self: Trainer) -> float:
        if hasattr(self, "stream"):
            next(self.stream)
        return validate(self)

    with patch.object(Trainer, "_load_data", keep), patch.object(Trainer, "validate", validate_and_take):
        yield


@contextmanager
def validation_on_everything() -> Iterator[None]:
    """Validation ignores `evaluation.steps`."""
    original = Trainer.validate

    def validate(self: Trainer) -> float:
        config = self.config
        section = config.evaluation.model_copy(update={"steps": 1000})
        self.config = config.model_copy(update={"evaluation": section})
        value = original(self)
        self.config = config
        return value

    with patch.object(Trainer, "validate", validate):
        yield


@contextmanager
def resumed_without_moments() -> Iterator[None]:
    """A resumed run begins with an optimizer that remembers nothing."""
    original = training_state.resume

    def resume(folder: Any, is_usable: Any, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        state = original(folder, is_usable, model, optimizer)
        for values in optimizer.state.values():
            values["exp_avg"].zero_()
        return state

    with patch.object(training_state, "resume", resume):
        yield


@contextmanager
def resumed_without_moments_where_the_layout_stays() -> Iterator[None]:
    """A run that resumes with as many shards as it was saved with begins with an optimizer that remembers nothing."""
    original = training_state.resume

    def resume(folder: Any, is_usable: Any, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        state = original(folder, is_usable, model, optimizer)
        shards = state.config["parallelism"]["data_parallel_shard_degree"] if state is not None else 0
        for values in optimizer.state.values() if shards == dist.get_world_size() else ():
            values["exp_avg"].zero_()
        return state

    with patch.object(training_state, "resume", resume):
        yield


@contextmanager
def resumed_shards_without_moments() -> Iterator[None]:
    """A resumed run loses the optimizer's state of one shard."""
    original = Trainer._resume

    def resume(self: Trainer, is_usable: Any) -> bool:
        resumed = original(self, is_usable)
        for values in self.optimizer.state.values():
            if self.dp_rank == 1 and self.config.parallelism.zero_stage:
                values["exp_avg"].to_local().zero_()
        return resumed

    with patch.object(Trainer, "_resume", resume):
        yield


@contextmanager
def loss_scale_lost_when_resumed() -> Iterator[None]:
    """A resumed run begins with the loss scale of a new one."""
    original = training_state.LossScaler
    with patch.object(training_state, "LossScaler", lambda device, *_, **__: original(device)):
        yield


@contextmanager
def computes_for_ever() -> Iterator[None]:
    """The first step never ends. It computes a sixth of the time: too much for a process that waits."""

    def train_step(self: Trainer, data: Any) -> Any:
        while True:
            began = time.thread_time()
            while time.thread_time() < began + 0.02:
                sum(range(10_000))
            time.sleep(0.1)

    with patch.object(Trainer, "train_step", train_step):
        yield


@contextmanager
def ends_before_its_first_step() -> Iterator[None]:
    """The process ends as if all were well."""
    with patch.object(Trainer, "train", lambda self: sys.exit(0)):
        yield


@contextmanager
def skipped_steps_forgotten_when_resumed() -> Iterator[None]:
    """A resumed run counts skipped steps from 0."""
    original = Trainer._resume

    def resume(self: Trainer, is_usable: Any) -> bool:
        resumed = original(self, is_usable)
        self.skipped_steps = 0
        return resumed

    with patch.object(Trainer, "_resume", resume):
        yield


@contextmanager
def cursor_goes_back_after_a_skipped_step() -> Iterator[None]:
    """A checkpoint of a skipped step has the samples that it consumed still to come."""
    original = Trainer.save

    def save(self: Trainer, is_last: bool = False) -> None:
        consumed = self.consumed_samples
        self.consumed_samples -= self.losses.consecutive_skips * self.config.training.global_batch_size
        original(self, is_last)
        self.consumed_samples = consumed

    with patch.object(Trainer, "save", save):
        yield


@contextmanager
def replicas_draw_the_same_samples() -> Iterator[None]:
    """Replicas of HSDP do not know of one another when they take samples."""
    original = Trainer._load_data

    def load_data(self: Trainer) -> Any:
        rank = self.dp_rank
        self.dp_rank = self.mesh["dp_shard"].get_local_rank()
        data = original(self)
        self.dp_rank = rank
        return data

    with patch.object(Trainer, "_load_data", load_data):
        yield


@contextmanager
def loop_ends_a_step_early() -> Iterator[None]:
    """A run that no signal ends leaves out its last step."""
    original = Trainer.train

    def train(self: Trainer) -> None:
        run, self.run = self.run, replace(self.run)
        vars(self.run)["total_steps"] = run.total_steps - 1
        original(self)
        self.run = run

    with patch.object(Trainer, "train", train):
        yield


@contextmanager
def cursor_of_full_batches() -> Iterator[None]:
    """A resumed run takes all batches before it for full ones, also those of the ramp-up."""
    original = Trainer._load_data

    def load_data(self: Trainer) -> Any:
        consumed, self.consumed_samples = self.consumed_samples, self.step * self.config.training.global_batch_size
        data = original(self)
        self.consumed_samples = consumed
        return data

    with patch.object(Trainer, "_load_data", load_data):
        yield


@contextmanager
def resumed_from_the_oldest() -> Iterator[None]:
    """A run that may choose its checkpoint resumes from the oldest."""
    original = loader.complete_steps
    with patch.object(loader, "complete_steps", lambda folder: original(folder)[::-1]):
        yield


@contextmanager
def oldest_checkpoints_kept() -> Iterator[None]:
    """A save removes the newest checkpoints, not the oldest."""
    original = saver.complete_checkpoint

    def complete_checkpoint(folder: Path, run: RunState, keep_latest: int) -> None:
        original(folder, run, 0)
        for step in complete_steps(folder)[keep_latest:] if keep_latest else []:
            shutil.rmtree(checkpoint_path(folder, step))

    with patch.object(saver, "complete_checkpoint", complete_checkpoint):
        yield


@contextmanager
def updates_do_not_wait_for_copies() -> Iterator[None]:
    """The next update does not wait until an asynchronous save has copied the weights."""
    with patch.object(Saver, "before_update", lambda self: None):
        yield


@contextmanager
def later_saves_hold_the_first_one_s_values() -> Iterator[None]:
    """Asynchronous saves after a process's first do not copy tensors into their buffers again."""
    original = Saver._copy_one

    def copy_one(self: Saver, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 or name not in self._copies:
            return original(self, name, tensor)
        with patch.object(torch.Tensor, "copy_", lambda copy, *_, **__: copy):
            return original(self, name, tensor)

    with patch.object(Saver, "_copy_one", copy_one):
        yield
