"""Stack profiles: constants for what a GPU, a software stack and a network achieve together.

The constants are few and physical. `FITTED` names those that `calibrate` may change, with bounds outside which a value
means that the model is wrong. The others follow from how the software works or from data sheets.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from titan_like.config.errors import ConfigError
from titan_like.config.paths import file_problem, read_toml
from titan_like.metrics.devices import (
    Device,
    builtin_devices,
    check_device_table,
    device_from,
    device_to_table,
    find_device,
)
from titan_like.planner.cluster import Links
from titan_like.planner.dtypes import NARROW


@dataclass(frozen=True)
class Bounds:
    """The range of a fitted constant, and the width of its prior."""

    low: float
    high: float
    spread: float  # standard deviation of the prior on the logarithm


FITTED: dict[str, Bounds] = {
    "gemm_efficiency": Bounds(0.3, 1.0, 0.1),
    "gemm_depth": Bounds(30, 600, 0.35),
    "attention_efficiency": Bounds(0.1, 1.0, 0.3),
    "memory_efficiency": Bounds(0.3, 1.0, 0.2),
    "compiled_traffic": Bounds(0.2, 1.0, 0.3),
    "operator_time": Bounds(1e-6, 1e-4, 0.7),
    "nvlink_efficiency": Bounds(0.1, 0.95, 0.1),
    "network_efficiency": Bounds(0.05, 0.95, 0.4),
    "message_efficiency": Bounds(0.03, 0.95, 0.5),
    "overlap": Bounds(0.01, 1.0, 0.3),
    "contention": Bounds(0.02, 0.5, 0.5),
    "microbatch_time": Bounds(1e-4, 0.05, 0.7),
    "step_time": Bounds(1e-3, 1.0, 0.7),
    "misaligned_rate": Bounds(1e12, 1e14, 0.7),
    "float8_relative": Bounds(0.4, 1.0, 0.1),
    "float8_rowwise": Bounds(0.2, 1.0, 0.3),
    "float4_relative": Bounds(0.2, 1.0, 0.2),
    "network_latency": Bounds(1e-6, 1e-2, 1.0),
}


@dataclass(frozen=True, eq=False)
class Profile:
    """Constants of a stack. Efficiencies are shares of the data sheet's figure; times are in seconds."""

    name: str
    device: Device
    gpus_per_node: int
    node_bandwidth: float  # of all network cards of a node, bytes per second in one direction; 0: unknown
    description: str = ""
    # The rows it is for: the start of the GPU's name, and the first word of the notes or the start of a session's name.
    groups: tuple[tuple[str, str], ...] = ()
    only_zero: int | None = None  # only rows with this ZeRO stage, which some studies run on another stack
    fitted_on: tuple[str, ...] = ()
    error_median: float = 0.1  # of the step time, relative, on rows left out of the fit
    error_p90: float = 0.2
    judged: dict[str, float] = field(default_factory=dict)  # from `accuracy.judgement`
    dtype: str = "bfloat16"

    # fitted
    gemm_efficiency: float = 0.8  # of the largest tile, once running
    gemm_depth: float = 150.0  # multiply-adds that starting and ending a tile costs: efficiency K / (K + depth)
    attention_efficiency: float = 0.5  # of fused attention
    memory_efficiency: float = 0.8
    compiled_traffic: float = 0.6  # share of the memory traffic between products that compiled layers keep
    operator_time: float = 1e-5  # host's time to launch one operator
    nvlink_efficiency: float = 0.75
    network_efficiency: float = 0.6  # collectives between nodes
    message_efficiency: float = 0.6  # pipeline messages between nodes
    overlap: float = 0.5  # share of backward computation that can hide data-parallel communication
    contention: float = 0.15  # share of hidden communication that computation is slowed down by
    microbatch_time: float = 1e-3  # per microbatch and rank, everything else
    step_time: float = 0.05  # per step, everything else
    float8_relative: float = 0.85  # efficiency of 8-bit products relative to 16-bit ones, with quantization
    float8_rowwise: float = 0.5  # the same if each row has its own scale, computed every time
    float4_relative: float = 0.6  # the same for 4-bit products
    misaligned_rate: float = 1e13  # FLOP/s of products with sizes that miss the fast kernels

    # how the stack works
    nvlink_latency: float = 3e-6  # per hop of a ring
    network_latency: float = 1e-5
    nvlink_switch: bool = True  # otherwise each GPU has equal shares of its links to all others of the node
    gathers_per_layer: int = 1  # under ZeRO 3
    ring_part: float = 1.0  # the largest share of a node's network cards that one ring can use
    message_shards: bool = True  # each tensor-parallel rank sends a part of a pipeline message
    message_exposed: float = 1.0  # share of a pipeline message that computation waits for
    tensor_exposed: float = 1.0  # the same for tensor-parallel collectives
    tensor_async_exposed: float = 0.7  # the same if they are split up to overlap with products
    fused_loss: bool = False  # the loss is one operator each way and writes the gradient over the logits
    fused_softmax: bool = True  # scale, mask and softmax are one operator
    fused_accumulation: bool = False  # the product that makes a gradient adds it to the sum of earlier microbatches
    causal_half: bool = False  # fused attention skips what the mask hides
    recompute_whole: bool = True  # recomputation also repeats a layer's last product and sum
    overlap_in_pipeline: bool = True  # a pipeline's last backward passes also hide gradient sums
    gather_hidden: bool = False  # ZeRO 1 and 2 gather parameters during the first forward pass
    gradient_bytes: int = 4  # per gradient in data-parallel sums
    parameter_bytes: int = 2  # per parameter in gathers
    optimizer_traffic: float = 52.0  # bytes per parameter that clipping and the update read and write
    blocking_launches: bool = False  # the host waits for every operator (CUDA_LAUNCH_BLOCKING=1)
    launch_norm: int = 4  # how sharply the slower of host and device sets a pass's time; see `host_and_device`
    host_operators: tuple[int, int] = (24, 40)  # in a layer's forward and backward pass
    tensor_host_forward: float = 0.0  # extra host time per layer with tensor parallelism, uncompiled
    tensor_host_backward: float = 0.0
    weight_state: float = 2.0  # resident bytes per parameter: weights
    gradient_state: float = 4.0  # gradients
    optimizer_state: float = 12.0  # master weights and moments
    buffer_state: float = 0.0  # flat buffers for sums and gathers
    logit_state: float = 8.0  # bytes per logit at the loss, apart from the logit: float32 copies, gradients
    trainer_state: bool = False  # weights, gradients and optimizer state are kept as in our own trainer
    overhead_bytes: float = 3e9  # context, libraries and communication buffers
    fragmentation: float = 0.05  # of activations and gathered weights
    one_node: bool = False  # of a job, not of a stack: it has no more GPUs than one node
    links: Links = field(init=False, repr=False)

    def __post_init__(self) -> None:
        links = Links(
            self.gpus_per_node,
            self.device.nvlink_bandwidth * self.nvlink_efficiency,
            self.node_bandwidth * self.network_efficiency,
            self.node_bandwidth * self.message_efficiency,
            self.nvlink_latency,
            self.network_latency,
            self.ring_part,
            self.nvlink_switch,
            self.one_node,
        )
        object.__setattr__(self, "links", links)

    @property
    def memory_rate(self) -> float:
        """Bytes per second that memory-bound operators read and write."""
        return self.device.memory_bandwidth * self.memory_efficiency

    def changed(self, **values: Any) -> Profile:
        """A copy with other values."""
        return replace(self, **values)


_TUPLES = ("groups", "fitted_on", "host_operators")


_DTYPES = ("float32", "bfloat16", "float16", *NARROW)
_PARTS = {"overlap", "contention", "compiled_traffic", "ring_part", "message_exposed", "tensor_exposed"}
_PARTS |= {"tensor_async_exposed", "float8_relative", "float8_rowwise", "float4_relative"}
_LEAST = 1e-6  # for constants that divide
_ABOVE_ZERO = {"node_bandwidth", "misaligned_rate", "ring_part", "float8_relative", "float8_rowwise", "float4_relative"}


def problem_of(key: str, kind: str, value: Any) -> str | None:
    """What is wrong with the value of a profile's field ``key``, whose annotation is ``kind``; None if nothing is."""
    if kind == "float":
        is_part = key in _PARTS or key.endswith("_efficiency")
        above_zero = key in _ABOVE_ZERO or key.endswith("_efficiency")
        high = 1.0 if is_part else 1e18
        least = _LEAST if above_zero else 0
        if _is_number(value) and (least <= value <= high or (key == "node_bandwidth" and value == 0)):
            return None
        return f"must be a number of at least {least:g}" + (" and at most 1" if is_part else "")
    if key == "dtype":
        return None if value in _DTYPES else f"unknown; use {', '.join(_DTYPES)}"
    is_right, problem = _KINDS[kind]
    return None if is_right(value) else problem


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= 1_000_000


def _is_list(value: Any, length: int | None, is_item: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and length in (None, len(value)) and all(map(is_item, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "must be true or false"),
    "str": (_is_text, "must be a string"),
    "int": (lambda value: _is_whole(value, 1), "must be a whole number of at least 1"),
    "int | None": (lambda value: _is_whole(value, 0) and value <= 3, "must be a ZeRO stage, 0 to 3"),
    "dict[str, float]": (
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
        "must be a table of numbers",
    ),
    "tuple[int, int]": (lambda value: _is_list(value, 2, lambda one: _is_whole(one, 0)), "must be two whole numbers"),
    "tuple[str, ...]": (lambda value: _is_list(value, None, _is_text), "must be a list of strings"),
    "tuple[tuple[str, str], ...]": (
        lambda value: _is_list(value, None, lambda pair: _is_list(pair, 2, _is_text)),
        "must be a list of pairs of strings",
    ),
}


def profile_from(name: str, table: dict[str, Any]) -> Profile:
    """Read a profile from its TOML. ``device`` names a GPU of devices.toml, or the one that [device_table] describes.

    Raises:
        ConfigError: keys are unknown or missing, a value is impossible, or the device is unknown or incomplete.
    """
    known = {f.name: str(f.type) for f in fields(Profile) if f.init and f.name not in ("name", "one_node")}
    table = dict(table)
    own = table.pop("device_table", None)
    unknown = sorted(set(table) - known.keys())
    if unknown:
        raise ConfigError(
            f"profile {name}: {unknown[0]}", table[unknown[0]], f"unknown; there are {', '.join(sorted(known))}"
        )
    for needed in ("device", "gpus_per_node", "node_bandwidth"):
        if needed not in table:
            raise ConfigError(f"profile {name}: {needed}", None, "missing; every profile needs it")
    for key, value in table.items():
        problem = problem_of(key, "str" if key == "device" else known[key], value)
        if problem is not None:
            raise ConfigError(f"profile {name}: {key}", value, problem)
    # TOML has names and lists where a profile has a device and tuples.
    values = dict(table)
    if own is not None:
        check_device_table(f"profile {name}: device_table", own)
        values["device"] = device_from(str(values["device"]), own)
    else:
        values["device"] = find_device(values["device"])
    if values.get("overhead_bytes", 0.0) >= values["device"].memory_bytes:
        problem = f"must be below the device's memory, {values['device'].memory_bytes:.4g}"
        raise ConfigError(f"profile {name}: overhead_bytes", values["overhead_bytes"], problem)
    for key in _TUPLES:
        if key in values:
            values[key] = tuple(tuple(v) if isinstance(v, list) else v for v in values[key])
    return Profile(name=name, **values)


def profile_to_toml(profile: Profile) -> str:
    """The inverse of `profile_from`: values that differ from the defaults, and all fitted ones, to four digits."""
    defaults: dict[str, Any] = {f.name: f.default for f in fields(Profile)} | {"judged": {}}
    values = asdict(profile) | {"device": profile.device.name}
    shown = {
        key: _rounded(value)
        for key, value in values.items()
        if key not in ("name", "one_node", "links") and (key in FITTED or value != defaults[key])
    }
    if not is_builtin(profile.device):
        shown["device_table"] = _rounded(device_to_table(profile.device))
    return tomli_w.dumps(shown)


def is_builtin(device: Device) -> bool:
    """Whether devices.toml has the device."""
    return builtin_devices().get(device.name) is device


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


@cache
def builtin_profiles() -> dict[str, Profile]:
    """The shipped profiles by name."""
    folder = resources.files("titan_like.planner").joinpath("profiles")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    return {
        file.name[:-5]: profile_from(file.name[:-5], tomllib.loads(file.read_text(encoding="utf-8"))) for file in files
    }


def load_profile(name: str, key: str = "--profile") -> Profile:
    """A shipped profile by name, or one from a TOML file. ``key`` is the setting that names it.

    Raises:
        ConfigError: there is no such profile or file.
    """
    if name in builtin_profiles():
        return builtin_profiles()[name]
    path = Path(name)
    if path.suffix == ".toml" and file_problem(path) != "does not exist":
        return profile_from(path.stem, read_toml(name, key))
    known = ", ".join(builtin_profiles())
    raise ConfigError(key, name, f"no such profile; there are {known}, or name a TOML file")


def profile_for_group(gpu: str, word: str, zero_stage: int = 0, session: str = "") -> Profile | None:
    """The most specific profile for rows of this GPU whose notes begin with this word; None if there is none.

    Instead of a study's word, a profile may name the start of a session, such as "bloom 02-2".
    """
    best, most = None, (False, -1)
    for profile in builtin_profiles().values():
        if profile.only_zero not in (None, zero_stage):
            continue
        for start, first in profile.groups:
            rank = (profile.only_zero is not None, len(start) + len(first))
            if gpu.startswith(start) and covers(first, word, session) and rank > most:
                best, most = profile, rank
    return best


def covers(first: str, word: str, session: str) -> bool:
    """Whether a profile's word is the study's, or the start of the session's name."""
    return first == word or (" " in first and session.startswith(first))
