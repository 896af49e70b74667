"""The training loop."""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from itertools import islice

import torch
import torch.distributed as dist

from titan_like.checkpoint.loader import resume
from titan_like.checkpoint.saver import SaveError, Saver
from titan_like.checkpoint.step_folders import RunState
from titan_like.checkpoint.tensor_names import model_tensors, optimizer_tensors, rng_tensors
from titan_like.config.errors import RunError
from titan_like.data.batch_size import global_batch_size_at
from titan_like.data.loader import BackgroundLoader, GlobalSampler
from titan_like.data.source import IGNORED_LABEL
from titan_like.metrics.console import Console, format_log_line
from titan_like.metrics.hardware import device_name, peak_memory_bytes, peak_tflops
from titan_like.metrics.profiling import StepProfiler
from titan_like.metrics.record import StepRecord
from titan_like.metrics.throughput import ThroughputMeter
from titan_like.metrics.writers import Writer, build_writers
from titan_like.optim.grad_norm import count_zeros, global_grad_norm, local_gradients
from titan_like.optim.loss_scaler import LossScaler
from titan_like.optim.optimizer import build_optimizer
from titan_like.optim.schedule import lr_factor
from titan_like.parallel.apply import build_pipeline
from titan_like.parallel.mesh import build_mesh, data_parallel_mesh
from titan_like.parallel.tensor import sum_partial_gradients
from titan_like.parallel.tied import sum_table_gradients
from titan_like.torch_private import multiply_all_
from titan_like.train.health import LossWatch
from titan_like.train.initial_weights import load_initial_weights
from titan_like.train.loss import summed_cross_entropy
from titan_like.train.random_streams import dropout_stream, seed_everything
from titan_like.train.setup import Run
from titan_like.train.signals import StopSignals

_MOST_REWINDS = 3  # to one checkpoint

Remark = Callable[[StepRecord], str | None]


class Trainer:
    """Trains one model on this process's part of the data. Needs a process group (see `titan_like.train.job`)."""

    def __init__(self, run: Run, remark: Remark | None = None) -> None:
        """``remark`` is told of every step, and what it says is printed."""
        self.run = run
        self.config = config = run.config
        self.mesh = mesh = build_mesh(run.layout, run.device.type)
        dp_mesh = data_parallel_mesh(mesh)
        self.dp_group, self.dp_rank, self.dp_size = dp_mesh.get_group(), dp_mesh.get_local_rank(), dp_mesh.size()

        seed_everything(config.job.seed, dropout_stream(mesh, config.parallelism), config.job.deterministic)
        self.pipeline = build_pipeline(config, run.model, mesh, run.device)
        self.model = self.pipeline.model
        self.loss_dtype = torch.promote_types(getattr(torch, config.training.dtype), torch.float32)
        self.optimizer = build_optimizer(self.model.parameters(), config.optimizer)
        self.scaler = LossScaler() if config.training.dtype == "float16" else LossScaler(scale=1.0)
        self.step = self.consumed_samples = self.consumed_tokens = self.skipped_steps = 0
        self.losses = LossWatch(config.health)
        self.signals = StopSignals()  # not handled unless someone does
        self.stop_signal = 0  # that any rank had received when it came to the end of the last step
        self.rewinds: Counter[int] = Counter()  # to each step
        self.saver = Saver(run.checkpoint_folder, config.checkpoint.keep_latest, config.checkpoint.async_)
        self.saved_steps: set[int] = set()  # by this process, after it began
        self.save_is_due = False
        is_new = not (config.checkpoint.enable and self._resume(self._is_wanted))
        if is_new and config.checkpoint.initial_load_path is not None:
            load_initial_weights(config.checkpoint.initial_load_path, self.model)
        self.start_step = self.step

        is_writer = dist.get_rank() == 0
        self.console = Console(is_writer, run.total_steps)
        self.console.print(f" {describe_run(run)}")
        self.profiler = StepProfiler(config, mesh, self.pipeline, run.device, self.console.print)
        self.writers: list[Writer] = build_writers(config, self.step) if is_writer else []
        self.remark = remark
        peak_name = config.cluster.gpu or device_name(run.device)
        peak = peak_tflops(peak_name, config.training.dtype)
        self.meter = ThroughputMeter(
            run.model, config.training.seq_len, config.activation_checkpoint, dist.get_world_size(), peak
        )

    def train(self) -> None:
        """Run to the last step, or until a signal asks to stop, logging, validating and saving on the way."""
        config, total = self.config, self.run.total_steps
        data = self._load_data()
        unlogged: list[StepRecord] = []
        if self.step >= total:
            self.console.print(f" nothing to train: the checkpoint is at step {self.step} of {total}")
        try:
            while self.step < total and not self.stop_signal:
                self.profiler.begin(self.step + 1)
                record = self.train_step(data)
                self.signals.can_save = True
                self.profiler.end(record)
                was_skipped = bool(record.skipped or record.nan or record.spike)
                if record.spike and config.health.loss_spike_action == "rewind" and self._rewind(record):
                    self.losses.add(record.step, record.loss, was_skipped)
                    data.close()
                    data = self._load_data()
                    unlogged.clear()
                    continue
                unlogged.append(record)
                is_last = self.step == total
                if config.evaluation.interval and (self.step % config.evaluation.interval == 0 or is_last):
                    record.validation_loss = self.validate()
                    self.console.print(
                        f" validation at iteration {self.step} | lm loss: {record.validation_loss:.6E} |"
                    )
                for writer in self.writers:
                    writer.write(record)
                self.losses.add(record.step, record.loss, was_skipped)
                self.console.add(record)
                is_last = is_last or self.stop_signal > 0
                if self._logs(self.step) or is_last:
                    seconds_left = self.console.seconds_left()
                    self.console.print(format_log_line(unlogged, total, config.training.seq_len, seconds_left))
                    unlogged.clear()
                remark = self.remark(record) if self.remark is not None else None
                if remark is not None:
                    self.console.print(remark)
                self.save_is_due = self.save_is_due or self.step % config.checkpoint.interval == 0
                # Without an update there is nothing new, and the weights may be ruined: good checkpoints stay.
                is_good = self.losses.consecutive_skips == 0
                if config.checkpoint.enable and (is_last or (self.save_is_due and is_good)):
                    self.save(is_last)
                    self.save_is_due = False
            if self.stop_signal and self.step < total:
                self.console.print(f" stopped by {signal.Signals(self.stop_signal).name} after step {self.step}")
        except RunError:  # raised by all ranks alike
            with suppress(SaveError):
                self.saver.finish()
            raise
        finally:
            data.close()
            self.console.close()
            for writer in self.writers:
                writer.close()

    def train_step(self, data: Iterator[torch.Tensor]) -> StepRecord:
        """One optimizer step over one global batch."""
        config, device = self.config, self.run.device
        started = time.perf_counter()
        batch_size = global_batch_size_at(config.training, self.consumed_samples)
        num_microbatches = batch_size // (config.training.micro_batch_size * self.dp_size)
        batches = [batch.to(device, non_blocking=True) for batch in islice(data, num_microbatches)]
        data_time = time.perf_counter() - started

        # The loss is the mean over the valid tokens of the global batch: count them first, divide once.
        num_tokens = torch.stack([(batch[:, 1] != IGNORED_LABEL).sum() for batch in batches]).sum()
        if self.dp_size > 1:
            dist.all_reduce(num_tokens, group=self.dp_group)

        loss = torch.zeros((), device=device, dtype=self.loss_dtype)

        def scaled_loss(logits: torch.Tensor, microbatch: int) -> torch.Tensor:
            micro_loss = summed_cross_entropy(logits, batches[microbatch][:, 1]) / num_tokens
            loss.add_(micro_loss.detach())
            return micro_loss * self.scaler.scale

        self.pipeline.forward_backward([batch[:, 0] for batch in batches], scaled_loss)
        self._complete_gradients()
        self.profiler.mark("gradient reduction")
        self._sum_over_samples(loss)

        grad_norm = global_grad_norm(self.model.counted_parameters(), self.mesh) / self.scaler.scale
        logs = self._logs(self.step + 1) or self.step + 1 == self.run.total_steps
        num_zeros = count_zeros(self.model.counted_parameters(), self.mesh).item() if logs else None
        # What single ranks notice becomes known to all of them in the same step.
        noticed = torch.tensor([self.signals.received, self.saver.is_writing], device=device, dtype=self.loss_dtype)
        dist.all_reduce(noticed, op=dist.ReduceOp.MAX)
        loss_value, norm_value, stop, is_writing = torch.cat((torch.stack((loss, grad_norm)), noticed)).tolist()
        self.profiler.mark("gradient norm")

        lr = config.optimizer.lr * lr_factor(config.lr_scheduler, self.step + 1, self.run.total_steps)
        loss_scale = self.scaler.scale
        finite, spike = math.isfinite(norm_value), self.losses.is_spike(loss_value)
        if finite and not spike:
            self.saver.before_update()
            self._update(norm_value, lr)
        self.optimizer.zero_grad(set_to_none=True)
        self.profiler.mark("optimizer")
        scales_loss = config.training.dtype == "float16"
        if scales_loss:
            self.scaler.update(overflowed=not finite)
        overflowed = scales_loss and not finite and math.isfinite(loss_value)

        self.step += 1
        self.skipped_steps += not finite or spike
        self.consumed_samples += batch_size
        self.consumed_tokens += batch_size * config.training.seq_len
        seconds = time.perf_counter() - started
        if not finite and not overflowed and not config.health.skip_nonfinite:
            problem = f"the loss of step {self.step} is {loss_value:.6g} and its gradient norm {norm_value:.6g}"
            raise RunError(f"{problem}; lower optimizer.lr, or set health.skip_nonfinite to go on without such steps")
        self.stop_signal = int(stop)
        if not is_writing:
            self.finish_save()
        return StepRecord(
            step=self.step,
            loss=loss_value,
            grad_norm=norm_value,
            lr=lr,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            global_batch_size=batch_size,
            step_time_s=seconds,
            data_time_s=data_time,
            throughput=self.meter.measure(batch_size * config.training.seq_len, seconds),
            peak_memory_bytes=peak_memory_bytes(device),
            skipped=int(overflowed),
            nan=int(not finite and not overflowed),
            spike=int(spike) if config.health.loss_spike_factor else None,
            num_zeros=num_zeros,
            loss_scale=loss_scale if scales_loss else None,
        )

    def _update(self, grad_norm: float, lr: float) -> None:
        """Unscale and clip the gradients, then step the optimizer."""
        max_norm = self.config.training.max_norm
        clip = min(1.0, max_norm / (grad_norm + 1e-6)) if max_norm else 1.0
        factor = clip / self.scaler.scale
        if factor != 1.0:
            multiply_all_(local_gradients(self.model.parameters()), factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss in nats per token over the first `evaluation.steps` global batches of the validation split."""
        config = self.config
        dataset = self.run.datasets["validation"]
        unit = config.training.micro_batch_size * self.dp_size
        wanted = min(len(dataset), config.evaluation.steps * config.training.global_batch_size)
        sampler = GlobalSampler(
            0, config.training.micro_batch_size, self.dp_rank, self.dp_size, last_sample=-(-wanted // unit) * unit
        )
        data = BackgroundLoader(dataset, sampler, config.data.num_workers, self.run.device)
        total = torch.zeros(2, device=self.run.device, dtype=self.loss_dtype)  # summed loss, valid tokens
        self.model.train(False)
        microbatches = config.training.global_batch_size // unit
        while batches := [batch.to(self.run.device, non_blocking=True) for batch in islice(data, microbatches)]:

            def add_loss(logits: torch.Tensor, microbatch: int, batches: list[torch.Tensor] = batches) -> torch.Tensor:
                labels = batches[microbatch][:, 1]
                total[0] += summed_cross_entropy(logits, labels)
                total[1] += (labels != IGNORED_LABEL).sum()
                return total[0]

            self.pipeline.forward([batch[:, 0] for batch in batches], add_loss)
        data.close()
        self.model.train()
        self.model.free_gathered_parameters()
        self._sum_over_samples(total)
        return (total[0] / total[1]).item()

    def save(self, is_last: bool = False) -> None:
        """Write a checkpoint of this moment; with `checkpoint.async` only begin to, unless it is the last."""
        self.finish_save()
        state = RunState(
            step=self.step,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            skipped_steps=self.skipped_steps,
            loss_scale=self.scaler.scale,
            loss_scale_good_steps=self.scaler.good_steps,
            model=self.run.model.model_dump(mode="json"),
            config=self.config.model_dump(mode="json"),
            recent_losses=list(self.losses.recent),
            consecutive_skips=self.losses.consecutive_skips,
            data=self.run.datasets["train"].fingerprint,
            versions={name: version(name) for name in ("torch", "safetensors")},
        )
        tensors = model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer) | rng_tensors()
        self.saver.save(tensors, state)
        if is_last or not self.config.checkpoint.async_:
            self.finish_save(is_last)

    def finish_save(self, is_last: bool = False) -> None:
        """Wait for the save under way, if there is one, and say how it went.

        Raises:
            RunError: it failed, and the configuration or its being the last says to stop.
        """
        try:
            path = self.saver.finish()
        except SaveError as error:
            if is_last or self.config.checkpoint.on_failure == "stop":
                raise RunError(str(error)) from error
            self.console.print(f" {error}; training goes on")
            return
        if path is not None:
            self.saved_steps.add(int(path.name.removeprefix("step-")))
            self.console.print(f" saved {path}")

    def _is_wanted(self, step: int) -> bool:
        """Whether the run may begin at a checkpoint."""
        return self.config.checkpoint.load_step in (None, step)

    def _is_of_this_run(self, step: int) -> bool:
        """Whether a checkpoint is in this run's past, and not of a branch that `checkpoint.load_step` left."""
        return step <= self.start_step or step in self.saved_steps

    def _resume(self, is_usable: Callable[[int], bool]) -> bool:
        """Go on from the newest usable checkpoint that loads. Whether there was one."""
        state = resume(self.run.checkpoint_folder, is_usable, self.model, self.optimizer)
        if state is None:
            return False
        if state.data and state.data != self.run.datasets["train"].fingerprint:
            problem = f"the checkpoint of step {state.step} in {self.run.checkpoint_folder} was trained on other data"
            raise RunError(f"{problem} than [data] now gives; restore it, or set checkpoint.folder to a new one")
        self.step, self.consumed_samples = state.step, state.consumed_samples
        self.consumed_tokens, self.skipped_steps = state.consumed_tokens, state.skipped_steps
        self.scaler.scale, self.scaler.good_steps = state.loss_scale, state.loss_scale_good_steps
        self.losses = LossWatch(self.config.health, state.recent_losses, state.consecutive_skips)
        return True

    def _rewind(self, record: StepRecord) -> bool:
        """Go back to the newest checkpoint, and on with the samples after those of a bad step (as in arXiv 2204.02311).

        False where there is none: then only the step's update is left out.

        Raises:
            RunError: it has been tried too often.
        """
        self.finish_save()
        consumed, skips = (self.consumed_samples, self.consumed_tokens), self.losses.consecutive_skips
        if not self._resume(self._is_of_this_run):
            return False
        self.rewinds[self.step] += 1
        if self.rewinds[self.step] > _MOST_REWINDS:
            problem = f"went back to step {self.step} {_MOST_REWINDS} times, and the loss spikes again"
            raise RunError(f"{problem} ({record.loss:.6g} in step {record.step}); lower optimizer.lr")
        left_out = range(self.consumed_samples, consumed[0])
        (self.consumed_samples, self.consumed_tokens), self.losses.consecutive_skips = consumed, skips
        for writer in self.writers:
            writer.close()
        self.writers = build_writers(self.config, self.step) if self.writers else []
        self.console.print(
            f" the loss of step {record.step} is a spike ({record.loss:.6g}): went back to step {self.step}, and on "
            f"without the samples {left_out.start} to {left_out.stop - 1}"
        )
        return True

    def _load_data(self) -> BackgroundLoader:
        config = self.config
        sampler = GlobalSampler(self.consumed_samples, config.training.micro_batch_size, self.dp_rank, self.dp_size)
        return BackgroundLoader(self.run.datasets["train"], sampler, config.data.num_workers, self.run.device)

    def _sum_over_samples(self, value: torch.Tensor) -> None:
        """Sum in place over the processes that see different samples; those of the last stage have the values."""
        if self.dp_size > 1:
            dist.all_reduce(value, group=self.dp_group)
        if self.mesh["pp"].size() > 1:
            dist.all_reduce(value, group=self.mesh["pp"].get_group())

    def _complete_gradients(self) -> None:
        """Sum what the backward passes left on several processes, besides what data parallelism sums."""
        for stage in self.model.stages:
            sum_partial_gradients(stage.module)
        ranks = self.pipeline.shape.ranks
        sum_table_gradients(self.model, self.mesh["pp"].get_group(), ranks[0], ranks[-1])

    def _logs(self, step: int) -> bool:
        return step % self.config.metrics.log_interval == 0


def describe_run(run: Run) -> str:
    """What is about to be trained, on how many processes, in one line."""
    processes = f"{run.layout.num_processes} process{'es' if run.layout.num_processes > 1 else ''} on {run.device.type}"
    return (
        f"{run.config.model.family} {run.config.model.flavor}: {run.model.num_parameters():,} parameters, "
        f"{run.config.training.dtype}, {processes} ({run.layout.described()})"
    )
