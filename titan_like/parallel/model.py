"""The part of the model that one process holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from titan_like.models.transformer import Transformer
from titan_like.parallel.data import DataParallel
from titan_like.parallel.weight_gradients import WeightGradients

ModelOutput = torch.Tensor | tuple[torch.Tensor, ...]  # what `Transformer.predict` returns
LossFunction = Callable[[Any, int], torch.Tensor]  # (the model's output, microbatch number) → scalar


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, or the whole model if there is no pipelining."""

    index: int
    module: Transformer
    data_parallel: DataParallel
    weight_gradients: WeightGradients | None = None  # set if backward passes defer the gradients of matrices


@dataclass(frozen=True)
class ParallelModel:
    """All stages of one process, in the model's order."""

    stages: list[Stage]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every local parameter. A process with both ends of a pipeline yields a tied table twice, under one name."""
        for stage in self.stages:
            yield from stage.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every local parameter, as in `named_parameters`."""
        return (parameter for _, parameter in self.named_parameters())

    def counted_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters without the last stage's copy of a tied table, so that all stages together count each once."""
        for stage in self.stages:
            copy = stage.module.embedding.weight if has_copy_of_table(stage) else None
            yield from (parameter for parameter in stage.module.parameters() if parameter is not copy)

    def train(self, mode: bool = True) -> None:
        """Switch dropout on or off."""
        for stage in self.stages:
            stage.module.train(mode)

    def free_gathered_parameters(self) -> None:
        """Keep only the shards, after forward passes that no backward pass follows."""
        for stage in self.stages:
            stage.data_parallel.free_gathered_parameters()

    def init_weights(self, seed: int) -> None:
        """Initialise every stage. A seed gives the same weights in every layout."""
        for stage in self.stages:
            stage.module.init_weights(seed)

    def copies(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (copy, original) of a tied table that this process holds twice."""
        tables = [stage.module.embedding.weight for stage in self.stages if holds_tied_table(stage)]
        return [(copy, tables[0]) for copy in tables[1:]]


def holds_tied_table(stage: Stage) -> bool:
    """Whether the stage holds an embedding table that is also the output matrix."""
    return stage.module.config.tied_embeddings and (stage.module.is_first or stage.module.is_last)


def has_copy_of_table(stage: Stage) -> bool:
    """Whether the stage holds a tied table only as its output matrix."""
    return holds_tied_table(stage) and not stage.module.is_first
