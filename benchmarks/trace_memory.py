"""Peak memory of a step, composed from a traced microbatch, against the whole step on fake tensors.

    python benchmarks/trace_memory.py
    python benchmarks/trace_memory.py "llama llama3.1_8b 8 4096 1 8 8 3 z1 pp4" --json mine.json

Without layouts it judges those of its last result again, in their groups. The composition was written with the first
two groups, and corrected after others had been chosen or drawn at random. Those drawn last, experts alone, were within
2.4 % as drawn. A layout takes 1 to 10 s.

A layout is: family flavor layers seq_len micro_batch microbatches processes pipeline_rank, then settings. Letters and
numbers are degrees (tp, pp, cp, ep, hsdp replicas), z the ZeRO stage, v virtual stages; other words are as in SETTINGS,
or a schedule. Models are a few layers of the flavor at full width, in bfloat16 unless said otherwise.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the code next to this file
from benchmarks.runs import parser_of, write
from tests.whole_step import whole_step
from titan_like.config.load import load_config
from titan_like.models.registry import model_config
from titan_like.parallel.layout import resolve_layout
from titan_like.planner.memory import rank_memory
from titan_like.planner.workload import workload_of
from titan_like.train.rules import check_rules

RESULTS = Path(__file__).parent / "results" / "trace_memory_cpu.json"
DEGREES = {
    "tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree", "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree", "hsdp": "data_parallel_replicate_degree", "z": "zero_stage",
    "v": "virtual_stages_per_rank",
}  # fmt: skip
MODES, METHODS = ("full", "selective", "experts"), ("ring", "ulysses", "all_gather")
SETTINGS = {"sp": ("parallelism.sequence_parallel", "true"), "float32": ("training.dtype", "float32")}
SETTINGS |= {"every2": ("activation_checkpoint.every_n_layers", "2")}
SETTINGS |= {word: ("activation_checkpoint.mode", word) for word in MODES}
SETTINGS |= {word: ("parallelism.context_parallel_method", word) for word in METHODS}
SETTINGS |= {"drop": ("model.overrides.dropout", "0.1"), "nodrop": ("model.overrides.dropout", "0.0")}


class Outcome(NamedTuple):
    """Bytes of one process, and the relative error of what is composed."""

    layout: str
    whole: int
    composed: int
    error: float


def settings_of(words: list[str]) -> dict[str, Any]:
    """The settings that a layout's words stand for."""
    found: dict[str, Any] = {}
    for word in words:
        name = word.rstrip("0123456789")
        if word in SETTINGS:
            key, value = SETTINGS[word]
            found[key] = value
        elif name in DEGREES:
            found[f"parallelism.{DEGREES[name]}"] = int(word[len(name) :])
        else:
            found["parallelism.pipeline_schedule"] = word
    return found


def judge(layout: str) -> Outcome:
    """Compose one layout's memory, and run its whole step on fake tensors."""
    family, flavor, layers, seq_len, micro, microbatches, processes, rank, *words = layout.split()
    settings = {"training.dtype": "bfloat16", "model.family": family, "model.flavor": flavor}
    settings |= {"model.overrides.num_layers": layers, "training.seq_len": seq_len, "training.steps": 10}
    settings |= {"training.micro_batch_size": micro} | settings_of(words)
    degrees = [settings.get(f"parallelism.{DEGREES[name]}", 1) for name in ("tp", "pp", "cp")]
    data_parallel = int(processes) // (degrees[0] * degrees[1] * degrees[2])
    settings["training.global_batch_size"] = int(micro) * int(microbatches) * data_parallel
    config = load_config([f"--{key}={value}" for key, value in settings.items()])
    model = model_config(config.model)
    where = resolve_layout(config.parallelism, int(processes))
    check_rules(config, model, where)
    whole = whole_step(config, model, where, int(rank) * (int(processes) // where.pipeline)).peak
    composed = rank_memory(workload_of(config, model, where), int(rank)).total
    return Outcome(layout, whole, composed, composed / whole - 1)


def report(outcomes: list[Outcome]) -> str:
    """The errors of a group."""
    sizes = [abs(outcome.error) for outcome in outcomes]
    found = f"{len(outcomes)} layouts: median {statistics.median(sizes):.2%}, largest {max(sizes):.2%}"
    return f"{found}, lowest {min(outcome.error for outcome in outcomes):+.2%}"


def main() -> None:
    """Print a line for each layout, and the errors of each group."""
    parser = parser_of(__doc__)
    parser.add_argument("layouts", nargs="*", help="layouts to judge (default: those of the last result)")
    arguments = parser.parse_args()
    groups = {name: [one["layout"] for one in found] for name, found in json.loads(RESULTS.read_text()).items()}
    groups, results = {"named": arguments.layouts} if arguments.layouts else groups, dict[str, list[Outcome]]()
    for group, layouts in groups.items():
        for outcome in map(judge, layouts):
            results.setdefault(group, []).append(outcome)
            print(f"{outcome.layout:82s} {outcome.whole / 2**20:9.1f} MiB {outcome.error:+7.2%}", flush=True)
    for group, outcomes in results.items():
        print(f"{group}: {report(outcomes)}")
    write(arguments.json, {name: [one._asdict() for one in found] for name, found in results.items()})


if __name__ == "__main__":
    main()
