"""The log line, short or in Megatron-LM's format, and a progress bar if stdout is a terminal."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Literal, NamedTuple

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from titan_like.metrics.record import StepRecord

_RECENT_STEPS = 100


class LineContext(NamedTuple):
    """Values of a log line that are not in the steps' records."""

    seq_len: int
    devices: int
    device_type: str
    device_memory: int | None  # bytes; None for a CPU
    total_steps: int = 0
    seconds_left: float | None = None


def format_log_line(records: Sequence[StepRecord], style: Literal["short", "megatron"], context: LineContext) -> str:
    """The log line of the last steps: means of times, losses and rates; other values are the last step's."""
    if style == "megatron":
        return f" {' | '.join(_megatron_parts(records, context))} |"
    return f" {' | '.join(_short_parts(records, context))}"


def _short_parts(records: Sequence[StepRecord], context: LineContext) -> list[str]:
    last, total = records[-1], context.total_steps
    losses = [record.losses or {"loss": record.loss} for record in records]
    device = "GPU" if context.device_type == "cuda" else "process"
    tokens = _rate(records, lambda record: record.throughput.tokens_per_second / context.devices)
    parts = [
        f"step {last.step:{len(str(total))}d}/{total}",
        *(f"{name.replace('_', ' ')} {_mean([terms[name] for terms in losses]):.4f}" for name in losses[-1]),
        f"grad norm {last.grad_norm:.3f}",
        f"lr {last.lr:.2e}",
        f"{tokens:,.0f} tokens/s" + (f" per {device}" if context.devices > 1 else ""),
    ]
    if last.throughput.mfu_model is not None:
        parts.append(f"MFU {_rate(records, lambda record: record.throughput.mfu_model or 0):.1%}")
    share = f" ({last.peak_memory_bytes / context.device_memory:.0%})" if context.device_memory else ""
    parts.append(f"memory {last.peak_memory_bytes / 2**30:.1f} GiB{share}")
    if skipped := sum(bool(record.skipped or record.nan or record.spike) for record in records):
        parts.append(f"{skipped} skipped")
    if len({record.loss_scale for record in records}) > 1:
        parts.append(f"loss scale {last.loss_scale:g}")
    if context.seconds_left:
        parts.append(f"{format_duration(context.seconds_left)} left")
    return parts


def _megatron_parts(records: Sequence[StepRecord], context: LineContext) -> list[str]:
    last = records[-1]
    seconds = sum(record.step_time_s for record in records)
    samples = sum(record.global_batch_size for record in records)
    losses = [record.losses or {"lm_loss": record.loss} for record in records]
    spikes = sum(record.spike or 0 for record in records)
    parts = [
        f"iteration {last.step:8d}/{context.total_steps:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"consumed tokens: {last.consumed_tokens:12d}",
        f"elapsed time per iteration (ms): {1000 * seconds / len(records):.1f}",
        f"learning rate: {last.lr:.3E}",
        f"global batch size: {last.global_batch_size:5d}",
        *(f"{name.replace('_', ' ')}: {_mean([terms[name] for terms in losses]):.6E}" for name in losses[-1]),
        f"grad norm: {last.grad_norm:.3f}",
        f"num zeros: {last.num_zeros or 0.0:.1f}",
        f"actual seq length: {context.seq_len:5d}",
        f"number of skipped iterations: {sum(record.skipped for record in records):3d}",
        f"number of nan iterations: {sum(record.nan for record in records):3d}",
        *([f"number of loss spikes: {spikes:3d}"] if spikes else []),
        f"samples per second: {samples / seconds:.3f}",
        f"TFLOPs: {_rate(records, lambda record: record.throughput.tflops_per_device):.2f}",
    ]
    if last.experts:
        parts.append(f"balance loss: {last.experts['balance_loss']:.4f}")
    if last.throughput.mfu_model is not None:
        parts.append(f"MFU: {_rate(records, lambda record: record.throughput.mfu_model or 0):.1%}")
    parts.append(f"memory: {last.peak_memory_bytes / 2**30:.1f} GiB")
    if last.loss_scale is not None:
        parts.append(f"loss scale: {last.loss_scale:.1f}")
    if context.seconds_left is not None:
        parts.append(f"time left: {format_duration(context.seconds_left)}")
    return parts


def _rate(records: Sequence[StepRecord], rate: Callable[[StepRecord], float]) -> float:
    """A rate over all steps together."""
    seconds = sum(record.step_time_s for record in records)
    return sum(rate(record) * record.step_time_s for record in records) / seconds


def _mean(values: list[float]) -> float:
    """Mean of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def describe_parameters(total: int, active: int, adapters: int = 0) -> str:
    """The numbers of all parameters, of active parameters (those a token uses) and of the adapters', in words."""
    message = f"{total:,} parameters" + (f" ({active:,} used by a token)" if active < total else "")
    return f"{message}, frozen, and {adapters:,} in adapters, trained" if adapters else message


def format_validation(step: int, figures: Mapping[str, float]) -> str:
    """The line about a validation: losses such as validation_loss/NAME, or figures of tasks as TASK/FIGURE."""
    parts = [(*name.partition("/"), value) for name, value in figures.items()]
    shown = [f"{name.replace('_', ' ')}{slash}{suffix} {value:.4f}" for name, slash, suffix, value in parts]
    return " | ".join([f" step {step}", *shown])


def format_sources(sources: dict[str, float]) -> str:
    """The log line of a blend, from ``samples/NAME`` and, unless it is a stream, ``epochs/NAME`` of each source."""
    samples = {key.removeprefix("samples/"): count for key, count in sources.items() if key.startswith("samples/")}
    total = max(1, sum(samples.values()))
    parts = [
        f"{name}: {count:.0f} samples ({count / total:.2%})"
        + (f", {sources[f'epochs/{name}']:.3f} epochs" if f"epochs/{name}" in sources else "")
        for name, count in samples.items()
    ]
    return " " + " | ".join(["sources", *parts]) + " |"


def format_duration(seconds: float) -> str:
    """A duration in its two largest units, such as 1 h 12 min."""
    seconds = round(seconds)
    for unit, size, smaller, part in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= size:
            return f"{seconds // size} {unit} {seconds % size // part} {smaller}"
    return f"{seconds} s"


class ProgressLines:
    """Prints progress on stderr, with at least some seconds before each line."""

    def __init__(self, seconds: float = 2.0) -> None:
        self._seconds, self._printed = seconds, time.monotonic()

    def __call__(self, message: str) -> None:
        """Print a line, unless the last one, or the start, is too recent."""
        now = time.monotonic()
        if now - self._printed > self._seconds:
            self._printed = now
            print(message, file=sys.stderr, flush=True)


class Console:
    """Prints for the whole job, so only one process may have ``enabled``."""

    def __init__(self, enabled: bool) -> None:
        self._enabled, self._total_samples = enabled, 0
        self._consumed_samples, self._seconds_per_sample = 0, deque[float](maxlen=_RECENT_STEPS)
        self._progress: Progress | None = None

    def start(self, total_steps: int, total_samples: int) -> None:
        """Show the progress of a run of this length from here on, by a bar if stdout is a terminal."""
        self._total_samples = total_samples
        if self._enabled and sys.stdout.isatty():
            steps = TextColumn(f"{{task.fields[step]}}/{total_steps}")
            self._progress = Progress(TextColumn("{task.description}"), BarColumn(), steps, TimeRemainingColumn())
            self._task = self._progress.add_task("training", total=total_samples, step=0)
            self._progress.start()

    def print(self, text: str) -> None:
        """Print a line, above the progress bar if there is one."""
        if not self._enabled:
            return
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def add(self, record: StepRecord) -> None:
        """Record a finished step and advance the progress bar."""
        self._consumed_samples = record.consumed_samples
        self._seconds_per_sample.append(record.step_time_s / record.global_batch_size)
        if self._progress is not None:
            self._progress.update(self._task, completed=record.consumed_samples, step=record.step)

    def seconds_left(self) -> float | None:
        """Time for the remaining samples at the median time of recent ones; None if a progress bar shows it.

        A ramp-up changes the time of a step, not of a sample. The median ignores stalls and the first step, which
        compiles. It is the lower median: after two steps, the ordinary one would average in the first step.
        """
        if self._progress is not None or not self._seconds_per_sample:
            return None
        return max(self._total_samples - self._consumed_samples, 0) * median_low(self._seconds_per_sample)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._progress is not None:
            self._progress.stop()
