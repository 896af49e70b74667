"""How many microbatches' activations a real step holds at once."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.distributed.launch import collect
from titan_like.data.batch import Batch
from titan_like.parallel.layout import Layout
from titan_like.parallel.model import ParallelModel, Stage
from titan_like.parallel.pipeline import Pipeline
from titan_like.parallel.schedules.simulate import max_in_flight
from titan_like.parallel.schedules.tables import schedule_table

DEGREE, MICROBATCHES, HIDDEN = 4, 8, (2, 3, 8)
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}


class Saved:
    """A tensor that autograd keeps for a backward pass, and drops after it."""

    def __init__(self, tensor, stage, microbatch):
        self.tensor, self.stage, self.microbatch = tensor, stage, microbatch


class WatchedStage(nn.Module):
    """A layer that notes which microbatches' tensors autograd holds, without asking the pipeline."""

    def __init__(self, index, num_stages, alive, peaks):
        super().__init__()
        self.index, self.alive, self.peaks = index, alive, peaks
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.layer = nn.Linear(HIDDEN[-1], HIDDEN[-1])
        self.done = 0

    def forward(self, x, *_):
        microbatch, self.done = self.done, self.done + 1

        def pack(tensor):
            saved = Saved(tensor, self.index, microbatch)
            self.alive.add(saved)
            return saved

        with saved_tensors_hooks(pack, lambda saved: saved.tensor):
            output = torch.tanh(self.layer(x))
        held = {(saved.stage, saved.microbatch) for saved in self.alive}
        self.peaks["rank"] = max(self.peaks["rank"], len(held))
        return output


class OneReplica:
    def before_forward(self):
        pass

    def before_backward(self, is_last):
        pass

    def after_backward(self):
        pass

    def finish(self):
        pass


def count(rank):
    results = {}
    for schedule, virtual in SCHEDULES.items():
        layout = Layout(DEGREE, schedule=schedule, virtual_stages=virtual)
        local = [stage for stage, of in enumerate(layout.stage_ranks) if of == rank]
        alive, peaks = weakref.WeakSet(), {"rank": 0}
        modules = [WatchedStage(stage, len(layout.stage_ranks), alive, peaks) for stage in local]
        model = ParallelModel([Stage(module.index, module, OneReplica()) for module in modules])
        pipeline = Pipeline(model, layout, dist.group.WORLD, HIDDEN, torch.float32, torch.device("cpu"))
        batch = [Batch(torch.randn(HIDDEN)) for _ in range(MICROBATCHES)]
        pipeline.forward_backward(batch, lambda output, _: output.sum())
        assert all(module.layer.weight.grad is not None for module in modules)
        results[schedule] = {"seen": peaks["rank"], "left": len(alive)}
    return results


@pytest.fixture(scope="module")
def counts():
    """Per rank, per schedule: what one real step held."""
    return collect(count, DEGREE)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_step_holds_as_many_microbatches_as_its_table_says(counts, schedule):
    """`test_pipeline_schedules` compares the tables with the papers."""
    expected = max_in_flight(schedule_table(schedule, DEGREE, SCHEDULES[schedule], MICROBATCHES))
    assert [of_rank[schedule]["seen"] for of_rank in counts] == expected
    assert [of_rank[schedule]["left"] for of_rank in counts] == [0] * DEGREE
