"""From a run's configuration to its step time, memory and rates, with an error band."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from titan_like.config.errors import all_of
from titan_like.config.schema import JobConfig
from titan_like.metrics.flops import Throughput, ThroughputMeter
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import model_config
from titan_like.parallel.layout import Layout, resolve_layout
from titan_like.planner.memory import Memory, memory
from titan_like.planner.profile import Profile
from titan_like.planner.stack import checked_profile
from titan_like.planner.step_time import StepTime, host_and_device_seconds, step_time
from titan_like.planner.workload import Workload, workload_of
from titan_like.train.environment import cluster_size
from titan_like.train.rules import broken_rules

# A profile's own band comes from rows left out of its fit. It is wider where a run differs from the fitted rows:
# 90th percentiles of absolute errors on such rows, which benchmarks/bands.py measures.
UNSEEN = {"another GPU": 0.34, "more GPUs": 0.21, "several GPUs": 0.33, "experts": 0.34, "another type": 0.26}
_LARGEST = 0.9  # errors are relative to the measured time, so 1 would mean that nothing is known
_WIDE = 1.6  # a band's end over its start
FLOAT8_NOTE = "float8.enable: times, memory and traffic are predicted as if all products were in training.dtype"


def predict(config: JobConfig, profile: Profile | None = None, expert_load: float = 1.0) -> Forecast:
    """Forecast the step of a run on the cluster that it names. ``expert_load`` is as in `Workload`.

    Raises a `ConfigError` if the settings contradict each other, or the GPU is unknown.
    """
    if config.parallelism.auto:
        from titan_like.planner.search import search  # which predicts layouts
        from titan_like.planner.search_space import set_keys

        config = search(config, None, profile, set_keys(config), kinds=1).config
    model = model_config(config.model)
    layout = resolve_layout(config.parallelism, cluster_size(config))
    if errors := list(broken_rules(config, model, layout)):
        raise all_of(errors)
    return predict_layout(config, model, layout, profile, expert_load)


def predict_layout(
    config: JobConfig, model: TransformerConfig, layout: Layout, profile: Profile | None, expert_load: float = 1.0
) -> Forecast:
    """Forecast the step of a run in a layout that its cluster holds; raises as `checked_profile`."""
    work = workload_of(config, model, layout)._replace(expert_load=expert_load)
    return forecast(work, checked_profile(config, layout.num_processes, profile))


def forecast(work: Workload, profile: Profile) -> Forecast:
    """Predict a run's step, with rates and an error band."""
    time, device = step_time(work, profile), profile.device
    peak = None if device.is_cpu else device.peak_flops(work.dtype) / 1e12
    recompute = work.activation_checkpoint
    meter = ThroughputMeter(work.model, work.seq_len, recompute, work.num_gpus, peak, work.decoder_seq_len)
    rates = meter.measure(work.global_batch_size * work.seq_len, time.total)
    error, (host_seconds, device_seconds) = band(work, profile), host_and_device_seconds(work, profile)
    low, high = time.total / (1 + error), time.total / (1 - error)
    return Forecast(work, profile, time, memory(work, profile), host_seconds, device_seconds, rates, low, high)


def band(work: Workload, profile: Profile) -> float:
    """The error, relative to the measured time, that nine in ten steps stay below. Causes add up as if independent."""
    causes = [profile.error_p90, *(UNSEEN[name] for name in unseen(work, profile))]
    return min(math.hypot(*causes), _LARGEST)


def unseen(work: Workload, profile: Profile) -> list[str]:
    """In what a run differs from the runs that a profile was fitted on."""
    nodes, fitted = (-(-gpus // profile.gpus_per_node) for gpus in (work.num_gpus, profile.most_gpus))
    differs = {
        "another GPU": profile.device.name not in (profile.fitted_gpus or (profile.device.name,)),
        "more GPUs": nodes > fitted and profile.most_gpus > 1,
        "several GPUs": work.num_gpus > profile.most_gpus == 1,
        "experts": work.has_experts and not profile.fitted_experts,
        "another type": work.dtype != profile.dtype,
    }
    return [name for name, is_unseen in differs.items() if is_unseen]


@dataclass(frozen=True)
class Forecast:
    """The step time, memory and rates that are expected of a run."""

    work: Workload
    profile: Profile
    time: StepTime
    memory: Memory
    host_seconds: float  # to launch a step's operators
    device_seconds: float  # to compute them
    rates: Throughput
    seconds_low: float  # nine in ten rows that the profile was not fitted on lie within these
    seconds_high: float

    @property
    def is_host_bound(self) -> bool:
        """Whether the GPU waits for the host. A CPU does its own launching."""
        return self.host_seconds > self.device_seconds and not self.profile.device.is_cpu

    @property
    def to_measure(self) -> str:
        """What would narrow a wide band; empty for others."""
        causes = ", ".join(unseen(self.work, self.profile)) or "few models"
        advice = f"wide band, because of {causes}: time a few steps of such runs, and fit a profile with calibrate"
        return advice if self.seconds_high > _WIDE * self.seconds_low else ""

    @property
    def taken(self) -> str:
        """The memory of the fullest GPU."""
        return f"{self.memory.largest / 2**30:.1f} of {self.memory.capacity / 2**30:.0f} GiB"

    @property
    def convention(self) -> str:
        """Whether the rate in TFLOP/s counts recomputation; as in Megatron-LM, only recomputed whole layers count."""
        names = {"none": "no recomputation", "full": "recomputation counted"}
        return names.get(self.work.recompute, "recomputation not counted")

    @property
    def stack(self) -> str:
        """The profile, the device and, where several nodes take part, the bandwidth that is assumed between them."""
        profile = self.profile
        source = "measured" if profile.own_links else "cluster.node_bandwidth"
        between = f", {profile.node_bandwidth / 1e9:.4g} GB/s between nodes ({source})"
        return f"profile {profile.name} on {profile.device.name}{'' if profile.one_node else between}"

    def __str__(self) -> str:
        """The step time with its band, a GPU's rate and the memory of the fullest GPU, on one line."""
        return (
            f"{self.time.total:.3f} s a step (between {self.seconds_low:.3f} and {self.seconds_high:.3f} in nine of "
            f"ten cases), {per_gpu(self.rates.tflops_per_device)} per GPU ({self.convention}), {self.taken}; "
            f"{self.stack}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The forecast for JSON."""
        return {
            "profile": self.profile.name,
            "gpus": self.work.num_gpus,
            "step_seconds": self.time._asdict(),
            "step_seconds_low": self.seconds_low,
            "step_seconds_high": self.seconds_high,
            "node_bandwidth": self.profile.node_bandwidth,
            "host_bound": self.is_host_bound,
            "host_seconds": self.host_seconds,
            "device_seconds": self.device_seconds,
            "memory_bytes": [rank._asdict() for rank in self.memory.ranks],
            "memory_capacity_bytes": self.memory.capacity,
            "fits": self.memory.fits,
            **asdict(self.rates),
        }


def per_gpu(rate: float) -> str:
    """A GPU's rate in words, with one decimal, or with three digits if it is slow."""
    return f"{rate:.1f} TFLOP/s" if rate >= 10 else f"{rate:.3g} TFLOP/s"
