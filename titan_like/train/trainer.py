"""The training loop."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from titan_like.checkpoint.saver import SaveError
from titan_like.config.errors import RunError
from titan_like.data.batch import Batch, count_tokens, num_labels
from titan_like.data.loading.batch_size import global_batch_size_at
from titan_like.data.loading.lengths import sample_length
from titan_like.data.loading.loader import BackgroundLoader, GlobalSampler
from titan_like.data.text.tokenizer import describe_vocabulary
from titan_like.metrics.console import LineContext, format_log_line, format_sources
from titan_like.metrics.flops import ThroughputMeter, visible_pairs
from titan_like.metrics.hardware import device_name, memory_bytes, peak_memory_bytes, peak_tflops
from titan_like.metrics.profiling import StepProfiler
from titan_like.metrics.record import StepRecord, named_losses
from titan_like.metrics.run_files import METRICS_FILE, lacks_validation
from titan_like.metrics.writers import build_writers, go_back
from titan_like.optim.optimizer import update
from titan_like.optim.schedule import describe_warmup
from titan_like.parallel.expert_balance import FIGURES
from titan_like.parallel.model import ModelOutput, sum_gradients_of_copies
from titan_like.parallel.tensor import sum_partial_gradients
from titan_like.parallel.timeline import stamp
from titan_like.train.memory import MemoryWatch
from titan_like.train.observer import Observer
from titan_like.train.pending_step import PendingStep, copy_to_host
from titan_like.train.setup import Run, describe_run
from titan_like.train.training_state import seed_step
from titan_like.train.validation import NO_LABELS, ValidatedState

_MOST_REWINDS = 3  # to the same checkpoint

StepCallback = Callable[[StepRecord], str | None]


class Trainer(ValidatedState):
    """Trains one model on this process's part of the data. Needs a process group (see `titan_like.train.job`)."""

    def __init__(self, run: Run, callback: StepCallback | None = None, observer: Observer | None = None) -> None:
        """``callback`` is called with the record of every step, and the text that it returns is printed."""
        super().__init__(run, observer or MemoryWatch(run))
        config = self.config
        self.has_labels = True  # whether the last step that was read had labels for each of the model's predictions
        self.rewinds: Counter[int] = Counter()  # step of a checkpoint → how often the run went back to it
        self.unlogged: list[StepRecord] = []  # steps since the last log line
        self.console.print(f" {describe_run(run)}")
        if (epochs := config.training.epochs) is not None:
            data = f"{epochs:g} epoch{'s' if epochs != 1 else ''} of {len(run.datasets['train']):,} samples"
            self.console.print(f" {data}: {self.total_steps:,} step{'s' if self.total_steps != 1 else ''}")
        if message := describe_warmup(self.schedule.shape, self.schedule.length):
            self.console.print(f" {message}")
        training, size = config.training, self.schedule.batch_size
        if size is not None and (training.batch_size_rampup or size != training.global_batch_size):
            self.console.print(f" lr_scheduler counts steps of {size} samples")
        if self.step == 0 and (message := describe_vocabulary(config, run.model.vocab_size)):
            self.console.print(f" {message}")
        if message := run.datasets["train"].described(config.training.micro_batch_size, self.dp_size):
            self.console.print(f" {message}")
        if config.compile.enable:
            self.console.print(" compiling the layers takes about half a minute the first time")
        self.profiler = StepProfiler(config, self.mesh, self.pipeline, run.device, self.console.print)
        # A signal or a failure may have ended the validation after the checkpoint's step.
        validates, metrics = self.step > 0 and self._validates(), Path(config.job.dump_folder, METRICS_FILE)
        misses = validates and dist.get_rank() == 0 and lacks_validation(metrics, self.run_id, self.step)
        self.misses_validation = validates and self._largest(misses) > 0
        # TensorBoard would drop what other files have of later steps, and reads files by the clock in their names.
        writes = dist.get_rank() == 0 and (self.step < self.total_steps or self.misses_validation)
        self.writers = build_writers(config, run.model, run.layout, self.step, self.run_id) if writes else []
        self.callback = callback
        peak = peak_tflops(config.cluster.gpu or device_name(run.device), config.training.dtype)
        length, devices = sample_length(config, run.model), dist.get_world_size()
        flops = config.activation_checkpoint, devices, peak, length.decoder
        self.meter = ThroughputMeter(run.model, length.encoder, *flops, self.num_adapted)
        self.line = LineContext(config.training.seq_len, devices, run.device.type, memory_bytes(run.device))
        self.observer.attach(self)

    def train(self) -> None:
        """Train to the last step, or until a signal asks to stop. Logs, validates and saves on the way."""
        data = self._load_data()
        if self.step >= self.total_steps:
            message = f"the checkpoint is at step {self.step} of {self.total_steps}"
            if (training := self.config.training).steps is None:
                message += f", {self.consumed_samples} samples; a batch of {training.global_batch_size} is not left"
            self.console.print(f" nothing to train: {message}")
        unread: PendingStep | None = None
        try:
            if self.misses_validation:
                self._log_validation()
            while self.step < self.total_steps and not self.stop_signal:
                self.profiler.begin(self.step + 1)
                issued = self.train_step(data)
                self.signals.can_save = True
                if unread is not None:
                    self._log_step(self.read_step(unread))
                unread = issued
                # Reading a step waits for the device. To keep it busy, a step is read only after the next one has been
                # issued, unless something below needs its numbers now.
                if not self._is_read_at_once() and not self.stop_signal:
                    continue
                record, unread = self.read_step(issued), None
                self.profiler.end(record)
                if record.spike and self._rewinds and self._rewind(record):
                    continue  # with the samples that come next
                is_last = self.step == self.total_steps or self.stop_signal > 0
                self._log_step(record, is_last)
                self._save_if_due(is_last)
                if self._validates():
                    self._log_validation()
                    if self.stop_signal:
                        self.finish_save()
                        if self.step not in self.saved_steps:
                            self._save_if_due(is_last=True)
            if self.stop_signal and self.step < self.total_steps:
                self.console.print(f" stopped by {signal.Signals(self.stop_signal).name} after step {self.step}")
        except RunError:  # all ranks raise it together, so a save in progress can still complete
            with suppress(SaveError):
                self.saver.finish()
            raise
        finally:
            data.close()
            self.validation_data = None  # ends its processes
            self.console.close()
            end = self._close_writers(sys.exception())
        if end.reason:
            self.console.print(f" {end.reason}")

    def train_step(self, data: Iterator[Batch]) -> PendingStep:
        """Issue one optimizer step over one global batch, without waiting for the device.

        ``data`` yields microbatches of this process's samples.
        """
        self.observer.begin_step(self.step + 1)
        config, device = self.config, self.run.device
        began, started = stamp(device), time.perf_counter()
        batch_size = global_batch_size_at(config.training, self.consumed_samples)
        num_microbatches = batch_size // (config.training.micro_batch_size * self.dp_size)
        batches = self._take(data, num_microbatches)
        data_time = time.perf_counter() - started
        # Not before there is a batch: torch seeds under a lock, with which worker processes must not be forked.
        seed_step(config.job.seed, self.step + 1, self.dropout_stream)

        # The loss is a weighted sum of means over the global batch's labels, one for each of the model's predictions.
        # Counting labels first lets every microbatch divide by the same numbers, so gradients only need to be summed.
        predictions = self.run.model.predictions
        num_each, num_tokens, num_pairs = self._count(batches)
        each = zip(self.run.model.coefficients, self.loss_scale / num_each.to(self.loss_dtype), strict=True)
        factors = torch.stack([coefficient * factor for coefficient, factor in each])
        losses = torch.zeros(len(predictions), device=device, dtype=self.loss_dtype)

        def add_loss(output: ModelOutput, microbatch: int) -> torch.Tensor:
            assert isinstance(output, torch.Tensor)
            losses.add_(output.detach())
            return output.sum()

        self.experts.begin(self.loss_scale, num_tokens)
        self.pipeline.forward_backward([batch._replace(loss_factors=factors) for batch in batches], add_loss)
        self._complete_gradients()
        self.observer.complete_gradients()
        self.profiler.mark("gradient reduction")
        self._sum_over_samples(losses)
        losses = losses if self.scaler is None else (losses / self.scaler.scale).to(self.loss_dtype)
        loss = losses.sum()
        grad_norm = self.gradients_counted.norm().double() / self.loss_scale
        self.profiler.mark("gradient norm")

        # The device decides whether to skip the update. The host learns of it when it reads the step.
        finite, spike = grad_norm.isfinite(), self.losses.is_spike(loss)
        consumed = self.consumed_samples + batch_size
        lr = self.schedule.lr_at(self.step + 1, consumed)
        self.saver.before_update()
        experts = self.experts.finish(skip=~finite | spike)
        terms = torch.cat((num_each.amin(0, keepdim=True), losses.double(), num_pairs[None], experts))
        values = self._values_to_read(terms, losses.sum(), grad_norm, spike)
        self._update(grad_norm, lr, skip=~finite | spike)
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.add(loss, ~finite | spike)
        if self.scaler is not None:
            self.scaler.update(overflowed=~finite & (num_each > 0).all())
        self.profiler.mark("optimizer")

        self.step += 1
        self.consumed_samples += batch_size
        self.consumed_tokens += batch_size * config.training.seq_len
        counts = self.step, lr, batch_size, self.consumed_samples, self.consumed_tokens
        issued = PendingStep(*counts, data_time, began, stamp(device), values)
        self.observer.end_step(issued)
        return issued

    def _count(self, batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Count the global batch, in float64: its labels of each prediction [predictions], its tokens that are not
        padding, and the pairs of a query and a key that document masks leave in all layers (0 without masks).
        """
        num_each = torch.stack([num_labels(batch, self.run.model.predictions) for batch in batches]).sum(0)
        masks = [mask for batch in batches if (mask := batch.document_mask) is not None]
        num_tokens = torch.stack(list(map(count_tokens, batches))).sum()
        num_pairs = sum([visible_pairs(self.run.model, mask) for mask in masks], torch.zeros_like(num_tokens))
        counts = torch.cat((num_each, num_tokens[None], num_pairs[None]))
        if self.token_group.size() > 1:
            dist.all_reduce(counts, group=self.token_group)
        *_, num_tokens, num_pairs = counts.double()
        whole_masks = self.cp_shard.size if self.cp_shard.method == "ulysses" else 1  # each CP rank has all of them
        return counts[:-2].double(), num_tokens, num_pairs / whole_masks

    def _update(self, grad_norm: torch.Tensor, lr: float, skip: torch.Tensor) -> None:
        """Unscale and clip the gradients and update the weights, unless ``skip``.

        ``grad_norm``, float64 and without the loss scale, and ``skip``, bool, are scalars on the device.
        """
        max_norm, factor = self.config.training.max_norm, None
        if max_norm or self.scaler is not None:
            clip = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(grad_norm)
            factor = clip / self.loss_scale
        update(self.optimizer, self.gradients_held, lr, factor, skip)

    def _values_to_read(
        self, terms: torch.Tensor, loss: torch.Tensor, grad_norm: torch.Tensor, spike: torch.Tensor
    ) -> torch.Tensor:
        """Start copying this step's `StepValues` to the host: float64 [8 + terms]."""
        # Signals and saves in progress are seen by single ranks. This all-reduce tells all ranks, in the same step.
        noticed = torch.zeros(2, device=loss.device, dtype=torch.float64)
        noticed[0].fill_(self.signals.received)
        noticed[1].fill_(self.saver.is_writing)
        if dist.get_world_size() > 1:
            dist.all_reduce(noticed, op=dist.ReduceOp.MAX)
        logs = self._logs(self.step + 1) or self.step + 1 == self.total_steps
        if logs and self.config.metrics.log_format == "megatron":
            num_zeros = self.gradients_counted.count_zeros()
        else:
            num_zeros = torch.full_like(loss, math.nan)
        scale = torch.ones_like(grad_norm) * self.loss_scale
        values = [value.double() for value in (loss, grad_norm, spike, scale, num_zeros)]
        return copy_to_host(torch.cat((torch.stack(values), noticed, terms)))

    def read_step(self, issued: PendingStep) -> StepRecord:
        """Wait for a step's numbers, and act on stop signals and finished saves that they report.

        Raises:
            RunError: gradients are not finite and `health.skip_nonfinite` is false, or a save failed.
        """
        config, predictions, coefficients = self.config, self.run.model.predictions, self.run.model.coefficients
        values, seconds = issued.read()
        tokens, num_pairs = issued.global_batch_size * config.training.seq_len, values.terms[len(predictions)]
        finite, scales_loss = math.isfinite(values.grad_norm), self.scaler is not None
        # With a loss scale, infinite gradients of a finite loss only mean that the scale was too large.
        overflowed = scales_loss and not finite and math.isfinite(values.loss)
        self.skipped_steps += not finite or bool(values.spike)
        self.has_labels = values.num_labels > 0
        numbers = f"{values.loss:.6g} and its gradient norm {values.grad_norm:.6g}"
        reason = f"the loss of step {issued.step} is {numbers}; lower optimizer.lr"
        if not self.has_labels:
            samples = f"the {issued.global_batch_size} samples of step {issued.step}"
            reason = f"{samples} {NO_LABELS}; look at the data or raise training.global_batch_size"
        if not finite and not overflowed and not config.health.skip_nonfinite:
            raise RunError(f"{reason}, or set health.skip_nonfinite to skip such steps")
        if not self.has_labels and self.losses.consecutive_skips == 0:
            self.console.print(f" {reason}; the step is skipped")
        self.stop_signal = int(values.stop_signal)
        if not values.is_saving:
            self.finish_save()
        record = StepRecord(
            step=issued.step,
            loss=values.loss,
            losses=named_losses(predictions, [x / c for x, c in zip(values.terms, coefficients, strict=False)]),
            experts=dict(zip(FIGURES, values.terms[len(predictions) + 1 :], strict=False)),
            grad_norm=values.grad_norm,
            lr=issued.lr,
            consumed_samples=issued.consumed_samples,
            consumed_tokens=issued.consumed_tokens,
            global_batch_size=issued.global_batch_size,
            step_time_s=seconds,
            data_time_s=issued.data_time_s,
            throughput=self.meter.measure(tokens, seconds, num_pairs),
            peak_memory_bytes=peak_memory_bytes(self.run.device),
            skipped=int(overflowed),
            nan=int(not finite and not overflowed),
            spike=int(values.spike) if config.health.loss_spike_factor else None,
            num_zeros=None if math.isnan(values.num_zeros) else values.num_zeros,
            loss_scale=values.loss_scale if scales_loss else None,
        )
        self.observer.read_step(record)
        return record

    @property
    def loss_scale(self) -> torch.Tensor | float:
        """The factor that multiplies the loss: 1, or the loss scaler's scalar in float16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def _is_read_at_once(self) -> bool:
        """Whether something after the step that was just issued needs its numbers. All ranks agree."""
        step, config = self.step, self.config
        ends, section = step == self.total_steps, config.checkpoint
        self.save_is_due |= section.enable and step % section.interval == 0
        self.export_is_due |= section.hugging_face_interval > 0 and (ends or step % section.hugging_face_interval == 0)
        saves = self.save_is_due or self.export_is_due
        is_looked_at = self._logs(step) or self._validates() or self.profiler.profiles(step)
        return ends or saves or is_looked_at or self._rewinds

    @property
    def _rewinds(self) -> bool:
        health = self.config.health
        return health.loss_spike_factor > 0 and health.loss_spike_action == "rewind"

    def _log_step(self, record: StepRecord, is_last: bool = False) -> None:
        """Record a step that has been read, and print a log line if one is due."""
        logs = is_last or self._logs(record.step)
        if logs and dist.get_rank() == 0:
            record.sources = self.run.datasets["train"].drawn(record.consumed_samples)
        for writer in self.writers:
            writer.write(record.step, record.as_dict())
        is_skipped = bool(record.skipped or record.nan or record.spike)
        self.losses.count(record.step, record.loss, is_skipped, self.has_labels)
        self.console.add(record)
        self.unlogged.append(record)
        if logs:
            context = self.line._replace(total_steps=self.total_steps, seconds_left=self.console.seconds_left())
            self.console.print(format_log_line(self.unlogged, self.config.metrics.log_format, context))
            self.unlogged.clear()
            if record.sources:
                self.console.print(format_sources(record.sources))
        text = self.callback(record) if self.callback is not None else None
        if text is not None:
            self.console.print(text)

    def _save_if_due(self, is_last: bool) -> None:
        # After a skipped update there is nothing new to save and the weights may be ruined, so a save must not displace
        # a good checkpoint.
        is_good = self.losses.consecutive_skips == 0
        if (is_last and self.config.checkpoint.enable) or (is_good and (self.save_is_due or self.export_is_due)):
            self.save(is_last)
            self.save_is_due = self.export_is_due = False

    def _rewind(self, record: StepRecord) -> bool:
        """Go back to the newest checkpoint and continue with the samples after the bad step's.

        PaLM handled loss spikes in this way (arXiv 2204.02311, section 5.1). Returns False if there is no checkpoint.
        Then only the step's update is skipped. A `RunError` says that the run went back to this one too often.
        """
        self.finish_save()
        consumed, skips = (self.consumed_samples, self.consumed_tokens), self.losses.consecutive_skips
        if not self._resume(self._is_of_this_run):
            return False
        self.rewinds[self.step] += 1
        if self.rewinds[self.step] > _MOST_REWINDS:
            reason = f"went back to step {self.step} {_MOST_REWINDS} times, but the loss spikes again"
            raise RunError(f"{reason} ({record.loss:.6g} in step {record.step}); lower optimizer.lr")
        self.unlogged.clear()
        # Resuming has reset the counters to the checkpoint's. The data cursor stays where it was, past the bad samples.
        left_out = range(self.consumed_samples, consumed[0])
        (self.consumed_samples, self.consumed_tokens), self.losses.consecutive_skips = consumed, skips
        self.find_end()
        if self.step == self.total_steps:  # no batch is left, and the next start must not take those samples again
            self.save(is_last=True)
        self.losses.count(record.step, record.loss, skipped=True)
        self.console.print(
            f" the loss of step {record.step} is a spike ({record.loss:.6g}): went back to step {self.step} and "
            f"skipped samples {left_out.start} to {left_out.stop - 1}"
        )
        go_back(self.writers, self.step)
        return True

    def _load_data(self) -> BackgroundLoader:
        config = self.config
        sampler = GlobalSampler(self.consumed_samples, config.training.micro_batch_size, self.dp_rank, self.dp_size)
        samples = self.run.masks.over(self.run.datasets["train"])
        self.data = BackgroundLoader(samples, sampler, config.data.num_workers, self.run.device)
        return self.data

    def _complete_gradients(self) -> None:
        """Sum the gradients that are still partial after data parallelism: those of norms and biases under sequence
        parallelism, and those of copies in several stages.
        """
        sum_partial_gradients(self.partial_parameters)
        if self.pp_group.size() > 1:
            sum_gradients_of_copies(self.model, self.pp_group, self.run.layout.stage_ranks)

    def _logs(self, step: int) -> bool:
        return step % self.config.metrics.log_interval == 0
