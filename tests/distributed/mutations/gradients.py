"""Bugs in how losses and gradients of microbatches, stages and processes become those of the step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from titan_like.data.source import IGNORED_LABEL
from titan_like.models.layers import cross_entropy
from titan_like.optim.optimizer import Gradients
from titan_like.parallel import activation_checkpoint, data, gradients
from titan_like.parallel.collectives import CopyToTensorRegion
from titan_like.parallel.model import ParallelModel, WholeModel
from titan_like.parallel.pipeline import Pipeline, RunningStage, TableSchedule
from titan_like.torch_private import is_in_backward_pass
from titan_like.train import trainer
from titan_like.train.trainer import Trainer


@contextmanager
def tied_tables_not_summed() -> Iterator[None]:
    """Each end of the pipeline keeps its own part of the table's gradient."""
    with patch.object(trainer, "sum_gradients_of_copies", lambda *_: None):
        yield


@contextmanager
def norm_of_one_stage() -> Iterator[None]:
    """Every stage clips at its own gradient norm."""
    original = Gradients.norm

    def of_this_stage(self: Gradients) -> torch.Tensor:
        with patch.object(dist, "all_reduce", _unless_group(self._mesh["pp"].get_group())):
            return original(self)

    with patch.object(Gradients, "norm", of_this_stage):
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
    original = WholeModel.forward_backward

    def forward_backward(self: WholeModel, inputs: list[torch.Tensor], loss: Any) -> None:
        original(self, inputs, lambda logits, microbatch: loss(logits, microbatch) * len(inputs))

    with patch.object(WholeModel, "forward_backward", forward_backward):
        yield


@contextmanager
def last_stage_not_updated() -> Iterator[None]:
    """The last stage's optimizer does nothing."""
    original = Trainer._update

    def update(self: Trainer, grad_norm: torch.Tensor, lr: float, skip: torch.Tensor) -> None:
        stage = self.mesh["pp"]
        if stage.size() == 1 or stage.get_local_rank() < stage.size() - 1:
            original(self, grad_norm, lr, skip)

    with patch.object(Trainer, "_update", update):
        yield


@contextmanager
def partial_gradients_not_summed() -> Iterator[None]:
    """Sequence parallelism leaves the gradients of norms partial."""
    with patch.object(trainer, "sum_partial_gradients", lambda _: None):
        yield


@contextmanager
def gradients_averaged_over_data() -> Iterator[None]:
    """Gradients are divided by the data-parallel degree, as if each process had divided by its own tokens."""
    original = Trainer._complete_gradients

    def complete_gradients(self: Trainer) -> None:
        original(self)
        self.gradients_held.multiply(torch.tensor(1 / self.dp_size, dtype=torch.float64))

    with patch.object(Trainer, "_complete_gradients", complete_gradients):
        yield


@contextmanager
def replicas_not_summed() -> Iterator[None]:
    """HSDP reduces gradients over shards and leaves out the replicas."""
    original = data.fully_shard

    def fully_shard(module: nn.Module, *, mesh: Any, **options: Any) -> Any:
        shards = mesh["dp_shard"] if mesh.ndim == 2 else mesh
        return original(module, mesh=shards, **options)

    with patch.object(data, "fully_shard", fully_shard):
        yield


@contextmanager
def one_shard_not_updated() -> Iterator[None]:
    """Under ZeRO the optimizer of one process leaves its shards as they are."""
    original = Trainer._update

    def update(self: Trainer, grad_norm: torch.Tensor, lr: float, skip: torch.Tensor) -> None:
        if self.dp_rank != 1 or self.config.parallelism.zero_stage == 0:
            original(self, grad_norm, lr, skip)

    with patch.object(Trainer, "_update", update):
        yield


@contextmanager
def weight_products_of_one_microbatch_lost() -> Iterator[None]:
    """A split backward pass forgets the weights' gradients of the second microbatch."""
    original = RunningStage._add_products

    def add_products(self: RunningStage, microbatch: int) -> None:
        if microbatch == 1:
            self._products[microbatch] = []
        original(self, microbatch)

    with patch.object(RunningStage, "_add_products", add_products):
        yield


@contextmanager
def gradient_never_sent() -> Iterator[None]:
    """A stage keeps a microbatch's gradient to itself, and the one before waits for ever."""
    original = RunningStage.get_bwd_send_ops

    def get_bwd_send_ops(self: RunningStage, bwd_chunk_id: int) -> Any:
        if bwd_chunk_id == 1:
            time.sleep(1000)
        return original(self, bwd_chunk_id)

    with patch.object(RunningStage, "get_bwd_send_ops", get_bwd_send_ops):
        yield


@contextmanager
def all_gathers_gradient_not_summed() -> Iterator[None]:
    """Sequence parallelism gives each process its part of its own gradient, and not of the sum."""
    original = CopyToTensorRegion.backward

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not ctx.sequence_parallel:
            return original(ctx, gradient)
        return gradient.chunk(ctx.group.size, 1)[ctx.group.rank], None, None

    with patch.object(CopyToTensorRegion, "backward", staticmethod(backward)):
        yield


@contextmanager
def last_unit_not_all_reduced() -> Iterator[None]:
    """Without ZeRO the gradients outside the layers stay those of each process."""
    original = data.GradientAllReduce
    with patch.object(data, "GradientAllReduce", lambda units, group: original(units[:-1], group)):
        yield


@contextmanager
def norm_of_one_shard() -> Iterator[None]:
    """Under ZeRO each process clips at the norm of its own shards."""
    original = Gradients.norm

    def of_this_shard(self: Gradients) -> torch.Tensor:
        with patch.object(dist, "all_reduce", _unless_group(self._mesh["dp_shard"].get_group())):
            return original(self)

    with patch.object(Gradients, "norm", of_this_shard):
        yield


@contextmanager
def tied_table_counted_twice() -> Iterator[None]:
    """The gradient norm has both copies of a tied table."""
    with patch.object(ParallelModel, "counted_parameters", ParallelModel.parameters):
        yield


@contextmanager
def recomputation_rounds() -> Iterator[None]:
    """What is recomputed is not quite what the forward pass computed."""
    original = activation_checkpoint.checkpoint

    def checkpoint(function: Any, *args: Any, **options: Any) -> Any:
        def changed(*inputs: Any) -> Any:
            x, *others = inputs
            return function(x * 1.001 if is_in_backward_pass() else x, *others)

        return original(changed, *args, **options)

    with patch.object(activation_checkpoint, "checkpoint", checkpoint):
        yield


@contextmanager
def gradients_summed_in_bfloat16() -> Iterator[None]:
    """Gradients of one process's microbatches are summed in the model's type, except for the last one."""
    add = gradients.add_all_

    def add_to_rounded(sums: list[torch.Tensor], new: list[torch.Tensor]) -> None:
        for total in sums:
            total.copy_(total.to(new[0].dtype))
        add(sums, new)

    with patch.object(gradients, "add_all_", add_to_rounded):
        yield


@contextmanager
def gradients_kept_in_bfloat16() -> Iterator[None]:
    """Gradients of one process's microbatches are summed and kept in the model's type."""
    add = gradients.add_all_

    def add_rounded(sums: list[torch.Tensor], new: list[torch.Tensor]) -> None:
        add(sums, new)
        for total in sums:
            total.copy_(total.to(new[0].dtype))

    with patch.object(gradients, "add_all_", add_rounded):
        yield


@contextmanager
def gradients_reduced_in_bfloat16() -> Iterator[None]:
    """Gradients are summed over processes in the model's type."""
    original = data.MixedPrecisionPolicy

    def policy(**options: Any) -> Any:
        return original(**options | {"reduce_dtype": options["param_dtype"]})

    with patch.object(data, "MixedPrecisionPolicy", policy):
        yield


@contextmanager
def validation_an_update_behind() -> Iterator[None]:
    """Only training casts weights to the model's type."""
    original = data.DataParallel.before_forward

    def before_forward(self: data.DataParallel) -> None:
        if torch.is_grad_enabled():
            original(self)

    with patch.object(data.DataParallel, "before_forward", before_forward):
        yield


@contextmanager
def gradients_of_complete_units_lost() -> Iterator[None]:
    """A unit of gradients in the half type that is complete drops them instead of adding them up."""

    def drop(self: gradients.ComputeCopies, number: int, _copy: torch.Tensor) -> None:
        for unit in self._units[number:]:
            for copy in unit.copies:
                copy.grad = None if unit._sums else copy.grad
            unit.add_gradients()

    with patch.object(gradients.ComputeCopies, "_on_gradient", drop):
        yield


@contextmanager
def table_gets_the_last_chunk_s_gradient() -> Iterator[None]:
    """In a half type, each chunk of the loss overwrites the gradient of the output matrix."""
    add = cross_entropy._add_product

    def overwrite(total: Any, gradient: torch.Tensor, x: torch.Tensor, several: bool) -> torch.Tensor:
        return add(total if x.dtype.itemsize > 2 else None, gradient, x, several)

    with patch.object(cross_entropy, "_add_product", overwrite):
        yield


@contextmanager
def gradients_reduced_in_float32() -> Iterator[None]:
    """Gradients are summed over processes in float32, whatever the configuration says."""
    original = data.MixedPrecisionPolicy

    def policy(**options: Any) -> Any:
        return original(**options | {"reduce_dtype": torch.float32})

    with patch.object(data, "MixedPrecisionPolicy", policy):
        yield


@contextmanager
def losses_summed_in_bfloat16() -> Iterator[None]:
    """Losses are summed in the model's type."""
    original = Trainer._sum_over_samples

    def sum_over_samples(self: Trainer, value: torch.Tensor) -> None:
        rounded = value.to(getattr(torch, self.config.training.dtype))
        original(self, rounded)
        value.copy_(rounded)

    with patch.object(Trainer, "_sum_over_samples", sum_over_samples):
        yield


@contextmanager
def norm_in_float16() -> Iterator[None]:
    """The gradient norm is rounded to float16."""
    original = Gradients.norm
    with patch.object(Gradients, "norm", lambda self: original(self).half().float()):
        yield


@contextmanager
def third_samples_of_microbatches_lost() -> Iterator[None]:
    """A microbatch has no loss after its second sample."""
    original = Trainer._with_labels

    def with_labels(self: Trainer, inputs: Any, labels: Any, factors: torch.Tensor) -> Any:
        kept = [torch.cat((own[:2], torch.full_like(own[2:], IGNORED_LABEL))) for own in labels]
        return original(self, inputs, kept, factors)

    with patch.object(Trainer, "_with_labels", with_labels):
        yield


@contextmanager
def microbatches_after_the_fourth_lost() -> Iterator[None]:
    """Of five or more microbatches only the first four have a loss."""
    original = WholeModel.forward_backward

    def forward_backward(self: WholeModel, inputs: list[torch.Tensor], loss: Any) -> None:
        original(self, inputs, lambda output, index: loss(output, index) if index < 4 else 0 * output.sum())

    with patch.object(WholeModel, "forward_backward", forward_backward):
        yield


@contextmanager
def receives_never_awaited() -> Iterator[None]:
    """A stage computes with whatever is in its buffer. Then the processes wait, and gloo spins."""

    def wait(self: TableSchedule, kind: str, step: Any, stage: RunningStage) -> None:
        self._receives.pop((kind, step.stage, step.microbatch), None)

    with patch.object(TableSchedule, "_wait_for_input", wait):
        yield
