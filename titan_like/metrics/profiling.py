"""Timelines and torch.profiler traces of the steps that [profiling] selects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_like.config.schema import JobConfig
from titan_like.metrics.record import StepRecord
from titan_like.metrics.step_timeline import RankTimes, StepTimeline, as_simulated, chrome_trace, measured
from titan_like.metrics.timeline_plot import can_draw, draw
from titan_like.metrics.timeline_report import figures, report
from titan_like.parallel.model import WholeModel
from titan_like.parallel.timeline import Timeline

if TYPE_CHECKING:
    from titan_like.parallel.pipeline import Pipeline


class StepProfiler:
    """Traces steps on any rank, and times steps on the first pipeline (rank 0 of every other dimension)."""

    def __init__(
        self,
        config: JobConfig,
        mesh: DeviceMesh,
        pipeline: Pipeline | WholeModel,
        device: torch.device,
        show: Callable[[str], None],
    ) -> None:
        """``show`` prints a text on global rank 0, and nothing on others."""
        self._section, self._folder = config.profiling, Path(config.job.dump_folder)
        self._pipeline, self._device, self._show = pipeline, device, show
        self._group, self._rank = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
        dimensions = [name for name in mesh.mesh_dim_names or () if name != "pp"]
        self._is_timing = all(mesh[name].get_local_rank() == 0 for name in dimensions)
        self._is_tracing = not config.profiling.trace_ranks or dist.get_rank() in config.profiling.trace_ranks
        self._trace: torch.profiler.profile | None = None

    def profiles(self, step: int) -> bool:
        """Whether any process profiles the step. All processes return the same."""
        return self._is_traced(step) or self._is_timed(step)

    def _is_timed(self, step: int) -> bool:
        interval = self._section.timeline_interval
        return step in self._section.timeline_steps or bool(interval and step % interval == 0)

    def _is_traced(self, step: int) -> bool:
        """Whether torch.profiler is on in the step, to record it or to warm up."""
        return any(0 <= traced - step <= self._section.trace_warmup_steps for traced in self._section.trace_steps)

    def begin(self, step: int) -> None:
        """Call this directly before a step."""
        if self._is_tracing and self._is_traced(step):
            if self._trace is None:
                shapes, stacks = self._section.trace_shapes, self._section.trace_stacks
                self._trace = torch.profiler.profile(record_shapes=shapes, with_stack=stacks)
                self._trace.prepare_trace()
            if step in self._section.trace_steps:
                self._trace.start_trace()
        if self._is_timing and self._is_timed(step):
            self._pipeline.timeline = Timeline(self._device, self._group)

    def mark(self, phase: str) -> None:
        """End a phase of the step, which began after the passes or at the previous mark."""
        if self._pipeline.timeline is not None:
            self._pipeline.timeline.mark(phase)

    def end(self, record: StepRecord) -> None:
        """Call this after the step: write and print the profile, and add its figures to global rank 0's record."""
        timeline, self._pipeline.timeline = self._pipeline.timeline, None
        times = timeline.finish() if timeline is not None else None
        if record.step in self._section.trace_steps:
            name = f"{self._folder}/trace/step-{record.step}-rank-"
            if self._trace is not None:
                self._trace.stop_trace()
                Path(name).parent.mkdir(parents=True, exist_ok=True)
                self._trace.export_chrome_trace(f"{name}{dist.get_rank()}.json")
                self._trace = None
            self._show(f" traces of step {record.step}: {name}*.json (open one in https://ui.perfetto.dev)")
        if times is not None:
            step = self._gather(times)
            if step is not None:
                record.profile = figures(step).as_metrics()
                self._show(write_timeline(step, record.step, self._folder / "timeline"))

    def _gather(self, times: RankTimes) -> StepTimeline | None:
        """The timeline of the whole pipeline, on its first rank only."""
        ranks: list[Any] | None = [None] * dist.get_world_size(self._group) if self._rank == 0 else None
        dist.gather_object(times, ranks, group=self._group, group_dst=0)
        layout = self._pipeline.layout
        return None if ranks is None else measured(layout.schedule, layout.pipeline, layout.virtual_stages, ranks)


def write_timeline(timeline: StepTimeline, step: int, folder: Path) -> str:
    """Write step-N.json, .txt and, if matplotlib is installed, .png. Returns the text to print."""
    folder.mkdir(parents=True, exist_ok=True)
    text = report(timeline, f"timeline of step {step}")
    path = folder / f"step-{step}.json"
    path.write_text(json.dumps(chrome_trace(timeline)) + "\n", encoding="utf-8")
    path.with_suffix(".txt").write_text(text + "\n", encoding="utf-8")
    if not can_draw():
        hint = "a picture needs matplotlib: pip install 'titan_like[plot]'"
        return f"{text}\nsaved {path} and .txt ({hint})"
    steps = [(f"step {step}, measured", timeline), ("its passes without messages and gaps", as_simulated(timeline))]
    draw(steps, path.with_suffix(".png"))
    return f"{text}\nsaved {path}, .txt and .png"
