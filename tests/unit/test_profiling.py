"""What [profiling] writes, and at which steps."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from titan_like.config.schema import JobConfig
from titan_like.metrics import profiling
from titan_like.metrics.profiling import StepProfiler
from titan_like.parallel.layout import Layout
from titan_like.parallel.schedules.tables import Action

MICROBATCHES = 3


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("pp", "dp_shard"))
    dist.destroy_process_group()


class Run:
    """Steps of three microbatches on one process, around which the profiler is called as the trainer does."""

    def __init__(self, mesh: Any, folder: Path, section: dict[str, Any]) -> None:
        config = JobConfig.model_validate({"job": {"dump_folder": str(folder)}, "profiling": section})
        self.pipeline: Any = SimpleNamespace(timeline=None, layout=Layout())
        self.shown: list[str] = []
        self.profiler = StepProfiler(config, mesh, self.pipeline, torch.device("cpu"), self.shown.append)

    def step(self, number: int) -> Any:
        self.profiler.begin(number)
        for microbatch in range(MICROBATCHES):
            for kind in "FB":
                if self.pipeline.timeline is not None:
                    self.pipeline.timeline.start(Action(kind, 0, microbatch))
                torch.ones(4, 4) @ torch.ones(4, 4)
                if self.pipeline.timeline is not None:
                    self.pipeline.timeline.stop(Action(kind, 0, microbatch))
        self.profiler.mark("optimizer")
        record = SimpleNamespace(step=number, profile=None)
        self.profiler.end(record)  # type: ignore[arg-type]
        return record


def names(folder: Path, suffix: str) -> list[str]:
    return sorted(path.name for path in folder.glob(f"*{suffix}"))


def test_timelines_of_steps(mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "can_draw", lambda: False)
    run = Run(mesh, tmp_path, {"timeline_steps": [2, 3], "timeline_interval": 3})
    looked_into = [number for number in range(1, 8) if run.step(number).profile is not None]
    assert looked_into == [2, 3, 6]
    folder = tmp_path / "timeline"
    assert names(folder, ".json") == ["step-2.json", "step-3.json", "step-6.json"]
    assert names(folder, ".txt") == ["step-2.txt", "step-3.txt", "step-6.txt"]
    assert not (tmp_path / "trace").exists()
    assert [text.splitlines()[0].split(":")[0] for text in run.shown] == [f"timeline of step {n}" for n in (2, 3, 6)]
    assert run.pipeline.timeline is None

    events = json.loads((folder / "step-6.json").read_text())["traceEvents"]
    passes = [event["name"] for event in events if event["ph"] == "X" and "args" in event]
    assert passes == [f"{kind}{m} of stage 0" for m in range(MICROBATCHES) for kind in "FB"]
    assert [event["name"] for event in events if event.get("cat") == "phase"] == ["optimizer"]


def test_traces_of_named_steps(mesh: Any, tmp_path: Path) -> None:
    run = Run(mesh, tmp_path, {"trace_steps": [2, 4]})
    assert [run.step(number).profile for number in range(1, 6)] == [None] * 5
    assert names(tmp_path / "trace", "") == ["step-2-rank-0.json", "step-4-rank-0.json"]
    assert not (tmp_path / "timeline").exists()
    assert run.shown == [
        f" traces of step {n}: {tmp_path}/trace/step-{n}-rank-*.json (open one in https://ui.perfetto.dev)"
        for n in (2, 4)
    ]
    for path in (tmp_path / "trace").iterdir():
        events = json.loads(path.read_text())["traceEvents"]
        products = [event for event in events if event.get("name") == "aten::matmul"]
        assert len(products) == 2 * MICROBATCHES
        assert not any({"Input Dims", "Python parent id"} & event["args"].keys() for event in products)


def test_the_profiler_starts_up_before_the_step_that_it_records(
    mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, list[int]] = {"prepare_trace": [], "start_trace": []}
    for name in calls:
        real = getattr(torch.profiler.profile, name)

        def call(self: Any, name: str = name, real: Any = real) -> None:
            calls[name].append(step)
            real(self)

        monkeypatch.setattr(torch.profiler.profile, name, call)
    section = {"trace_steps": [5, 6, 12], "trace_warmup_steps": 2, "trace_shapes": True, "trace_stacks": True}
    run = Run(mesh, tmp_path, section)
    for step in range(1, 12):  # the run ends before step 12
        run.step(step)
    assert calls == {"prepare_trace": [3, 6, 10], "start_trace": [5, 6]}
    assert [step for step in range(1, 12) if run.profiler.profiles(step)] == [3, 4, 5, 6, 10, 11]
    events = json.loads((tmp_path / "trace" / "step-5-rank-0.json").read_text())["traceEvents"]
    product = next(event for event in events if event.get("name") == "aten::matmul")
    assert product["args"]["Input Dims"] == [[4, 4], [4, 4]]
    assert any(event.get("cat") == "python_function" and "test_profiling.py" in event["name"] for event in events)
    step = 12  # in torch 2.11, a profiler that is left prepared keeps the next one from starting
    run.step(step)


def test_processes_beside_the_first_pipeline_write_traces_alone(mesh: Any, tmp_path: Path) -> None:
    """The profiler of data-parallel rank 1, whose mesh only tells its coordinates."""

    class Mesh(dict[str, Any]):
        mesh_dim_names = ("pp", "dp_shard")

    first, second = (SimpleNamespace(get_group=lambda: None, get_local_rank=lambda rank=rank: rank) for rank in (0, 1))
    for ranks, files in (([1], []), ([], ["trace"])):
        section = {"timeline_interval": 1, "trace_steps": [1], "trace_ranks": ranks}
        assert Run(Mesh(pp=first, dp_shard=second), tmp_path, section).step(1).profile is None
        assert names(tmp_path, "") == files
