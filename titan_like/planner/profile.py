"""Stack profiles: constants for what a GPU, a software stack and a network achieve together.

`Links` says how fast bytes move between GPUs with them. Collectives are rings, as NCCL runs them for large messages. An
all-reduce over n ranks moves 2(n-1)/n of its bytes over every link, and an all-gather or reduce-scatter (n-1)/n (NVIDIA
nccl-tests, PERFORMANCE.md; arXiv 2104.04473, section 3.2).

The constants are few and physical. `FITTED` are those that `calibrate` may change, with bounds outside which a value
means that the model is wrong. The others follow from how the software works or from data sheets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import tomli
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from titan_like.config.errors import ConfigError, all_of, field_errors, require
from titan_like.config.paths import read_toml, unreadable_reason
from titan_like.metrics import devices


@lru_cache(maxsize=4096)
def _ring(links: Links, size: int, stride: int) -> tuple[float, float]:
    """One way round a ring: seconds for the first byte, and seconds per byte of the result."""
    return links.ring_latency(size, stride), (size - 1) / size / links.ring_bandwidth(size, stride)


class Links:
    """Achieved bandwidths and latencies of a cluster of equal nodes: bytes per second in one direction, and seconds."""

    def __init__(self, profile: Profile) -> None:
        self.gpus_per_node, self.one_node = profile.gpus_per_node, profile.one_node
        self.nvlink = profile.device.nvlink_bandwidth * profile.nvlink_efficiency  # of one GPU
        # Of all network cards of a node together: in rings, in all-to-alls, and in messages between two GPUs.
        self.node = profile.node_bandwidth * profile.network_efficiency
        self.node_all_to_all = profile.node_bandwidth * profile.all_to_all_efficiency
        self.node_messages = profile.node_bandwidth * profile.message_efficiency
        self.nvlink_latency, self.network_latency = profile.nvlink_latency, profile.network_latency
        self.ring_part, self.switched = profile.ring_part, profile.nvlink_switch

    def all_to_all(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds until every rank of each group has sent the others their equal parts of its ``nbytes``.

        What leaves a node shares all of its network cards.
        """
        if self._stays_inside(size, stride):
            return self.all_gather(nbytes, size, stride)
        inside = min(size - 1, max(1, self.gpus_per_node // stride)) / size
        slowest = max(inside / self.nvlink, (1 - inside) * self.gpus_per_node / self.node_all_to_all)
        return self.ring_latency(size, stride) + nbytes * slowest

    def all_reduce(self, nbytes: float, size: int, stride: int) -> float:
        """Seconds to sum ``nbytes`` on every rank: as two times round, but of many ranks NCCL makes trees."""
        trees = 64 / max(size - 1, 64)  # whose latency grows with the logarithm
        return 2 * self.all_gather(nbytes, size, stride, trees)

    def all_gather(self, nbytes: float, size: int, stride: int, latencies: float = 1.0) -> float:
        """Seconds to all-gather a result of ``nbytes``; a reduce-scatter of an input of that size takes as long."""
        if size == 1 or nbytes == 0:
            return 0.0
        latency, per_byte = _ring(self, size, stride)
        return latencies * latency + nbytes * per_byte

    def message(self, nbytes: float, stride: int, ranks: int = 2) -> float:
        """Seconds of the slowest message if each GPU sends one to the GPU ``stride`` further on, in rows of ``ranks``.

        A row that does not fit in a node leaves it, and each GPU then has its share of the node's cards.
        """
        if stride * ranks <= self.gpus_per_node:
            return self.nvlink_latency + nbytes / self.nvlink
        return self.network_latency + nbytes * self.gpus_per_node / self.node_messages

    def ring_latency(self, size: int, stride: int) -> float:
        """Seconds until the first byte is round a ring, over hops inside nodes and, if it leaves one, between nodes."""
        hops, between = size - 1, 0
        if not self._stays_inside(size, stride):
            between = max(1, -(-size * stride // self.gpus_per_node) - 1) if stride < self.gpus_per_node else hops
        return between * self.network_latency + (hops - between) * self.nvlink_latency

    def ring_bandwidth(self, size: int, stride: int) -> float:
        """Bytes per second of one ring while all GPUs of a node are in such rings.

        A ring has ``size`` ranks, ``stride`` apart. A node holds gpus_per_node / stride of a ring's ranks, and
        ``stride`` rings share its network cards.
        """
        if self._stays_inside(size, stride):
            return self.nvlink if self.switched else self.nvlink * (size - 1) / (self.gpus_per_node - 1)
        rings = min(stride, self.gpus_per_node)
        share = self.node * min(1 / rings, self.ring_part)
        return min(share, self.nvlink) if rings < self.gpus_per_node else share

    def _stays_inside(self, size: int, stride: int) -> bool:
        """Whether no ring leaves its node. If groups do not divide a node evenly, some of them span two nodes."""
        ranks = size * stride
        return ranks <= self.gpus_per_node and (self.one_node or self.gpus_per_node % ranks == 0)


Part = Annotated[float, Field(ge=0, le=1)]
Efficiency = Annotated[float, Field(ge=1e-6, le=1)]  # divides
Amount = Annotated[float, Field(ge=0, le=1e18)]
Rate = Annotated[float, Field(ge=1e-6, le=1e18)]  # divides
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Whole = Annotated[int, Field(ge=0, le=1_000_000)]


class Bounds(NamedTuple):
    """The range of a fitted constant, and the width of its prior."""

    low: float
    high: float
    spread: float  # standard deviation of the prior on the logarithm


@dataclass(frozen=True, eq=False)
class Profile:
    """Constants of a stack. Efficiencies are shares of the data sheet's figure; times are in seconds."""

    name: str
    device: devices.Device
    gpus_per_node: Count
    node_bandwidth: Amount  # of all network cards of a node, bytes per second in one direction; 0: unknown
    description: str = ""
    fitted_on: tuple[str, ...] = ()
    fitted_gpus: tuple[str, ...] = ()  # names of the GPUs of the rows that it is fitted on
    most_gpus: Count = 1  # of these rows
    fitted_experts: bool = False  # some of these rows have experts
    error_median: Amount = 0.1  # of the step time, relative, on rows left out of the fit
    error_p90: Amount = 0.2
    dtype: Literal["float32", "bfloat16", "float16", "float8", "float4"] = "bfloat16"  # of these rows

    gemm_efficiency: Annotated[Efficiency, Bounds(0.3, 1.0, 0.1)] = 0.8  # of the largest tile, once running
    # Multiply-adds that starting and ending a tile costs: efficiency K / (K + depth).
    gemm_depth: Annotated[Amount, Bounds(30, 600, 0.35)] = 150.0
    attention_efficiency: Annotated[Efficiency, Bounds(0.1, 1.0, 0.3)] = 0.5  # of fused attention
    memory_efficiency: Annotated[Efficiency, Bounds(0.3, 1.0, 0.2)] = 0.8
    # 0: every operator between products reads and writes memory; 1: neighbours are one kernel.
    fusion: Annotated[Part, Bounds(0.01, 1.0, 0.5)] = 0.0
    operator_time: Annotated[Amount, Bounds(1e-6, 1e-4, 0.7)] = 1e-5  # host's time to launch one operator
    nvlink_efficiency: Annotated[Efficiency, Bounds(0.1, 0.95, 0.1)] = 0.75
    network_efficiency: Annotated[Efficiency, Bounds(0.05, 0.95, 0.4)] = 0.6  # rings between nodes
    all_to_all_efficiency: Annotated[Efficiency, Bounds(0.05, 0.98, 0.2)] = 0.9  # all-to-alls between nodes
    network_latency: Annotated[Amount, Bounds(1e-6, 1e-2, 1.0)] = 1e-5
    message_efficiency: Annotated[Efficiency, Bounds(0.03, 0.95, 0.5)] = 0.6  # pipeline messages between nodes
    # Share of backward computation that can hide data-parallel communication.
    overlap: Annotated[Part, Bounds(0.01, 1.0, 0.3)] = 0.5
    contention: Annotated[Part, Bounds(0.02, 0.5, 0.5)] = 0.15  # share of hidden communication that slows it down
    microbatch_time: Annotated[Amount, Bounds(1e-4, 0.05, 0.7)] = 1e-3  # per microbatch and rank, everything else
    step_time: Annotated[Amount, Bounds(1e-3, 1.0, 0.7)] = 0.05  # per step, everything else
    # Efficiency of 8-bit products relative to 16-bit ones, with quantization.
    float8_relative: Annotated[Efficiency, Bounds(0.4, 1.0, 0.1)] = 0.85
    float8_rowwise: Annotated[Efficiency, Bounds(0.2, 1.0, 0.3)] = 0.5  # the same, each row with a scale of its own
    float4_relative: Annotated[Efficiency, Bounds(0.2, 1.0, 0.2)] = 0.6  # the same for 4-bit products
    # FLOP/s of products with sizes that miss the fast kernels.
    misaligned_rate: Annotated[Rate, Bounds(1e12, 1e14, 0.7)] = 1e13
    # Efficiency of all experts' products in one call, relative to one product.
    grouped_relative: Annotated[Efficiency, Bounds(0.2, 1.0, 0.3)] = 0.9
    # Share of the all-to-alls around experts that computation waits for.
    expert_exposed: Annotated[Part, Bounds(0.02, 1.0, 0.5)] = 1.0

    # how the stack works
    nvlink_latency: Amount = 3e-6  # per hop of a ring
    host_bandwidth: Rate = 2.5e10  # between a GPU and pinned memory, in bytes per second: PCIe 4.0 × 16
    # Two GPUs can use all their links with each other; otherwise each has equal shares of its own to all of the node.
    nvlink_switch: bool = True
    gathers_per_layer: Count = 1  # under ZeRO 3
    ring_part: Efficiency = 1.0  # the largest share of a node's network cards that one ring can use
    message_shards: bool = True  # each tensor-parallel rank sends a part of a pipeline message
    message_exposed: Part = 1.0  # share of a pipeline message that computation waits for
    tensor_exposed: Part = 1.0  # the same for tensor-parallel collectives
    causal_half: bool = False  # fused attention skips what the mask hides
    overlap_in_pipeline: bool = True  # a pipeline's last backward passes also hide gradient sums
    gather_hidden: bool = False  # ZeRO 1 and 2 gather parameters during the first forward pass
    gradient_bytes: Count = 4  # per gradient in data-parallel sums
    parameter_bytes: Count = 2  # per parameter in gathers
    accumulation_bytes: Amount = 10.0  # per parameter and microbatch: read the new gradient, read and write the sum
    optimizer_traffic: Amount = 52.0  # bytes per parameter that clipping and the update read and write
    # How sharply the slower of host and device sets a pass's time; see `host_and_device`. 1: the host waits for every
    # operator (CUDA_LAUNCH_BLOCKING=1).
    launch_norm: Count = 4
    tensor_host_forward: Amount = 0.0  # extra host time per layer with tensor parallelism, uncompiled
    tensor_host_backward: Amount = 0.0
    overhead_bytes: Amount = 3e9  # context, libraries and communication buffers
    fragmentation: Amount = 0.05  # of activations and gathered weights
    cores: Whole = 0  # of a CPU, if a node's processes share them; 0: each has its own
    # Properties of a job, not of a stack:
    one_node: bool = False  # it has no more GPUs than one node
    own_links: bool = False  # the links between nodes were measured on its cluster, so its settings do not change them

    @cached_property
    def seconds(self) -> dict[Any, Any]:
        """What `titan_like.planner.cost` has computed with these constants."""
        return {}

    @cached_property
    def links(self) -> Links:
        """What the stack achieves on the cluster's links."""
        return Links(self)

    @property
    def memory_rate(self) -> float:
        """Bytes per second that memory-bound operators read and write."""
        return self.device.memory_bandwidth * self.memory_efficiency

    def changed(self, **values: Any) -> Profile:
        """A copy with other values."""
        return replace(self, **values)


_HINTS = get_type_hints(Profile, include_extras=True)
FITTED = {
    name: bounds
    for name, hint in _HINTS.items()
    for bounds in getattr(hint, "__metadata__", ())
    if isinstance(bounds, Bounds)
}
_OF_JOBS = ("one_node", "own_links")


def load_profile(name: str, key: str = "--profile") -> Profile:
    """A shipped profile by name, or one from a TOML file. ``key`` is the setting that names it.

    Raises a `ConfigError` if there is no such profile or file.
    """
    if name in builtin_profiles():
        return builtin_profiles()[name]
    path = Path(name)
    if path.suffix == ".toml" and unreadable_reason(path) != "does not exist":
        return profile_from(path.stem, read_toml(name, key))
    known = ", ".join(builtin_profiles())
    reason = f"no such profile; there are {known}, or name a TOML file, as in benchmarks/profiles of the repository"
    raise ConfigError(key, name, reason)


@cache
def builtin_profiles() -> dict[str, Profile]:
    """The shipped profiles by name."""
    folder = resources.files("titan_like.planner").joinpath("profiles")
    files = {Path(file.name).stem: file for file in folder.iterdir() if file.name.endswith(".toml")}
    return {name: profile_from(name, tomli.loads(files[name].read_text(encoding="utf-8"))) for name in sorted(files)}


def profile_from(name: str, table: dict[str, Any]) -> Profile:
    """Read a profile from its TOML. ``device`` names a GPU of devices.toml, or the one that [device_table] describes.

    Raises a `ConfigError` for unknown or missing keys, impossible values, and a device that is unknown or incomplete.
    """
    table = dict(table)
    device_table = table.pop("device_table", None)
    try:  # as JSON, whose lists may be tuples
        model = _table().model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        listed = "titan_like/planner/profile.py describes all fields, see docs/planner.md, Calibrate"
        raise all_of(field_errors(error.errors(), f"profile {name}: ".__add__, _table(), None, listed)) from None
    values = model.model_dump(exclude_unset=True)
    if device_table is not None:
        devices.check_device_table(f"profile {name}: device_table", device_table)
        device = devices.device_from(values["device"], device_table)
    else:
        device = devices.find_device(values["device"])
    overhead = values.get("overhead_bytes", 0.0)
    reason = f"must be below the device's memory, {device.memory_bytes:.4g}"
    require(overhead < device.memory_bytes, f"profile {name}: overhead_bytes", overhead, reason)
    return Profile(name=name, **values | {"device": device})


@cache
def _table() -> type[BaseModel]:
    """What a profile's TOML may hold: the fields of `Profile`, with the name of the device."""
    hints = _HINTS | {"device": str}
    needed = ("device", "gpus_per_node", "node_bandwidth")
    names = [f.name for f in fields(Profile) if f.name not in ("name", *_OF_JOBS)]
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    field_types: dict[str, Any] = {name: (hints[name], ... if name in needed else None) for name in names}
    return create_model("ProfileTable", __config__=config, **field_types)


def profile_to_toml(profile: Profile) -> str:
    """The inverse of `profile_from`: values that differ from the defaults, and all fitted ones, to four digits."""
    defaults = {f.name: f.default for f in fields(Profile) if f.name not in ("name", *_OF_JOBS)}
    values = {name: getattr(profile, name) for name in defaults} | {"device": profile.device.name}
    shown = {name: value for name, value in values.items() if name in FITTED or value != defaults[name]}
    if not is_builtin(profile.device):
        shown["device_table"] = devices.device_to_table(profile.device)
    return tomli_w.dumps(json.loads(json.dumps(shown), parse_float=lambda text: float(f"{float(text):.4g}")))


def is_builtin(device: devices.Device) -> bool:
    """Tell whether a device is one of devices.toml, and not a measured one."""
    return devices.builtin_devices().get(device.name) is device
