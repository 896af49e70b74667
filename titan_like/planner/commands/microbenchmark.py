"""Measure this machine and write a profile of it. Start it with torchrun to measure the links between processes.

Each constant is measured with what the planner uses it for: linear layers give GEMMs; an attention core gives
attention; a tiny layer gives the host's launch time; norms, activations and sums give the memory's efficiency;
collectives give links. What runs is recorded as in a trace and priced by `cost`: an efficiency is the time that it is
predicted to take at an efficiency of 1 over the measured time. The shortest of many runs counts, because other load
on the machine only ever adds time. Several processes (torchrun) all measure at once, as in training, and their mean
counts. If a CPU has fewer cores than processes, the median run counts, because the shortest had a core for themselves.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titan_like.config import JobConfig
from titan_like.config.errors import require
from titan_like.config.options import OptionParser, as_installed
from titan_like.metrics.collectives import BETWEEN_NODES, Measurement, operation_on
from titan_like.metrics.devices import Device, known_device
from titan_like.metrics.hardware import peak_memory_bytes
from titan_like.models.batch import Context
from titan_like.models.registry import build_model, model_config
from titan_like.planner.commands.outcome import Outcome, toml_option
from titan_like.planner.cost import Kernels, pass_times
from titan_like.planner.links import latency_of, with_links
from titan_like.planner.profile import Profile, profile_to_toml
from titan_like.planner.stack import default_profile
from titan_like.planner.trace.program import Pass, Segment
from titan_like.planner.trace.recorder import Recorder
from titan_like.train.environment import environment_number
from titan_like.train.host_memory import keep_freed_memory
from titan_like.train.job import process_group
from titan_like.train.setup import select_device

_SECONDS = 1.0  # per figure, with at least three runs
_DEPTHS = [10 * 1.15**i for i in range(32)]  # candidates for gemm_depth: 10 to 760

# Linear layers: tokens, inputs, outputs. Models on a CPU are smaller.
_PRODUCTS_CPU: tuple[tuple[int, int, int], ...] = (
    *((512, 128, 384), (512, 128, 512), (512, 512, 128)),
    *((256, 512, 1536), (512, 512, 512), (256, 1024, 1024)),
)
_PRODUCTS_GPU = ((4096, 1024, 3072), (4096, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 16384), (8192, 8192, 8192))
# Transformer layers: samples, tokens of each, hidden size, heads.
_LAYERS_CPU: tuple[tuple[int, int, int, int], ...] = ((4, 256, 128, 4), (2, 256, 256, 4), (1, 256, 512, 8))
_LAYERS_GPU = ((4, 2048, 2048, 16), (2, 2048, 4096, 32))
_TINY = {"hidden_size": 16, "num_attention_heads": 2}

_ALTERNATIONS = 10  # rounds of a product and a collective
_SMALLEST = 1 << 12  # bytes of a collective whose time is latency; larger ones tell the bandwidth
_LARGEST_CPU, _LARGEST_GPU = 1 << 24, 1 << 28

# What the first steps of a process on a CPU add to its size besides tensors (threads, scratch space), and the share of
# activations, logits and gathered weights that the allocator keeps on top of them (0.3 to 0.9 in runs of 1 and 2
# processes, models of 1 to 13 million parameters).
_FIRST_STEPS, _FRAGMENTATION = 53e6, 0.6


def add_options(parser: OptionParser) -> None:
    """Add the command's options. It takes no settings of a run."""
    parser.add_path("--out", "where to write the profile", "FILE.toml", type=toml_option, required=True)


def run(options: argparse.Namespace, settings: list[str]) -> Outcome:
    """Measure this machine and write the profile."""
    require(not settings, "command line", " ".join(settings), "microbenchmark takes no settings of a run")
    device = select_device("float32")
    if device.type == "cpu":
        keep_freed_memory()  # as training does
    with process_group(device):
        profile, lines = measure(device, Path(options.out).stem)
        dist.barrier()
    if environment_number("RANK", 0):
        return Outcome("", {})
    toml = f"# Written by {as_installed('scripts/plan.py')} microbenchmark.\n{profile_to_toml(profile)}"
    text = "\n".join([*lines, f"wrote {options.out}"])
    return Outcome(text, {"microbenchmark": lines}, files={Path(options.out): toml})


class Timed(NamedTuple):
    """Operators, recorded as in a trace, and how long they took."""

    operators: Pass
    seconds: float

    def predicted(self, dtype: str, profile: Profile) -> float:
        """Seconds on the device under a profile."""
        return pass_times(self.operators, True, {}, Kernels(dtype), profile).compute


class Machine:
    """One process's device, with timers for operations on it and on all processes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_cpu, self.began = device, device.type == "cpu", time.perf_counter()
        self.processes = dist.get_world_size()
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.processes))  # processes on this machine
        self.products = _PRODUCTS_CPU if self.is_cpu else _PRODUCTS_GPU
        self.layers = _LAYERS_CPU if self.is_cpu else _LAYERS_GPU
        cores = len(os.sched_getaffinity(0))
        self.shared_cores = cores if self.is_cpu and self.local_size > cores else 0
        self.typical: Callable[[list[float]], float] = statistics.median if self.shared_cores else min

    def show(self, message: str) -> None:
        """Print on stderr what is measured next."""
        if dist.get_rank() == 0:
            print(f"{time.perf_counter() - self.began:5.1f} s  {message}", file=sys.stderr, flush=True)

    def seconds(self, run: Callable[[], object], times: int = 1, launch_only: bool = False) -> float:
        """Seconds of the run that counts, from several ``times`` in a row, so that a GPU does not wait for the host.

        ``launch_only``: until the host has launched the operators, on which the device may still work.
        """
        durations: list[float] = []
        run()
        began = time.perf_counter()
        while len(durations) < 3 or time.perf_counter() - began < _SECONDS:
            self._finish()
            start = time.perf_counter()
            for _ in range(times):
                run()
            if not launch_only:
                self._finish()
            durations.append((time.perf_counter() - start) / times)
        return self.mean(self.typical(durations))

    def timed(self, run: Callable[[], object], times: int = 1, launch_only: bool = False) -> Timed:
        """A run's operators and `seconds`."""
        recorder = Recorder([Segment()])
        with recorder:
            run()
        return Timed(recorder.current, self.seconds(run, times, launch_only))

    def seconds_between(self, run: Callable[[], object], product: Callable[[], object]) -> float:
        """Seconds that a run adds when it alternates with products on every process.

        This is how collectives run in training. On a CPU, the threads that carry a message find the cores busy, and
        everyone waits while other processes of the machine are scheduled.
        """

        def elapsed(*steps: Callable[[], object]) -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(_ALTERNATIONS):
                for step in steps:
                    step()
            self._finish()
            return time.perf_counter() - start

        elapsed(product, run)
        rounds = [(elapsed(product, run), elapsed(product)) for _ in range(7)]
        alternating, alone = (self.typical(list(times)) for times in zip(*rounds, strict=True))
        return self.mean(max(alternating - alone, 0.0) / _ALTERNATIONS)

    def mean(self, value: float) -> float:
        """The mean of a value over the processes."""
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.processes

    def _finish(self) -> None:
        if not self.is_cpu:
            torch.cuda.synchronize(self.device)


def measure(device: torch.device, name: str) -> tuple[Profile, list[str]]:
    """A profile of this machine, and its figures in words. Every process of the default group calls it."""
    machine = Machine(device)
    constants: dict[str, float] = {}
    if machine.is_cpu:  # first, because the largest resident set never shrinks
        resident = machine.mean(peak_memory_bytes(device))
        constants = {"overhead_bytes": resident + _FIRST_STEPS, "fragmentation": _FRAGMENTATION}
    main = "float32"
    if not machine.is_cpu:
        main = "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    machine.show("memory")
    bandwidth = _memory_bandwidth(machine)
    machine.show("GEMMs")
    products = {dtype: _products(machine, dtype) for dtype in dict.fromkeys(("float32", main))}
    peaks = {dtype: max(run.operators.flops / run.seconds for run in timed) for dtype, timed in products.items()}
    if "bfloat16" in peaks:
        peaks["float16"] = peaks["bfloat16"]
    machine.show("links")
    links = _links(machine) if machine.processes > 1 else []
    measured = _device(machine, peaks, bandwidth, links[2].bus_bandwidth if links else bandwidth)
    profile = with_products(_start(machine, name, measured).changed(dtype=main), products[main], main)
    profile = with_links(profile, links)
    ideal = profile.changed(attention_efficiency=1.0, memory_efficiency=1.0, fusion=0.0)
    machine.show("attention")
    constants["attention_efficiency"] = _attention_efficiency(machine, main, ideal)
    machine.show("host")
    constants["operator_time"] = _operator_time(machine, main)
    machine.show("operators between GEMMs")
    constants["memory_efficiency"] = _memory_efficiency(machine, main, ideal)
    profile = profile.changed(**constants)
    return profile, _described(profile, links, main)


def _both_passes(
    machine: Machine, dtype: str, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]
) -> Callable[[], object]:
    """A run of a function and of its backward pass, on random inputs of these shapes."""
    options = {"device": machine.device, "dtype": getattr(torch, dtype)}
    inputs = [torch.randn(shape, requires_grad=True, **options) for shape in shapes]
    gradient = torch.randn_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, gradient)


def _memory_bandwidth(machine: Machine) -> float:
    """Bytes per second of c = a + b on arrays that exceed the caches."""
    elements = (1 << 24) if machine.is_cpu else (1 << 28)
    a, b, c = (torch.ones(elements, device=machine.device) for _ in range(3))
    return 3 * 4 * elements / machine.seconds(lambda: torch.add(a, b, out=c))


def _products(machine: Machine, dtype: str) -> list[Timed]:
    """The forward and backward passes of linear layers: three products each."""
    shapes = [((tokens, inputs), (outputs, inputs)) for tokens, inputs, outputs in machine.products]
    return [machine.timed(_both_passes(machine, dtype, F.linear, *operands)) for operands in shapes]


def with_products(profile: Profile, products: list[Timed], dtype: str) -> Profile:
    """The profile with the depth and the efficiency that fit measured GEMMs best, by squared relative errors."""
    best, smallest = profile, math.inf
    for depth in _DEPTHS:
        trial = profile.changed(gemm_depth=depth, gemm_efficiency=1.0)
        ratios = [math.log(product.predicted(dtype, trial) / product.seconds) for product in products]
        shift = statistics.mean(ratios)
        spread = sum((ratio - shift) ** 2 for ratio in ratios)
        if spread < smallest:
            best, smallest = trial.changed(gemm_efficiency=min(1.0, math.exp(shift))), spread
    return best


def _attention_efficiency(machine: Machine, dtype: str, ideal: Profile) -> float:
    """Efficiency of causal fused attention, forward and backward."""
    samples, seq_len, hidden, heads = machine.layers[0]
    attention = partial(F.scaled_dot_product_attention, is_causal=True)
    run = _both_passes(machine, dtype, attention, *[(samples, heads, seq_len, hidden // heads)] * 3)
    timed = machine.timed(run)
    return min(1.0, timed.predicted(dtype, ideal) / timed.seconds)


def _operator_time(machine: Machine, dtype: str) -> float:
    """Seconds per operator: the host's time for a layer with almost nothing to compute, over its launches."""
    section = JobConfig().model
    model = model_config(section.model_copy(update={"overrides": _TINY}))
    layer: Any = build_model(model, section.family).layers["0"].to(device=machine.device, dtype=getattr(torch, dtype))
    x = torch.randn(1, 8, model.hidden_size, device=machine.device, dtype=getattr(torch, dtype))

    def run() -> None:
        layer(x, Context()).sum().backward()

    timed = machine.timed(run, launch_only=True)
    return timed.seconds / timed.operators.launches


def _memory_efficiency(machine: Machine, dtype: str, ideal: Profile) -> float:
    """Efficiency of a layer's two norms, its activation, its two residual sums and two sums of their gradients.

    They are timed one by one, not as the rest of a whole layer's time: a short run is more likely to find a moment in
    which nothing else runs.
    """

    def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, scale.shape, scale, scale)

    efficiencies = []
    for samples, seq_len, hidden, _ in machine.layers:
        tokens = samples * seq_len
        x = torch.ones(tokens, hidden, device=machine.device, dtype=getattr(torch, dtype))
        runs = [(2, _both_passes(machine, dtype, norm, (tokens, hidden), (hidden,)))]
        runs.append((1, _both_passes(machine, dtype, partial(F.gelu, approximate="tanh"), (tokens, 4 * hidden))))
        runs.append((4, partial(torch.add, x, x)))
        timed = [(count, machine.timed(run, times=4)) for count, run in runs]
        predicted = sum(count * result.predicted(dtype, ideal) for count, result in timed)
        efficiencies.append(predicted / sum(count * result.seconds for count, result in timed))
    return min(1.0, statistics.geometric_mean(efficiencies))  # caches may beat the memory that updates go through


def _links(machine: Machine) -> list[Measurement]:
    """Small and large all-reduces over all processes, and messages between neighbours that all send at once."""
    n, group = machine.processes, dist.group.WORLD
    assert group is not None
    sharing = machine.local_size if n > machine.local_size else 0  # then the links between machines are the slowest
    tokens, inputs, outputs = machine.products[-1]
    x, weight = torch.ones(tokens, inputs, device=machine.device), torch.ones(inputs, outputs, device=machine.device)
    results = []
    for nbytes in (_SMALLEST, _LARGEST_CPU if machine.is_cpu else _LARGEST_GPU):
        buffer, spare = (torch.ones(nbytes // 4, device=machine.device) for _ in range(2))
        for operation in ("all_reduce", "send_receive"):
            run = operation_on(operation, buffer, spare, group)
            seconds = max(machine.seconds_between(run, lambda: x @ weight), 1e-9)
            results.append(Measurement(BETWEEN_NODES if sharing else "node", n, operation, nbytes, seconds, sharing))
    return results


def _device(machine: Machine, peaks: dict[str, float], bandwidth: float, link: float) -> Device:
    """This machine's device with its measured figures. A known GPU's link is the data sheet's."""
    if machine.is_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / machine.local_size
        return Device("CPU", memory, bandwidth, link, 1, 1, peaks, is_cpu=True)
    properties = torch.cuda.get_device_properties(machine.device)
    listed = known_device(properties.name)
    link = listed.nvlink_bandwidth if listed else link
    return Device(properties.name, properties.total_memory, bandwidth, link, properties.multi_processor_count, 8, peaks)


def _start(machine: Machine, name: str, device: Device) -> Profile:
    """The constants that are not measured: on a GPU the nearest shipped profile's, on a CPU the defaults."""
    if machine.is_cpu:
        profile = Profile(name, device, machine.local_size, 0.0, microbatch_time=1e-4, step_time=1e-3, overlap=0.01)
    else:
        nearest = default_profile(known_device(device.name) or device)
        profile = nearest.changed(name=name, device=device, gpus_per_node=machine.local_size)
    threads = f", torch threads of each: {torch.get_num_threads()}" if machine.is_cpu else ""
    return profile.changed(
        description=f"measured on {machine.processes} × {device.name}{threads}, PyTorch {torch.__version__}",
        node_bandwidth=profile.node_bandwidth if machine.processes > 1 else 0.0,
        fitted_on=(),
        fitted_gpus=(),
        cores=machine.shared_cores,
        causal_half=True,
        error_median=0.15,
        error_p90=0.3,
    )


def _described(profile: Profile, links: list[Measurement], dtype: str) -> list[str]:
    device = profile.device
    peak, memory = device.peak_flops(dtype) / 1e12, device.memory_bandwidth / 1e9
    lines = [
        profile.description,
        f"  GEMMs               {peak:10.3g} TFLOP/s {dtype} at best, {profile.gemm_efficiency:.2f} of it at a depth "
        f"far above {profile.gemm_depth:.0f}",
        f"  attention           {profile.attention_efficiency:10.2f} of it",
        f"  memory              {memory:10.3g} GB/s, {profile.memory_efficiency:.2f} of it between GEMMs",
        f"  an operator's start {1e6 * profile.operator_time:10.3g} µs",
    ]
    if not links:
        return [*lines, "  one process: no links; start it with torchrun to measure them"]
    _, _, *largest = links
    lines += [f"  {link.operation:19s} {link.bus_bandwidth / 1e9:10.3g} GB/s" for link in largest]
    return [*lines, f"  a hop of a ring     {1e6 * latency_of(links):10.3g} µs"]
