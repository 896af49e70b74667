"""The training loop."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_like.checkpoint.manager import (
    RunState,
    checkpoint_path,
    complete_steps,
    load_checkpoint,
    save_checkpoint,
    sweep,
    unreadable,
)
from titan_like.config.errors import RunError
from titan_like.config.schema import Parallelism
from titan_like.data.loader import BackgroundLoader, GlobalSampler
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
from titan_like.train.batch_size import global_batch_size_at
from titan_like.train.loss import IGNORED_LABEL, summed_cross_entropy
from titan_like.train.setup import Run


class Trainer:
    """Trains one model on this process's part of the data. Needs a process group (see `process_group`)."""

    def __init__(self, run: Run) -> None:
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
        if config.checkpoint.enable:
            self._resume()
        self.start_step = self.step

        is_writer = dist.get_rank() == 0
        self.console = Console(is_writer, run.total_steps)
        self.console.print(f" {describe_run(run)}")
        self.profiler = StepProfiler(config, mesh, self.pipeline, run.device, self.console.print)
        self.writers: list[Writer] = build_writers(config, self.step) if is_writer else []
        peak_name = config.cluster.gpu or device_name(run.device)
        peak = peak_tflops(peak_name, config.training.dtype)
        self.meter = ThroughputMeter(
            run.model, config.training.seq_len, config.activation_checkpoint, dist.get_world_size(), peak
        )

    def train(self) -> None:
        """Run to the last step, logging, validating and saving on the way."""
        config, total = self.config, self.run.total_steps
        data = self._load_data()
        unlogged: list[StepRecord] = []
        if self.step >= total:
            self.console.print(f" nothing to train: the checkpoint is at step {self.step} of {total}")
        try:
            while self.step < total:
                self.profiler.begin(self.step + 1)
                record = self.train_step(data)
                self.profiler.end(record)
                unlogged.append(record)
                is_last = self.step == total
                if config.evaluation.interval and (self.step % config.evaluation.interval == 0 or is_last):
                    record.validation_loss = self.validate()
                    self.console.print(
                        f" validation at iteration {self.step} | lm loss: {record.validation_loss:.6E} |"
                    )
                for writer in self.writers:
                    writer.write(record)
                if self._logs(self.step) or is_last:
                    self.console.print(format_log_line(unlogged, total, config.training.seq_len))
                    unlogged.clear()
                self.console.advance_to(self.step)
                if config.checkpoint.enable and (self.step % config.checkpoint.interval == 0 or is_last):
                    path = self.save()
                    self.console.print(f" saved {path}")
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

        pipeline_group = self.mesh["pp"].get_group()
        grad_norm = global_grad_norm(self.model.counted_parameters(), pipeline_group) / self.scaler.scale
        logs = self._logs(self.step + 1) or self.step + 1 == self.run.total_steps
        num_zeros = count_zeros(self.model.counted_parameters(), pipeline_group).item() if logs else None
        loss_value, norm_value = torch.stack((loss, grad_norm)).tolist()
        self.profiler.mark("gradient norm")

        lr = config.optimizer.lr * lr_factor(
            config.lr_scheduler, self.step + 1 - self.skipped_steps, self.run.total_steps
        )
        loss_scale = self.scaler.scale
        finite = math.isfinite(norm_value)
        if finite:
            self._update(norm_value, lr)
        self.optimizer.zero_grad(set_to_none=True)
        self.profiler.mark("optimizer")
        scales_loss = config.training.dtype == "float16"
        if scales_loss:
            self.scaler.update(overflowed=not finite)
        overflowed = scales_loss and not finite and math.isfinite(loss_value)

        self.step += 1
        self.skipped_steps += not finite
        self.consumed_samples += batch_size
        self.consumed_tokens += batch_size * config.training.seq_len
        seconds = time.perf_counter() - started
        if not finite and not overflowed and not config.health.skip_nonfinite:
            problem = f"the loss of step {self.step} is {loss_value:.6g} and its gradient norm {norm_value:.6g}"
            raise RunError(f"{problem}; lower optimizer.lr, or set health.skip_nonfinite to go on without such steps")
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
            num_zeros=num_zeros,
            loss_scale=loss_scale if scales_loss else None,
        )

    def _update(self, grad_norm: float, lr: float) -> None:
        """Unscale and clip the gradients, then step the optimizer."""
        max_norm = self.config.training.max_norm
        clip = min(1.0, max_norm / (grad_norm + 1e-6)) if max_norm else 1.0
        factor = clip / self.scaler.scale
        if factor != 1.0:
            torch._foreach_mul_(local_gradients(self.model.parameters()), factor)
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

    def save(self) -> Path:
        """Write a checkpoint of this moment."""
        state = RunState(
            step=self.step,
            consumed_samples=self.consumed_samples,
            consumed_tokens=self.consumed_tokens,
            skipped_steps=self.skipped_steps,
            loss_scale=self.scaler.scale,
            loss_scale_good_steps=self.scaler.good_steps,
            model=self.run.model.model_dump(mode="json"),
            config=self.config.model_dump(mode="json"),
        )
        keep = self.config.checkpoint.keep_latest
        return save_checkpoint(self.run.checkpoint_folder, self.model, self.optimizer, state, keep)

    def _resume(self) -> None:
        """Go on from the newest checkpoint that loads, naming any that does not."""
        folder, wanted = self.run.checkpoint_folder, self.config.checkpoint.load_step
        found: list[list[int]] = [[]]
        if dist.get_rank() == 0:
            sweep(folder)
            found = [complete_steps(folder) if wanted is None else [wanted]]
        dist.broadcast_object_list(found, src=0)  # listings of a network file system may lag behind on other nodes
        steps = found[0]
        for step in reversed(steps):
            path = checkpoint_path(folder, step)
            try:
                self._agree(unreadable(path))  # or some would wait for the others in the collective load
                state = load_checkpoint(path, self.model, self.optimizer)
            except Exception as error:  # whatever a damaged file raises
                if dist.get_rank() == 0:
                    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                    print(f"checkpoint {path} is damaged and is not used ({reason})", flush=True)
                continue
            self.step, self.consumed_samples = state.step, state.consumed_samples
            self.consumed_tokens, self.skipped_steps = state.consumed_tokens, state.skipped_steps
            self.scaler.scale, self.scaler.good_steps = state.loss_scale, state.loss_scale_good_steps
            if dist.get_rank() == 0:
                print(f"resumed from {path}", flush=True)
            return
        if steps:
            if wanted is not None:
                raise RunError(f"{path} cannot be loaded; choose another checkpoint.load_step")
            raise RunError(f"none of the checkpoints in {folder} can be loaded; move them away to start anew")

    def _agree(self, problem: str | None) -> None:
        """Raise on every rank what any rank found."""
        problems: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        for rank, text in enumerate(problems):
            if text is not None:
                raise RuntimeError(f"rank {rank}: {text}")

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


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """The default process group: torchrun's processes, or this one alone."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()  # not after an error: other ranks may wait in a collective that will never come


def dropout_stream(mesh: DeviceMesh, parallelism: Parallelism) -> int:
    """Number of the random stream that this process draws dropout from.

    Processes that hold different activations draw differently. Tensor-parallel processes hold the same ones between
    layers, except under sequence parallelism.
    """
    sharded = ["pp", "dp_replicate", "dp_shard", *(["tp"] if parallelism.sequence_parallel else [])]
    stream = 0
    for name in sharded:
        stream = stream * mesh[name].size() + mesh[name].get_local_rank()
    return stream


def seed_everything(seed: int, stream: int, deterministic: bool) -> None:
    """Seed every generator, and choose deterministic kernels if asked."""
    random.seed(seed + stream)
    np.random.seed((seed + stream) % 2**32)
    torch.manual_seed(seed + stream)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
