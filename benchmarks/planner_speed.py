"""How many layouts the planner judges in a second on one core: step time and memory of each.

    python benchmarks/planner_speed.py

Every layout of 175B parameters on 1,536 GPUs with tensor parallelism within a node, equal stages and a global batch of
1,536: 1F1B and interleaved, ZeRO 0 to 3, full and selective recomputation.
"""

from __future__ import annotations

import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # measure the code beside this file

from titan_like.models.registry import FAMILIES, builtin_flavors
from titan_like.planner.memory import largest_memory
from titan_like.planner.profile import load_profile
from titan_like.planner.step_time import step_time
from titan_like.planner.workload import Workload

GPUS, BATCH = 1536, 1536


def layouts() -> list[Workload]:
    """All of them, those that do not fit too."""
    model = FAMILIES["gpt"].model_validate(builtin_flavors("gpt")["gpt3_175b"])
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
                flash=False,
                dtype="float16",
            )
            found.append(work)
    return found


def main() -> None:
    """Time the first pass, where nothing is known yet, and later ones."""
    profile, works = load_profile("selene_2021"), layouts()
    for name in ("first pass", "second pass", "third pass"):
        start = time.process_time()
        judged = [(step_time(work, profile).total, largest_memory(work, profile)) for work in works]
        seconds = time.process_time() - start
        print(f"{name:12s} {len(works)} layouts in {seconds:.3f} s: {len(works) / seconds:,.0f} a second")
    fitting = [(seconds, work) for (seconds, used), work in zip(judged, works, strict=True) if used < 80 * 2**30]
    seconds, best = min(fitting, key=lambda pair: pair[0])
    layout = f"tensor {best.tensor}, pipeline {best.pipeline} × {best.virtual_stages}, data {best.shard}"
    rest = f"ZeRO {best.zero_stage}, microbatches of {best.micro_batch_size}, recomputation {best.recompute}"
    print(f"fastest that fits: {layout}, {rest}: {seconds:.2f} s")


if __name__ == "__main__":
    main()
