"""Measured steps of this project's trainer, to which `plan.py calibrate` fits a profile.

A JSON file holds runs in a list, or under ``cases`` next to what all of them share. A run has ``command``, with the
settings of train.py after other words; ``tokens_per_second``, ``step_time_s`` or ``tflops_per_gpu`` (without
recomputation); ``gpu``, its name; and perhaps ``gpus``, ``model`` and ``source``. The file of benchmarks/peers.py is
one. Its runs of other trainers, whose ``side`` is not "ours", and cases that did not run are left out.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_like.config.errors import require
from titan_like.config.load import load_config
from titan_like.config.paths import blaming, parse_json, user_file
from titan_like.metrics.devices import known_device
from titan_like.metrics.flops import model_flops_per_token
from titan_like.models.registry import model_config
from titan_like.parallel.layout import resolve_layout
from titan_like.planner.profile import Profile, is_builtin
from titan_like.planner.step_time import step_time
from titan_like.planner.workload import Workload, workload_of


@dataclass(frozen=True)
class Row:
    """One measured run."""

    model: str
    gpu: str
    work: Workload
    seconds: float  # per step
    source: str

    def adapted(self, profile: Profile) -> Profile:
        """The profile on the row's own GPU, unless that is unknown or the profile itself describes its device."""
        device = known_device(self.gpu) if is_builtin(profile.device) else None
        return profile if device in (None, profile.device) else profile.changed(device=device)

    def predicted(self, profile: Profile) -> float:
        """Seconds of a step under a profile, on the row's own GPU."""
        return step_time(self.work, self.adapted(profile)).total


def read_rows(path: str | Path) -> tuple[list[Row], list[str]]:
    """The rows of a JSON file, and which rows are left out and why.

    Raises a `ConfigError` if the file cannot be read, or holds no list of rows.
    """
    rows, left_out = list[Row](), list[str]()
    for number, case in enumerate(read_cases(path), start=1):
        try:
            rows.append(_row(case))
        except KeyError as error:
            left_out.append(f"row {number}: {error.args[0]} is not stated")
        except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
            left_out.append(f"row {number}: {error}")
    return rows, left_out


def read_cases(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSON file, each with what all of them share. Raises a `ConfigError` if it holds no list of rows."""
    hint = 'give a JSON file, such as {"gpu": "H100", "cases": [{"command": "train.py …", "step_time_s": 0.5}]}'
    judge = "benchmarks/planner_accuracy.py --points judges published runs in CSV; of this trainer's runs, "
    require(Path(path).suffix.lower() != ".csv", "--points", str(path), judge + hint)
    with user_file(Path(path), blaming("--points", str(path), hint), may_stream=True):
        content = parse_json(Path(path).read_text(encoding="utf-8"))
    shared = content if isinstance(content, dict) else {"cases": content}
    cases, machine = shared.pop("cases", None), shared.get("machine")
    are_rows = isinstance(cases, list) and all(isinstance(case, dict) for case in cases)
    require(are_rows, "--points", str(path), 'has no list of rows under "cases"')
    shared |= machine if isinstance(machine, dict) else {}
    return [shared | case for case in cases if case.get("side", "ours") == "ours" and "problem" not in case]


def _row(case: dict[str, Any]) -> Row:
    """Read a run. Raises a `KeyError` for what is not stated, and what `read_rows` catches for what is impossible."""
    words = shlex.split(case["command"])
    config = load_config(words[next(index for index, word in enumerate([*words, "--"]) if word.startswith("--")) :])
    model, layout = model_config(config.model), resolve_layout(config.parallelism, int(case.get("gpus", 1)))
    work = workload_of(config, model, layout)
    tokens = work.global_batch_size * work.seq_len
    if case.get("step_time_s"):
        seconds = float(case["step_time_s"])
    elif case.get("tflops_per_gpu"):
        flops = tokens * model_flops_per_token(model, work.seq_len, decoder_seq_len=work.decoder_seq_len)
        seconds = flops / (work.num_gpus * float(case["tflops_per_gpu"]) * 1e12)
    elif case.get("tokens_per_second"):
        seconds = tokens / float(case["tokens_per_second"])
    else:
        raise ValueError("neither step_time_s nor tokens_per_second nor tflops_per_gpu is stated")
    if not 1e-9 < seconds < 1e6:
        raise ValueError(f"a step of {seconds} s")
    name = case.get("model") or f"{config.model.family} {config.model.flavor}"
    source = case.get("source") or f"this trainer on {case['gpu']}, PyTorch {case.get('torch', 'unknown')}"
    return Row(str(name), case["gpu"], work, seconds, str(source))
