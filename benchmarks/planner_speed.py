"""Layouts that the planner judges per second on one core, and the time of its commands with and without traces on disk.

    python benchmarks/planner_speed.py --json benchmarks/results/planner_speed_cpu.json

The first part computes what a search computes of most layouts: a bound on the step time, and the memory. The layouts
are all of 175B parameters on 1,536 GPUs with tensor parallelism within a node, equal stages and a batch of 1,536: 1F1B
and interleaved, ZeRO 0 to 3, full and selective recomputation. The second part runs `scripts/plan.py search` for 175B
parameters on 1,536 and for 1T on 3,072 A100s, over every layout that the trainer accepts, and `predict`. Each runs in a
new process, first without traces, then with those that the first left.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the code next to this file

from benchmarks.runs import ROOT, machine, parser_of, write
from benchmarks.stack_profiles import profiles
from titan_like.models.registry import config_class, flavors
from titan_like.planner.bounds import least_step_seconds
from titan_like.planner.memory import largest_memory
from titan_like.planner.trace import TraceKey, estimate, trace
from titan_like.planner.workload import Workload

GPUS, BATCH = 1536, 1536
COMMANDS = {
    "search gpt3_175b": ["search", "--job.config_file=train_configs/gpt3_175b.toml", "--gpus=1536"],
    "search gpt_1t": ["search", "--job.config_file=train_configs/gpt_1t.toml", "--gpus=3072"],
    "predict gpt_145b": ["predict", "--job.config_file=train_configs/gpt_145b.toml"],
}


def layouts() -> list[Workload]:
    """Every layout, including those that do not fit."""
    model = config_class("gpt").model_validate(flavors("gpt")["gpt3_175b"])
    found = []
    for tensor, pipeline, micro, virtual in product((1, 2, 4, 8), range(1, 97), (1, 2, 4, 8, 16), (1, 2, 3, 4, 6)):
        if GPUS % (tensor * pipeline) or model.num_layers % (pipeline * virtual) or (virtual > 1 and pipeline == 1):
            continue
        shard = GPUS // (tensor * pipeline)
        microbatches, rest = divmod(BATCH, shard * micro)
        if rest or (virtual > 1 and microbatches % pipeline):
            continue
        schedule = "interleaved_1f1b" if virtual > 1 else "1f1b"
        work = Workload(model, 2048, micro, BATCH, tensor, pipeline, shard=shard, dtype="float16")
        work = work._replace(schedule=schedule, virtual_stages=virtual, sequence_parallel=tensor > 1)
        for zero, recompute in product(range(4), ("full", "selective")):
            found.append(work._replace(zero_stage=zero, recompute=recompute))
    return found


def layouts_per_second() -> dict[str, float]:
    """Rates of processor time in the first pass, with traces in memory and nothing else, and in the second."""
    profile, works, rates = profiles()["selene_2021"], layouts(), {}
    for key in {TraceKey.of(work) for work in works}:
        estimate(key), trace(key)
    for name in ("first pass", "second pass"):
        start = time.process_time()
        for work in works:
            least_step_seconds(work, profile, source=estimate), largest_memory(work, profile)
        rates[name] = len(works) / (time.process_time() - start)
        print(f"{name:12s} {len(works)} layouts: {rates[name]:,.0f} a second")
    return rates


def timed(name: str, cache: str) -> dict[str, float | int]:
    """Run a command in a new process; ``cache`` is its folder of traces."""
    target = Path(cache) / "found.json"
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "scripts/plan.py", *COMMANDS[name], f"--json={target}"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"XDG_CACHE_HOME": cache}, check=True, capture_output=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {"clock_seconds": seconds, "processor_seconds": sum(after[:2]) - sum(before[:2])}  # user and system
    searched = json.loads(target.read_text(encoding="utf-8")).get("search", {})
    found |= {key: searched[key] for key in ("valid", "computed") if key in searched}
    print(name, "  ".join(f"{key} {value:,.1f}" for key, value in found.items()), flush=True)
    return found


def main() -> None:
    """Measure, print and write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--commands", nargs="*", choices=COMMANDS, default=list(COMMANDS))
    options = parser.parse_args()
    commands = {}
    for name in options.commands:
        with tempfile.TemporaryDirectory() as cache:
            commands[name] = {when: timed(name, cache) for when in ("cold", "warm")}
    write(options.json, {**machine(), "commands": commands, "layouts_per_second": layouts_per_second()})


if __name__ == "__main__":
    main()
