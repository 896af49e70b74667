"""The part of the model that one process holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    copies_in: dict[str, tuple[int, ...]] = field(default_factory=dict)  # parameter in several stages → these stages

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every local parameter. Copies that a process holds, such as of a tied table, come under the same name."""
        for stage in self.stages:
            yield from stage.module.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Every local parameter, as in `named_parameters`."""
        return (parameter for _, parameter in self.named_parameters())

    def counted_parameters(self) -> Iterator[nn.Parameter]:
        """Every local parameter, but of copies only the first stage's, so all stages together have each one once."""
        for stage in self.stages:
            for name, parameter in stage.module.named_parameters():
                if self.copies_in.get(name, (stage.index,))[0] == stage.index:
                    yield parameter

    def copies_of(self, name: str) -> list[nn.Parameter]:
        """The copies of one parameter that this process holds, in the order of its stages."""
        held = self.copies_in.get(name, ())
        return [dict(stage.module.named_parameters())[name] for stage in self.stages if stage.index in held]

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
        """Pairs (copy, original), of the same shape, of every parameter that this process holds more than once."""
        held = [self.copies_of(name) for name in self.copies_in]
        return [(copy, same[0]) for same in held for copy in same[1:]]
