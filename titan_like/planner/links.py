"""A profile with the links that bench_comm.py has measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_like.config.errors import require
from titan_like.config.paths import blaming, parse_json, user_file
from titan_like.metrics.collectives import BETWEEN_NODES, BUS_SHARES, Measurement
from titan_like.planner.profile import Profile, is_builtin


def read_measurements(path: str, on_cpus: bool) -> list[Measurement]:
    """The measurements in a file of ``bench_comm.py --json``. Raises a `ConfigError` if it is no such file."""
    refuse = blaming("--links", path, "give a JSON file that scripts/bench_comm.py has written")
    names = Measurement.__dataclass_fields__
    with user_file(Path(path), refuse, "is not one", may_stream=True):
        table = parse_json(Path(path).read_text(encoding="utf-8"))
        reason = f"was measured on {table['device']}; give measurements of the profile's own kind of machine"
        require((table["device"] == "CPU") == on_cpus, "--links", path, reason)
        read = [Measurement(**{name: row[name] for name in names}) for row in table["measurements"]]
        if not (read and all(row.seconds > 0 and row.processes > 1 and row.operation in BUS_SHARES for row in read)):
            raise ValueError("no valid measurements")
        return read


def with_links(profile: Profile, measurements: list[Measurement]) -> Profile:
    """The profile with the bandwidths and latencies of the links that were measured.

    The widest group inside a node gives the node's links, and pairs of ranks on two nodes give the network's.
    Bandwidths come from the largest buffers, less latency. Processes on one machine's CPU have no other links.
    """
    inside = [row for row in measurements if not row.sharing]
    widest = [row for row in inside if row.processes == max(other.processes for other in inside)]
    pairs = [row for row in measurements if row.dimension == BETWEEN_NODES]
    changes: dict[str, Any] = {}
    if widest:
        all_reduce, *_, latency = _figures(widest)
        device = profile.device
        if not is_builtin(device):  # its links are no data sheet's, but an earlier measurement's
            device = replace(device, nvlink_bandwidth=all_reduce)
        efficiency = min(1.0, all_reduce / device.nvlink_bandwidth)
        changes = {"device": device, "nvlink_efficiency": efficiency, "nvlink_latency": latency}
    if pairs or (widest and profile.device.is_cpu):
        processes = pairs[0].sharing if pairs else profile.gpus_per_node  # each of which gets these bandwidths
        *rates, latency = _figures(pairs or widest)
        changes |= {"node_bandwidth": max(rates) * processes, "network_latency": latency, "own_links": True}
        names = ("network_efficiency", "message_efficiency", "all_to_all_efficiency")
        changes |= {name: rate / max(rates) for name, rate in zip(names, rates, strict=True)}
    return profile.changed(**changes)


def _figures(measurements: list[Measurement]) -> tuple[float, float, float, float]:
    """Bandwidths of all-reduces, messages and all-to-alls, and the latency of a hop."""
    by_operation = {name: [row for row in measurements if row.operation == name] for name in BUS_SHARES}
    reduced = by_operation["all_reduce"]
    require(reduced, "--links", None, "the file has no all_reduce; measure it too")
    messages, exchanges = (by_operation[name] or reduced for name in ("send_receive", "all_to_all"))
    return _bandwidth(reduced), _bandwidth(messages), _bandwidth(exchanges), latency_of(reduced)


def latency_of(reduced: list[Measurement]) -> float:
    """Seconds of a hop: of a ring's 2(n − 1), if the smallest all-reduce takes nothing but their latency."""
    smallest = min(reduced, key=lambda row: row.bytes)
    return smallest.seconds / (2 * (smallest.processes - 1))


def _bandwidth(measurements: list[Measurement]) -> float:
    """Bus bandwidth of the bytes by which the largest buffer exceeds the smallest, so without latency."""
    first, last = (extreme(measurements, key=lambda row: row.bytes) for extreme in (min, max))
    if last.seconds <= first.seconds:  # the same one, or too small to tell
        return last.bus_bandwidth
    return replace(last, bytes=last.bytes - first.bytes, seconds=last.seconds - first.seconds).bus_bandwidth
