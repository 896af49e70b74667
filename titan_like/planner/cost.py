"""Seconds of traced passes on a stack: a GPU, its software, and a network.

Matrix products are computed in waves, one output tile per multiprocessor. The last wave and the tiles at the edges may
be partly empty (NVIDIA, "Matrix Multiplication Background": tile and wave quantization). A tile of depth K takes as
long as K + ``gemm_depth`` multiply-adds per element at the sustained rate. A product may instead be bound by memory.
All other operators read and write memory. `titan_like.planner.profile.Links` gives the time of collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from titan_like.planner.profile import Profile
from titan_like.planner.trace.program import HOST, Attention, Gemm, Pass, Segment
from titan_like.planner.workload import NARROW, element_bytes, stored_dtype

# Rows, columns, and rate relative to the largest tile: smaller tiles reuse less of what they load.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.85), (128, 64, 0.65), (64, 64, 0.45))

MESSAGES = ("send", "receive")  # between neighbours of a ring
EXPERTS = "ep"  # the group whose messages are rows of tokens on their way to experts

Groups = Mapping[str, tuple[int, int]]  # as `Program.groups`


class Kernels(NamedTuple):
    """What the kernels of a traced operator depend on besides the profile."""

    dtype: str  # of products with weights inside layers
    compiled: bool = False  # a compiler fuses the operators between products


class Times(NamedTuple):
    """Seconds of passes over one segment, or over several."""

    compute: float = 0.0
    recomputed: float = 0.0  # computation of a forward pass that the backward pass repeats
    exposed: float = 0.0  # communication within layers that computation waits for
    host: float = 0.0  # the host's time to launch the operators

    @property
    def device(self) -> float:
        """Seconds from the first kernel to the last, if the host is fast."""
        return self.compute + self.recomputed + self.exposed

    def plus(self, other: Times, count: int = 1) -> Times:
        """The sum of these and ``count`` times ``other``."""
        return Times(*[seconds + count * added for seconds, added in zip(self, other, strict=True)])


def segment_times(
    segment: Segment, is_layer: bool, groups: Groups, kernels: Kernels, profile: Profile
) -> tuple[Times, Times, Times]:
    """Seconds of a segment's passes, in the order of `Segment.passes`. The profile keeps what it has computed."""
    cache, key = profile.seconds, (segment, is_layer, kernels)
    if key not in cache:
        cache[key] = tuple(pass_times(pass_, is_layer, groups, kernels, profile) for pass_ in segment.passes)
    return cache[key]


def pass_times(pass_: Pass, is_layer: bool, groups: Groups, kernels: Kernels, profile: Profile) -> Times:
    """Seconds of a pass. ``is_layer``: products outside layers never run in narrow types."""
    dtype = kernels.dtype if is_layer else stored_dtype(kernels.dtype)
    seconds, exposed, hides = [0.0, 0.0], 0.0, 0.0  # computed first, recomputed
    for gemm, count in pass_.gemms.items():
        seconds[gemm.recomputed] += count * gemm_time(gemm, dtype, profile)
    for core, count in pass_.attention.items():
        time = count * attention_time(core, dtype, profile)
        seconds[core.recomputed] += time
        hides += time * (not core.backward)
    fused = 1.0 if kernels.compiled else profile.fusion
    for repeat in (False, True):
        eager, in_groups = (pair[1] if repeat else pair[0] - pair[1] for pair in (pass_.eager_bytes, pass_.fused_bytes))
        seconds[repeat] += ((1 - fused) * eager + fused * in_groups) / profile.memory_rate
    copies = 0.0  # to or from the host's memory, next to everything else
    for (kind, group, _), (calls, nbytes) in pass_.collectives.items():
        if group == HOST:
            copies += nbytes / profile.host_bandwidth
        elif group in groups:
            size, stride = groups[group]
            time = calls * collective_time(kind, nbytes / calls, size, stride, profile)
            if kind in MESSAGES:  # arrive during attention to what is there; backward, sums wait for each other
                time, hides = max(0.0, time - hides), max(0.0, hides - time)
            exposed += time * (profile.expert_exposed if group == EXPERTS else profile.tensor_exposed)
    exposed = max(exposed, copies - sum(seconds))
    launches = pass_.fused_launches if kernels.compiled else pass_.launches
    return Times(seconds[0], seconds[1], exposed, launches * profile.operator_time)


def gemm_time(gemm: Gemm, dtype: str, profile: Profile) -> float:
    """Seconds of products with elements of 4 bytes in float32, else 2.

    Fast kernels need rows that begin at multiples of the device's `tensor_element`; see `Gemm.alignment`.
    """
    cache, key = profile.seconds, (gemm, dtype)
    if key not in cache:
        m, n, k, batch, _, alignment, is_grouped = gemm
        device, best = profile.device, float("inf")
        # The best tile: waves, each as long as one tile takes, over all multiprocessors.
        for rows, columns, relative in _TILES:
            waves = -(-(-(-m // rows) * -(-n // columns) * batch) // device.multiprocessors)
            best = min(best, waves * rows * columns / relative)
        compute = best * device.multiprocessors * 2 * (k + profile.gemm_depth) / gemm_rate(dtype, profile)
        moved = element_bytes(dtype) * batch * (m * k + k * n + m * n)
        seconds = max(compute, moved / profile.memory_rate)
        if alignment % min(16, device.tensor_element):
            seconds = max(seconds, gemm.flops / profile.misaligned_rate)
        cache[key] = seconds / profile.grouped_relative if is_grouped else seconds
    return cache[key]


def gemm_rate(dtype: str, profile: Profile) -> float:
    """FLOP/s of products whose tiles are the largest and fill all multiprocessors."""
    rate = profile.device.peak_flops(dtype) * profile.gemm_efficiency
    if dtype in NARROW:
        rate *= profile.float8_relative if dtype == "float8" else profile.float4_relative
    return rate


def attention_time(core: Attention, dtype: str, profile: Profile) -> float:
    """Seconds of fused attention (arXiv 2205.14135): bound by computation, five products backward and two forward."""
    flops = core.flops(profile.causal_half) * (1.25 if core.backward else 1)
    return flops / (profile.device.peak_flops(stored_dtype(dtype)) * profile.attention_efficiency)


def collective_time(kind: str, nbytes: float, size: int, stride: int, profile: Profile) -> float:
    """Seconds of a collective. ``nbytes``: the result of an all-gather, the input of all others."""
    links = profile.links
    if kind == "all_reduce":
        return links.all_reduce(nbytes, size, stride)
    if kind == "all_to_all":
        return links.all_to_all(nbytes, size, stride)
    if kind in MESSAGES:  # to the next one of a ring, which does both at once
        return links.all_gather(nbytes * size, size, stride) / (size - 1) / 2
    return links.all_gather(nbytes, size, stride)
