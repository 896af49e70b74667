"""Time of a pipeline step compared with the ideal time of its schedule, and the memory that the runtime holds.

    python benchmarks/pipeline_bubble.py                        # this project's runtime and torch's, about half an hour
    python benchmarks/pipeline_bubble.py --runtimes own --microbatches 8
    sudo python benchmarks/pipeline_bubble.py --realtime        # on a machine that does other things, too
    python benchmarks/pipeline_bubble.py --pictures             # those of docs/pipeline_timeline.md; needs matplotlib

Stages sleep instead of computing (see sleeping_stages.py), so four of them run at full speed on two cores. Everything
else is real: one process per pipeline rank, messages over gloo, autograd, `titan_like.parallel.pipeline.Pipeline`.

ratio = median time of a step / ideal time: the simulated time of the schedule's table, with messages that take none. If
a rank has v stages, a pass sleeps for 1/v of a microbatch's time. torch.distributed.pipelining runs the same stages. It
does the first stage's whole backward pass in the second part, which does not change the ideal times of its tables.

Memory is the peak of torch's CPU allocator over two steps, minus its content before the runtime was built, in units of
one activation between stages. The stages themselves keep only their input until its backward pass.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from runs import machine, parser_of, write
from sleeping_stages import TORCH_SCHEDULES, OwnRuntime, Times, TorchRuntime, launch

from titan_like.metrics.step_timeline import StepTimeline, measured, simulated
from titan_like.metrics.timeline_plot import draw
from titan_like.metrics.timeline_report import figures, report
from titan_like.parallel.schedules.tables import SPLIT_BACKWARD, check_schedule, stages_per_rank
from titan_like.parallel.timeline import Timeline

CASES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("looped_bfs", 2),
    ("interleaved_zero_bubble", 2),
    ("zbv_zero_bubble", 2),
    ("dualpipe_v", 2),
]


class Case(NamedTuple):
    """What is measured."""

    runtime: str
    schedule: str
    virtual_stages: int
    microbatches: int


SMALL = (1, 64, 64)  # shape of a tensor between stages when measuring time: 16 KiB
LARGE = (1, 512, 512)  # and when measuring memory: 1 MiB


def build(case: Case, times: Times, shape: Sequence[int]) -> OwnRuntime | TorchRuntime:
    """Build a runtime over sleeping stages on this rank."""
    degree = dist.get_world_size()
    if case.runtime == "own":
        return OwnRuntime(case.schedule, degree, case.virtual_stages, times, shape)
    return TorchRuntime(case.schedule, degree, case.virtual_stages, times, case.microbatches)


def ideal_seconds(schedule: str, degree: int, virtual: int, times: Times, microbatches: int) -> float:
    """Time of a step without messages and overheads."""
    part = times / stages_per_rank(schedule, virtual)
    return simulated(schedule, degree, virtual, microbatches, part.of).seconds


def run_step(runtime: OwnRuntime | TorchRuntime, data: torch.Tensor) -> tuple[float, StepTimeline | None]:
    """Run one step of the whole pipeline; returns its seconds, and its timeline if the runtime keeps one."""
    group = dist.group.WORLD
    assert group is not None
    timeline = None
    if isinstance(runtime, OwnRuntime):
        timeline = runtime.pipeline.timeline = Timeline(torch.device("cpu"), group)
    dist.barrier()
    started = time.perf_counter()
    runtime.step(data)
    ended = time.perf_counter()
    spans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(spans, (started, ended, None if timeline is None else timeline.finish()))
    seconds = max(end for _, end, _ in spans) - min(start for start, _, _ in spans)  # one machine has one clock
    if not isinstance(runtime, OwnRuntime):
        return seconds, None
    layout = runtime.pipeline.layout
    return seconds, measured(layout.schedule, layout.pipeline, layout.virtual_stages, [times for _, _, times in spans])


def measure_time(rank: int, cases: list[Case], times: Times, steps: int, output: Path) -> None:
    """Time every (runtime, schedule, virtual stages, microbatches); rank 0 prints a row for each and writes all."""
    rows = []
    degree = dist.get_world_size()
    for case in cases:
        name, schedule, virtual, microbatches = case
        runtime = build(case, times, SMALL)
        data = torch.zeros(microbatches, *SMALL[1:])
        run_step(runtime, data)
        runs = [run_step(runtime, data) for _ in range(steps)]
        ideal = ideal_seconds(schedule, degree, virtual, times, microbatches)
        seconds = [run[0] for run in runs]
        row: dict[str, Any] = case._asdict() | {
            "ideal_s": round(ideal, 4),
            "steps_s": [round(value, 4) for value in seconds],
            "ratio": round(statistics.median(seconds) / ideal, 4),
        }
        timelines = [run[1] for run in runs if run[1] is not None]
        if timelines:
            row |= summary(timelines)
        rows.append(row)
        if rank == 0:
            bubbles = f"{row['bubble']:8.4f} {row['bubble_ideal']:8.4f}" if "bubble" in row else f"{'':17}"
            passes = "  ".join(f"{kind} {value:.2f}" for kind, value in row.get("pass_ms", {}).items())
            median = statistics.median(row["steps_s"])
            print(f"{name:<8}{schedule:<24}{virtual:>3}{microbatches:>4}{row['ideal_s']:9.3f} {median:9.3f}"
                  f"{row['ratio']:8.3f}   {bubbles}  {passes}", flush=True)  # fmt: skip
    if rank == 0:
        output.write_text(json.dumps(rows), encoding="utf-8")


def summary(timelines: list[StepTimeline]) -> dict[str, Any]:
    """Bubbles, exposed communication and times of passes from the timelines."""
    found = [figures(timeline) for timeline in timelines]
    passes: dict[str, list[float]] = {}
    for timeline in timelines:
        for event in timeline.passes:
            passes.setdefault(event.action.kind, []).append(1000 * (event.end - event.start))
    return {
        "bubble": round(statistics.median(f.bubble_fraction for f in found), 4),
        "bubble_ideal": round(found[0].bubble_fraction_ideal, 4),
        "exposed_communication": round(statistics.median(f.exposed_communication for f in found), 4),
        "pass_ms": {kind: round(statistics.mean(values), 2) for kind, values in sorted(passes.items())},
    }


def draw_pictures(rank: int, folder: Path) -> None:
    """Draw the second step of three schedules above the same step in theory, and print its report."""
    times, degree, microbatches = Times(0.02, 0.02, 0.02), dist.get_world_size(), 8
    for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)):
        runtime, data = OwnRuntime(schedule, degree, virtual, times, SMALL), torch.zeros(microbatches, *SMALL[1:])
        run_step(runtime, data)
        _, step = run_step(runtime, data)
        if rank == 0 and step is not None:
            part = times / stages_per_rank(schedule, virtual)
            steps = {"measured": step, "theory": simulated(schedule, degree, virtual, microbatches, part.of)}
            bubbles = {name: figures(shown).bubble_fraction for name, shown in steps.items()}
            panels = [(f"{schedule}, {name}: bubble {bubbles[name]:.3f}", shown) for name, shown in steps.items()]
            draw(panels, folder / f"{schedule}.png")
            print(report(step, schedule), end="\n\n", flush=True)
        dist.barrier()


def measure_memory(rank: int, cases: list[Case], times: Times, output: Path) -> None:
    """Peak activations in each rank's runtime, for every (runtime, schedule, virtual stages, microbatches)."""
    rows = []
    for case in cases:
        microbatches = case.microbatches
        data = torch.zeros(microbatches, *LARGE[1:])
        dist.barrier()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            runtime = build(case, times, LARGE)
            for _ in range(2):
                runtime.step(data)
        peaks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(peaks, round(peak_bytes(profile) / (data[0].numel() * data.element_size()), 1))
        rows.append(case._asdict() | {"peak_activations": peaks})
        if rank == 0:
            numbers = "".join(f"{value:9.1f}" for value in peaks)
            print(
                f"{case.runtime:<8}{case.schedule:<24}{case.virtual_stages:>3}{microbatches:>4}  {numbers}", flush=True
            )
    if rank == 0:
        output.write_text(json.dumps(rows), encoding="utf-8")


def peak_bytes(profile: torch.profiler.profile) -> int:
    """Peak bytes allocated since the profile began; the allocator reports its total with every change."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


def main() -> None:
    """Read the command line, measure, write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks (default 4)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16, 32], help="(default 4 8 16 32)")
    parser.add_argument("--runtimes", nargs="+", choices=["own", "torch"], default=["own", "torch"])
    parser.add_argument("--schedules", nargs="+", choices=list(TORCH_SCHEDULES), default=list(TORCH_SCHEDULES))
    parser.add_argument("--forward-ms", type=float, default=60.0, help="t_F = t_I = t_W of a microbatch (default 60)")
    parser.add_argument("--steps", type=int, default=5, help="steps after the first (default 5)")
    parser.add_argument("--no-memory", action="store_true", help="measure time only")
    parser.add_argument("--realtime", action="store_true", help="run with real-time priority (needs the permission)")
    images = Path(__file__).resolve().parents[1] / "docs" / "images"
    parser.add_argument("--pictures", type=Path, nargs="?", const=images, metavar="FOLDER", help="only draw pictures")
    args = parser.parse_args()
    if args.pictures:
        launch(draw_pictures, args.ranks, args.realtime, args.pictures)
        return

    times = Times(*[args.forward_ms / 1000] * 3)
    cases = [
        Case(runtime, schedule, virtual, microbatches)
        for runtime in args.runtimes
        for schedule, virtual in CASES
        for microbatches in args.microbatches
        if schedule in args.schedules and check_schedule(schedule, args.ranks, virtual, microbatches) is None
        if (runtime, schedule) != ("torch", "dualpipe_v") or microbatches >= 2 * args.ranks  # torch refuses fewer
    ]
    command = " ".join(["python benchmarks/pipeline_bubble.py", *sys.argv[1:]])
    result: dict[str, Any] = {"command": command, "machine": machine(), "ranks": args.ranks}
    result["seconds_of_a_microbatch"] = vars(times)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.json"
        print(f"{'runtime':<8}{'schedule':<24}{'v':>3}{'m':>4}{'ideal s':>9} {'median s':>9}{'ratio':>8}   "
              f"{'bubble':>8} {'ideal':>8}  passes (ms)")  # fmt: skip
        launch(measure_time, args.ranks, args.realtime, cases, times, args.steps, output)
        result["time"] = json.loads(output.read_text())
        if not args.no_memory:
            print(f"\n{'runtime':<8}{'schedule':<24}{'v':>3}{'m':>4}  most activations on each rank")
            whole = [case for case in cases if case.schedule not in SPLIT_BACKWARD and case.microbatches in (8, 32)]
            launch(measure_memory, args.ranks, False, whole, Times(0.002, 0.002, 0.002), output)
            result["memory"] = json.loads(output.read_text())
    write(args.json, result)


if __name__ == "__main__":
    main()
