"""torch's own pipeline schedules run the same stages to the same gradients."""

import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from tests.distributed.launch import base_config, by_name, collect
from tests.distributed.layouts import pipeline
from tests.float64 import bound
from titan_like.data.batch import Batch
from titan_like.models.registry import model_config
from titan_like.parallel.apply import build_pipeline
from titan_like.parallel.layout import resolve_layout
from titan_like.parallel.mesh import build_mesh
from titan_like.parallel.pipeline import loss_of_last_stage

RANKS, MICROBATCHES = 2, 4
SCHEDULES = {"gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved_1f1b": (ScheduleInterleaved1F1B, 2)}


def gradients_of(pipeline):
    gradients = by_name((name, p.grad) for name, p in pipeline.model.named_parameters())
    for parameter in pipeline.model.parameters():
        parameter.grad = None
    return gradients


def compare(rank, folder):
    found = {}
    for name, (kind, virtual_stages) in SCHEDULES.items():
        config = base_config(folder, {"training.dtype": "float64"} | pipeline(RANKS, name, virtual_stages))
        mesh = build_mesh(resolve_layout(config.parallelism, RANKS), "cpu")
        ours = build_pipeline(config, model_config(config.model), mesh, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        batches = torch.randint(0, 256, (MICROBATCHES, 2, 4, 64), generator=generator)  # tokens and labels
        ones = torch.ones(1, dtype=torch.float64)
        inputs = [Batch(tokens, labels, loss_factors=ones) for tokens, labels in batches]

        def loss(losses, _microbatch):
            return losses.sum()

        ours.forward_backward(inputs, loss)
        expected = gradients_of(ours)

        single = virtual_stages == 1
        stages = ours.stages[0] if single else ours.stages
        schedule = kind(stages, MICROBATCHES, loss_fn=loss_of_last_stage, scale_grads=False)
        for stage in ours.stages:
            stage.begin(inputs, loss)
        losses = []
        is_last = any(stage.is_last for stage in ours.stages)
        target = torch.arange(MICROBATCHES) if is_last else None
        schedule.step(target=target, losses=losses, return_outputs=False)
        for stage in ours.stages:
            stage.end()
        gradients = gradients_of(ours)
        assert gradients.keys() == expected.keys()
        found[name] = {
            "worst": max(((gradients[n] - expected[n]).norm() / expected[n].norm()).item() for n in expected),
            "parameters": len(expected),
            "losses": len(losses),
        }
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By rank and schedule."""
    return collect(compare, RANKS, tmp_path_factory.mktemp("torch_schedules"))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_schedules_give_the_same_gradients(found, schedule):
    assert all(of_rank[schedule]["parameters"] > 10 for of_rank in found)
    assert max(of_rank[schedule]["worst"] for of_rank in found) <= bound()
    assert [of_rank[schedule]["losses"] for of_rank in found] == [0, MICROBATCHES]
