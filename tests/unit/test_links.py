"""Bandwidths as nccl-tests defines them, and profiles with measured links."""

import json
from pathlib import Path

import pytest

from titan_like.config import load_config
from titan_like.metrics.collectives import BETWEEN_NODES, Measurement
from titan_like.planner.links import read_measurements, with_links
from titan_like.planner.predict import predict
from titan_like.planner.profile import load_profile, profile_to_toml


@pytest.mark.parametrize(
    ("operation", "factor"),  # nccl-tests, doc/PERFORMANCE.md, for 8 ranks
    [
        ("all_reduce", 1.75),
        ("all_gather", 0.875),
        ("reduce_scatter", 0.875),
        ("all_to_all", 0.875),
        ("send_receive", 1),
    ],
)
def test_bus_bandwidths_are_those_of_nccl_tests(operation: str, factor: float) -> None:
    one = Measurement("tp", 8, operation, 10**9, 0.5)
    assert one.algorithm_bandwidth == 2e9 and one.bus_bandwidth == pytest.approx(2e9 * factor)


def ring(dimension: str, processes: int, bandwidth: float, latency: float, sharing: int = 0) -> list[Measurement]:
    """All-reduces of a ring with this bandwidth and latency of a hop, and messages at half of it."""
    hops, figures = 2 * (processes - 1), []
    for size in (4096, 2**24, 2**30):
        figures.append(("all_reduce", size, hops * (latency + size / processes / bandwidth)))
        figures.append(("send_receive", size, latency + 2 * size / bandwidth))
    return [Measurement(dimension, processes, *one, sharing) for one in figures]


def test_a_profile_takes_the_links_that_were_measured(tmp_path: Path) -> None:
    """The widest group inside a node counts, and for the network the pairs between two nodes.

    Four processes of each node were measured, which share what a profile's node of eight has, and a ring of all data
    ranks, which leaves the node, tells nothing of the links inside.
    """
    measured = [*ring("tp", 2, 1e9, 1e-3), *ring("ep", 4, 200e9, 5e-6), *ring("dp_shard", 8, 2e9, 1e-4, 1)]
    measured += ring(BETWEEN_NODES, 2, 20e9, 3e-5, 4)
    file = tmp_path / "links.json"
    file.write_text(json.dumps({"device": "NVIDIA H100", "measurements": [one.as_dict() for one in measured]}))
    start = load_profile("titan_h100")
    links = with_links(start, read_measurements(str(file), False)).links
    # Latency is that of the smallest buffers, of which 4,096 / n bytes a hop add up to 0.4 % here.
    assert links.nvlink == pytest.approx(200e9) and links.nvlink_latency == pytest.approx(5e-6, rel=4e-3)
    assert links.node == pytest.approx(4 * 20e9) and links.node_messages == pytest.approx(4 * 10e9)
    assert links.network_latency == pytest.approx(3e-5, rel=4e-3)
    # The prediction of the planner is then what was measured, but for the 4 KiB that count as latency.
    whole = next(one for one in measured if (one.dimension, one.bytes, one.operation) == ("ep", 2**30, "all_reduce"))
    assert links.all_reduce(2**30, 4, 1) == pytest.approx(whole.seconds, rel=1e-5)


def test_links_that_were_measured_count_more_than_those_of_the_cluster_section() -> None:
    measured = with_links(load_profile("titan_h100"), ring(BETWEEN_NODES, 2, 20e9, 3e-5, 4))
    cluster = ["--cluster.gpu=H100", "--cluster.nodes=2", "--cluster.gpus_per_node=8", "--model.flavor=1.7b"]
    settings = [*cluster, "--training.dtype=bfloat16", "--training.global_batch_size=128", "--training.steps=9"]
    plain, other = load_config(settings), load_config([*settings, "--cluster.node_bandwidth=1"])
    assert predict(other, measured).time == predict(plain, measured).time
    assert predict(other, load_profile("titan_h100")).time.total > predict(plain, load_profile("titan_h100")).time.total


def test_a_profile_of_cpus_takes_faster_links_than_its_own(tmp_path: Path) -> None:
    path = tmp_path / "cpu.toml"
    device = "memory_gib = 8\nmemory_bandwidth = 40\nnvlink = 1\nmultiprocessors = 1\ntensor_element = 1\n"
    path.write_text(
        'device = "CPU"\ngpus_per_node = 4\nnode_bandwidth = 4e9\nnvlink_efficiency = 0.5\n'
        f"[device_table]\n{device}peak = {{ float32 = 0.1 }}\nis_cpu = true\n"
    )
    found = with_links(load_profile(str(path)), ring("dp_shard", 4, 2e9, 1e-3))
    path.write_text(profile_to_toml(found))
    for links in (found.links, load_profile(str(path)).links):
        assert links.nvlink == pytest.approx(2e9)
        assert links.node / 4 == pytest.approx(2e9) and links.node_messages / 4 == pytest.approx(1e9)
