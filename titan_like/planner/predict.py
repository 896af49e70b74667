"""From a run's configuration to its step time, memory and rates, with an error band."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from titan_like.config.errors import all_of, require
from titan_like.config.schema import JobConfig
from titan_like.data.loading.lengths import sample_length
from titan_like.metrics.devices import Device, find_device
from titan_like.metrics.flops import Throughput, ThroughputMeter
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import model_config
from titan_like.optim.state_size import optimizer_state
from titan_like.optim.update_work import update_work
from titan_like.parallel.layout import Layout, method_of, resolve_layout
from titan_like.parallel.split import layers_per_stage
from titan_like.planner.bands import band
from titan_like.planner.memory import Memory, memory
from titan_like.planner.profile import Profile, builtin_profiles, is_builtin, load_profile
from titan_like.planner.step_time import StepTime, host_and_device_seconds, step_time
from titan_like.planner.workload import BYTES, Adapters, Workload
from titan_like.train.environment import cluster_size
from titan_like.train.rules import broken_rules

# Our own trainer has been measured on the H100, whose constants also stand in for newer GPUs. PyTorch's FSDP with fused
# attention stands in on the A100, and a stack with unfused attention on the V100.
_NEAREST = {"V100": "dgx2_v100", "T4": "dgx2_v100"} | dict.fromkeys(
    ("A100", "A800", "A30", "A40", "A10", "A10G"), "fsdp_a100"
)
_NEWEST = "titan_h100"

FLOAT8_NOTE = "float8.enable: times, memory and traffic are predicted as if all products were in training.dtype"


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


def predict(config: JobConfig, profile: Profile | None = None, expert_load: float = 1.0) -> Forecast:
    """Forecast the step of a run on the cluster that it names. ``expert_load`` is as in `Workload`.

    Raises:
        ConfigError: the settings contradict each other, or the GPU is unknown.
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


def checked_profile(config: JobConfig, num_processes: int, profile: Profile | None) -> Profile:
    """The profile of `profile_of`, adapted to our own trainer and to the run's cluster.

    Raises:
        ConfigError: as `profile_of`; or the device lacks the data type, or the profile knows nothing of links between
            processes.
    """
    profile = profile_of(config, profile)
    training, cluster, bandwidth = config.training, config.cluster, profile.node_bandwidth
    if cluster.node_bandwidth and not profile.own_links:
        bandwidth = cluster.node_bandwidth * 1e9
    reason = f"{profile.name} was measured with one process; measure it with several (torchrun), or set this"
    require(num_processes == 1 or bandwidth, "cluster.node_bandwidth", None, reason)
    profile.device.peak_flops(compute_type(config))  # raises ConfigError
    per_node = cluster.gpus_per_node or profile.gpus_per_node
    return of_own_trainer(profile, training.dtype, training.reduce_dtype).changed(
        gpus_per_node=per_node,
        node_bandwidth=bandwidth,
        one_node=num_processes <= per_node,
        operator_time=0.0 if config.compile.cudagraphs else profile.operator_time,  # one launch for all of a step's
    )


def profile_of(config: JobConfig, profile: Profile | None) -> Profile:
    """The stack's profile, on its own device if it describes one, else on the cluster's GPU.

    If ``profile`` is None, the configuration names the profile, or the GPU's default is used.

    Raises:
        ConfigError: no GPU is named, or it is unknown.
    """
    if profile is None and config.cluster.profile is not None:
        profile = load_profile(config.cluster.profile, "cluster.profile")
    if profile is not None and (config.cluster.gpu is None or not is_builtin(profile.device)):
        return profile
    reason = 'say which GPU the run is for, such as "A100-80GB" or "H100"'
    require(config.cluster.gpu, "cluster.gpu", None, reason)
    device = find_device(config.cluster.gpu or "")
    return profile.changed(device=device) if profile else default_profile(device)


def forecast(work: Workload, profile: Profile) -> Forecast:
    """Predict a run's step, with rates and an error band."""
    time, device = step_time(work, profile), profile.device
    peak = None if device.is_cpu else device.peak_flops(work.dtype) / 1e12
    recompute = work.activation_checkpoint
    meter = ThroughputMeter(work.model, work.seq_len, recompute, work.num_gpus, peak, work.decoder_seq_len)
    rates = meter.measure(work.global_batch_size * work.seq_len, time.total)
    error = band(work, profile)
    return Forecast(
        work,
        profile,
        time,
        memory(work, profile),
        *host_and_device_seconds(work, profile),
        rates,
        time.total / (1 + error),
        time.total / (1 - error),
    )


def default_profile(device: Device) -> Profile:
    """The default constants for our own trainer on a device."""
    name = _NEAREST.get(device.name.split("-")[0], _NEWEST)
    return builtin_profiles()[name].changed(device=device)


def of_own_trainer(profile: Profile, dtype: str, reduce_dtype: str = "float32") -> Profile:
    """A stack's constants, with our own trainer's way of working in place of its own."""
    return profile.changed(
        message_exposed=1.0 if profile.device.is_cpu else 0.0,  # our trainer waits only when a pass needs it
        # Weights are DTensors, and taking their local parts and gradients costs the host time. For a GPT layer with 12
        # parameters it needs 375 µs forward and 880 µs backward instead of 90 and 150 (PyTorch 2.13, server CPU).
        tensor_host_forward=285e-6,
        tensor_host_backward=730e-6,
        message_shards=False,
        fusion=0.0,
        accumulation_bytes=BYTES[dtype] + 8.0,
        # AdamW 28 and the norm 4; with 16-bit gradients 26 and 2, and the weight's 16-bit copy 2.
        optimizer_traffic=32.0 - 2.0 * (BYTES[dtype] < 4),
        gradient_bytes=BYTES[reduce_dtype],
        parameter_bytes=BYTES[dtype],
        dtype=dtype,
    )


def compute_type(config: JobConfig) -> str:
    """The data type whose speed counts. float64 is treated as float32."""
    dtype = config.training.dtype
    return "float32" if dtype == "float64" else dtype


def workload_of(config: JobConfig, model: TransformerConfig, layout: Layout) -> Workload:
    """The configuration's sections as a `Workload`."""
    training, recompute, num_stages = config.training, config.activation_checkpoint, len(layout.stage_ranks)
    return Workload(
        model=model,
        seq_len=training.seq_len,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        **vars(layout),
        context_method=method_of(config, model).name,
        zero_stage=config.parallelism.zero_stage,
        recompute=recompute.mode,
        recompute_every=recompute.every_n_layers,
        budget=1.0 if recompute.budget is None else recompute.budget,
        offload=recompute.offload,
        dtype=compute_type(config),
        dropout=getattr(model, "dropout", 0.0) > 0,
        compiled=config.compile.enable,
        causal=model.is_causal,
        stage_layers=tuple(layers_per_stage(config, model, num_stages)) if layout.pipeline > 1 else None,
        optimizer=optimizer_state(config.optimizer),
        update=update_work(config.optimizer),
        decoder_seq_len=sample_length(config, model).decoder,
        lora=Adapters(config.lora.rank, config.lora.dropout > 0, tuple(config.lora.modules)),
    )
