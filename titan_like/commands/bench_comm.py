"""Measure collectives: torchrun --nproc_per_node=N scripts/bench_comm.py [--parallelism.KEY VALUE ...]

Times all-reduces, all-gathers, reduce-scatters, all-to-alls and messages between neighbours, from --smallest to
--largest bytes, in the groups of each dimension of the mesh that the run's layout has (without settings, all processes
together), and between two nodes if there are several. All groups of a dimension communicate at the same time, as in
training. Bandwidths are defined as in nccl-tests. The planner reads the file that --json writes:
python scripts/plan.py predict --profile P --links FILE.json.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from titan_like.config import load_config
from titan_like.config.errors import require
from titan_like.config.load import run_command
from titan_like.config.options import OptionParser, write_json
from titan_like.metrics.collectives import BETWEEN_NODES, BUS_SHARES, Measurement, operation_on
from titan_like.metrics.timeline_plot import check_picture
from titan_like.parallel.layout import resolve_layout
from titan_like.parallel.mesh import build_expert_mesh, build_mesh
from titan_like.train.environment import check_meeting, environment_number, number_of_processes
from titan_like.train.job import process_group
from titan_like.train.setup import host_memory_bytes, select_device

_BLOCKS = 5  # blocks of runs; their median counts
_MOST_RUNS = 100  # in a block
_ELEMENT = 4  # bytes of float32
_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


def build_parser() -> argparse.ArgumentParser:
    """The options of the measurement, in addition to a run's settings, of which only the layout is used."""
    parser = OptionParser(description=__doc__, takes_settings=True)
    parser.add_argument("--smallest", type=size_option, default="4k", help="bytes of the smallest buffers (4k)")
    meaning = "bytes of the largest buffers, in steps of 4 × (1g)"
    parser.add_argument("--largest", type=size_option, default="1g", help=meaning)
    parser.add_number("--seconds", float, least=1e-3, most=1e6, default=1.0, help="for each operation and size")
    parser.add_path("--picture", "draw bus bandwidths (needs matplotlib)", "FILE.png")
    return parser


def size_option(text: str) -> int:
    """Bytes from a text such as 4k, 16m or 1g."""
    number, unit = (text[:-1], _UNITS[text[-1].lower()]) if text[-1:].lower() in _UNITS else (text, 1)
    if not (number.isdecimal() and 2**10 <= int(number) * unit <= 2**36):
        raise argparse.ArgumentTypeError(f'"{text}" must be from 1k to 64g, such as 4k, 16m or 1g')
    return int(number) * unit


def sizes_of(options: argparse.Namespace) -> list[int]:
    """Bytes of the buffers to measure, ascending."""
    require(options.smallest <= options.largest, "--smallest", options.smallest, f"is above {options.largest}")
    sizes = [options.smallest]
    while sizes[-1] < options.largest:
        sizes.append(min(4 * sizes[-1], options.largest))
    return sizes


def main(argv: list[str]) -> int:
    """Measure and print."""
    options, settings = build_parser().parse_known_args(argv)
    sizes = sizes_of(options)
    config = load_config(settings)
    processes = number_of_processes()
    check_picture("--picture", options.picture)
    reason = "there is nothing to communicate; start several, with torchrun --nproc_per_node=2"
    require(processes != 1, "processes", 1, reason)
    layout, per_node = resolve_layout(config.parallelism, processes), environment_number("LOCAL_WORLD_SIZE", processes)
    check_meeting()
    device = select_device("float32")
    buffers, room = 3, host_memory_bytes() // per_node  # gloo needs one more, for all-gathers and others
    if device.type == "cuda":
        buffers, room = 2, torch.cuda.mem_get_info(device)[0]
    reason = f"{buffers} buffers of this size need more than the {room / 2**30:.3g} GiB of a process; lower it"
    require(buffers * sizes[-1] <= 0.8 * room, "--largest", options.largest, reason)
    rows: list[Measurement] = []
    with process_group(device):
        is_first = dist.get_rank() == 0
        buffer, spare = (torch.zeros(sizes[-1] // _ELEMENT, device=device) for _ in range(2))
        mesh = build_mesh(layout, device.type)
        groups = [(name, mesh.get_group(name)) for name in mesh.mesh_dim_names or () if mesh[name].size() > 1]
        if layout.expert > 1:
            groups.append(("ep", build_expert_mesh(layout, device.type).get_group("ep")))
        pairs = between_nodes(processes, per_node)
        for name, group in [*groups, *([(BETWEEN_NODES, pairs)] if pairs else [])]:
            sharing = int(largest(sharing_of(group, per_node), device))
            if is_first:
                print(f"{name}: {group.size()} processes on {dist.get_backend()}\n{_HEAD}", flush=True)
            for operation in BUS_SHARES:
                for size in sizes:
                    elements = max(1, size // _ELEMENT // group.size()) * group.size()
                    run = operation_on(operation, buffer[:elements], spare[:elements], group)
                    seconds = seconds_of(run, device, options.seconds)
                    rows.append(Measurement(name, group.size(), operation, elements * _ELEMENT, seconds, sharing))
                    if is_first:
                        print(line(rows[-1]), flush=True)
        dist.barrier()
    if not is_first:
        return 0
    if options.json:
        name = "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
        facts = {"device": name, "torch": torch.__version__, "processes": processes, "processes_of_a_node": per_node}
        write_json(options.json, facts | {"measurements": [row.as_dict() for row in rows]})
    if options.picture:
        draw(rows, Path(options.picture))
    return 0


def between_nodes(processes: int, per_node: int) -> dist.ProcessGroup | None:
    """This rank's group with the same local rank of the neighbouring node; None if there is one node.

    All pairs of nodes communicate at once. If the number of nodes is odd, the ranks of the last node only wait.
    """
    if processes < 2 * per_node:
        return None
    nodes = processes // per_node
    pairs = [[n * per_node + i, (n + 1) * per_node + i] for n in range(0, nodes - 1, 2) for i in range(per_node)]
    waiting = [[rank] for rank in range(2 * per_node * (nodes // 2), processes)]
    return dist.new_subgroups_by_enumeration([*pairs, *waiting])[0]


def sharing_of(group: dist.ProcessGroup, per_node: int) -> int:
    """Number of groups like this one that share a node's links to other nodes; 0 if this group stays in its node."""
    nodes = [rank // per_node for rank in dist.get_process_group_ranks(group)]
    return 0 if len(set(nodes)) == 1 else per_node // nodes.count(nodes[0])


def seconds_of(run: Callable[[], None], device: torch.device, budget: float) -> float:
    """Seconds of one run on the slowest of all processes, which call this: the median of blocks in ``budget`` s."""

    def block(runs: int) -> float:
        dist.barrier()
        _finish(device)
        start = time.perf_counter()
        for _ in range(runs):
            run()
        _finish(device)
        return (time.perf_counter() - start) / runs

    with warnings.catch_warnings():  # two functions are renamed in later versions
        warnings.simplefilter("ignore", FutureWarning)
        block(1)  # connects
        runs = min(_MOST_RUNS, max(1, int(budget / _BLOCKS / largest(block(1), device))))
        return largest(statistics.median(block(runs) for _ in range(_BLOCKS)), device)


def largest(value: float, device: torch.device) -> float:
    """The largest of all processes' values."""
    maximum = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    return maximum.item()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_HEAD = f"{'operation':15s} {'bytes':>13s} {'µs':>12s} {'algorithm GB/s':>15s} {'bus GB/s':>9s}"


def line(row: Measurement) -> str:
    """A row of the table."""
    return (
        f"{row.operation:15s} {row.bytes:13,d} {1e6 * row.seconds:12,.1f} {row.algorithm_bandwidth / 1e9:15.3f} "
        f"{row.bus_bandwidth / 1e9:9.3f}"
    )


def draw(rows: list[Measurement], path: Path) -> None:
    """Draw bus bandwidths against sizes, a panel for each dimension."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.dimension for row in rows))
    figure = Figure(figsize=(5.5 * len(names), 4), layout="constrained")
    for panel, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for operation in BUS_SHARES:
            points = [row for row in rows if (row.dimension, row.operation) == (name, operation)]
            panel.plot([p.bytes for p in points], [p.bus_bandwidth / 1e9 for p in points], "o-", label=operation)
        panel.set(xscale="log", yscale="log", xlabel="bytes", ylabel="bus bandwidth, GB/s", title=name)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=130)


run = partial(run_command, main)
