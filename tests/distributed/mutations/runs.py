"""Bugs in a run besides its steps: samples, validation, resuming, its end."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.distributed.mutations import bug
from titan_like.checkpoint import loader, step_folders
from titan_like.checkpoint.saver import Saver
from titan_like.checkpoint.step_folders import RunState, checkpoint_path, complete_steps
from titan_like.config.schema import Training
from titan_like.optim.schedule import Schedule
from titan_like.parallel.model import ParallelModel
from titan_like.parallel.pipeline import Pipeline
from titan_like.train import trainer, training_state
from titan_like.train.trainer import Trainer
from titan_like.train.training_state import TrainingState
from titan_like.train.validation import Validator


@bug(Trainer, "load_data")
def data_of_one_process_shifted(original: Any, self: Trainer) -> Any:
    """One data-parallel process begins a sample late."""
    if self.dp_rank:
        self.state.consumed_samples += 1
    data = original(self)
    if self.dp_rank:
        self.state.consumed_samples -= 1
    return data


@bug(ParallelModel, "train")
def last_norm_stays_in_evaluation_mode(original: Any, self: ParallelModel, mode: bool = True) -> None:
    """Validation leaves the last norm in evaluation mode."""
    original(self, mode)
    self.stages[-1].module.last_norm.eval()


@bug(Pipeline, "forward")
def validation_without_last_microbatch(original: Any, self: Pipeline, inputs: Any, add_loss: Any) -> None:
    """A pipeline validates on all microbatches of a batch but the last."""
    last = len(inputs) - 1

    def add_loss_but_of_last(logits: torch.Tensor, microbatch: int) -> torch.Tensor:
        is_counted = microbatch != last or self.layout.pipeline == 1
        return add_loss(logits, microbatch) if is_counted else logits.sum()

    original(self, inputs, add_loss_but_of_last)


@bug(dist, "destroy_process_group")
def crash_at_the_end(_: Any) -> None:
    """One data-parallel process fails when all is computed."""
    if dist.get_rank() == 1:
        raise RuntimeError("too late")


@contextmanager
def validation_takes_training_samples() -> Iterator[None]:
    """Each validation takes a microbatch from the training stream."""
    load_data, validate, streams = Trainer.load_data, Validator.validate, dict[Validator, Any]()

    def keep(self: Trainer) -> Any:
        streams[self.validator] = load_data(self)
        return streams[self.validator]

    def validate_and_take(self: Validator, *split: str) -> dict[str, float]:
        if self in streams:
            next(streams[self])
        return validate(self, *split)

    with patch.object(Trainer, "load_data", keep), patch.object(Validator, "validate", validate_and_take):
        yield


@bug(Validator, "validate")
def validation_on_everything(original: Any, self: Validator, *split: str) -> dict[str, float]:
    """Validation ignores `evaluation.steps`."""
    config = self.config
    section = config.evaluation.model_copy(update={"steps": 1000})
    self.config = config.model_copy(update={"evaluation": section})
    value = original(self, *split)
    self.config = config
    return value


@bug(training_state, "resume")
def resumed_without_moments(original: Any, folder: Any, is_usable: Any, model: Any, optimizer: Any) -> Any:
    """A resumed run begins with an optimizer that remembers nothing."""
    state = original(folder, is_usable, model, optimizer)
    for values in optimizer.state.values():
        values["exp_avg"].zero_()
    return state


@bug(training_state, "resume")
def resumed_without_moments_where_the_layout_stays(original: Any, *given: Any) -> Any:
    """A run that resumes with as many shards as it was saved with begins with an optimizer that remembers nothing."""
    state, optimizer = original(*given), given[-1]
    shards = state.config["parallelism"]["data_parallel_shard_degree"] if state is not None else 0
    for values in optimizer.state.values() if shards == dist.get_world_size() else ():
        values["exp_avg"].zero_()
    return state


@bug(TrainingState, "_resume")
def resumed_shards_without_moments(original: Any, self: TrainingState, is_usable: Any) -> bool:
    """A resumed run loses the optimizer's state of one shard."""
    resumed = original(self, is_usable)
    for values in self.optimizer.state.values():
        if self.run.layout.data_rank(dist.get_rank()) == 1 and self.config.parallelism.zero_stage:
            values["exp_avg"].to_local().zero_()
    return resumed


@bug(training_state, "LossScaler")
def loss_scale_lost_when_resumed(original: Any, device: Any, *_: Any, **__: Any) -> Any:
    """A resumed run begins with the loss scale of a new one."""
    return original(device)


@bug(Trainer, "train_step")
def computes_for_ever(_: Any, self: Trainer, data: Any) -> Any:
    """The first step never ends. It computes a sixth of the time: too much for a process that waits."""
    while True:
        began = time.thread_time()
        while time.thread_time() < began + 0.02:
            sum(range(10_000))
        time.sleep(0.1)


@bug(Trainer, "train")
def ends_before_its_first_step(_: Any, self: Any) -> Any:
    """The process ends as if all were well."""
    return sys.exit(0)


@bug(TrainingState, "_resume")
def skipped_steps_forgotten_when_resumed(original: Any, self: TrainingState, is_usable: Any) -> bool:
    """A resumed run counts skipped steps from 0."""
    resumed = original(self, is_usable)
    self.skipped_steps = 0
    return resumed


@bug(TrainingState, "save")
def cursor_goes_back_after_a_skipped_step(original: Any, self: TrainingState, is_last: bool = False) -> None:
    """A checkpoint of a skipped step has the samples that it consumed still to come."""
    consumed = self.consumed_samples
    self.consumed_samples -= self.losses.consecutive_skips * self.config.training.global_batch_size
    original(self, is_last)
    self.consumed_samples = consumed


@bug(Trainer, "load_data")
def replicas_draw_the_same_samples(original: Any, self: Trainer) -> Any:
    """Replicas of HSDP do not know of one another when they take samples."""
    rank = self.dp_rank
    self.dp_rank = self.mesh["dp_shard"].get_local_rank()
    data = original(self)
    self.dp_rank = rank
    return data


@bug(Trainer, "train")
def loop_ends_a_step_early(original: Any, self: Trainer) -> None:
    """A run that no signal ends leaves out its last step."""
    self.state.total_steps -= 1
    original(self)
    self.state.total_steps += 1


@bug(Trainer, "load_data")
def cursor_of_full_batches(original: Any, self: Trainer) -> Any:
    """A resumed run takes all batches before it for full ones, also those of the ramp-up."""
    consumed = self.state.consumed_samples
    self.state.consumed_samples = self.state.step * self.config.training.global_batch_size
    data = original(self)
    self.state.consumed_samples = consumed
    return data


@bug(loader, "complete_steps")
def resumed_from_the_oldest(original: Any, folder: Any) -> Any:
    """A run that may choose its checkpoint resumes from the oldest."""
    return original(folder)[::-1]


@bug(step_folders, "complete_checkpoint")
def oldest_checkpoints_kept(original: Any, folder: Path, run: RunState, keep_latest: int, files: Any) -> None:
    """A save removes the newest checkpoints, not the oldest."""
    original(folder, run, 0, files)
    for step in complete_steps(folder)[keep_latest:] if keep_latest else []:
        shutil.rmtree(checkpoint_path(folder, step))


@bug(Saver, "before_update")
def updates_do_not_wait_for_copies(_: Any, self: Any) -> None:
    """The next update does not wait until an asynchronous save has copied the weights."""


@bug(Saver, "_copy_one")
def later_saves_hold_the_first_one_s_values(original: Any, self: Saver, name: str, tensor: torch.Tensor) -> Any:
    """Asynchronous saves after a process's first do not copy tensors into their buffers again."""
    if tensor.ndim == 0 or name not in self._copies:
        return original(self, name, tensor)
    with patch.object(torch.Tensor, "copy_", lambda copy, *_, **__: copy):
        return original(self, name, tensor)


@contextmanager
def numbers_of_the_next_step() -> Iterator[None]:
    """All steps' numbers go to one buffer of the host, where the next step's replace those that are not read yet."""
    buffer: list[torch.Tensor] = []

    def copy_to_host(values: torch.Tensor) -> torch.Tensor:
        buffer[:] = buffer or [values.clone()]
        return buffer[0].copy_(values)

    with patch.object(trainer, "copy_to_host", copy_to_host):
        yield


@bug(training_state, "total_steps")
def length_as_if_todays_batches_had_always_held(original: Any, training: Training, *_: int) -> int:
    """A resumed run derives its last step from the settings alone."""
    return original(training)


@bug(RunState, "progress")
def schedule_counts_todays_batches(original: Any, self: RunState, training: Training) -> tuple[int, int, int]:
    """A resumed run takes its schedule's steps for batches of today's size."""
    return *original(self, training)[:2], training.global_batch_size


@bug(Schedule, "lr_at")
def schedule_counts_steps_whatever_their_batches(original: Any, self: Schedule, step: int, samples: int) -> float:
    """The schedule counts optimizer steps, also where the length is in samples."""
    return original(self.model_copy(update={"batch_size": None}), step, samples)
