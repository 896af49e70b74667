"""Collectives between processes of this machine, and what a profile that takes them predicts of measured runs.

    python benchmarks/comm_profile.py
    python benchmarks/comm_profile.py --processes 4 --largest 16m --rounds 1
    python benchmarks/comm_profile.py --json benchmarks/results/comm_cpu.json --picture docs/images/comm_cpu.png

For each number of processes: bench_comm.py; plan.py microbenchmark, whose profile has links of its own; and runs of
train.py that split a model along one axis. Each run is predicted before and after the profile takes what bench_comm.py
measured (plan.py predict --links), and both errors are printed. Measured is the shortest step, as in
benchmarks/planner_own_trainer.py. Measure on an idle machine; `load` says how idle it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.planner_own_trainer import WIDE, measure, predict, torchrun

KINDS = {
    "data": "--parallelism.data_parallel_shard_degree",
    "tensor": "--parallelism.tensor_parallel_degree",
    "pipeline": "--parallelism.pipeline_parallel_degree",
}
LAYERS = "--model.overrides.num_layers=8"
MODEL = ["--model.family=gpt", *WIDE, LAYERS, "--training.seq_len=256", "--training.global_batch_size=8"]


def settings_of(kind: str, processes: int) -> list[str]:
    """A run that splits the model, or the batch, over all processes."""
    size = {"data": 8 // processes, "tensor": 4, "pipeline": 1}[kind]
    return [*MODEL, f"{KINDS[kind]}={processes}", f"--training.micro_batch_size={size}"]


def compared(processes: int, kind: str, profile: Path, links: Path, rounds: int, steps: int) -> dict[str, Any]:
    """A measured run and its predictions before and after the profile takes the links."""
    settings, load = settings_of(kind, processes), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder, row = Path(name), {"run": f"{kind} {processes}", "processes": processes}
        seconds = min(min(measure(processes, settings, steps, folder / str(n))[0]) for n in range(rounds))
        row |= {"measured_s": seconds, "load": load}
        for when, words in (("before", []), ("after", ["--links", str(links)])):
            parts = predict(profile, [*settings, *words], folder)["step_seconds"]
            row[when] = {"seconds": parts["total"], "error": parts["total"] / seconds - 1}
            row[when]["communication"] = parts["tensor"] + parts["messages"] + parts["data"]
    before, after = row["before"], row["after"]
    print(
        f"{row['run']:11s} measured {seconds:.4f} s; before {before['seconds']:.4f} s ({before['error']:+.1%}), "
        f"after {after['seconds']:.4f} s ({after['error']:+.1%})",
        flush=True,
    )
    return row


def main() -> None:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--largest", default="256m", help="of bench_comm.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a run, after three of warm-up")
    parser.add_argument("--json", metavar="PATH", help="write the figures to this file")
    parser.add_argument("--picture", metavar="FILE.png", help="of the collectives between the most processes")
    options = parser.parse_args()
    collectives, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for processes in options.processes:
            links, profile = (Path(folder) / f"processes_{processes}.{ending}" for ending in ("json", "toml"))
            words = ["--largest", options.largest, "--json", str(links)]
            if options.picture and processes == max(options.processes):
                words += ["--picture", str(Path(options.picture).resolve())]
            print(torchrun(processes, "scripts/bench_comm.py", *words), flush=True)
            print(torchrun(processes, "scripts/plan.py", "microbenchmark", "--out", str(profile)), flush=True)
            collectives[str(processes)] = json.loads(links.read_text())
            rows += [compared(processes, kind, profile, links, options.rounds, options.steps) for kind in KINDS]
    errors = {when: statistics.median(abs(row[when]["error"]) for row in rows) for when in ("before", "after")}
    print(f"median error before {errors['before']:.1%}, after {errors['after']:.1%}")
    if options.json:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
        result = machine | {"median_error": errors, "runs": rows, "collectives": collectives}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
