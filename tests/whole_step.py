"""One whole step of one process on fake tensors: the recipe with data parallelism and the pipeline.

It takes seconds, and judges `planner.memory` and `planner.traffic`, which compose the same from a traced microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple
from unittest import mock

import torch

from titan_like.config.schema import JobConfig
from titan_like.data.loading.lengths import sample_length
from titan_like.models import parts
from titan_like.models.config import TransformerConfig
from titan_like.optim import adamw
from titan_like.optim.adamw import FusedAdamW
from titan_like.optim.optimizer import Gradients, update
from titan_like.parallel.apply import build_parallel_model, run_batches
from titan_like.parallel.layout import Layout
from titan_like.parallel.mesh import build_mesh
from titan_like.planner.dry_run import built_optimizer, built_state
from titan_like.planner.predict import workload_of
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.trace.levels import Event
from titan_like.planner.trace.program import Collective, Segment
from titan_like.planner.trace.recorder import Recorder
from titan_like.planner.trace.run import fake_process_group, microbatch
from titan_like.planner.trace.stand_ins import as_on_gpu, without_host_reads
from titan_like.torch_private import fake_tensor_mode


class WholeStep(NamedTuple):
    """The peak memory of one process in a step, and the messages that it sends."""

    passes: int  # most bytes of tensors at once in forward and backward passes, optimizer state included
    update: int  # the same in the update
    weights: int  # bytes of master weights
    optimizer: int
    collectives: dict[Collective, tuple[int, int]]  # → calls, bytes

    @property
    def peak(self) -> int:
        """Most bytes of tensors at once."""
        return max(self.passes, self.update)


def whole_step(
    config: JobConfig, model: TransformerConfig, layout: Layout, rank: int, block: int = 1 << 22
) -> WholeStep:
    """Run the passes and the update of one process's step."""
    work, device = workload_of(config, model, layout), torch.device("cpu")
    mode = fake_tensor_mode()
    with fake_process_group(rank, layout.num_processes), as_on_gpu(mode):
        mesh = build_mesh(layout, "cpu")
        with parts.WithoutInit():
            parallel_model = build_parallel_model(config, model, mesh, device)
        for stage in parallel_model.stages:
            without_host_reads(stage.module)
        length = sample_length(config, model).positions
        runner = run_batches(config, parallel_model, mesh, device, work.micro_batch_size, length)
        recorder = Recorder([Segment()])
        key = TraceKey.of(work)
        with mode:
            optimizer = built_optimizer(config, parallel_model)
            state = built_state(parallel_model, optimizer)
        blocks = mock.patch.dict(adamw.BLOCK, cpu=block)  # few, because operators on fake tensors take a millisecond
        with mode, recorder, _resizes_recorded(recorder), blocks:
            for parameter in parallel_model.parameters():
                recorder.number_of(parameter.data)
            for value in (value for values in optimizer.state.values() for value in values.values()):
                recorder.ignore(value)
            batches = [microbatch(key) for _ in range(work.microbatches)]
            runner.forward_backward(batches, lambda losses, _: losses.sum())
            last = len(recorder.events)
            if isinstance(optimizer, FusedAdamW):
                optimizer.write_copies(parallel_model.copied_units())
                gradients = Gradients(parallel_model.parameters(), mesh, parallel_model.expert_mesh)
                update(optimizer, gradients, 1.0, torch.ones(()), torch.zeros(()))
    levels = [state.optimizer + level for level in accumulate(event.bytes for event in recorder.events)]
    return WholeStep(
        max(levels[:last]), max(levels[last - 1 :]), state.parameters, state.optimizer, recorder.current.collectives
    )


@contextmanager
def _resizes_recorded(recorder: Recorder) -> Iterator[None]:
    """FSDP2 frees gathered weights by changing the size of their storage, which no operator shows."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if id(storage) in recorder._alive:
            number, before = recorder._alive[id(storage)]
            recorder._alive[id(storage)] = number, size
            recorder.events.append(Event(recorder.segment, recorder.which, number, size - before))
        return original(storage, size)

    with mock.patch.object(torch.UntypedStorage, "resize_", resize):
        yield
