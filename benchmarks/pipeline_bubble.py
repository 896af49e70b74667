"""Step time of every pipeline schedule beside its theoretical one.

    python benchmarks/pipeline_bubble.py
    python benchmarks/pipeline_bubble.py --schedules 1f1b dualpipe_v --microbatches 8 --json bubble.json

Four gloo processes run `titan_like.parallel.pipeline.Pipeline` over stages that sleep (`sleeping_stages.py`): a rank
takes 20 ms for the forward pass of a microbatch and 20 ms for each half of its backward pass, divided among its
stages. In theory a step takes m·(t_F + t_B)·(1 + bubble), with the closed form of the bubble; `simulate` of the
schedule's table gives the same or more. A step lasts from when the first rank begins to when the last one is done.

Where a step takes longer, the passes' own times say why: ``passes`` is the step that passes of the measured times
would make without messages and gaps, so above 1 it is sleeps that overran; what the step takes beyond that is messages
and the work between passes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sleeping_stages import OwnRuntime, Times, launch

from titan_like.metrics.step_timeline import StepTimeline, as_simulated, measured
from titan_like.metrics.timeline import Timeline
from titan_like.metrics.timeline_report import figures
from titan_like.parallel.schedules import (
    check_schedule,
    ideal_bubble,
    schedule_table,
    simulate,
    stage_ranks,
    stages_per_rank,
    step_time,
)

DEGREE = 4
MICROBATCHES = (4, 8, 16, 32)
SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("looped_bfs", 2),
    ("interleaved_zero_bubble", 2),
    ("zbv_zero_bubble", 2),
    ("dualpipe_v", 2),
)
RANK_TIMES = Times(forward=0.020, input_gradient=0.020, weight_gradient=0.020)  # of all stages of a rank
HIDDEN_SHAPE = (1, 16, 64)
WARMUP, STEPS = 1, 3
GOAL = 1.05

Case = tuple[str, int, int]  # schedule, stages per rank, microbatches


def theoretical(case: Case) -> dict[str, float]:
    """Seconds of a step by the closed form, and by simulation of the table."""
    schedule, virtual, microbatches = case
    per_stage = RANK_TIMES / stages_per_rank(schedule, virtual)
    busy = microbatches * (RANK_TIMES.forward + RANK_TIMES.input_gradient + RANK_TIMES.weight_gradient)
    table = schedule_table(schedule, DEGREE, virtual, microbatches)
    events = simulate(table, stage_ranks(schedule, DEGREE, virtual), per_stage.of)
    bubble = ideal_bubble(schedule, DEGREE, virtual, microbatches)
    return {"bubble": bubble, "theoretical_s": busy * (1 + bubble), "simulated_s": step_time(events)}


def run_cases(rank: int, cases: list[Case], path: str, nice: int) -> None:
    """Measure all cases on this rank; rank 0 writes them."""
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    results: list[Any] = []
    for case in cases:
        results.append(run_case(case))
        if rank == 0:
            print("measured", *case, f"{results[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    if rank == 0:
        Path(path).write_text(json.dumps(results), encoding="utf-8")


def run_case(case: Case) -> dict[str, Any] | None:
    """The steps of one case, on rank 0."""
    schedule, virtual, microbatches = case
    runtime = OwnRuntime(schedule, DEGREE, virtual, RANK_TIMES, HIDDEN_SHAPE)
    batch = [torch.zeros(HIDDEN_SHAPE) for _ in range(microbatches)]
    seconds, timelines = [], []
    for _ in range(WARMUP + STEPS):
        group = dist.group.WORLD
        assert group is not None
        runtime.pipeline.timeline = timeline = Timeline(torch.device("cpu"), group)
        began = time.perf_counter()  # processes of one machine have the same clock
        runtime.step(batch)
        ended = time.perf_counter()
        seen: list[Any] = [None] * DEGREE
        dist.all_gather_object(seen, (began, ended, timeline.finish()))
        seconds.append(max(end for _, end, _ in seen) - min(begin for begin, _, _ in seen))
        timelines.append(measured(schedule, DEGREE, virtual, [times for _, _, times in seen]))
    if dist.get_rank():
        return None
    return {"schedule": schedule, "stages_per_rank": virtual, "microbatches": microbatches} | summary(
        case, seconds[WARMUP:], timelines[WARMUP:]
    )


def summary(case: Case, seconds: list[float], timelines: list[StepTimeline]) -> dict[str, Any]:
    """The median step beside theory."""
    theory, middle = theoretical(case), statistics.median(seconds)
    timeline = timelines[seconds.index(middle)]
    sums = figures(timeline)
    slowest = max(timeline.passes, key=lambda event: event.end - event.start)
    return {
        **theory,
        "measured_s": middle,
        "steps_s": seconds,
        "ratio": middle / theory["theoretical_s"],
        "ratio_to_simulated": middle / theory["simulated_s"],
        "passes_ratio": as_simulated(timeline).seconds / theory["theoretical_s"],
        "bubble_measured": sums.bubble,
        "exposed_communication": sums.exposed_communication,
        "between_passes": sum(share.other for share in sums.ranks) / (DEGREE * timeline.seconds),
        "slowest_pass": f"{slowest.action} on rank {slowest.rank}: {1000 * (slowest.end - slowest.start):.1f} ms",
    }


def show(results: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'schedule':<24} {'v':>2} {'m':>3} {'measured':>9} {'theory':>8} {'ratio':>6} "
        f"{'simulated':>9} {'passes':>7} {'exposed':>8} {'between':>8}"
    )
    for row in results:
        print(
            f"{row['schedule']:<24} {row['stages_per_rank']:>2} {row['microbatches']:>3} {row['measured_s']:>8.3f}s "
            f"{row['theoretical_s']:>7.3f}s {row['ratio']:>6.3f} {row['simulated_s']:>8.3f}s "
            f"{row['passes_ratio']:>7.3f} {100 * row['exposed_communication']:>7.2f}% "
            f"{100 * row['between_passes']:>7.2f}%" + ("  misses the goal" if row["ratio"] > GOAL else "")
        )
    missed = sum(row["ratio"] > GOAL for row in results)
    print(f"{len(results) - missed} of {len(results)} within {GOAL} of theory; medians of {STEPS} steps")


def machine() -> dict[str, Any]:
    """Where this ran."""
    cpu = platform.processor() or platform.machine()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": [round(load, 2) for load in os.getloadavg()],  # before
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=sorted({name for name, _ in SCHEDULES}))
    parser.add_argument("--microbatches", nargs="+", type=int, default=MICROBATCHES)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--nice", type=int, default=os.getpriority(os.PRIO_PROCESS, 0), help="of the four processes")
    options = parser.parse_args()
    cases = [
        (schedule, virtual, microbatches)
        for schedule, virtual in SCHEDULES
        if schedule in options.schedules
        for microbatches in options.microbatches
        if check_schedule(schedule, DEGREE, virtual, microbatches) is None
    ]
    before = machine()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        launch(run_cases, DEGREE, cases, str(path), options.nice)
        results = json.loads(path.read_text(encoding="utf-8"))
    show(results)
    if options.json is not None:
        about = {
            "command": " ".join(["python", *sys.argv]),
            "machine": before,
            "nice": options.nice,
            "pipeline_degree": DEGREE,
            "rank_times_s": vars(RANK_TIMES),
            "warmup": WARMUP,
            "steps": STEPS,
            "results": results,
        }
        options.json.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
