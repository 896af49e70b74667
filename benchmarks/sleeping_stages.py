"""Pipeline stages that sleep instead of computing, so that the time of a step is that of the schedule and the runtime.

Processes, messages and autograd are real, and sleeping stages need no core. A stage adds a number to its input. Its
forward pass sleeps, and so do both parts of its backward pass: the gradient of its input, which the previous stage
waits for, and the gradient of its weight.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from titan_like.data.batch import Batch
from titan_like.parallel.layout import Layout
from titan_like.parallel.model import ParallelModel, Stage
from titan_like.parallel.pipeline import Pipeline
from titan_like.parallel.schedules.tables import Action, schedule_table, stages_per_rank
from titan_like.parallel.weight_gradients import WeightGradients


@dataclass(frozen=True)
class Times:
    """Seconds of each pass of one microbatch through one stage."""

    forward: float
    input_gradient: float
    weight_gradient: float

    def __truediv__(self, stages: int) -> Times:
        return Times(self.forward / stages, self.input_gradient / stages, self.weight_gradient / stages)

    def of(self, action: Action) -> float:
        """Seconds of a kind of pass."""
        backward = {"I": self.input_gradient, "W": self.weight_gradient}
        return backward.get(action.kind, sum(backward.values()) if action.kind == "B" else self.forward)


class SleepingStage(nn.Module):
    """x + weight, [batch, seq, hidden]. ``deferred`` collects deferred weight gradients, as in real layers."""

    def __init__(self, times: Times, is_first: bool, is_last: bool, deferred: WeightGradients | None = None) -> None:
        super().__init__()
        self.times, self.is_first, self.is_last, self.deferred = times, is_first, is_last, deferred
        self.weight = nn.Parameter(torch.zeros(1))
        if is_first:  # like an embedding table, so that later stages have gradients
            self.entry = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor | Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Sleep, then add the weight: [batch, seq, hidden]. Our runtime gives a batch, and a later stage's input."""
        if isinstance(x, Batch):
            x = x.tokens if hidden is None else hidden
        if self.is_first:
            x = x + self.entry
        x = _Sleep.apply(x, self)
        return x if self.deferred is not None else x + _SleepForWeight.apply(self.weight, self.times)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: SleepingStage) -> Any:
        time.sleep(stage.times.forward)
        ctx.save_for_backward(x)  # as in real layers
        ctx.stage = stage
        return x + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        time.sleep(ctx.stage.times.input_gradient)
        if ctx.stage.deferred is not None:
            ctx.stage.deferred.defer(ctx.stage.weight, partial(_weight_gradient, ctx.stage.times, x, gradient))
        return gradient * 1, None


def _weight_gradient(times: Times, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Sleep as long as the second part of a backward pass takes; holds the input until then, as real layers do."""
    time.sleep(times.weight_gradient)
    return gradient.sum().reshape(1)


class _SleepForWeight(torch.autograd.Function):
    """A separate autograd node, because torch's split of a backward pass runs a node completely or not at all."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, times: Times) -> Any:
        ctx.times = times
        return weight * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.times.weight_gradient)
        return gradient, None


class _NoDataParallel:
    """A single replica, which has nothing to reduce."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


class OwnRuntime:
    """This project's `Pipeline` over sleeping stages."""

    def __init__(self, schedule: str, degree: int, virtual: int, times: Times, hidden_shape: Sequence[int]) -> None:
        self.layout = Layout(degree, schedule=schedule, virtual_stages=virtual)
        times, ranks = times / stages_per_rank(schedule, virtual), self.layout.stage_ranks
        table = schedule_table(schedule, degree, virtual, 4 * degree)
        splits = any(action.kind == "W" for action in table[0])
        stages = []
        for index in (stage for stage, rank in enumerate(ranks) if rank == dist.get_rank()):
            deferred = WeightGradients() if splits else None
            module = SleepingStage(times, index == 0, index == len(ranks) - 1, deferred)
            stages.append(Stage(index, module, _NoDataParallel(), deferred))  # type: ignore[arg-type]
        group = dist.group.WORLD
        assert group is not None
        device = torch.device("cpu")
        self.pipeline = Pipeline(ParallelModel(stages), self.layout, group, hidden_shape, torch.float32, device)

    def step(self, microbatches: torch.Tensor) -> None:
        """One step over [microbatches, seq, hidden]."""
        self.pipeline.forward_backward(list(map(Batch, microbatches.split(1))), lambda output, _: output.sum())


class TorchRuntime:
    """torch.distributed.pipelining over sleeping stages."""

    def __init__(self, schedule: str, degree: int, virtual: int, times: Times, microbatches: int) -> None:
        from torch.distributed import pipelining

        kind = getattr(pipelining, TORCH_SCHEDULES[schedule])
        layout = Layout(degree, schedule=schedule, virtual_stages=virtual)
        times, ranks, rank = times / stages_per_rank(schedule, virtual), layout.stage_ranks, dist.get_rank()
        stages = []
        for index in (stage for stage, of in enumerate(ranks) if of == rank):
            module = SleepingStage(times, index == 0, index == len(ranks) - 1)
            stages.append(pipelining.PipelineStage(module, index, len(ranks), torch.device("cpu")))
        held = stages[0] if stages_per_rank(schedule, virtual) == 1 else stages
        self.schedule = kind(held, microbatches, loss_fn=lambda output, _: output.sum(), scale_grads=False)
        self._is_first, self._is_last = rank == ranks[0], rank == ranks[-1]

    def step(self, microbatches: torch.Tensor) -> None:
        """One step over [microbatches, seq, hidden]."""
        target = microbatches[:, 0, 0] if self._is_last else None  # the loss does not need it
        arguments = [microbatches] if self._is_first else []
        self.schedule.step(*arguments, target=target, losses=[], return_outputs=False)


TORCH_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv_zero_bubble": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


def launch(function: Callable[..., None], world_size: int, realtime: bool, *arguments: Any) -> None:
    """Call ``function(rank, *arguments)`` on every rank of a fresh gloo process group.

    ``realtime`` gives the processes real-time priority, which needs the permission. They wake up briefly for each pass,
    and then without delay, whatever else the machine does.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = (world_size, store.port, realtime, function, arguments)
    mp.start_processes(_worker, workers, nprocs=world_size, start_method="spawn")


def _worker(
    rank: int, world_size: int, port: int, realtime: bool, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    if realtime:  # threads that start later, such as gloo's, inherit it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo")
    function(rank, *arguments)
    dist.destroy_process_group()
