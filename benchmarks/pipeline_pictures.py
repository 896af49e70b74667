"""Draw the pictures in docs/pipeline_timeline.md: measured steps above the same steps in theory. Needs matplotlib.

    python benchmarks/pipeline_pictures.py

Four gloo processes run each schedule with the sleeping stages of `sleeping_stages.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_bubble import run_step
from sleeping_stages import OwnRuntime, Times, launch

from titan_like.metrics.step_timeline import StepTimeline, simulated
from titan_like.metrics.timeline_plot import draw
from titan_like.metrics.timeline_report import figures, report
from titan_like.parallel.schedules.tables import stages_per_rank

DEGREE, MICROBATCHES, HIDDEN_SHAPE = 4, 8, (1, 16, 64)
RANK_TIMES = Times(forward=0.020, input_gradient=0.020, weight_gradient=0.020)  # sum over the stages of a rank
PICTURES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}  # stages per rank
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"


def measure(rank: int, folder: Path) -> None:
    """Measure the second step of each schedule; rank 0 draws it."""
    for schedule, virtual in PICTURES.items():
        runtime = OwnRuntime(schedule, DEGREE, virtual, RANK_TIMES, HIDDEN_SHAPE)
        data = torch.zeros(MICROBATCHES, *HIDDEN_SHAPE[1:])
        run_step(runtime, data)
        _, step = run_step(runtime, data)
        dist.barrier()
        if rank == 0 and step is not None:
            picture(schedule, virtual, step, folder)


def picture(schedule: str, virtual: int, step: StepTimeline, folder: Path) -> None:
    """Draw the measured step above the theoretical one, and print its report."""
    per_stage = RANK_TIMES / stages_per_rank(schedule, virtual)
    theory = simulated(schedule, DEGREE, virtual, MICROBATCHES, per_stage.of)
    panels = [
        (f"{schedule}, {name}: bubble {figures(shown).bubble_fraction:.3f}", shown)
        for name, shown in (("measured", step), ("theory", theory))
    ]
    draw(panels, folder / f"{schedule}.png")
    print(report(step, schedule), end="\n\n", flush=True)


def main() -> None:
    """Measure the steps, print the reports, draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--realtime", action="store_true", help="run with real-time priority (needs the permission)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    launch(measure, DEGREE, options.realtime, options.folder)


if __name__ == "__main__":
    main()
