"""Seconds and memory of a step over one long sequence that several CPU processes share, by method.

    python benchmarks/long_sequences.py                                         # 32,768 tokens on 1 and 2 processes
    python benchmarks/long_sequences.py --tokens 131072 --processes 4 --methods all_gather --steps 1 \\
        --limit_gib 8 --recompute full

Each run is the debug Llama in float32 with one thread a process. Its processes take one step more, to warm up, then
``--steps`` steps, of which the median counts. What they send in a step, as the planner lists it, is then sent again
without any computation. The limit is the time of one process divided by the number of processes, plus that. Processes
beyond the machine's cores share them, so divide by the cores there. Memory is the most that all processes together
have had resident.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from runs import ROOT, arguments, machine, parser_of, torchrun, write

METHODS = ("all_gather", "ulysses", "ring")


def worker(settings: list[str], steps: int, output: Path) -> None:
    """Train, then repeat what was sent, and write this process's figures."""
    import torch
    import torch.distributed as dist

    from titan_like.config import load_config
    from titan_like.planner.traffic import step_traffic
    from titan_like.planner.workload import workload_of
    from titan_like.train.job import process_group
    from titan_like.train.rules import resolve_settings
    from titan_like.train.setup import prepare_run
    from titan_like.train.trainer import Trainer

    run = prepare_run(resolve_settings(load_config(settings)))
    traffic = step_traffic(workload_of(run.config, run.model, run.layout), 0)
    with process_group(run.device):
        trainer = Trainer(run)
        data, seconds = trainer.load_data(), []
        for _ in range(steps + 1):
            started = time.perf_counter()
            trainer.read_step(trainer.train_step(data))
            seconds.append(time.perf_counter() - started)
        data.close()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        size, rank = dist.get_world_size(), dist.get_rank()

        def again() -> None:
            for message, (calls, nbytes) in traffic.items():
                part = torch.zeros(-(-nbytes // calls // 4 // size))
                whole = torch.zeros(len(part) * size)
                for _ in range(calls):
                    if message.kind == "all_gather":
                        dist.all_gather_into_tensor(whole, part)
                    elif message.kind == "reduce_scatter":
                        dist.reduce_scatter_tensor(part, whole)
                    elif message.kind == "all_to_all":
                        dist.all_to_all_single(torch.empty_like(whole), whole)
                    elif message.kind == "all_reduce":
                        dist.all_reduce(whole)
                    elif message.kind == "send":
                        exchange = [
                            dist.P2POp(dist.isend, whole, (rank + 1) % size),
                            dist.P2POp(dist.irecv, torch.empty_like(whole), (rank - 1) % size),
                        ]
                        for work in dist.batch_isend_irecv(exchange):
                            work.wait()

        sent = []
        for _ in range(3 if size > 1 else 0):
            dist.barrier()
            started = time.perf_counter()
            again()
            sent.append(time.perf_counter() - started)
        figures = {
            "seconds": seconds[1:],
            "sent": min(sent, default=0.0),
            "bytes": most,
            "loss": trainer.state.losses.recent,
        }
        Path(f"{output}.{rank}").write_text(json.dumps(figures))


def measure(tokens: int, processes: int, method: str, steps: int, recompute: str) -> dict[str, Any]:
    """The figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "job.config_file": "debug_llama",
            "job.dump_folder": folder,
            "model.overrides.max_seq_len": tokens,
            "training.seq_len": tokens,
            "training.micro_batch_size": 1,
            "training.global_batch_size": 1,
            "training.steps": steps + 1,
            "checkpoint.enable": "false",
            "evaluation.interval": 0,
            "model.overrides.num_kv_heads": 4,
            "activation_checkpoint.mode": recompute,
            "parallelism.context_parallel_degree": processes,
            "parallelism.context_parallel_method": method if processes > 1 else "auto",
        }
        output = Path(folder, "figures")
        command = [*torchrun(processes), __file__, "worker", str(steps), str(output), *arguments(settings)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
        ranks = [json.loads(Path(f"{output}.{rank}").read_text()) for rank in range(processes)]
    seconds = max(statistics.median(rank["seconds"]) for rank in ranks)
    return {
        "tokens": tokens,
        "processes": processes,
        "method": method if processes > 1 else "",
        "seconds": seconds,
        "communication_seconds": max(rank["sent"] for rank in ranks),
        "resident_bytes": sum(rank["bytes"] for rank in ranks),
    }


def main() -> int:
    """Measure, and print a table. The status is 1 if a run takes more memory than ``--limit_gib``."""
    if sys.argv[1:2] == ["worker"]:
        _, _, steps, output, *settings = sys.argv
        worker(settings, int(steps), Path(output))
        return 0
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="positions of the sequence")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="that share it; 1 for comparison")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--steps", type=int, default=3, help="measured in each run")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--limit_gib", type=float, help="of memory that all processes may take together")
    options = parser.parse_args()
    runs, alone, cores = list[dict[str, Any]](), None, len(os.sched_getaffinity(0))
    print(f"{'processes':>9}  {'method':>10}  {'s a step':>9}  {'s sending':>9}  {'of the limit':>12}  {'GiB':>6}")
    for processes in options.processes:
        for method in options.methods if processes > 1 else [""]:
            found = measure(options.tokens, processes, method, options.steps, options.recompute)
            if processes == 1:
                alone = found["seconds"]
            if alone is not None and processes > 1:
                found["limit"] = alone / min(processes, cores) + found["communication_seconds"]
            share = f"{found['seconds'] / found['limit']:.2f}" if "limit" in found else ""
            runs.append(found)
            told = f"{processes:>9}  {method:>10}  {found['seconds']:>9.2f}  {found['communication_seconds']:>9.2f}"
            print(f"{told}  {share:>12}  {found['resident_bytes'] / 2**30:>6.2f}", flush=True)
    write(options.json, {"machine": machine(), "runs": runs})
    most = max(run["resident_bytes"] for run in runs) / 2**30
    return int(options.limit_gib is not None and most > options.limit_gib)


if __name__ == "__main__":
    sys.exit(main())
