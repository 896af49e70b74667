"""Layouts that the planner judges per second on one core, and the time of a search.

    python benchmarks/planner_speed.py --json benchmarks/results/planner_speed_cpu.json

The first part computes step time and memory of every layout of 175B parameters on 1,536 GPUs with tensor parallelism
within a node, equal stages and a global batch of 1,536: 1F1B and interleaved, ZeRO 0 to 3, full and selective
recomputation. The second part runs `scripts/plan.py search` in a new process for 175B parameters on 1,536 and for 1T on
3,072 A100s, over every layout that the trainer accepts. Times are processor times, including children and the start of
the process.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the code next to this file

from titan_like.models.registry import config_class, flavors
from titan_like.planner.memory import largest_memory
from titan_like.planner.profile import load_profile
from titan_like.planner.step_time import step_time
from titan_like.planner.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
GPUS, BATCH = 1536, 1536
SEARCHES = {"gpt3_175b": 1536, "gpt_1t": 3072}  # configuration → GPUs
PASSES = ("first pass", "second pass", "third pass")


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
        for zero, recompute in product(range(4), ("full", "selective")):
            work = Workload(
                model,
                seq_len=2048,
                micro_batch_size=micro,
                global_batch_size=BATCH,
                tensor=tensor,
                pipeline=pipeline,
                shard=shard,
                schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
                virtual_stages=virtual,
                sequence_parallel=tensor > 1,
                zero_stage=zero,
                recompute=recompute,
                dtype="float16",
            )
            found.append(work)
    return found


def judge() -> dict[str, float]:
    """Layouts per second: in the first pass, with empty caches, and in later ones."""
    profile, works = load_profile("selene_2021").changed(trainer_state=True), layouts()
    rates = {}
    for name in PASSES:
        start = time.process_time()
        for work in works:
            step_time(work, profile), largest_memory(work, profile)
        rates[name] = len(works) / (time.process_time() - start)
        print(f"{name:12s} {len(works)} layouts: {rates[name]:,.0f} a second")
    return rates


def timed_search(name: str, gpus: int) -> dict[str, float | int]:
    """Run one search in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "found.json"
        command = [sys.executable, "scripts/plan.py", "search", f"--job.config_file=train_configs/{name}.toml"]
        before, start = _children_seconds(), time.perf_counter()
        subprocess.run([*command, f"--gpus={gpus}", f"--json={target}"], cwd=ROOT, check=True, capture_output=True)
        wall, seconds = time.perf_counter() - start, _children_seconds() - before
        found = json.loads(target.read_text(encoding="utf-8"))["search"]
    best = found["ranked"][0]
    print(
        f"{name} on {gpus} GPUs: {seconds:.1f} s ({wall:.1f} s on the clock), best of {found['valid']:,} layouts takes "
        f"{best['step_seconds']['total']:.2f} s a step"
    )
    return {
        "gpus": gpus,
        "processor_seconds": seconds,
        "clock_seconds": wall,
        "valid": found["valid"],
        "computed": found["computed"],
    }


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", metavar="PATH", help="also write the figures to this file")
    options = parser.parse_args()
    result = {
        "python": platform.python_version(),
        "layouts_per_second": judge(),
        "searches": {name: timed_search(name, gpus) for name, gpus in SEARCHES.items()},
    }
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
