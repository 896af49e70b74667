"""Bugs in how losses and gradients of microbatches, stages and processes become those of the step."""

import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.mutations import bug, under
from titan_like.data.batch import Batch
from titan_like.data.source import IGNORED_LABEL
from titan_like.models.layers import cross_entropy
from titan_like.optim.optimizer import Gradients
from titan_like.parallel import activation_checkpoint, data, gradients
from titan_like.parallel.collectives import CopyToTensorRegion
from titan_like.parallel.model import ParallelModel, WholeModel
from titan_like.parallel.offload import LayerTensors
from titan_like.parallel.pipeline import Pipeline, RunningStage, TableSchedule
from titan_like.torch_private import is_in_backward_pass
from titan_like.train import trainer
from titan_like.train.trainer import Trainer


@bug(trainer, "sum_gradients_of_copies")
def tied_tables_not_summed(*_: Any) -> None:
    """Each end of the pipeline keeps its own part of the table's gradient."""


@bug(Gradients, "norm")
def norm_of_one_stage(original: Any, self: Gradients) -> torch.Tensor:
    """Every stage clips at its own gradient norm."""
    with patch.object(dist, "all_reduce", _unless_group(self._groups["pp"])):
        return original(self)


def _unless_group(left_out: dist.ProcessGroup) -> Any:
    original = dist.all_reduce

    def all_reduce(*args: Any, **options: Any) -> Any:
        return None if options.get("group") is left_out else original(*args, **options)

    return all_reduce


@bug(Trainer, "train_step")
def tokens_of_one_process(original: Any, self: Trainer, data: Any) -> Any:
    """The loss is a mean of the processes' means, each over its own tokens."""
    sums, pending = dist.all_reduce, [self.dp_size > 1]

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if pending.pop() if pending else False:
            return tensor.mul_(dist.get_world_size(options["group"])).clamp_(min=1)
        return sums(tensor, *args, **options)

    with patch.object(dist, "all_reduce", all_reduce):
        return original(self, data)


@bug(Pipeline, "forward_backward")
def last_microbatch_dropped(original: Any, self: Pipeline, inputs: list[torch.Tensor], loss: Any) -> None:
    """A pipeline leaves out the last microbatch's loss."""
    last = len(inputs) - 1

    def loss_but_of_last(logits: torch.Tensor, microbatch: int) -> torch.Tensor:
        return loss(logits, microbatch) * (microbatch != last or self.layout.pipeline == 1)

    original(self, inputs, loss_but_of_last)


@bug(WholeModel, "forward_backward")
def loss_times_microbatches(original: Any, self: WholeModel, inputs: list[torch.Tensor], loss: Any) -> None:
    """Gradients are those of the loss times the number of microbatches."""
    original(self, inputs, lambda logits, microbatch: loss(logits, microbatch) * len(inputs))


@bug(Trainer, "_update")
def last_stage_not_updated(original: Any, self: Trainer, *update: Any, **skip: Any) -> None:
    """The last stage's optimizer does nothing."""
    stage = self.mesh["pp"]
    if stage.size() == 1 or stage.get_local_rank() < stage.size() - 1:
        original(self, *update, **skip)


@bug(trainer, "sum_partial_gradients")
def partial_gradients_not_summed(_original: Any, _: Any) -> None:
    """Sequence parallelism leaves the gradients of norms partial."""


@bug(Trainer, "_complete_gradients")
def gradients_averaged_over_data(original: Any, self: Trainer) -> None:
    """Gradients are divided by the data-parallel degree, as if each process had divided by its own tokens."""
    original(self)
    self.gradients_held.multiply(torch.tensor(1 / self.dp_size, dtype=torch.float64))


@bug(data, "fully_shard")
def replicas_not_summed(original: Any, module: nn.Module, *, mesh: Any, **options: Any) -> Any:
    """HSDP reduces gradients over shards and leaves out the replicas."""
    shards = mesh["dp_shard"] if mesh.ndim == 2 else mesh
    return original(module, mesh=shards, **options)


@bug(Trainer, "_update")
def one_shard_not_updated(original: Any, self: Trainer, grad_norm: torch.Tensor, lr: float, skip: torch.Tensor) -> None:
    """Under ZeRO the optimizer of one process leaves its shards as they are."""
    if self.dp_rank != 1 or self.config.parallelism.zero_stage == 0:
        original(self, grad_norm, lr, skip)


@bug(RunningStage, "_add_products")
def weight_products_of_one_microbatch_lost(original: Any, self: RunningStage, microbatch: int) -> None:
    """A split backward pass forgets the weights' gradients of the second microbatch."""
    if microbatch == 1:
        self._products[microbatch] = []
    original(self, microbatch)


@bug(RunningStage, "get_bwd_send_ops")
def gradient_never_sent(original: Any, self: RunningStage, bwd_chunk_id: int) -> Any:
    """A stage keeps a microbatch's gradient to itself, and the one before waits for ever."""
    if bwd_chunk_id == 1:
        time.sleep(1000)
    return original(self, bwd_chunk_id)


@bug(CopyToTensorRegion, "backward")
def all_gathers_gradient_not_summed(original: Any, ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    """Sequence parallelism gives each process its part of its own gradient, and not of the sum."""
    if not ctx.sequence_parallel:
        return original(ctx, gradient)
    return gradient.chunk(ctx.group.size, 1)[ctx.group.rank], None, None


@bug(data, "GradientAllReduce")
def last_unit_not_all_reduced(original: Any, units: Any, group: Any) -> Any:
    """Without ZeRO the gradients outside the layers stay those of each process."""
    return original(units[:-1], group)


@bug(Gradients, "norm")
def norm_of_one_shard(original: Any, self: Gradients) -> torch.Tensor:
    """Under ZeRO each process clips at the norm of its own shards."""
    with patch.object(dist, "all_reduce", _unless_group(self._groups["dp_shard"])):
        return original(self)


@under(lambda: patch.object(ParallelModel, "counted_parameters", ParallelModel.parameters))
def tied_table_counted_twice() -> None:
    """The gradient norm has both copies of a tied table."""


@bug(activation_checkpoint, "checkpoint")
def recomputation_rounds(original: Any, function: Any, *args: Any, **options: Any) -> Any:
    """What is recomputed is not quite what the forward pass computed."""

    def changed(*inputs: Any) -> Any:
        x, *others = inputs
        return function(x * 1.001 if is_in_backward_pass() else x, *others)

    return original(changed, *args, **options)


@bug(LayerTensors, "wait")
def offloaded_tensors_read_before_they_are_back(original: Any, self: LayerTensors) -> None:
    """Nothing waits for the copies from the host. On a CPU, which has made them by then, none has come yet."""
    if not self.is_fetched:
        original(self)
    elif self.host.stream is None:
        for saved in self.saved.values():
            saved.on_device.zero_()


@bug(LayerTensors, "begin_backward")
def offloaded_tensors_of_the_layer_below(original: Any, self: LayerTensors, gradient: torch.Tensor) -> None:
    """A layer gets back what another one has saved in storages of the same sizes."""
    others = [] if self.is_fetched or self.below is None else self.below.saved.values()
    for mine, other in zip(self.saved.values(), others, strict=False):
        if mine.on_host.shape == other.on_host.shape and mine.on_host.dtype == other.on_host.dtype:
            mine.on_host, other.on_host = other.on_host, mine.on_host
    original(self, gradient)


@bug(gradients.CopiedUnit, "add_gradients")
def gradients_summed_in_bfloat16(original: Any, self: gradients.CopiedUnit, frees: bool) -> None:
    """Gradients of one process's microbatches are summed in the model's type, except for the last one."""
    for total in self._gradients.values():
        total.copy_(total.to(self.copies[0].dtype))
    original(self, frees)


@bug(gradients.CopiedUnit, "add_gradients")
def gradients_kept_in_bfloat16(original: Any, self: gradients.CopiedUnit, frees: bool) -> None:
    """Gradients of one process's microbatches are summed and kept in the model's type."""
    original(self, frees)
    for total in self._gradients.values():
        total.copy_(total.to(self.copies[0].dtype))


@bug(data, "MixedPrecisionPolicy")
def gradients_reduced_in_bfloat16(original: Any, **options: Any) -> Any:
    """Gradients are summed over processes in the model's type."""
    return original(**options | {"reduce_dtype": options["param_dtype"]})


@bug(data.DataParallel, "before_forward")
def validation_an_update_behind(original: Any, self: data.DataParallel) -> None:
    """Only training casts weights to the model's type."""
    if torch.is_grad_enabled():
        original(self)


@bug(gradients.ComputeCopies, "_on_gradient")
def gradients_of_complete_units_lost(_: Any, self: gradients.ComputeCopies, number: int, _copy: torch.Tensor) -> None:
    """A unit of gradients in the half type that is complete drops them instead of adding them up."""
    for unit in self.units[number:]:
        for known, copy in enumerate(unit.copies):
            copy.grad = None if known in unit._gradients else copy.grad
        unit.add_gradients(frees=False)


@bug(cross_entropy, "_add_product")
def table_gets_the_last_chunk_s_gradient(original: Any, total: Any, gradient: Any, x: Any, *several: Any) -> Any:
    """In a half type, each chunk of the loss overwrites the gradient of the output matrix."""
    return original(total if x.dtype.itemsize > 2 else None, gradient, x, *several)


@bug(data, "MixedPrecisionPolicy")
def gradients_reduced_in_float32(original: Any, **options: Any) -> Any:
    """Gradients are summed over processes in float32, whatever the configuration says."""
    return original(**options | {"reduce_dtype": torch.float32})


@bug(Trainer, "_sum_over_samples")
def losses_summed_in_bfloat16(original: Any, self: Trainer, value: torch.Tensor) -> None:
    """Losses are summed in the model's type."""
    rounded = value.to(getattr(torch, self.config.training.dtype))
    original(self, rounded)
    value.copy_(rounded)


@bug(Gradients, "norm")
def norm_in_float16(original: Any, self: Any) -> Any:
    """The gradient norm is rounded to float16."""
    return original(self).half().float()


@bug(WholeModel, "forward_backward")
def third_samples_of_microbatches_lost(original: Any, self: WholeModel, batches: list[Batch], loss: Any) -> None:
    """A microbatch has no loss after its second sample."""

    def lost(labels: torch.Tensor) -> torch.Tensor:
        return torch.cat((labels[:2], torch.full_like(labels[2:], IGNORED_LABEL)))

    original(self, [batch._replace(labels=lost(batch.labels)) for batch in batches], loss)


@bug(WholeModel, "forward_backward")
def microbatches_after_the_fourth_lost(original: Any, self: WholeModel, inputs: list[torch.Tensor], loss: Any) -> None:
    """Of five or more microbatches only the first four have a loss."""
    original(self, inputs, lambda output, index: loss(output, index) if index < 4 else 0 * output.sum())


@bug(TableSchedule, "_wait_for_input")
def receives_never_awaited(_: Any, self: TableSchedule, kind: str, step: Any, stage: RunningStage) -> None:
    """A stage computes with whatever is in its buffer. Then the processes wait, and gloo spins."""
    self._receives.pop((kind, step.stage, step.microbatch), None)
