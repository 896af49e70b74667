"""Bytes that a training process on a CPU holds besides its tensors, measured by training two models for two steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from titan_like.config.schema import JobConfig
from titan_like.metrics.devices import Device
from titan_like.metrics.hardware import peak_memory_bytes
from titan_like.models.registry import model_config
from titan_like.models.transformer import ModelInputs
from titan_like.optim.optimizer import build_optimizer
from titan_like.parallel.apply import build_pipeline
from titan_like.parallel.collectives import build_mesh
from titan_like.parallel.layout import resolve_layout
from titan_like.planner.memory import RankMemory, memory
from titan_like.planner.predict import workload_of
from titan_like.planner.profile import Profile

_SMALL, _LARGE = 64, 512  # hidden sizes


class Overhead(NamedTuple):
    """What the planner adds to the tensors."""

    overhead_bytes: float  # bytes of interpreter, libraries and threads
    fragmentation: float  # share of activations, logits and gathered weights


def measure_overhead() -> Overhead:
    """Measure this process. Every rank calls it, after `keep_freed_memory` and before it has held much else."""
    small, small_tensors = _train(_SMALL)
    large, large_tensors = _train(_LARGE)
    # Two sizes tell a constant part from one that grows with the tensors that come and go.
    moving = large_tensors.activations + large_tensors.logits + large_tensors.gathered
    beyond = large - small - (large_tensors.total - small_tensors.total)
    return Overhead(small - small_tensors.total, max(0.0, beyond / moving))


def _train(hidden_size: int) -> tuple[float, RankMemory]:
    """Train for two steps; the largest resident set so far in bytes, and what the tensors should take of it."""
    n = dist.get_world_size()
    config = JobConfig.model_validate(
        {
            "model": {"overrides": {"hidden_size": hidden_size}},
            "training": {"seq_len": 256, "micro_batch_size": 4, "global_batch_size": 4 * n, "steps": 2},
        }
    )
    model, layout, device = model_config(config.model), resolve_layout(config.parallelism, n), torch.device("cpu")
    pipeline = build_pipeline(config, model, build_mesh(layout, device.type), device)
    optimizer = build_optimizer(pipeline.model.named_parameters(), config.optimizer)
    tokens = torch.randint(model.vocab_size, (4, 256))
    for _ in range(2):
        inputs = [ModelInputs(tokens, labels=tokens, loss_factors=torch.full((1,), 1 / tokens.numel()))]
        pipeline.forward_backward(inputs, lambda losses, _: losses.sum())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    cpu = Device("CPU", 1, 1, 1, 1, 1, {}, is_cpu=True)
    tensors = Profile("", cpu, 1, 1, trainer_state=True, overhead_bytes=0, fragmentation=0)
    return peak_memory_bytes(device), memory(workload_of(config, model, layout), tensors).ranks[0]
