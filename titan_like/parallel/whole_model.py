"""Training without pipelining: the process holds all layers, or shards of them, and runs one microbatch at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titan_like.models.transformer import ModelInputs
from titan_like.parallel.model import LossFunction, ParallelModel
from titan_like.parallel.schedules.communication import Step
from titan_like.parallel.schedules.shape import PipelineShape
from titan_like.parallel.timeline import Timeline


class WholeModel:
    """Has the interface of `titan_like.parallel.pipeline.Pipeline` and runs one microbatch after the other."""

    def __init__(self, model: ParallelModel) -> None:
        self.model = model
        (self.stage,) = model.stages
        self.shape = PipelineShape("1f1b", 1, 1)
        self.num_actions = 0  # passes so far, which grows as long as training makes progress
        self.timeline: Timeline | None = None  # if set, receives the time of every pass

    def forward_backward(self, inputs: Sequence[ModelInputs], loss_function: LossFunction) -> None:
        """Accumulate the gradients of all microbatches' losses."""
        data_parallel = self.stage.data_parallel
        data_parallel.before_forward()
        for microbatch, x in enumerate(inputs):
            self._start("F", microbatch)
            loss = loss_function(self.stage.module(*x), microbatch)
            self._stop("F", microbatch)
            self._start("B", microbatch)
            data_parallel.before_backward(is_last=microbatch == len(inputs) - 1)
            loss.backward()
            data_parallel.after_backward()
            self._stop("B", microbatch)
        data_parallel.finish()

    @torch.no_grad()
    def forward(self, inputs: Sequence[ModelInputs], loss_function: LossFunction) -> None:
        """Call ``loss_function`` with what the model returns for every microbatch; no gradients."""
        self.stage.data_parallel.before_forward()
        for microbatch, x in enumerate(inputs):
            loss_function(self.stage.module(*x), microbatch)
            self.num_actions += 1

    def _start(self, kind: str, microbatch: int) -> None:
        self.num_actions += 1
        if self.timeline is not None:
            self.timeline.start(Step(kind, 0, microbatch))

    def _stop(self, kind: str, microbatch: int) -> None:
        if self.timeline is not None:
            self.timeline.stop(Step(kind, 0, microbatch))
