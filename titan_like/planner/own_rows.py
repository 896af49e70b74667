"""Measured rows of this project's trainer: the command of each run, and how fast it was.

A JSON file holds them in a list, or under ``cases`` next to what all of them share. A row has ``command``, with the
settings of train.py after other words; ``tokens_per_second`` or ``step_time_s``; ``gpu``, its name; and perhaps
``gpus`` and ``source``. The file of benchmarks/peers.py is one. Its rows of other trainers, whose ``side`` is not
"ours", and cases that did not run are left out.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from titan_like.config.errors import ConfigError
from titan_like.config.load import load_config
from titan_like.metrics.devices import find_device
from titan_like.models.registry import model_config
from titan_like.parallel.layout import resolve_layout
from titan_like.planner.predict import workload_of
from titan_like.planner.workload import Workload


class OwnRun(NamedTuple):
    """One run of the trainer."""

    model: str
    gpu: str
    work: Workload
    seconds: float  # per step
    source: str


def read_cases(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON file, each with what all of them share.

    Raises:
        ConfigError: it holds no list of rows.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("--points", str(path), f"cannot be read: {error}") from None
    shared = content if isinstance(content, dict) else {"cases": content}
    cases, machine = shared.pop("cases", None), shared.get("machine")
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise ConfigError("--points", str(path), 'has no list of rows under "cases"')
    shared |= machine if isinstance(machine, dict) else {}
    return [shared | case for case in cases if case.get("side", "ours") == "ours" and "problem" not in case]


def own_run(case: dict[str, Any]) -> OwnRun:
    """Read one row.

    Raises:
        ValueError: it says too little, or something impossible.
    """
    try:
        words = shlex.split(case["command"])
        config = load_config(words[next(at for at, word in enumerate([*words, "--"]) if word.startswith("--")) :])
        model, gpu = model_config(config.model), find_device(case["gpu"]).name
        work = workload_of(config, model, resolve_layout(config.parallelism, int(case.get("gpus", 1))))
        tokens = work.global_batch_size * work.seq_len
        seconds = float(case["step_time_s"] if "step_time_s" in case else tokens / float(case["tokens_per_second"]))
    except KeyError as error:
        raise ValueError(f"{error.args[0]} is not stated") from None
    except (ConfigError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(str(error)) from None
    if not 1e-9 < seconds < 1e6:
        raise ValueError(f"a step of {seconds} s")
    source = case.get("source") or f"this trainer on {gpu}, PyTorch {case.get('torch', 'unknown')}"
    return OwnRun(f"{config.model.family} {config.model.flavor}", gpu, work, seconds, str(source))
