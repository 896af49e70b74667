"""Start jobs: count false alarms of the watchdog on a busy machine, or what starts, saves and loads cost as ranks grow.

    python benchmarks/starts.py alarms --starts 200 --json starts.json
    python benchmarks/starts.py ranks --ranks 8 16 32 48 --json starts_ranks.json

alarms: each start runs train.py under torchrun on two ranks for a few steps of a tiny model, with a short
hang_timeout_seconds, while other processes keep the processors busy. Several starts may run --together; they are load
for one another. A start has failed if the job did not exit with 0. Its output is then searched for the cause: a line
that names a rank, an exception in a thread, or a line of the watchdog about itself.

ranks: gloo processes of a tiny model, in two layouts, take two steps and save; the next start resumes from that and
takes one more. They are forked from a process that has imported everything, with torchrun's variables but not torchrun,
and rank 0 hosts the store; `counted_start.py` counts. Each quantity is fitted by terms of `GROWTH`, and extrapolated.
Counts are exact. Seconds are of ranks that share the machine's cores, so they grow with the ranks whatever a rank does.
Heartbeats have a limit, by which the watchdogs of many ranks slow down.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from operator import truediv
from pathlib import Path
from typing import Any

import numpy as np
from runs import ROOT, machine, origin, parser_of, torchrun, write

SETTINGS = [
    "--job.config_file=train_configs/debug_gpt.toml",
    "--training.seq_len=16",
    "--training.micro_batch_size=1",
    "--lr_scheduler.warmup_steps=0",
    "--evaluation.interval=0",
    "--metrics.log_interval=1",
]
ALARMS = [
    "--model.overrides.num_layers=1",
    "--training.global_batch_size=2",
    "--training.steps=5",
    "--checkpoint.enable=false",
]
# Layouts of `ranks`: settings, and samples of a step for every two ranks.
MODEL_PARALLEL = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.tensor_parallel_degree=2"]
LAYOUTS = {
    "data n, ZeRO 3": (["--parallelism.zero_stage=3"], 2),
    "pipeline 2 × tensor 2 × data n/4, ZeRO 1": ([*MODEL_PARALLEL, "--parallelism.zero_stage=1"], 1),
}
PHASES = ("settings and data", "rendezvous", "default group", "mesh", "model", "first step")
FAR = (1024, 16384)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
ENVIRONMENT |= {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)])}
TERMS = {"log2 n": np.log2, "n": lambda n: n, "n log2 n": lambda n: n * np.log2(n), "n²": lambda n: n**2}
GROWTH: list[tuple[str, ...]] = [(), ("log2 n",), ("n",), ("n log2 n",), ("n²",), ("n", "n²")]  # the simplest first
# Signs in the output that the watchdog ended a job, or failed itself.
TRACES = {
    "a rank was named": r"^error: ranks? [\d, ]+ (died|has hung|never sent)",
    "the store was called gone": r"^error: the process that hosts the job's store",
    "an exception in a thread": r"^Exception in thread",
    "the watchdog failed at something": r"^the watchdog of rank",
}


def keep_busy() -> None:
    """Keep a processor busy until the process is killed."""
    while True:
        sum(range(100_000))


def start_once(dump: Path, ranks: int, timeout: float) -> tuple[bool, list[str], float]:
    """Start one job; returns whether it exited with 0, which `TRACES` its output has, and its seconds."""
    settings = [*SETTINGS, *ALARMS, f"--job.dump_folder={dump}", f"--health.hang_timeout_seconds={timeout}"]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()
    command = [*torchrun(ranks), "train.py", *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    found = [name for name, pattern in TRACES.items() if re.search(pattern, output, re.MULTILINE)]
    if done.returncode:
        print(output[-2000:], flush=True)
    return done.returncode == 0, found, time.monotonic() - began


def count_alarms(options: argparse.Namespace) -> None:
    """Start the jobs and print the counts."""
    busy = [multiprocessing.get_context("spawn").Process(target=keep_busy, daemon=True) for _ in range(options.busy)]
    for process in busy:
        process.start()
    ended_well, traces, seconds = 0, Counter[str](), []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.together) as pool:
        folders = [Path(folder) / str(number) for number in range(options.starts)]
        starts = [pool.submit(start_once, dump, options.ranks, options.timeout) for dump in folders]
        for number, start in enumerate(as_completed(starts), 1):
            went_well, found, took = start.result()
            ended_well += went_well
            traces.update(found)
            seconds.append(round(took, 1))
            if number % 10 == 0 or number == options.starts:
                print(f"{number} starts, {ended_well} ended well, {dict(traces) or 'nothing'} found", flush=True)
    for process in busy:
        process.kill()
    result = {"starts": options.starts, "ended_well": ended_well, "found": dict(traces)}
    result |= {name: getattr(options, name) for name in ("ranks", "together", "busy", "timeout")}
    result |= {"median_seconds": sorted(seconds)[len(seconds) // 2] if seconds else None}
    print(json.dumps(result, indent=2))
    write(options.json, result)


def start_ranks(layout: str, ranks: int, dump: Path, steps: int, timeout: float) -> list[dict[str, Any]]:
    """Start one job; returns what each rank has counted. Raises a `RuntimeError` if it fails or takes too long."""
    from counted_start import work

    settings, batch = LAYOUTS[layout]
    settings = [*SETTINGS, *settings, f"--job.dump_folder={dump}", f"--training.steps={steps}"]
    settings += [f"--training.global_batch_size={ranks * batch // 2}", "--checkpoint.enable=true"]
    settings += ["--data.dataset=text", f'--data.paths=["{ROOT}/docs/*.md"]']  # tokenized at once
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = (ranks, free_port(), settings, folder, time.time())
        processes = [context.Process(target=work, args=(rank, *job)) for rank in range(ranks)]
        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                process.start()
            while any(process.is_alive() for process in processes):
                failed = [rank for rank, process in enumerate(processes) if process.exitcode]
                if failed or time.monotonic() > deadline:
                    logs = [log.read_text() for log in folder.glob(f"rank-{failed[0] if failed else 0}.log")]
                    raise RuntimeError("\n".join(["a rank failed" if failed else "too slow", *logs]))
                time.sleep(0.1)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(layout: str, ranks: int, timeout: float) -> dict[str, float]:
    """Start, save and resume; returns each quantity by name. Times end when the last rank is there."""
    with tempfile.TemporaryDirectory() as name:
        began = start_ranks(layout, ranks, Path(name), 2, timeout)
        files = [path for path in Path(name, "checkpoint", "step-2").rglob("*") if path.is_file()]
        sizes = [path.stat().st_size for path in files]
        metadata = Path(name, "checkpoint", "step-2", ".metadata").stat().st_size
        resumed = start_ranks(layout, ranks, Path(name), 3, timeout)

    def seconds(run: list[dict[str, Any]], phase: str) -> float:
        return round(max(rank["times"][phase] for rank in run), 3)

    def count(run: list[dict[str, Any]], name: str) -> list[int]:
        return [rank["counts"].get(name, 0) for rank in run]

    operations, late = count(began, "store operations"), count(began, "store operations after the first step")
    beats = count(began, "watchdog operations")
    alive = [rank["times"]["end"] - rank["times"]["default group"] for rank in began]
    all_bytes, save_bytes = count(began, "store bytes"), count(began, "object bytes after the first step")
    load_bytes = count(resumed, "object bytes before the first step")
    after_save = count(began, "sockets after save")
    row: dict[str, float] = {f"seconds to {phase}": seconds(began, phase) for phase in PHASES}
    row |= {
        "seconds of the save": seconds(began, "seconds of save"),
        "seconds of the load": seconds(resumed, "seconds of load"),
        "calls that make groups, a rank": max(count(began, "calls that make groups")),
        "groups, a rank": max(count(began, "groups of this rank")),
        "sockets of rank 0 after the save": after_save[0],
        "sockets of another rank after the save": max(after_save[1:]),
        "store operations of the start, a rank": max(operations[1:]),
        "store operations of the start, all ranks": sum(operations),
        "store bytes of the start, a rank": max(all_bytes[1:]),
        "store bytes of the start, all ranks": sum(all_bytes),
        "store operations of the first save, a rank": max(late[1:]),
        "heartbeats a second, all ranks": round(sum(map(truediv, beats, alive)), 2),
        "bytes of objects in a save, rank 0": save_bytes[0],
        "bytes of objects in a save, another rank": max(save_bytes[1:]),
        "bytes of objects in a resumed start, another rank": max(load_bytes[1:]),
        "files of a checkpoint": len(files),
        "bytes of metadata": metadata,
        "bytes of a checkpoint": sum(sizes),
    }
    return row


def fit(ranks: list[int], values: list[float]) -> tuple[str, dict[int, float], bool]:
    """The simplest of `GROWTH` whose error is at most 1 % above the best one's.

    It has fewer factors than there are values. Returns the formula, its values for `FAR`, and whether it grows faster
    than log n.
    """

    def columns(n: Any, terms: tuple[str, ...]) -> Any:
        return np.stack([np.ones_like(n), *(TERMS[term](n) for term in terms)], 1)

    n, y = np.array(ranks, float), np.array(values, float)
    scale = np.where(y > 0, y, 1.0)
    fits = []
    for terms in GROWTH:
        if not terms or len(terms) + 1 < len(ranks):
            factors = np.linalg.lstsq(columns(n, terms) / scale[:, None], y / scale, rcond=None)[0]
            fits.append((float(np.abs((columns(n, terms) @ factors - y) / scale).max()), terms, factors))
    least = min(error for error, *_ in fits)
    _, terms, factors = next(found for found in fits if found[0] <= least + 0.01)
    formula = f"{factors[0]:.3g}" + "".join(f" {x:+.3g} {term}" for x, term in zip(factors[1:], terms, strict=True))
    far = columns(np.array(FAR, float), terms) @ factors
    return (
        formula,
        {n: float(f"{x:.3g}") for n, x in zip(FAR, far, strict=True)},
        len(terms) > 0 and terms != ("log2 n",),
    )


def count_ranks(options: argparse.Namespace) -> None:
    """Measure each layout with each number of ranks, and print the table, the fits and what grows fast."""
    from titan_like.train import watchdog

    most = watchdog._HEARTBEATS_PER_SECOND
    os.environ |= ENVIRONMENT
    context, began = multiprocessing.get_context("forkserver"), time.monotonic()
    context.set_forkserver_preload(["counted_start"])
    first = context.Process(target=int)  # starts the server, which imports everything
    first.start()
    first.join()
    imports = round(time.monotonic() - began, 1)
    print(f"imports of one process: {imports} s")
    result: dict[str, Any] = {**origin(), "machine": machine(), "seconds_of_imports": imports, "layouts": {}}
    for layout in LAYOUTS:
        rows: dict[int, dict[str, float]] = {}
        for ranks in options.ranks:
            began = time.monotonic()
            try:
                rows[ranks] = measure(layout, ranks, options.timeout)
            except RuntimeError as error:
                print(f"{layout}, {ranks} ranks: {error}", file=sys.stderr, flush=True)
            print(f"{layout}, {ranks} ranks: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        print(f"{layout:<50}" + "".join(f"{n:>12,}" for n in (*rows, *FAR)) + "  growth")
        result["layouts"][layout] = {"ranks": [*rows]}
        for name in next(iter(rows.values()), {}):
            values = [row[name] for row in rows.values()]
            formula, far, is_fast = fit([*rows], values)
            if name.startswith("heartbeats"):
                formula, far = f"{formula}, at most {most}", {n: min(x, most) for n, x in far.items()}
            is_fast &= not name.startswith(("seconds", "heartbeats"))
            result["layouts"][layout][name] = {"measured": values, "growth": formula, "extrapolated": far}
            figures = "".join(f"{x:>12,.6g}" for x in (*values, *far.values()))
            print(f"{name:<50}{figures}  {formula}{' !' * is_fast}")
        write(options.json, result)
    print("! grows faster than log n")


def main() -> None:
    """Run the chosen mode."""
    parser = parser_of(__doc__)
    modes = parser.add_subparsers(required=True)
    alarms, ranks = modes.add_parser("alarms"), modes.add_parser("ranks")
    alarms.add_argument("--starts", type=int, default=200)
    alarms.add_argument("--ranks", type=int, default=2)
    alarms.add_argument("--together", type=int, default=1, help="starts that run at the same time")
    alarms.add_argument("--busy", type=int, default=4, help="processes that keep the processors busy")
    alarms.add_argument("--timeout", type=float, default=20.0, help="health.hang_timeout_seconds")
    alarms.set_defaults(run=count_alarms)
    ranks.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 48], help="multiples of 4, at least 8")
    ranks.add_argument("--timeout", type=float, default=120.0, help="seconds after which a start has failed")
    ranks.set_defaults(run=count_ranks)
    for mode in alarms, ranks:
        mode.add_argument("--json", type=Path, metavar="PATH", help="file to write the result to")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
