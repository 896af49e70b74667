"""Start jobs on a busy machine and count false alarms of the watchdog.

    python benchmarks/starts.py --starts 200 --json starts.json

Each start runs train.py under torchrun on two ranks for a few steps of a tiny model, with a short hang_timeout_seconds,
while other processes keep the processors busy. Several starts may run --together; they are load for one another. A
start has failed if the job did not exit with 0. Its output is then searched for the cause: a line that names a rank, an
exception in a thread, or a line of the watchdog about itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from runs import ROOT, parser_of, torchrun, write

SETTINGS = [
    "--job.config_file=train_configs/debug_gpt.toml",
    "--model.overrides.num_layers=1",
    "--training.seq_len=16",
    "--training.micro_batch_size=1",
    "--training.global_batch_size=2",
    "--training.steps=5",
    "--lr_scheduler.warmup_steps=0",
    "--evaluation.interval=0",
    "--checkpoint.enable=false",
]
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
    settings = [*SETTINGS, f"--job.dump_folder={dump}", f"--health.hang_timeout_seconds={timeout}"]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()
    command = [*torchrun(ranks), "train.py", *settings]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    found = [name for name, pattern in TRACES.items() if re.search(pattern, output, re.MULTILINE)]
    if done.returncode:
        print(output[-2000:], flush=True)
    return done.returncode == 0, found, time.monotonic() - began


def main() -> None:
    """Start the jobs and print the counts."""
    parser = parser_of(__doc__)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--together", type=int, default=1, help="starts that run at the same time")
    parser.add_argument("--busy", type=int, default=4, help="processes that keep the processors busy")
    parser.add_argument("--timeout", type=float, default=20.0, help="health.hang_timeout_seconds")
    options = parser.parse_args()
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


if __name__ == "__main__":
    main()
