"""torchrun scripts/bench_comm.py, and a plan with what it measured."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.jobs import free_port
from tests.e2e.scripts import REPO, TORCHRUN, Script
from titan_like.commands.bench_comm import main as bench_comm
from titan_like.commands.plan import main as plan
from titan_like.config.errors import ConfigError
from titan_like.metrics.collectives import BETWEEN_NODES, BUS_SHARES


def run_on_two_nodes(*words: str) -> list[subprocess.CompletedProcess[str]]:
    """One torchrun of two processes for each node, both on this machine."""
    meeting = ["--nnodes=2", "--nproc_per_node=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    script = [str(REPO / "scripts/bench_comm.py"), "--seconds=0.01", *words]
    started = [Script(TORCHRUN, [*meeting, f"--node_rank={node}", *script]) for node in range(2)]
    return [node.wait() for node in started]


@pytest.mark.exhaustive
def test_dimensions_and_pairs_of_nodes_are_measured_and_a_plan_takes_it(tmp_path: Path, capsys) -> None:
    file = tmp_path / "links.json"
    layout = ["--parallelism.tensor_parallel_degree=2", f"--json={file}", f"--picture={tmp_path / 'links.png'}"]
    first, second = run_on_two_nodes("--smallest=4k", "--largest=64k", *layout)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    measurements = json.loads(file.read_text())["measurements"]
    found = [(one["dimension"], one["sharing"], one["operation"], one["bytes"]) for one in measurements]
    sizes = (4096, 16384, 65536)
    # Tensor ranks share a node. Two groups of data ranks, like two pairs of ranks, share the links between nodes.
    dimensions = (("dp_shard", 2), ("tp", 0), (BETWEEN_NODES, 2))
    assert found == [
        (*dimension, operation, size) for dimension in dimensions for operation in BUS_SHARES for size in sizes
    ]
    assert all(one["seconds"] > 0 and one["processes"] == 2 for one in measurements)
    assert first.stdout.splitlines()[-1].endswith(f"{measurements[-1]['bus_bandwidth'] / 1e9:.3f}")
    assert not second.stdout
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")

    file.write_text(file.read_text().replace('"device": "CPU"', '"device": "NVIDIA H100"'))
    gpu = ["--cluster.gpu=H100", "--cluster.nodes=1", "--cluster.gpus_per_node=8", "--profile=fsdp_a100"]
    gpu += ["--parallelism.tensor_parallel_degree=2", "--training.global_batch_size=64", "--training.steps=1"]
    times = []
    for links in ([], [f"--links={file}"]):
        model = ["--model.flavor=gpt2_124m", "--training.seq_len=1024"]
        plan(["predict", *model, *gpu, f"--json={tmp_path / 'p.json'}", *links])
        times.append(json.loads((tmp_path / "p.json").read_text())["predict"])
    assert times[0] != times[1]


def test_one_process_has_nothing_to_communicate() -> None:
    with pytest.raises(ConfigError, match="nothing to communicate; start several"):
        bench_comm([])
