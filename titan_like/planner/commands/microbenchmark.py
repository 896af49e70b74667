"""Measure this machine and write a profile of it. Start it with torchrun to measure the links between processes.

All processes measure at once: on GPUs over NCCL, on a CPU over gloo, where they share the cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch.distributed as dist

from titan_like.config import ConfigError
from titan_like.config.options import path_option
from titan_like.planner.commands.outcome import Outcome, check_toml
from titan_like.planner.profile import profile_to_toml


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options. It takes no settings of a run."""
    parser.add_argument("--out", type=path_option, metavar="FILE.toml", help="where to write the profile")


def run(options: argparse.Namespace, settings: list[str]) -> Outcome:
    """Measure this machine and write the profile.

    Raises:
        ConfigError: there is no file to write to.
    """
    from titan_like.planner.microbenchmark import measure  # imports torch, which takes seconds
    from titan_like.train.environment import environment_number
    from titan_like.train.host_memory import keep_freed_memory
    from titan_like.train.job import process_group
    from titan_like.train.setup import select_device

    if settings:
        raise ConfigError("command line", settings[0], "microbenchmark takes no settings of a run")
    if options.out is None:
        raise ConfigError("--out", None, "say where to write the profile")
    check_toml(options.out)
    began = time.perf_counter()
    is_first = environment_number("RANK", 0) == 0

    def show(what: str) -> None:
        if is_first:
            print(f"{time.perf_counter() - began:5.1f} s  {what}", file=sys.stderr, flush=True)

    device = select_device("float32")
    if device.type == "cpu":
        keep_freed_memory()  # as training does
    with process_group(device):
        found = measure(device, Path(options.out).stem, show)
        dist.barrier()
    if not is_first:
        return Outcome("", {})
    lines = [*found.lines, f"wrote {options.out}"]
    toml = f"# Written by plan.py microbenchmark.\n{profile_to_toml(found.profile)}"
    return Outcome("\n".join(lines), {"microbenchmark": found.lines}, files={Path(options.out): toml})
