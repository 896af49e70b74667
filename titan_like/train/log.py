"""What a run prints and writes about itself: messages at its start, log lines, metrics, validations."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from titan_like.checkpoint.changes import changes
from titan_like.config.errors import ConfigError
from titan_like.data.loading.lengths import sample_length
from titan_like.data.text.tokenizer import describe_vocabulary
from titan_like.metrics.console import Console, LineContext, format_log_line, format_sources, format_validation
from titan_like.metrics.flops import ThroughputMeter
from titan_like.metrics.hardware import device_name, memory_bytes, peak_memory_bytes, peak_tflops
from titan_like.metrics.record import StepRecord, named_losses
from titan_like.metrics.writers import RunEnd, Writer, build_writers, go_back
from titan_like.optim.schedule import describe_warmup
from titan_like.parallel.compile_scope import compile_scope, compile_seconds
from titan_like.parallel.expert_balance import FIGURES
from titan_like.parallel.lora import adapter_parameters
from titan_like.train.diagnosis import diagnose_folder
from titan_like.train.pending_step import PendingStep, StepValues
from titan_like.train.setup import Run, describe_run
from titan_like.train.training_state import TrainingState

StepCallback = Callable[[StepRecord], str | None]


def start_messages(run: Run, state: TrainingState) -> Iterator[str]:
    """What is trained, from where and for how long: one line each."""
    config, training, dataset = run.config, run.config.training, run.datasets["train"]
    if state.resumed is not None and not state.is_complete:
        yield from changes(state.resumed, config, run.model, state.schedule)
    yield describe_run(run)
    if (epochs := training.epochs) is not None:
        data = f"{epochs:g} epoch{'s' if epochs != 1 else ''} of {len(dataset):,} samples"
        yield f"{data}: {state.total_steps:,} step{'s' if state.total_steps != 1 else ''}"
    if message := describe_warmup(state.schedule.shape, state.schedule.length):
        yield message
    size = state.schedule.batch_size
    if size is not None and (training.batch_size_rampup or size != training.global_batch_size):
        yield f"lr_scheduler counts steps of {size} samples"
    if state.step == 0 and (message := describe_vocabulary(config, run.model.vocab_size)):
        yield message
    if message := dataset.described(training.micro_batch_size, run.layout.data_parallel):
        yield message
    if config.compile.enable:
        scope, num_layers = compile_scope(config, run.model, run.layout), len(run.model.layer_kinds)
        part = "the layers" if scope == "layers" else f"the model as one graph of {num_layers} layers"
        yield f"compiling {part} takes about {compile_seconds(scope, num_layers)} s the first time"


class RunLog:
    """Logs steps and validations: on the console, in metrics.jsonl and with the trackers that [metrics] enables."""

    def __init__(
        self, run: Run, state: TrainingState, console: Console, writes: bool, callback: StepCallback | None
    ) -> None:
        """``writes``: whether there will be anything to log. Only rank 0 writes it.

        ``callback`` is called with the record of every step, and the text that it returns is printed.
        """
        self.run, self.state, self.console, self.callback = run, state, console, callback
        # TensorBoard would drop what other files have of later steps, and reads files by the clock in their names.
        self.writers: list[Writer] = []
        if writes and dist.get_rank() == 0:
            self.writers = build_writers(run.config, run.model, run.layout, state.step, state.run_id)
        self._unlogged: list[StepRecord] = []  # steps since the last log line
        config, device, devices = run.config, run.device, run.layout.num_processes
        self._line = LineContext(config.training.seq_len, devices, device.type, memory_bytes(device))
        length = sample_length(config, run.model)
        self._meter = ThroughputMeter(
            run.model,
            length.encoder,
            config.activation_checkpoint,
            devices,
            peak_tflops(config.cluster.gpu or device_name(device), config.training.dtype),
            length.decoder,
            adapter_parameters(run.model, config.lora),
        )

    def is_due(self, step: int) -> bool:
        """Whether a log line is due after ``step``."""
        return step % self.run.config.metrics.log_interval == 0

    def record_of(self, issued: PendingStep, values: StepValues, seconds: float, overflowed: bool) -> StepRecord:
        """The record of a step that took ``seconds``. ``overflowed``: its loss scale was too large."""
        predictions, coefficients = self.run.model.predictions, self.run.model.coefficients
        health, is_finite = self.run.config.health, math.isfinite(values.grad_norm)
        tokens, num_pairs = issued.global_batch_size * self._line.seq_len, values.terms[len(predictions)]
        return StepRecord(
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
            throughput=self._meter.measure(tokens, seconds, num_pairs),
            peak_memory_bytes=peak_memory_bytes(self.run.device),
            skipped=int(overflowed),
            nan=int(not is_finite and not overflowed),
            spike=int(values.spike) if health.loss_spike_factor else None,
            num_zeros=None if math.isnan(values.num_zeros) else values.num_zeros,
            loss_scale=None if self.state.scaler is None else values.loss_scale,
        )

    def write(self, record: StepRecord, with_line: bool) -> None:
        """Write a step's metrics, at a log line with how much each source of a blend has given so far."""
        if with_line and dist.get_rank() == 0:
            record.sources = self.run.datasets["train"].drawn(record.consumed_samples)
        for writer in self.writers:
            writer.write(record.step, record.as_dict())

    def print(self, record: StepRecord, with_line: bool) -> None:
        """Advance the progress, print a log line about the steps since the last one, and call the callback."""
        self.console.add(record)
        self._unlogged.append(record)
        if with_line:
            left = self.console.seconds_left()
            context = self._line._replace(total_steps=self.state.total_steps, seconds_left=left)
            self.console.print(format_log_line(self._unlogged, self.run.config.metrics.log_format, context))
            self._unlogged.clear()
            if record.sources:
                self.console.print(format_sources(record.sources))
        text = self.callback(record) if self.callback is not None else None
        if text is not None:
            self.console.print(text)

    def add_validation(self, losses: dict[str, dict[str, float]], evaluation: dict[str, float]) -> None:
        """Add a validation's losses, by split, and the figures of tasks to what is logged about the latest step."""
        step, values = self.state.step, dict(evaluation)
        for split, terms in losses.items():
            results = {f"validation_{name}{split.removeprefix('validation')}": loss for name, loss in terms.items()}
            self.console.print(format_validation(step, results))
            values |= results
        if evaluation:
            self.console.print(format_validation(step, evaluation))
        for writer in self.writers:
            writer.write(step, values)

    def go_back(self, spike: StepRecord, left_out: range) -> None:
        """Print that the run went back because of a ``spike``, and drop the metrics of the steps since the checkpoint.

        ``left_out``: samples that will not be trained.
        """
        self.console.print(
            f" the loss of step {spike.step} is a spike ({spike.loss:.6g}): went back to step {self.state.step} and "
            f"skipped samples {left_out.start} to {left_out.stop - 1}"
        )
        self._unlogged.clear()
        go_back(self.writers, self.state.step)

    def print_diagnosis(self, known: str) -> None:
        """Print what is wrong with the run that has ended, except what is ``known``, on rank 0."""
        with suppress(ConfigError, OSError):  # metrics that cannot be read fail no run
            folder = Path(self.run.config.job.dump_folder)
            for finding in diagnose_folder(folder) if self.writers else []:
                if finding.text not in known:
                    self.console.print(f" {finding.text}")

    def close(self, end: RunEnd) -> None:
        """Close the console and the writers of a run that ends."""
        self.console.close()
        for writer in self.writers:
            writer.close(end)
