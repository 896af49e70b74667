"""Time from ``torchrun --nproc_per_node=2 train.py`` to the end of the first step, and where it goes.

    python benchmarks/startup.py --runs 5 --json startup.json

Every run starts train.py under torchrun on its debug configuration. Rank 0 records the time after each phase, and the
figures are the differences. The first run, which also tokenizes the corpus, is listed separately; the medians are over
the later runs, which find the tokens in the cache.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "train_configs/debug_gpt.toml"
SETTINGS = ["--training.steps", "1", "--lr_scheduler.warmup_steps", "0", "--evaluation.interval", "0",
            "--checkpoint.enable", "false"]  # fmt: skip
PHASES = {
    "launch": "torchrun until the rank's interpreter runs: torchrun imports torch itself",
    "import_torch": "import torch",
    "import_rest": "import of train.py's other modules",
    "config_and_data": "read and check the configuration, open the corpus",
    "process_group": "start the process group",
    "build": "mesh, model on the meta device, sharding, weights, optimizer, writers",
    "first_step": "the first step, its first batch and its loss",
}


def worker(output: str, argv: list[str]) -> None:
    """One rank: train.py with its phases timed."""
    ends = {"start": float(os.environ["BENCHMARK_STARTED"]), "launch": time.time()}

    def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            ends[phase] = time.time()
            return result

        return call

    gc.disable()  # as train.py does, which enables it again after its imports
    timed("import_torch", importlib.import_module)("torch")
    sys.path.insert(0, str(ROOT))
    setup = importlib.import_module("titan_like.train.setup")
    trainer = timed("import_rest", importlib.import_module)("titan_like.train.trainer")
    # train.py imports these names at run time, so it gets the timed versions.
    setup.prepare_run = timed("config_and_data", setup.prepare_run)
    trainer.dist.init_process_group = timed("process_group", trainer.dist.init_process_group)
    trainer.Trainer.__init__ = timed("build", trainer.Trainer.__init__)
    trainer.Trainer.train_step = timed("first_step", trainer.Trainer.train_step)
    sys.argv = ["train.py", *argv]
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    if os.environ["RANK"] == "0":
        Path(output).write_text(json.dumps(ends))


def measure(ranks: int, folder: Path) -> dict[str, float]:
    """Run one job; returns the seconds of each phase and their total."""
    output = folder / "times.json"
    output.unlink(missing_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    settings = ["--job.config_file", str(ROOT / CONFIG), "--job.dump_folder", str(folder / "run"), *SETTINGS]
    environment = os.environ | {"BENCHMARK_STARTED": repr(time.time())}
    done = subprocess.run(
        [*torchrun, __file__, "worker", str(output), *settings], env=environment, capture_output=True, text=True
    )
    if done.returncode or not output.exists():
        raise SystemExit(f"torchrun failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    ends = json.loads(output.read_text())
    phases = {phase: ends[phase] - ends[before] for before, phase in pairwise(["start", *PHASES])}
    return {**phases, "total": ends["first_step"] - ends["start"]}


def main() -> None:
    """Read the command line, measure, write the result."""
    from overhead import machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="runs after the first (default 5)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        runs = [measure(args.ranks, Path(folder)) for _ in range(args.runs + 1)]
    first, rest = runs[0], runs[1:]
    medians = {name: statistics.median(run[name] for run in rest) for name in first}
    print(f"{'seconds':<16} {'first run':>10} {'median':>8} {'least':>8} {'most':>8}")
    for name, median in medians.items():
        values = [run[name] for run in rest]
        row = f"{name:<16} {first[name]:10.2f} {median:8.2f} {min(values):8.2f} {max(values):8.2f}"
        print(f"{row}  {PHASES.get(name, 'start of torchrun to the end of the first step')}")
    if args.json:
        command = f"torchrun --standalone --nproc_per_node={args.ranks} train.py --job.config_file {CONFIG}"
        result = {
            "command": " ".join(["python benchmarks/startup.py", *sys.argv[1:]]),
            "train_command": " ".join([command, *SETTINGS]),
            "machine": machine(),
            "phases": PHASES,
            "first_run_s": first,
            "runs_s": rest,
            "median_s": medians,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], sys.argv[3:])
    else:
        main()
