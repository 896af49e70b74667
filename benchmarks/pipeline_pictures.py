"""Draw the pictures of docs/pipeline_timeline.md: measured steps, each over the same step in theory. Needs matplotlib.

    python benchmarks/pipeline_pictures.py

Four gloo processes run each schedule over the sleeping stages of `pipeline_bubble.py`.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_bubble import DEGREE, HIDDEN_SHAPE, RANK_TIMES, WARMUP
from sleeping_stages import OwnRuntime, launch

from titan_like.metrics.step_timeline import measured, simulated
from titan_like.metrics.timeline import Timeline
from titan_like.metrics.timeline_plot import draw
from titan_like.metrics.timeline_report import figures, report
from titan_like.parallel.schedules import stages_per_rank

MICROBATCHES = 8
PICTURES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}  # stages per rank
FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"


def run(rank: int, path: str) -> None:
    """The last step of each schedule; rank 0 writes them."""
    steps = {}
    group = dist.group.WORLD
    assert group is not None
    for schedule, virtual in PICTURES.items():
        runtime = OwnRuntime(schedule, DEGREE, virtual, RANK_TIMES, HIDDEN_SHAPE)
        batch = [torch.zeros(HIDDEN_SHAPE) for _ in range(MICROBATCHES)]
        for _ in range(WARMUP + 1):
            runtime.pipeline.timeline = timeline = Timeline(torch.device("cpu"), group)
            runtime.step(batch)
        times = [timeline.finish()] * DEGREE
        dist.all_gather_object(times, timeline.finish())
        steps[schedule] = measured(schedule, DEGREE, virtual, times)
    if rank == 0:
        Path(path).write_bytes(pickle.dumps(steps))


def main() -> None:
    """Measure, print the reports, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.pickle"
        launch(run, DEGREE, str(path))
        steps = pickle.loads(path.read_bytes())
    for schedule, virtual in PICTURES.items():
        per_stage = RANK_TIMES / stages_per_rank(schedule, virtual)
        theory = simulated(schedule, DEGREE, virtual, MICROBATCHES, per_stage.of)
        panels = [
            (f"{schedule}, {name}: bubble {figures(step).bubble:.3f}", step)
            for name, step in (("measured", steps[schedule]), ("theory", theory))
        ]
        draw(panels, options.folder / f"{schedule}.png")
        print(report(steps[schedule], schedule), end="\n\n")


if __name__ == "__main__":
    main()
