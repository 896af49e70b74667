"""Without pipelining: the whole model is on this process, or its shards are, and microbatches follow one another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from titan_like.parallel.model import LossFunction, ParallelModel
from titan_like.parallel.schedules.communication import Step
from titan_like.parallel.schedules.shape import PipelineShape
from titan_like.parallel.timeline import Timeline


class WholeModel:
    """Runs batches as `titan_like.parallel.pipeline.Pipeline` does, one microbatch after the other."""

    def __init__(self, model: ParallelModel) -> None:
        self.model = model
        (self.stage,) = model.stages
        self.shape = PipelineShape("1f1b", 1, 1)
        self.num_actions = 0  # passes so far: it grows as long as training gets on
        self.timeline: Timeline | None = None  # receives the time of every pass while it is set

    def forward_backward(self, tokens: Sequence[torch.Tensor], loss_function: LossFunction) -> None:
        """Add the gradients of all microbatches' losses to the parameters. tokens: each [micro_batch, seq]."""
        data_parallel = self.stage.data_parallel
        for microbatch, x in enumerate(tokens):
            self._start("F", microbatch)
            loss = loss_function(self.stage.module(x), microbatch)
            self._stop("F", microbatch)
            self._start("B", microbatch)
            data_parallel.before_backward(is_last=microbatch == len(tokens) - 1)
            loss.backward()
            self._stop("B", microbatch)
        data_parallel.finish()

    @torch.no_grad()
    def forward(self, tokens: Sequence[torch.Tensor], loss_function: LossFunction) -> None:
        """Only call ``loss_function`` with every microbatch's logits."""
        for microbatch, x in enumerate(tokens):
            loss_function(self.stage.module(x), microbatch)
            self.num_actions += 1

    def _start(self, kind: str, microbatch: int) -> None:
        self.num_actions += 1
        if self.timeline is not None:
            self.timeline.start(Step(kind, 0, microbatch))

    def _stop(self, kind: str, microbatch: int) -> None:
        if self.timeline is not None:
            self.timeline.stop(Step(kind, 0, microbatch))
