"""Runs of train.py for other benchmarks, and what each of them parses, says of the machine and writes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Record = dict[str, Any]  # a line of metrics.jsonl


def parser_of(documentation: str | None) -> argparse.ArgumentParser:
    """A parser with --json."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="file to write the result to")
    return parser


def write(path: Path | None, result: object) -> None:
    """Write a result, if --json names a file."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def arguments(settings: Mapping[str, object]) -> list[str]:
    """Settings by key, as arguments of train.py."""
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()]


def torchrun(processes: int) -> list[str]:
    """The beginning of a command that starts a job of these processes on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def train(settings: Iterable[str], folder: Path | str, processes: int = 1, **variables: str) -> list[Record]:
    """Run train.py in new processes of one thread each, on ``variables`` too; returns the lines of metrics.jsonl."""
    start = [sys.executable] if processes == 1 else torchrun(processes)
    command = [*start, "train.py", *settings, f"--job.dump_folder={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return read_records(folder)


def read_records(folder: Path | str) -> list[Record]:
    """The lines of a run's metrics.jsonl."""
    path = Path(folder, "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def origin() -> dict[str, str | None]:
    """The date, in UTC, and the commit of this checkout, marked if files differ; None without git."""
    origin: dict[str, str | None] = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": None}
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "describe", "--always", "--dirty"]
        origin["commit"] = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return origin


def forget_tuning(cache: str) -> None:
    """Delete what autotuning chose while other processes used the GPU; kernels stay in the compile cache."""
    for path in Path(cache).rglob("*.best_config"):
        path.unlink()


def trainer_of(settings: Iterable[str]) -> Any:
    """A trainer in this process, in its process group, which ends with the process, and its data."""
    import torch

    from titan_like.config import load_config
    from titan_like.train.job import process_group
    from titan_like.train.rules import resolve_settings
    from titan_like.train.setup import prepare_run
    from titan_like.train.trainer import Trainer

    run = prepare_run(resolve_settings(load_config([*settings, "--training.steps=10"])))
    if not torch.distributed.is_initialized():
        process_group(run.device).__enter__()
    trainer = Trainer(run)
    return trainer, trainer.load_data()


def machine() -> dict[str, Any]:
    """A description of the machine."""
    import torch

    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
