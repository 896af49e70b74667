"""Compare the planner's step time and memory with the measured ones, once in a run."""

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_like.config.errors import require
from titan_like.config.load import edit
from titan_like.metrics.hardware import device_name
from titan_like.metrics.record import StepRecord
from titan_like.metrics.run_files import write_forecast
from titan_like.planner.predict import Forecast, predict_layout
from titan_like.planner.stack import named_profile
from titan_like.train.environment import environment_number
from titan_like.train.setup import Run

WARM_UP, MEASURED = 3, 5  # steps left out at the start, while buffers and code are made, and steps counted then
MEMORY_BAND = 0.1  # of the measured memory; nine in ten measured runs should lie within it


def step_forecast(run: Run) -> Callable[[StepRecord], str | None] | None:
    """The function that compares a run's steps with their prediction, on global rank 0; None on other ranks."""
    return StepForecast(run).add if environment_number("RANK", 0) == 0 else None


class StepForecast:
    """The comparison of one run. If the planner cannot predict the run, training goes on without it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._left, self._seconds = WARM_UP, list[float]()
        self._batch_size = run.config.training.global_batch_size
        self._forecast = self._predict()

    def add(self, record: StepRecord) -> str | None:
        """Record a step. After the last step that counts, return the line to print."""
        if len(self._seconds) == MEASURED:  # it has been printed
            return None
        if record.global_batch_size != self._batch_size:  # the batch grew: begin again
            self._batch_size, self._seconds = record.global_batch_size, []
            self._forecast = self._predict()
        if self._left:
            self._left -= 1
            return None
        self._seconds.append(record.step_time_s)
        if len(self._seconds) < MEASURED:
            return None
        if not isinstance(self._forecast, Forecast):
            return self._forecast
        measured = statistics.median(self._seconds), record.peak_memory_bytes
        on_gpu = self._run.device.type == "cuda"
        comparison = {
            "steps": f"steps {record.step - MEASURED + 1} to {record.step}",
            "profile": self._forecast.profile.name,
            "predicted_seconds": self._forecast.time.total,
            "measured_seconds": measured[0],
            "seconds_low": self._forecast.seconds_low,
            "seconds_high": self._forecast.seconds_high,
            "predicted_memory_bytes": predicted_memory(self._forecast, on_gpu),
            "measured_memory_bytes": measured[1],
        }
        write_forecast(Path(self._run.config.job.dump_folder), comparison)
        return describe(self._forecast, on_gpu, record.step, *measured)

    def _predict(self) -> Forecast | str | None:
        """The forecast, a sentence that says why there is none, or None if no forecast was asked for."""
        try:
            return predicted(self._run, self._batch_size)
        except Exception as error:  # whatever it is, training matters more
            return f" no prediction of steps: {error}"


def predicted(run: Run, global_batch_size: int) -> Forecast | None:
    """Forecast a run's step on this machine; None on a CPU without a profile.

    Raises a `ConfigError` if the GPU is unknown, the profile is not for this machine, or products are in float8.
    """
    config, on_gpu = run.config, run.device.type == "cuda"
    profile = named_profile(config)
    if not on_gpu and (profile is None or not profile.device.is_cpu):
        return None
    require(not config.float8.enable, "float8.enable", True, "is not predicted")
    is_for_gpus = profile is None or not profile.device.is_cpu
    require(is_for_gpus or not on_gpu, "cluster.profile", config.cluster.profile, "was measured on a CPU")
    overrides: dict[str, Any] = {"cluster.gpu": config.cluster.gpu or device_name(run.device) or None}
    if config.cluster.gpus_per_node is None and "LOCAL_WORLD_SIZE" in os.environ:
        overrides["cluster.gpus_per_node"] = environment_number("LOCAL_WORLD_SIZE", 1, least=1)
    overrides |= {"training.global_batch_size": global_batch_size, "training.batch_size_rampup": None}
    config = edit(config, overrides)
    return predict_layout(config, run.model, run.layout, profile)


def predicted_memory(forecast: Forecast, on_gpu: bool) -> float:
    """Memory of rank 0 as it is measured: the tensors' on a GPU, the whole process's on a CPU. In bytes."""
    first = forecast.memory.ranks[0]
    return first.total - first.overhead if on_gpu else first.total


def describe(forecast: Forecast, on_gpu: bool, step: int, seconds: float, memory_bytes: int) -> str:
    """The prediction next to the measurement, with a warning if they differ by more than the error band."""
    memory = predicted_memory(forecast, on_gpu)
    off, memory_off = forecast.time.total / seconds - 1, memory / memory_bytes - 1
    line = (
        f" steps {step - MEASURED + 1} to {step}: {forecast.time.total:.4g} s predicted, {seconds:.4g} s measured "
        f"({off:+.1%}) | memory of rank 0: {memory / 2**30:.3g} GiB predicted, {memory_bytes / 2**30:.3g} GiB measured "
        f"({memory_off:+.1%}) | profile {forecast.profile.name} |"
    )
    warnings = []
    if not forecast.seconds_low <= seconds <= forecast.seconds_high:
        warnings.append(f"the step time is outside {forecast.seconds_low:.4g} to {forecast.seconds_high:.4g} s")
    if abs(memory_off) > MEMORY_BAND:
        warnings.append(f"memory is more than {MEMORY_BAND:.0%} off")
    return line + (f" WARNING: {'; '.join(warnings)} |" if warnings else "")
