"""Bugs to put into the product: each a context manager within which it computes something else in some layouts.

The verifier's processes enter them by name, so they can be pickled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_like.models import transformer
from titan_like.models.llama.model import Llama
from titan_like.models.transformer import Transformer
from titan_like.optim.grad_norm import local_gradients
from titan_like.parallel import activation_checkpoint, apply, data, tensor_splits
from titan_like.parallel.collectives import Enter, Group
from titan_like.parallel.model import Stage
from titan_like.parallel.pipeline import Pipeline
from titan_like.parallel.split import StageLayers
from titan_like.train import loss, trainer
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

    def of_this_stage(parameters: Any, mesh: DeviceMesh) -> torch.Tensor:
        with patch.object(dist, "all_reduce", _unless_group(mesh["pp"].get_group())):
            return original(parameters, mesh)

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


@contextmanager
def gradients_averaged_over_data() -> Iterator[None]:
    """Gradients are divided by the data-parallel degree, as if each process had divided by its own tokens."""
    original = Trainer._complete_gradients

    def complete_gradients(self: Trainer) -> None:
        original(self)
        torch._foreach_div_(local_gradients(self.model.parameters()), self.dp_size)

    with patch.object(Trainer, "_complete_gradients", complete_gradients):
        yield


@contextmanager
def same_start_on_every_stage() -> Iterator[None]:
    """Each stage numbers its layers from 0 when it draws their weights."""
    original_init, original_fill = Transformer.init_weights, transformer.fill_normal

    def init_weights(self: Transformer, seed: int) -> None:
        first = min(map(int, self.layers))

        def fill(parameter: nn.Parameter, seed: int, name: str, std: float) -> None:
            parts = name.split(".")
            if parts[0] == "layers":
                parts[1] = str(int(parts[1]) - first)
            original_fill(parameter, seed, ".".join(parts), std)

        with patch.object(transformer, "fill_normal", fill):
            original_init(self, seed)

    with patch.object(Transformer, "init_weights", init_weights):
        yield


@contextmanager
def all_gathers_gradient_not_summed() -> Iterator[None]:
    """Sequence parallelism gives each process its part of its own gradient, and not of the sum."""
    original = Enter.backward

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not ctx.sequence_parallel:
            return original(ctx, gradient)
        return gradient.chunk(ctx.group.size, 1)[ctx.group.rank], None, None

    with patch.object(Enter, "backward", staticmethod(backward)):
        yield


@contextmanager
def positions_begin_anew_in_each_part() -> Iterator[None]:
    """Under sequence parallelism rotary positions are those within a process's part of the sequence."""
    original = Llama.layer_inputs

    def layer_inputs(self: Llama, seq_len: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        parts = self.sequence_shards
        return tuple(table.repeat(parts, 1) for table in original(self, seq_len // parts, device))

    with patch.object(Llama, "layer_inputs", layer_inputs):
        yield


@contextmanager
def same_dropout_everywhere() -> Iterator[None]:
    """All processes draw dropout from one stream."""
    with patch.object(trainer, "dropout_stream", lambda *_: 0):
        yield


@contextmanager
def same_dropout_in_all_heads() -> Iterator[None]:
    """Tensor-parallel processes drop the same probabilities of attention, each in its own heads."""

    def attention_core(_module: nn.Module, forward: Any, _group: Group, *inputs: torch.Tensor) -> torch.Tensor:
        return forward(*inputs)

    with patch.object(tensor_splits, "_attention_core", attention_core):
        yield


@contextmanager
def dropout_drawn_anew_in_recomputation() -> Iterator[None]:
    """Recomputation does not put the random generator back."""
    original = activation_checkpoint.checkpoint

    def checkpoint(*args: Any, **options: Any) -> Any:
        return original(*args, **options | {"preserve_rng_state": False})

    with patch.object(activation_checkpoint, "checkpoint", checkpoint):
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
def softmax_of_own_vocabulary() -> Iterator[None]:
    """The loss's softmax is over a process's own part of the vocabulary."""
    original = loss.all_gather

    def all_gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        gathered = original(x, dim, group).clone()
        gathered[:, 0] = float("-inf")
        gathered[group.rank, 0] = x[0, 0]
        return gathered

    with patch.object(loss, "all_gather", all_gather):
        yield


@contextmanager
def one_shard_not_updated() -> Iterator[None]:
    """Under ZeRO the optimizer of one process leaves its shards as they are."""
    original = Trainer._update

    def update(self: Trainer, grad_norm: float, lr: float) -> None:
        if self.dp_rank != 1 or self.config.parallelism.zero_stage == 0:
            original(self, grad_norm, lr)

    with patch.object(Trainer, "_update", update):
        yield


@contextmanager
def middle_stages_swapped() -> Iterator[None]:
    """The second and the third stage hold each other's layers."""
    original = apply.split_layers

    def split_layers(counts: list[int]) -> list[StageLayers]:
        stages = original(counts)
        if len(stages) > 3:
            stages[1], stages[2] = stages[2], stages[1]
        return stages

    with patch.object(apply, "split_layers", split_layers):
        yield


@contextmanager
def weight_products_of_one_microbatch_lost() -> Iterator[None]:
    """A split backward pass forgets the weights' gradients of the second microbatch."""
    original = Pipeline._backward_for_weights

    def backward_for_weights(self: Pipeline, stage: Stage, microbatch: int) -> None:
        if microbatch == 1:
            self._products[stage.index, microbatch] = []
        original(self, stage, microbatch)

    with patch.object(Pipeline, "_backward_for_weights", backward_for_weights):
        yield


@contextmanager
def validation_without_last_microbatch() -> Iterator[None]:
    """A pipeline validates on all microbatches of a batch but the last."""
    original = Pipeline.forward

    def forward(self: Pipeline, inputs: list[torch.Tensor], add_loss: Any) -> None:
        last = len(inputs) - 1

        def add_loss_but_of_last(logits: torch.Tensor, microbatch: int) -> torch.Tensor:
            is_counted = microbatch != last or self.shape.degree == 1
            return add_loss(logits, microbatch) if is_counted else logits.sum()

        original(self, inputs, add_loss_but_of_last)

    with patch.object(Pipeline, "forward", forward):
        yield


@contextmanager
def key_heads_of_the_next_group() -> Iterator[None]:
    """Under tensor parallelism queries meet the keys and values of another group of heads."""
    original = tensor_splits.attention_core

    def attention_core(module: Any, tp: tensor_splits.TensorParallel) -> None:
        original(module, tp)
        forward = module.forward
        tensor_splits.replace_forward(module, lambda q, k, v: forward(q, k.roll(1, 1), v.roll(1, 1)))

    from titan_like.models.llama import sharding

    plan = sharding.TENSOR_PARALLEL_PLAN | {"layers.*.attention.core": attention_core}
    with patch.object(sharding, "TENSOR_PARALLEL_PLAN", plan):
        yield


@contextmanager
def gradient_never_sent() -> Iterator[None]:
    """A stage keeps a microbatch's gradient to itself, and the one before waits for ever."""
    original = Pipeline._send

    def send(self: Pipeline, kind: str, stage: int, microbatch: int) -> None:
        if (kind, microbatch) == ("B", 1):
            time.sleep(1000)
        original(self, kind, stage, microbatch)

    with patch.object(Pipeline, "_send", send):
        yield


@contextmanager
def crash_at_the_end() -> Iterator[None]:
    """One data-parallel process fails when all is computed."""

    def destroy() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("too late")

    with patch.object(dist, "destroy_process_group", destroy):
        yield
