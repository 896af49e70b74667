"""The training loop."""

import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist

from titan_like.checkpoint.best import validation_loss
from titan_like.checkpoint.saver import SaveError
from titan_like.config.errors import ConfigError, RunError, first_line
from titan_like.data.batch import Batch
from titan_like.data.loading.batch_size import global_batch_size_at, total_samples
from titan_like.data.loading.loader import BackgroundLoader, GlobalSampler
from titan_like.metrics.console import Console
from titan_like.metrics.profiling import StepProfiler
from titan_like.metrics.record import StepRecord
from titan_like.metrics.writers import RunEnd
from titan_like.optim.optimizer import Gradients, update
from titan_like.parallel.apply import build_pipeline
from titan_like.parallel.context import cp_shard_of
from titan_like.parallel.expert_balance import ExpertBalance
from titan_like.parallel.mesh import build_mesh, one_dimension
from titan_like.parallel.model import ModelOutput, sum_gradients_of_copies
from titan_like.parallel.tensor import partial_parameters, sum_partial_gradients
from titan_like.parallel.timeline import stamp
from titan_like.train.log import RunLog, StepCallback, start_messages
from titan_like.train.memory import MemoryWatch
from titan_like.train.microbatches import count_global_batch, take_microbatches
from titan_like.train.observer import Observer
from titan_like.train.pending_step import PendingStep, copy_to_host
from titan_like.train.seeds import dropout_stream, seed_everything, seed_step
from titan_like.train.setup import Run
from titan_like.train.signals import StopSignals
from titan_like.train.training_state import TrainingState
from titan_like.train.validation import NO_LABELS, Stopped, Validator


class Trainer:
    """Trains one model on this process's part of the data. Needs a process group (see `titan_like.train.job`)."""

    def __init__(
        self,
        run: Run,
        callback: StepCallback | None = None,
        observer: Observer | None = None,
        signals: StopSignals | None = None,
    ) -> None:
        """Build the model and resume from a checkpoint, if there is one that may be used.

        ``callback`` is called with the record of every step, and the text that it returns is printed. ``signals``
        handles the signals that stop the run; by default none is handled.
        """
        self.run, self.config = run, run.config
        self.observer = observer or MemoryWatch(run)
        self.signals = signals or StopSignals()
        config, layout, rank = run.config, run.layout, dist.get_rank()
        self.mesh = mesh = build_mesh(layout, run.device.type)
        # The ranks with other samples, or with other CP shards of the same samples.
        self.token_group = one_dimension(mesh, "dp", "dp_replicate", "dp_shard").get_group()
        self.num_processes = layout.num_processes
        self.dp_rank, self.dp_size = layout.data_rank(rank), layout.data_parallel
        self.cp_shard = cp_shard_of(config, run.model, mesh)
        self.dropout_stream = dropout_stream(layout, rank)
        seed_everything(config.job.seed, self.dropout_stream, config.job.deterministic)
        self.pipeline = build_pipeline(config, run.model, mesh, run.device, run.tuning)
        self.model = model = self.pipeline.model
        self.experts = ExpertBalance(model, mesh)
        self.loss_dtype = torch.promote_types(getattr(torch, config.training.dtype), torch.float32)
        self.coefficients = torch.tensor(run.model.coefficients, dtype=torch.float64, device=run.device)
        # Of `StepValues`, those from spike to is_saving, as they are in most steps.
        self.usual_values = torch.tensor([0.0, 1.0, math.nan, 0.0, 0.0], dtype=torch.float64, device=run.device)
        self.stages_group = mesh.get_group("pp")
        self.partial_parameters = [p for stage in model.stages for p in partial_parameters(stage.module)]
        self.gradients_held = Gradients(model.parameters(), mesh, model.expert_mesh)
        self.gradients_counted = Gradients(model.counted_parameters(), mesh, model.expert_mesh)

        self.console = Console(enabled=rank == 0)
        self.state = state = TrainingState(run, model, self.console)
        self.console.start(state.total_steps, total_samples(config.training, state.step, state.consumed_samples))
        for message in start_messages(run, state):
            self.console.print(f" {message}")
        self.validator = Validator(run, self.pipeline, mesh, self.observer, self.signals, self.console)
        self.profiler = StepProfiler(config, mesh, self.pipeline, run.device, self.console.print)
        self.validates_first = self.validator.is_overdue(state)
        writes = not state.is_complete or self.validates_first
        self.log = RunLog(run, state, self.console, writes, callback)
        self.has_labels = True  # whether the last step that was read had labels for each of the model's predictions
        self.observer.attach(self)

    def train(self) -> None:
        """Train to the last step, or until a signal asks to stop. Logs, validates and saves on the way."""
        state, signals = self.state, self.signals
        data = self.load_data()
        if state.is_complete:
            self.console.print(f" nothing to train: {state.described_end()}")
        unread: PendingStep | None = None
        try:
            if self.validates_first:
                self._validate()
            while not state.is_complete and not signals.agreed:
                self.profiler.begin(state.step + 1)
                issued = self.train_step(data)
                signals.can_save = True
                if unread is not None:
                    self._log_step(self.read_step(unread))
                unread = issued
                # Reading a step waits for the device. To keep it busy, a step is read only after the next one has been
                # issued, unless something below needs its numbers now.
                if not self._is_read_at_once() and not signals.agreed:
                    continue
                record, unread = self.read_step(issued), None
                if not isinstance(issued.ended, float):
                    record.host_lead_s = time.perf_counter() - issued.issued
                self.profiler.end(record)
                if record.spike and self.config.health.rewinds and (left_out := state.rewind(record)) is not None:
                    self.log.go_back(record, left_out)
                    continue  # with the samples that come next
                is_last = state.is_complete or signals.agreed > 0
                self._log_step(record, is_last)
                state.save_if_due(is_last)
                if self.validator.is_due(state.step, state.total_steps):
                    self._validate()
                    if signals.agreed or state.stops_early:
                        state.save_at_stop()
            if signals.agreed and not state.is_complete:
                self.console.print(f" stopped by {signal.Signals(signals.agreed).name} after step {state.step}")
            if state.stops_early and (self.validates_first or state.step > state.start_step):
                self.console.print(f" {state.described_stop()}")
            if best := state.described_best():
                self.console.print(f" {best}")
        except RunError:  # all ranks raise it together, so a save in progress can still complete
            with suppress(SaveError):
                state.saver.finish()
            raise
        finally:
            data.close()
            self.validator.close()
            end = self._end(sys.exception())
            self.log.close(end)
        if end.reason:
            self.console.print(f" {end.reason}")
        if state.is_complete and state.step > state.start_step:
            self.log.print_diagnosis(end.reason)

    def train_step(self, data: Iterator[Batch]) -> PendingStep:
        """Issue one optimizer step over one global batch, without waiting for the device.

        ``data`` yields microbatches of this process's samples.
        """
        config, state, device = self.config, self.state, self.run.device
        self.observer.begin_step(state.step + 1)
        began, started = stamp(device), time.perf_counter()
        batch_size = global_batch_size_at(config.training, state.consumed_samples)
        num_microbatches = batch_size // (config.training.micro_batch_size * self.dp_size)
        batches = take_microbatches(data, num_microbatches, self.cp_shard, device, self.observer)
        data_time = time.perf_counter() - started
        # Not before there is a batch: torch seeds under a lock, with which worker processes must not be forked.
        seed_step(config.job.seed, state.step + 1, self.dropout_stream)

        # The loss is a weighted sum of means over the global batch's labels, one for each of the model's predictions.
        # Counting labels first lets every microbatch divide by the same numbers, so gradients only need to be summed.
        counts = count_global_batch(batches, self.run.model, self.token_group, self.cp_shard)
        scaled = self.coefficients if state.scaler is None else self.coefficients * state.scaler.scale
        factors = (scaled / counts.labels).to(self.loss_dtype)
        losses = torch.zeros(len(factors), device=device, dtype=self.loss_dtype)

        def add_loss(output: ModelOutput, microbatch: int) -> torch.Tensor:
            assert isinstance(output, torch.Tensor)
            losses.add_(output.detach())
            return output.sum()

        self.experts.begin(state.loss_scale, counts.tokens)
        self.pipeline.forward_backward([batch._replace(loss_factors=factors) for batch in batches], add_loss)
        self._complete_gradients()
        self.observer.complete_gradients()
        self.profiler.mark("gradient reduction")
        self._sum_over_samples(losses)
        losses = losses.double() if state.scaler is None else losses / state.scaler.scale
        loss = losses.sum()
        grad_norm = self.gradients_counted.norm().double()
        grad_norm = grad_norm if state.scaler is None else grad_norm / state.scaler.scale
        self.profiler.mark("gradient norm")

        # The device decides whether to skip the update. The host learns of it when it reads the step.
        finite = grad_norm < math.inf
        spike = state.losses.is_spike(loss) if config.health.loss_spike_factor else None
        skip = ~finite if spike is None else ~finite | spike
        consumed = state.consumed_samples + batch_size
        lr = state.schedule.lr_at(state.step + 1, consumed)
        state.saver.before_update()
        fewest = counts.labels if len(counts.labels) == 1 else counts.labels.amin(0, keepdim=True)
        terms = fewest, losses, counts.pairs[None], self.experts.finish(skip)
        values = self._values_to_read(terms, loss, grad_norm, spike)
        self._update(grad_norm, lr, skip)
        state.optimizer.zero_grad(set_to_none=True)
        state.losses.add(loss, skip)
        if state.scaler is not None:
            state.scaler.update(overflowed=~finite & (counts.labels > 0).all())
        self.profiler.mark("optimizer")

        state.step += 1
        state.consumed_samples += batch_size
        state.consumed_tokens += batch_size * config.training.seq_len
        issued = PendingStep(
            step=state.step,
            lr=lr,
            global_batch_size=batch_size,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            data_time_s=data_time,
            began=began,
            ended=stamp(device),
            issued=time.perf_counter(),
            values=values,
        )
        self.observer.end_step(issued)
        return issued

    def _update(self, grad_norm: torch.Tensor, lr: float, skip: torch.Tensor) -> None:
        """Unscale and clip the gradients and update the weights, unless ``skip``.

        ``grad_norm``, float64 and without the loss scale, and ``skip``, bool, are scalars on the device.
        """
        max_norm, factor = self.config.training.max_norm, None
        if max_norm or self.state.scaler is not None:
            clip = (max_norm / (grad_norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(grad_norm)
            factor = clip if self.state.scaler is None else clip / self.state.scaler.scale
        update(self.state.optimizer, self.gradients_held, lr, factor, skip)

    def _values_to_read(
        self, terms: Sequence[torch.Tensor], loss: torch.Tensor, grad_norm: torch.Tensor, spike: torch.Tensor | None
    ) -> torch.Tensor:
        """Start copying this step's `StepValues` to the host: float64 [8 + terms]. ``terms`` are float64 vectors."""
        state, (no_spike, scale, num_zeros, noticed) = self.state, self.usual_values.split([1, 1, 1, 2])
        received, is_writing = self.signals.received, state.saver.is_writing
        # Single ranks see signals and saves in progress. By this all-reduce, all ranks see them in the same step.
        if received or is_writing or self.num_processes > 1:
            noticed = noticed.clone()
            for value, seen in zip(noticed, (received, is_writing), strict=True):
                if seen:
                    value.fill_(seen)
            if self.num_processes > 1:
                dist.all_reduce(noticed, op=dist.ReduceOp.MAX)
        step = state.step + 1
        logs = self.log.is_due(step) or step == self.state.total_steps
        if logs and self.config.metrics.log_format == "megatron":
            num_zeros = self.gradients_counted.count_zeros().double()[None]
        if state.scaler is not None:
            scale = state.scaler.scale[None]
        firsts = loss[None], grad_norm[None], no_spike if spike is None else spike.double()[None]
        return copy_to_host(torch.cat((*firsts, scale, num_zeros, noticed, *terms)))

    def read_step(self, issued: PendingStep) -> StepRecord:
        """Wait for a step's numbers, and act on stop signals and finished saves that they report.

        Raises a `RunError` if gradients are not finite and `health.skip_nonfinite` is false, or a save failed.
        """
        state = self.state
        values, seconds = issued.read()
        is_finite = math.isfinite(values.grad_norm)
        # With a loss scale, infinite gradients of a finite loss only mean that the scale was too large.
        overflowed = state.scaler is not None and not is_finite and math.isfinite(values.loss)
        if not is_finite or values.spike:
            state.skipped_steps += 1
        self.has_labels = values.num_labels > 0
        numbers = f"{values.loss:.6g} and its gradient norm {values.grad_norm:.6g}"
        reason = f"the loss of step {issued.step} is {numbers}; lower optimizer.lr"
        if not self.has_labels:
            samples = f"the {issued.global_batch_size} samples of step {issued.step}"
            reason = f"{samples} {NO_LABELS}; look at the data or raise training.global_batch_size"
        if not is_finite and not overflowed and not self.config.health.skip_nonfinite:
            raise RunError(f"{reason}, or set health.skip_nonfinite to skip such steps")
        if not self.has_labels and state.losses.consecutive_skips == 0:
            self.console.print(f" {reason}; the step is skipped")
        self.signals.agreed = int(values.stop_signal)
        if not values.is_saving:
            state.finish_save()
        record = self.log.record_of(issued, values, seconds, overflowed)
        self.observer.read_step(record)
        return record

    def _is_read_at_once(self) -> bool:
        """Whether something after the step that was just issued needs its numbers. All ranks agree."""
        step, total_steps = self.state.step, self.state.total_steps
        saves, validates = self.state.note_due_saves(), self.validator.is_due(step, total_steps)
        is_looked_at = self.log.is_due(step) or self.profiler.profiles(step)
        return step == total_steps or saves or validates or is_looked_at or self.config.health.rewinds

    def _log_step(self, record: StepRecord, is_last: bool = False) -> None:
        """Log a step that has been read. A `RunError` ends the run if too many steps were bad."""
        with_line = is_last or self.log.is_due(record.step)
        self.log.write(record, with_line)
        is_skipped = bool(record.skipped or record.nan or record.spike)
        self.state.losses.count(record.step, record.loss, is_skipped, self.has_labels)
        self.log.print(record, with_line)

    def _validate(self) -> None:
        """Validate and add the figures to what is logged about the step. A signal that asks to stop ends this."""
        try:
            losses, evaluation = self.validator.run_all()
        except Stopped:
            self.console.print(f" a signal leaves the validation at step {self.state.step} to the resumed run")
            return
        if losses:
            self.state.add_validation(validation_loss(losses))
        self.log.add_validation(losses, evaluation)

    def _end(self, error: BaseException | None) -> RunEnd:
        """How the run ends, because of the ``error`` if there is one."""
        if error is not None:
            code = 2 if isinstance(error, ConfigError) else 1
            return RunEnd(code, 0, f"{type(error).__name__}: {first_line(error)}")
        validation = None if self.validator.is_finite else "the loss of the last validation is not finite"
        reasons = filter(None, (self.state.losses.described(), validation))
        return RunEnd(0, 0 if self.state.is_complete else self.signals.agreed, "; ".join(reasons))

    def load_data(self) -> BackgroundLoader:
        """Read this process's part of the training samples, from the data cursor on."""
        state, size = self.state, self.config.training.micro_batch_size
        samples = self.run.masks.over(self.run.datasets["train"])
        sampler = GlobalSampler(state.consumed_samples, size, self.dp_rank, self.dp_size)
        state.data = BackgroundLoader(samples, sampler, self.config.data.num_workers, self.run.device)
        return state.data

    def _complete_gradients(self) -> None:
        """Sum the gradients of norms and biases under sequence parallelism, and of copies in several stages."""
        if self.partial_parameters:
            sum_partial_gradients(self.partial_parameters)
        if self.stages_group.size() > 1:
            sum_gradients_of_copies(self.model, self.stages_group, self.run.layout.stage_ranks)

    def _sum_over_samples(self, value: torch.Tensor) -> None:
        """Sum in place over samples, their CP shards and stages. Only the last stage's ranks have values but zero."""
        for group in self.validator.scorer.groups:
            dist.all_reduce(value, group=group)
