"""The stack profile of a run: which one it is, and how our own trainer and the run's cluster change it."""

from titan_like.config.errors import require
from titan_like.config.schema import JobConfig
from titan_like.metrics.devices import Device, find_device
from titan_like.planner.profile import Profile, builtin_profiles, is_builtin, load_profile
from titan_like.planner.workload import BYTES, compute_type

# Our own trainer has been measured on the H100, whose constants also stand in for newer GPUs. PyTorch's FSDP with fused
# attention stands in on the A100, and a stack with unfused attention on the V100.
_NEAREST = {"V100": "dgx2_v100", "T4": "dgx2_v100"} | dict.fromkeys(
    ("A100", "A800", "A30", "A40", "A10", "A10G"), "fsdp_a100"
)
_NEWEST = "titan_h100"


def checked_profile(config: JobConfig, num_processes: int, profile: Profile | None) -> Profile:
    """The profile of `profile_of`, adapted to our own trainer and to the run's cluster.

    Raises its `ConfigError`, and one if the device lacks the data type or no bandwidth between processes is known.
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

    If ``profile`` is None, the configuration names the profile, or the GPU's default is used. Raises a `ConfigError` if
    no GPU is named, or it is unknown.
    """
    profile = profile or named_profile(config)
    if profile is not None and (config.cluster.gpu is None or not is_builtin(profile.device)):
        return profile
    reason = 'say which GPU the run is for, such as "A100-80GB" or "H100"'
    require(config.cluster.gpu, "cluster.gpu", None, reason)
    device = find_device(config.cluster.gpu or "")
    return profile.changed(device=device) if profile else default_profile(device)


def named_profile(config: JobConfig) -> Profile | None:
    """The profile that `cluster.profile` names. Raises a `ConfigError` if there is none, or it is invalid."""
    name = config.cluster.profile
    return None if name is None else load_profile(name, "cluster.profile")


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
        gather_hidden=True,  # FSDP2 gathers a layer while the forward pass computes the one before
        fusion=0.0,
        accumulation_bytes=BYTES[dtype] + 8.0,
        # AdamW 28 and the norm 4; with 16-bit gradients 26 and 2, and the weight's 16-bit copy 2.
        optimizer_traffic=32.0 - 2.0 * (BYTES[dtype] < 4),
        gradient_bytes=BYTES[reduce_dtype],
        parameter_bytes=BYTES[dtype],
    )
