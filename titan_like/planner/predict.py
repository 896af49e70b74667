"""A run's configuration → step time, memory, rates, and how far to trust them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titan_like.config.errors import ConfigError
from titan_like.config.schema import JobConfig
from titan_like.metrics.devices import Device, find_device
from titan_like.metrics.throughput import Throughput, ThroughputMeter
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import model_config
from titan_like.parallel.layout import Layout, resolve_layout
from titan_like.parallel.schedules.tables import stages_per_rank
from titan_like.parallel.split import layers_per_stage
from titan_like.planner.dtypes import BYTES
from titan_like.planner.memory import Memory, memory
from titan_like.planner.profile import Profile, builtin_profiles, is_builtin, load_profile
from titan_like.planner.simulator import simulated_step_time
from titan_like.planner.step_time import StepTime
from titan_like.planner.workload import Workload
from titan_like.train.rules import check_rules

# Whose constants our own trainer is predicted with, until it has been measured itself: PyTorch's FSDP with fused
# attention on A100 and newer; on V100 a stack with unfused attention.
_NEAREST = {"V100": "dgx2_v100", "T4": "dgx2_v100"} | dict.fromkeys(
    ("A100", "A800", "A30", "A40", "A10", "A10G"), "fsdp_a100"
)
_NEWEST = "fsdp_h100"


@dataclass(frozen=True)
class Forecast:
    """What is expected of one step."""

    work: Workload
    profile: Profile
    num_gpus: int
    time: StepTime
    memory: Memory
    rates: Throughput
    seconds_low: float  # nine in ten rows that the profile was not fitted on lie between these
    seconds_high: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "profile": self.profile.name,
            "gpus": self.num_gpus,
            "step_seconds": self.time._asdict(),
            "step_seconds_low": self.seconds_low,
            "step_seconds_high": self.seconds_high,
            "memory_bytes": [rank._asdict() for rank in self.memory.ranks],
            "memory_capacity_bytes": self.memory.capacity,
            "fits": self.memory.fits,
            "tokens_per_second": self.rates.tokens_per_second,
            "tflops_per_device": self.rates.tflops_per_device,
            "mfu_model": self.rates.mfu_model,
            "mfu_causal": self.rates.mfu_causal,
            "hfu": self.rates.hfu,
        }


def predict(config: JobConfig, profile: Profile | None = None) -> Forecast:
    """The step of a run on the cluster that it names.

    Raises:
        ConfigError: the settings contradict each other, or the GPU is not known.
    """
    model = model_config(config.model)
    profile, device = profile_and_device(config, profile)
    layout = resolve_layout(config.parallelism, cluster_size(config))
    check_rules(config, model, layout)
    return predict_layout(config, model, layout, profile, device)


def predict_layout(
    config: JobConfig, model: TransformerConfig, layout: Layout, profile: Profile, device: Device
) -> Forecast:
    """The step of a run on a cluster that its layout fits.

    Raises:
        ConfigError: the device lacks the type, or the profile knows nothing of links between processes.
    """
    work = workload_of(config, model, layout)
    return forecast(work, checked_profile(config, layout.num_processes, profile, device), config)


def checked_profile(config: JobConfig, num_processes: int, profile: Profile, device: Device) -> Profile:
    """The stack's constants `for_run`.

    Raises:
        ConfigError: the device lacks the type, or the profile knows nothing of links between processes.
    """
    profile = for_run(profile, config, device)
    if num_processes > 1 and not profile.node_bandwidth:
        problem = f"{profile.name} was measured with one process; measure it with several (torchrun), or set this"
        raise ConfigError("cluster.node_bandwidth", None, problem)
    device.peak_flops(compute_type(config))  # refuses
    return profile.changed(one_node=num_processes <= profile.gpus_per_node)


def profile_and_device(config: JobConfig, profile: Profile | None) -> tuple[Profile, Device]:
    """The stack and what it runs on: the profile's own device where it brings one, else the cluster's GPU.

    Without a profile it is the configuration's, or the GPU's own.

    Raises:
        ConfigError: no GPU is named, or one that is not known.
    """
    if profile is None and config.cluster.profile is not None:
        profile = load_profile(config.cluster.profile, "cluster.profile")
    if profile is not None and (config.cluster.gpu is None or not is_builtin(profile.device)):
        return profile, profile.device
    if config.cluster.gpu is None:
        raise ConfigError("cluster.gpu", None, 'say which GPU the run is for, such as "A100-80GB" or "H100"')
    device = find_device(config.cluster.gpu)
    return profile or default_profile(device), device


_LARGEST_BAND = 0.9  # errors are relative to what is measured: at 1 nothing is known


def forecast(work: Workload, profile: Profile, config: JobConfig) -> Forecast:
    """Predict, and put rates and an error band beside it."""
    time, device = simulated_step_time(work, profile), profile.device
    peak = None if device.is_cpu else device.peak_flops(work.dtype) / 1e12
    meter = ThroughputMeter(work.model, work.seq_len, config.activation_checkpoint, work.num_gpus, peak)
    rates = meter.measure(work.global_batch_size * work.seq_len, time.total)
    band = profile.error_p90
    return Forecast(
        work,
        profile,
        work.num_gpus,
        time,
        memory(work, profile),
        rates,
        time.total / (1 + band),
        time.total / (1 - min(band, _LARGEST_BAND)),
    )


def cluster_size(config: JobConfig) -> int:
    """GPUs of the job: of the cluster, else the product of the degrees."""
    cluster, degrees = config.cluster, config.parallelism
    if cluster.nodes is not None:
        if cluster.gpus_per_node is None:
            problem = f"cluster.nodes is {cluster.nodes}; say how many GPUs each of them has"
            raise ConfigError("cluster.gpus_per_node", None, problem)
        return cluster.nodes * cluster.gpus_per_node
    return (
        degrees.pipeline_parallel_degree
        * degrees.data_parallel_replicate_degree
        * max(degrees.data_parallel_shard_degree, 1)
        * degrees.context_parallel_degree
        * degrees.tensor_parallel_degree
    )


def default_profile(device: Device) -> Profile:
    """Constants for our own trainer on a device that no profile was asked for."""
    name = _NEAREST.get(device.name.split("-")[0], _NEWEST)
    return builtin_profiles()[name].changed(device=device)


def for_run(profile: Profile, config: JobConfig, device: Device) -> Profile:
    """A stack's constants, with what is known of our own trainer and of the run's cluster in their place."""
    training, cluster = config.training, config.cluster
    return of_own_trainer(profile, training.dtype, training.reduce_dtype).changed(
        device=device,
        gpus_per_node=cluster.gpus_per_node or profile.gpus_per_node,
        node_bandwidth=cluster.node_bandwidth * 1e9 if cluster.node_bandwidth else profile.node_bandwidth,
    )


def of_own_trainer(profile: Profile, dtype: str, reduce_dtype: str = "float32") -> Profile:
    """A stack's constants with how our own trainer works in the place of how that stack does."""
    return profile.changed(
        trainer_state=True,
        message_exposed=1.0 if profile.device.is_cpu else 0.0,  # waited for where a pass needs it, and not before
        # Weights are DTensors, whose local parts are taken and given gradients one by one: a GPT's layer of 12 takes
        # the host 375 and 880 µs in place of 90 and 150 (PyTorch 2.13, a server's CPU).
        tensor_host_forward=285e-6,
        tensor_host_backward=730e-6,
        fused_loss=False,  # PyTorch's, in float32
        logit_state=8.0,
        recompute_whole=False,  # torch stops recomputing where nothing more is needed
        optimizer_traffic=28.0 + 8.0,  # fused AdamW in float32: weight, gradient and moments; the norm before it
        gradient_bytes=BYTES[reduce_dtype],
        parameter_bytes=BYTES[dtype],
        dtype=dtype,
    )


def compute_type(config: JobConfig) -> str:
    """The type whose speed counts; float64 is taken for float32."""
    dtype = config.training.dtype
    return "float32" if dtype == "float64" else dtype


def workload_of(config: JobConfig, model: TransformerConfig, layout: Layout) -> Workload:
    """The configuration's sections as the planner's numbers."""
    training, parallelism, recompute = config.training, config.parallelism, config.activation_checkpoint
    schedule, virtual = parallelism.pipeline_schedule, parallelism.virtual_stages_per_rank
    stages = layout.pipeline * stages_per_rank(schedule, virtual)
    return Workload(
        model=model,
        seq_len=training.seq_len,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        replicate=layout.replicate,
        shard=layout.shard,
        context=layout.context,
        schedule=schedule if layout.pipeline > 1 else "1f1b",
        virtual_stages=virtual if layout.pipeline > 1 else 1,
        sequence_parallel=parallelism.sequence_parallel,
        zero_stage=parallelism.zero_stage,
        recompute=recompute.mode,
        recompute_every=recompute.every_n_layers,
        flash=True,
        dtype=compute_type(config),
        dropout=getattr(model, "dropout", 0.0) > 0,
        compiled=config.compile.enable,
        stage_layers=tuple(layers_per_stage(config, model, stages)) if layout.pipeline > 1 else None,
    )
