"""torchrun scripts/bench_comm.py, and a plan with what it measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.jobs import REPO
from titan_like.commands.plan import main as plan
from titan_like.planner.links import BUS_SHARES


def run(processes: int, *words: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*torchrun, str(REPO / "scripts/bench_comm.py"), "--seconds=0.01", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


def test_each_dimension_is_measured_and_a_plan_takes_it(tmp_path: Path, capsys) -> None:
    file = tmp_path / "links.json"
    layout = ["--parallelism.tensor_parallel_degree=2", f"--json={file}", f"--picture={tmp_path / 'links.png'}"]
    result = run(4, "--smallest=4k", "--largest=64k", *layout)
    assert result.returncode == 0, result.stderr
    measurements = json.loads(file.read_text())["measurements"]
    found = [(one["dimension"], one["operation"], one["bytes"]) for one in measurements]
    sizes = (4096, 16384, 65536)
    assert found == [
        (name, operation, size) for name in ("dp_shard", "tp") for operation in BUS_SHARES for size in sizes
    ]
    assert all(one["seconds"] > 0 and one["processes"] == 2 for one in measurements)
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")

    gpu = ["--cluster.gpu=H100", "--cluster.nodes=1", "--cluster.gpus_per_node=8", "--profile=fsdp_h100"]
    gpu += ["--parallelism.tensor_parallel_degree=2", "--training.global_batch_size=64"]
    times = []
    for links in ([], [f"--links={file}"]):
        plan(
            [
                "predict",
                "--model.flavor=gpt2_124m",
                "--training.seq_len=1024",
                *gpu,
                f"--json={tmp_path / 'p.json'}",
                *links,
            ]
        )
        times.append(json.loads((tmp_path / "p.json").read_text())["predict"])
    assert times[0] != times[1]


def test_one_process_has_nothing_to_communicate() -> None:
    result = run(1)
    assert result.returncode != 0 and "nothing to communicate; start several" in result.stderr
