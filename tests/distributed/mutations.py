"""Bugs to put into the product: each a context manager within which it computes something else in some layouts.

The verifier's processes enter them by name, so they can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from titan_like.parallel import tensor_splits
from titan_like.parallel.collectives import Group
from titan_like.parallel.pipeline import Pipeline
from titan_like.train import trainer
from titan_like.train.trainer import Trainer


@contextmanager
def tied_tables_not_summed() -> Iterator[None]:
    """Each end of the pipeline keeps its own part of the table's gradient."""
    with patch.object(trainer, "sum_table_gradients", lambda *_: None):
        yield


@contextmanager
def norm_of_one_stage() -> Iterator[None]:
    """Every stage clips at its own gradient norm."""
    original = trainer.global_grad_norm

    def of_this_stage(parameters: Any, group: dist.ProcessGroup) -> torch.Tensor:
        with patch.object(dist, "all_reduce", _unless_group(group)):
            return original(parameters, group)

    with patch.object(trainer, "global_grad_norm", of_this_stage):
        yield


def _unless_group(left_out: dist.ProcessGroup) -> Any:
    original = dist.all_reduce

    def all_reduce(*args: Any, **options: Any) -> Any:
        return None if options.get("group") is left_out else original(*args, **options)

    return all_reduce


@contextmanager
def tokens_of_one_process() -> Iterator[None]:
    """The loss is a mean of the processes' means, each over its own tokens."""
    original, train_step = dist.all_reduce, Trainer.train_step
    pending = [False]

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if pending.pop() if pending else False:
            return tensor.mul_(dist.get_world_size(options["group"])).clamp_(min=1)
        return original(tensor, *args, **options)

    def count_first(self: Trainer, data: Iterator[torch.Tensor]) -> Any:
        pending[:] = [self.dp_size > 1]
        return train_step(self, data)

    with patch.object(dist, "all_reduce", all_reduce), patch.object(Trainer, "train_step", count_first):
        yield


@contextmanager
def last_microbatch_dropped() -> Iterator[None]:
    """A pipeline leaves out the last microbatch's loss."""
    original = Pipeline.forward_backward

    def forward_backward(self: Pipeline, inputs: list[torch.Tensor], loss: Any) -> None:
        last = len(inputs) - 1

        def loss_but_of_last(logits: torch.Tensor, microbatch: int) -> torch.Tensor:
            return loss(logits, microbatch) * (microbatch != last or self.shape.degree == 1)

        original(self, inputs, loss_but_of_last)

    with patch.object(Pipeline, "forward_backward", forward_backward):
        yield


@contextmanager
def loss_times_microbatches() -> Iterator[None]:
    """Gradients are those of the loss times the number of microbatches."""
    original = Pipeline.forward_backward

    def forward_backward(self: Pipeline, inputs: list[torch.Tensor], loss: Any) -> None:
        original(self, inputs, lambda logits, microbatch: loss(logits, microbatch) * len(inputs))

    with patch.object(Pipeline, "forward_backward", forward_backward):
        yield


@contextmanager
def last_stage_not_updated() -> Iterator[None]:
    """The last stage's optimizer does nothing."""
    original = Trainer._update

    def update(self: Trainer, grad_norm: float, lr: float) -> None:
        stage = self.mesh["pp"]
        if stage.size() == 1 or stage.get_local_rank() < stage.size() - 1:
            original(self, grad_norm, lr)

    with patch.object(Trainer, "_update", update):
        yield


@contextmanager
def partial_gradients_not_summed() -> Iterator[None]:
    """Sequence parallelism leaves the gradients of norms partial."""
    with patch.object(trainer, "sum_partial_gradients", lambda _: None):
        yield


@contextmanager
def row_bias_added_by_each() -> Iterator[None]:
    """Every tensor-parallel process adds the bias to its part of the sum."""
    original = tensor_splits._row_linear

    def row_linear(module: nn.Linear, sequence_parallel: bool, group: Group, x: torch.Tensor) -> torch.Tensor:
        result = original(module, sequence_parallel, group, x)
        return result if module.bias is None else result + (group.size - 1) * tensor_splits.local(module.bias)

    with patch.object(tensor_splits, "_row_linear", row_linear):
        yield


@contextmanager
def data_of_one_process_shifted() -> Iterator[None]:
    """One data-parallel process begins a sample late."""
    original = Trainer._load_data

    def load_data(self: Trainer) -> Any:
        if self.dp_rank:
            self.consumed_samples += 1
        data = original(self)
        if self.dp_rank:
            self.consumed_samples -= 1
        return data

    with patch.object(Trainer, "_load_data", load_data):
        yield
