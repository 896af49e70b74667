"""Start jobs on a busy machine and count false alarms of the watchdog; send it heartbeats while modules load.

    python benchmarks/starts.py --starts 200 --signs 100000 --json starts.json

Each start runs train.py under torchrun on two ranks for a few steps of a tiny model, with a short hang_timeout_seconds,
while other processes keep the processors busy. Several starts may run --together; they are load for one another. A
start has failed if the job did not exit with 0. Its output is then searched for the cause: a line that names a rank, an
exception in a thread, or a line of the watchdog about itself. Finally, a process sends heartbeats from a thread while
its main thread imports modules, drops them and imports them again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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
MODULES = (
    "asyncio",
    "dataclasses",
    "email",
    "html",
    "http",
    "pydantic",
    "rich",
    "tomllib",
    "unittest",
    "wsgiref",
    "xml",
)


def keep_busy() -> None:
    """Keep a processor busy until the process is killed."""
    while True:
        sum(range(100_000))


def start_once(dump: Path, ranks: int, timeout: float) -> tuple[bool, list[str], float]:
    """Start one job; returns whether it exited with 0, which `TRACES` its output has, and its seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    settings = [*SETTINGS, f"--job.dump_folder={dump}", f"--health.hang_timeout_seconds={timeout}"]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()
    done = subprocess.run(
        [*command, "train.py", *settings], cwd=ROOT, env=environment, capture_output=True, text=True
    )  # fmt: skip
    output = done.stdout + done.stderr
    found = [name for name, pattern in TRACES.items() if re.search(pattern, output, re.MULTILINE)]
    if done.returncode:
        print(output[-2000:], flush=True)
    return done.returncode == 0, found, time.monotonic() - began


def give_signs(count: int) -> dict[str, float]:
    """Send ``count`` heartbeats while modules are imported; returns how many succeeded, and how fast."""
    sys.path.insert(0, str(ROOT))
    import torch

    from titan_like.train import watchdog as watchdog_module
    from titan_like.train.job import process_group

    failures: list[str] = []
    with process_group(torch.device("cpu")):
        # The watchdog reports lines of the product, so make the lines here count as such.
        watchdog_module._PACKAGE = str(Path(__file__).parent)
        watchdog = watchdog_module.Watchdog(timeout=600.0)
        watchdog._log_once = lambda what, error: failures.append(f"{what}: {error!r}")  # type: ignore[method-assign]
        given, seconds = 0, 0.0

        def sign() -> None:
            nonlocal given, seconds
            began = time.monotonic()
            for _ in range(count):
                try:
                    watchdog._send_heartbeat()
                    given += 1
                except Exception as error:
                    failures.append(repr(error))
            seconds = time.monotonic() - began

        sys.setswitchinterval(1e-5)  # seconds; a short interval puts heartbeats between as many bytecodes as possible
        thread = threading.Thread(target=sign)
        thread.start()
        imports = 0
        while thread.is_alive():
            for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
                del sys.modules[name]
            for name in MODULES:
                importlib.import_module(name)
            imports += len(MODULES)
    for failure, times in Counter(failures).most_common(5):
        print(f"{times} times: {failure}")
    return {"signs": given, "failures": len(failures), "imports": imports, "signs_per_second": round(count / seconds)}


def main() -> None:
    """Run both and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--together", type=int, default=1, help="starts that run at the same time")
    parser.add_argument("--busy", type=int, default=4, help="processes that keep the processors busy")
    parser.add_argument("--timeout", type=float, default=20.0, help="health.hang_timeout_seconds")
    parser.add_argument("--signs", type=int, default=100_000)
    parser.add_argument("--json", metavar="PATH")
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
    signs = give_signs(options.signs) if options.signs else {}
    for process in busy:
        process.kill()
    settings = {
        "ranks": options.ranks,
        "together": options.together,
        "busy_processes": options.busy,
        "hang_timeout_seconds": options.timeout,
    }
    result = {"starts": options.starts, "ended_well": ended_well, "found": dict(traces), **settings}
    result |= {"median_seconds": sorted(seconds)[len(seconds) // 2] if seconds else None} | signs
    print(json.dumps(result, indent=2))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
