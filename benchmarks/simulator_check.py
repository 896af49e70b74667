"""Simulated time of a pipeline step, by the walk over its schedule table, compared with the measured time.

    python benchmarks/simulator_check.py                       # about a quarter of an hour
    python benchmarks/simulator_check.py --realtime            # on a machine that does other things, too

Stages sleep instead of computing (see sleeping_stages.py); processes, messages and autograd are real. Short separate
runs (6 microbatches, sleeps of another length, 8 steps of each of two schedules) first measure the overhead of a pass,
the gap between two passes and the latency of a message. With these constants a step of every schedule is simulated and
then run; nothing is fitted to it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pipeline_bubble import CASES, SMALL, run_step
from runs import machine, parser_of, write
from sleeping_stages import OwnRuntime, Times, launch

from titan_like.metrics.step_timeline import StepTimeline, simulated
from titan_like.parallel.schedules.tables import Action, check_schedule, inputs, outcome, stages_per_rank

CONSTANTS_FROM = (("1f1b", 1), ("zbv_zero_bubble", 2))  # one schedule with whole backward passes, one with split ones
CONSTANTS_MICROBATCHES, CONSTANTS_STEPS = 6, 8


@dataclass(frozen=True)
class Overheads:
    """Median overheads of the runtime, in seconds."""

    passes: dict[str, float]  # overhead by kind of pass
    gap: float  # between two passes of a rank that do not wait
    message: float  # from the end of a pass to the start of a pass on another rank that waits for it
    around: float  # before the first pass of a step and after the last


def overheads(runs: list[tuple[float, StepTimeline]], times: Times) -> Overheads:
    """Overheads from measured steps (seconds, timeline); passes sleep for ``times``, split over a rank's stages."""
    passes: dict[str, list[float]] = {}
    gaps, messages = [], []
    for _, step in runs:
        per_stage = times / stages_per_rank(step.schedule, step.virtual_stages)
        for event in step.passes:
            passes.setdefault(event.action.kind, []).append(event.end - event.start - per_stage.of(event.action))
        gaps += list(gaps_of(step))
        messages += list(messages_of(step))
    return Overheads(
        {kind: statistics.median(values) for kind, values in sorted(passes.items())},
        statistics.median(gaps),
        statistics.median(messages),
        statistics.median(seconds - step.seconds for seconds, step in runs),
    )


def gaps_of(step: StepTimeline) -> Iterator[float]:
    """Gaps between two passes of a rank, except those in which it waits for an input."""
    waits = {wait.action: wait.start for wait in step.waits}
    for rank in range(step.pipeline_degree):
        mine = sorted((event for event in step.passes if event.rank == rank), key=lambda event: event.start)
        for i in range(1, len(mine)):
            yield waits.get(mine[i].action, mine[i].start) - mine[i - 1].end


def messages_of(step: StepTimeline) -> Iterator[float]:
    """Times from the end of a pass to the start of the pass on another rank that was waiting for it."""
    made = {outcome(event.action): event.end for event in step.passes}
    for wait in step.waits:
        for needed in inputs(wait.action, len(step.ranks)):
            if step.ranks[needed.stage] != wait.rank and wait.start < made[needed]:
                yield wait.end - made[needed]


def predicted(schedule: str, degree: int, virtual: int, microbatches: int, times: Times, extra: Overheads) -> float:
    """Simulated seconds of a step. A gap follows every pass, and its message is posted at the end of the gap."""
    per_stage = times / stages_per_rank(schedule, virtual)

    def duration(action: Action) -> float:
        return per_stage.of(action) + extra.passes[action.kind] + extra.gap

    step = simulated(schedule, degree, virtual, microbatches, duration, max(0.0, extra.message - extra.gap))
    return step.seconds - extra.gap + extra.around


def measure(
    rank: int, degree: int, constants: Times, times: Times, counts: list[int], steps: int, output: Path
) -> None:
    """Measure the constants, then every case; rank 0 prints and writes."""
    how = constants, CONSTANTS_MICROBATCHES, CONSTANTS_STEPS
    short = [run for kind, virtual in CONSTANTS_FROM for run in measured_steps(kind, degree, virtual, *how)]
    extra = overheads(short, constants)
    if rank == 0:
        passes = ", ".join(f"{kind} {1000 * value:.2f}" for kind, value in extra.passes.items())
        waits = f"gap {1000 * extra.gap:.3f}, message {1000 * extra.message:.3f}"
        print(f"ms over the sleep: {passes}; {waits}", flush=True)
    rows = []
    for schedule, virtual in CASES:
        for microbatches in counts:
            if check_schedule(schedule, degree, virtual, microbatches) is not None:
                continue
            runs = measured_steps(schedule, degree, virtual, times, microbatches, steps)
            seconds = statistics.median(run for run, _ in runs)
            expected = predicted(schedule, degree, virtual, microbatches, times, extra)
            row = {"schedule": schedule, "virtual_stages": virtual, "microbatches": microbatches}
            row |= {"measured_s": round(seconds, 4), "steps_s": [round(run, 4) for run, _ in runs]}
            rows.append(row | {"simulated_s": round(expected, 4), "error": round(expected / seconds - 1, 5)})
            if rank == 0:
                told = f"{seconds:10.4f}{expected:11.4f}{expected / seconds - 1:+9.2%}"
                print(f"{schedule:<24}{virtual:>3}{microbatches:>4}{told}", flush=True)
    if rank == 0:
        output.write_text(json.dumps({"overheads_s": asdict(extra), "cases": rows}), encoding="utf-8")


def measured_steps(
    schedule: str, degree: int, virtual: int, times: Times, microbatches: int, steps: int
) -> list[tuple[float, StepTimeline]]:
    """Run steps on all ranks; returns the seconds and the timeline of each step after the first."""
    runtime = OwnRuntime(schedule, degree, virtual, times, SMALL)
    data = torch.zeros(microbatches, *SMALL[1:])
    run_step(runtime, data)
    runs = [run_step(runtime, data) for _ in range(steps)]
    return [(seconds, step) for seconds, step in runs if step is not None]


def main() -> None:
    """Read the command line, measure, write the result."""
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks (default 4)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16, 32], help="(default 4 8 16 32)")
    parser.add_argument("--forward-ms", type=float, default=60.0, help="t_F = t_I = t_W of a microbatch (default 60)")
    parser.add_argument("--constants-ms", type=float, default=40.0, help="the same time in the short runs (default 40)")
    parser.add_argument("--steps", type=int, default=7, help="steps after the first (default 7)")
    parser.add_argument("--realtime", action="store_true", help="run with real-time priority (needs the permission)")
    args = parser.parse_args()

    times, constants = (Times(*[ms / 1000] * 3) for ms in (args.forward_ms, args.constants_ms))
    result: dict[str, Any] = {
        "command": " ".join(["python benchmarks/simulator_check.py", *sys.argv[1:]]),
        "machine": machine(),
        "ranks": args.ranks,
        "seconds_of_a_microbatch": vars(times),
        "seconds_in_the_short_runs": vars(constants),
    }
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        launch(measure, args.ranks, args.realtime, args.ranks, constants, times, args.microbatches, args.steps, output)
        result |= json.loads(output.read_text())
    errors = [abs(case["error"]) for case in result["cases"]]
    result["error_median"], result["error_largest"] = statistics.median(errors), max(errors)
    print(f"{len(errors)} cases, error: median {statistics.median(errors):.2%}, largest {max(errors):.2%}")
    write(args.json, result)


if __name__ == "__main__":
    main()
