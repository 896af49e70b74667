"""Peak memory of a step, composed from a traced microbatch, against the whole step on fake tensors.

    python benchmarks/trace_memory.py
    python benchmarks/trace_memory.py "llama llama3.1_8b 8 4096 1 8 8 3 z1 pp4" --json mine.json
    python benchmarks/trace_memory.py --draw 40 --seed 2

Without layouts it judges those of its last result again, in their groups. A layout takes 1 to 30 s. Errors are of the
peak, of the fullest moment of the passes, and of the fullest moment after them.

A layout is: family flavor layers seq_len micro_batch microbatches processes pipeline_rank, then settings. Letters and
numbers are degrees (tp, pp, cp, ep, hsdp replicas), z the ZeRO stage, v virtual stages; other words are as in SETTINGS,
a schedule, or key=value. Models are a few layers of the flavor at full width, in bfloat16 unless said otherwise.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the code next to this file
from benchmarks.runs import parser_of, write
from tests.whole_step import whole_step
from titan_like.config.errors import ConfigError
from titan_like.config.load import load_config
from titan_like.config.schema import JobConfig
from titan_like.models.config import TransformerConfig
from titan_like.models.registry import model_config
from titan_like.parallel.layout import Layout, resolve_layout
from titan_like.parallel.schedules.tables import SCHEDULES, stages_per_rank
from titan_like.planner.memory import rank_moments
from titan_like.planner.workload import workload_of
from titan_like.train.rules import check_rules

RESULTS = Path(__file__).parent / "results" / "trace_memory_cpu.json"
DEGREES = {
    "tp": "tensor_parallel_degree", "pp": "pipeline_parallel_degree", "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree", "hsdp": "data_parallel_replicate_degree", "z": "zero_stage",
    "v": "virtual_stages_per_rank",
}  # fmt: skip
MODES, METHODS = ("full", "selective", "experts"), ("ring", "ulysses", "all_gather")
OPTIMIZERS = ("adafactor", "muon", "sgd")
SETTINGS = {"sp": ("parallelism.sequence_parallel", "true"), "float32": ("training.dtype", "float32")}
SETTINGS |= {"every2": ("activation_checkpoint.every_n_layers", "2")}
SETTINGS |= {word: ("activation_checkpoint.mode", word) for word in MODES}
SETTINGS |= {word: ("parallelism.context_parallel_method", word) for word in METHODS}
SETTINGS |= {word: ("optimizer.name", word) for word in OPTIMIZERS}
SETTINGS |= {"drop": ("model.overrides.dropout", "0.1"), "nodrop": ("model.overrides.dropout", "0.0")}
SETTINGS |= {"lora": ("lora.rank", "16"), "offload": ("activation_checkpoint.offload", "true")}
SETTINGS |= {"compile": ("compile.enable", "true"), "float8": ("float8.enable", "true")}
# Flavors to draw, each with the fewest layers of a stage: those of a period of its kinds of layers.
FLAVORS = {
    "gpt gpt2_124m": 1, "gpt gpt2_1558m": 1, "gpt gpt3_6.7b": 1, "llama llama3.2_1b": 1, "llama llama3.1_8b": 1,
    "moe olmoe_1b_7b": 1, "moe mixtral_8x7b": 1, "decoder qwen3_8b": 1, "decoder gemma2_9b": 2,
    "decoder gpt_oss_20b": 2, "decoder deepseek_v3": 4, "t5 220m": 2, "t5 v1.1_3b": 2, "bert 336m": 1,
}  # fmt: skip


class Outcome(NamedTuple):
    """Bytes of one process in the whole step, and the relative errors of what is composed."""

    layout: str
    whole: int
    error: float
    of_passes: float
    of_update: float


def settings_of(words: list[str]) -> dict[str, Any]:
    """The settings that a layout's words stand for."""
    found: dict[str, Any] = {}
    for word in words:
        name = word.rstrip("0123456789")
        if "=" in word:
            key, value = word.split("=", 1)
            found[key] = value
        elif word in SETTINGS:
            key, value = SETTINGS[word]
            found[key] = value
        elif name in DEGREES:
            found[f"parallelism.{DEGREES[name]}"] = int(word[len(name) :])
        else:
            found["parallelism.pipeline_schedule"] = word
    return found


def run_of(layout: str) -> tuple[JobConfig, TransformerConfig, Layout, int]:
    """A layout's run, and its pipeline rank.

    Raises:
        ConfigError: the trainer refuses the run.
    """
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
    return config, model, where, int(rank)


def judge(layout: str) -> Outcome:
    """Compose one layout's memory, and run its whole step on fake tensors."""
    config, model, where, rank = run_of(layout)
    whole = whole_step(config, model, where, rank * (where.num_processes // where.pipeline))
    passes, update = (moment.total for moment in rank_moments(workload_of(config, model, where), rank))
    errors = max(passes, update) / whole.peak, passes / whole.passes, update / whole.update
    return Outcome(layout, whole.peak, *(ratio - 1 for ratio in errors))


def drawn(count: int, seed: int) -> Iterator[str]:
    """Random layouts that the trainer accepts, over families, axes, schedules, recomputation and optimizers."""
    pick = random.Random(seed).choice
    while count:
        flavor, pipeline = pick(list(FLAVORS)), pick((1, 1, 2, 4))
        schedule = pick(list(SCHEDULES)) if pipeline > 1 else "1f1b"
        stages = stages_per_rank(schedule, pick((1, 2, 3)))
        layers = pipeline * stages * FLAVORS[flavor] * pick((1, 2, 3) if pipeline == 1 else (1, 2))
        tensor, context, expert, replicas = pick((1, 1, 2, 4)), pick((1, 1, 1, 2)), pick((1, 1, 2, 4)), pick((1, 1, 2))
        processes = pipeline * tensor * context * replicas * pick((1, 2, 4, 8))
        micro, microbatches = pick((1, 1, 2)), pick((1, 2, 3, 4)) * (1 if pipeline == 1 else pipeline)
        words = [f"z{pick((0, 1, 2, 3))}", f"tp{tensor}", pick(("", "sp")) if tensor > 1 else "", f"pp{pipeline}"]
        words += [schedule, f"v{stages}"] if pipeline > 1 else []
        words += [f"cp{context}", f"ep{expert}" if flavor.startswith("moe") else "", f"hsdp{replicas}"]
        words += [pick(("", "", *MODES)), pick(("", "", "every2")), pick(("", "", "", *OPTIMIZERS))]
        words += [pick(("", "", "", word)) for word in ("lora", "offload", "compile")] + [pick(("", "", "", "float32"))]
        settings = [word for word in words if word and word not in ("tp1", "pp1", "cp1", "ep1", "hsdp1")]
        numbers = [layers, pick((512, 1024, 2048)), micro, microbatches, processes, pick(range(pipeline))]
        layout = " ".join([flavor, *map(str, numbers), *settings])
        try:
            run_of(layout)
        except ConfigError:
            continue
        if not {"offload", "compile"} <= {*settings}:  # of which the whole step does not see the layer in flight
            yield layout
            count -= 1


def report(outcomes: list[Outcome]) -> str:
    """The errors of a group."""
    lines = [f"{len(outcomes)} layouts"]
    for name, errors in (
        ("peak", [outcome.error for outcome in outcomes]),
        ("passes", [outcome.of_passes for outcome in outcomes]),
        ("update", [outcome.of_update for outcome in outcomes]),
    ):
        sizes = sorted(map(abs, errors))
        lines.append(
            f"{name}: median {statistics.median(sizes):.3%}, largest {sizes[-1]:.2%}, lowest {min(errors):+.2%}"
        )
    return "; ".join(lines)


def main() -> None:
    """Print a line for each layout, and the errors of each group."""
    parser = parser_of(__doc__)
    parser.add_argument("layouts", nargs="*", help="layouts to judge (default: those of the last result)")
    parser.add_argument("--draw", type=int, metavar="N", help="judge N random layouts instead")
    parser.add_argument("--seed", type=int, default=1, help="of the random layouts")
    arguments = parser.parse_args()
    if arguments.draw:
        groups = {f"drawn with seed {arguments.seed}": list(drawn(arguments.draw, arguments.seed))}
    elif arguments.layouts:
        groups = {"named": arguments.layouts}
    else:
        groups = {name: [one["layout"] for one in group] for name, group in json.loads(RESULTS.read_text()).items()}
    results = dict[str, list[Outcome]]()
    for group, layouts in groups.items():
        for outcome in map(judge, layouts):
            results.setdefault(group, []).append(outcome)
            errors = " ".join(f"{error:+8.3%}" for error in outcome[2:])
            print(f"{outcome.layout:96s} {outcome.whole / 2**20:9.1f} MiB {errors}", flush=True)
    for group, outcomes in results.items():
        print(f"{group}: {report(outcomes)}")
    write(arguments.json, {name: [one._asdict() for one in group] for name, group in results.items()})


if __name__ == "__main__":
    main()
