"""Bugs to put into the product: each a context manager within which it computes something else in some layouts.

The verifier's processes enter them by name, so they can be pickled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_like.models import transformer
from titan_like.models.layers import init
from titan_like.models.llama.model import Llama
from titan_like.models.transformer import Transformer
from titan_like.optim.grad_norm import local_gradients
from titan_like.optim.loss_scaler import LossScaler
from titan_like.parallel import activation_checkpoint, apply, data, tensor_splits
from titan_like.parallel.collectives import Enter, Group
from titan_like.parallel.model import Stage
from titan_like.parallel.pipeline import Pipeline
from titan_like.parallel.split import StageLayers
from titan_like.train import loss, trainer
from titan_like.train.trainer import Trainer

HALF = ("bfloat16", "float16")


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


@contextmanager
def bad_gradients_known_to_their_holder() -> Iterator[None]:
    """Gradients that are not finite count only on the processes that hold them."""
    original = trainer.global_grad_norm

    def norm(parameters: Any, mesh: DeviceMesh) -> torch.Tensor:
        parameters = list(parameters)
        whole = original(parameters, mesh)
        knows = any(not part.isfinite().all() for part in local_gradients(parameters))
        return whole if knows or whole.isfinite() else torch.ones_like(whole)

    with patch.object(trainer, "global_grad_norm", norm):
        yield


def _after_init(change: Callable[[Trainer], None]) -> Any:
    """Change every trainer once it is built."""
    original = Trainer.__init__

    def init(self: Trainer, *args: Any) -> None:
        original(self, *args)
        change(self)

    return patch.object(Trainer, "__init__", init)


@contextmanager
def bad_gradients_kept() -> Iterator[None]:
    """A skipped step leaves its gradients for the next one to add to."""

    def change(self: Trainer) -> None:
        zero_grad = self.optimizer.zero_grad

        def zero_unless_bad(set_to_none: bool = True) -> None:
            if all(part.isfinite().all() for part in local_gradients(self.model.parameters())):
                zero_grad(set_to_none)

        self.optimizer.zero_grad = zero_unless_bad  # type: ignore[method-assign]

    with _after_init(change):
        yield


@contextmanager
def learning_rate_waits_in_skipped_steps() -> Iterator[None]:
    """The schedule counts updates in place of steps."""
    original, train_step, skipped = trainer.lr_factor, Trainer.train_step, [0]

    def count(self: Trainer, data: Any) -> Any:
        skipped[0] = self.skipped_steps
        return train_step(self, data)

    def lr_factor(section: Any, step: int, total: int) -> float:
        return original(section, step - skipped[0], total)

    with patch.object(trainer, "lr_factor", lr_factor), patch.object(Trainer, "train_step", count):
        yield


@contextmanager
def end_of_decay_forgotten() -> Iterator[None]:
    """The learning rate falls until the end of the run, wherever its decay is to end."""
    original = trainer.lr_factor

    def lr_factor(section: Any, step: int, total: int) -> float:
        return original(section.model_copy(update={"decay_steps": None}), step, total)

    with patch.object(trainer, "lr_factor", lr_factor):
        yield


@contextmanager
def dropout_halved_in_split_attention() -> Iterator[None]:
    """Under tensor parallelism attention drops half as much."""
    from titan_like.models.gpt import sharding

    def attention_core(module: Any, tp: tensor_splits.TensorParallel) -> None:
        module.dropout /= 2
        tensor_splits.attention_core(module, tp)

    plan = sharding.TENSOR_PARALLEL_PLAN | {"layers.*.attention.core": attention_core}
    with patch.object(sharding, "TENSOR_PARALLEL_PLAN", plan):
        yield


@contextmanager
def dropout_halved_in_later_stages() -> Iterator[None]:
    """Stages after the first drop half as much."""
    original = Transformer.keep_stage

    def keep_stage(self: Transformer, layers: range, is_first: bool, is_last: bool) -> None:
        original(self, layers, is_first, is_last)
        for layer in self.layers.values():
            layer.dropout = layer.dropout / (1 if is_first else 2)  # type: ignore[assignment, operator]

    with patch.object(Transformer, "keep_stage", keep_stage):
        yield


@contextmanager
def dropout_scale_lost_in_split_sequences() -> Iterator[None]:
    """What dropout keeps is not scaled up where sequences are split."""
    apply_tensor_parallel, dropout, is_split = apply.apply_tensor_parallel, F.dropout, [False]

    def note(model: Any, mesh: Any, sequence_parallel: bool) -> None:
        is_split[0] = sequence_parallel
        apply_tensor_parallel(model, mesh, sequence_parallel)

    def without_scale(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        kept = dropout(x, p, training, inplace)
        return kept * (1 - p) if is_split[0] and training else kept

    with patch.object(apply, "apply_tensor_parallel", note), patch.object(F, "dropout", without_scale):
        yield


@contextmanager
def gradients_not_unscaled() -> Iterator[None]:
    """float16's loss scale stays in the gradients."""
    original = Trainer._update

    def update(self: Trainer, grad_norm: float, lr: float) -> None:
        torch._foreach_mul_(local_gradients(self.model.parameters()), self.scaler.scale)
        original(self, grad_norm, lr)

    with patch.object(Trainer, "_update", update):
        yield


@contextmanager
def clipped_before_unscaling() -> Iterator[None]:
    """float16's gradients are clipped by their norm with the loss scale in it."""
    original = Trainer._update

    def update(self: Trainer, grad_norm: float, lr: float) -> None:
        original(self, grad_norm * self.scaler.scale, lr)

    with patch.object(Trainer, "_update", update):
        yield


@contextmanager
def vectors_decay() -> Iterator[None]:
    """In half types weight decay applies to norms and biases too."""

    def change(self: Trainer) -> None:
        for group in self.optimizer.param_groups if self.config.training.dtype in HALF else []:
            group["weight_decay"] = self.config.optimizer.weight_decay

    with _after_init(change):
        yield


@contextmanager
def norms_never_updated_in_bfloat16() -> Iterator[None]:
    """The optimizer does not know of norms where the model computes in bfloat16."""

    def change(self: Trainer) -> None:
        if self.config.training.dtype == "bfloat16":
            del self.optimizer.param_groups[1]["params"][:]

    with _after_init(change):
        yield


@contextmanager
def shard_of_padding_is_nan() -> Iterator[None]:
    """The loss of a process whose part of the vocabulary is all padding is not a number."""
    original = loss.all_gather

    def all_gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        gathered = original(x, dim, group)
        return gathered.masked_fill(gathered.isneginf(), float("nan"))

    with patch.object(loss, "all_gather", all_gather):
        yield


@contextmanager
def later_blocks_of_shards_misplaced() -> Iterator[None]:
    """Shards that begin above the first block of random numbers get those of the block before."""
    original = init.normal_rows

    def normal_rows(seed: int, name: str, shape: torch.Size, std: float, start: int, stop: int) -> torch.Tensor:
        block = max(1, init.BLOCK_ELEMENTS // shape[1:].numel())
        shift = block if start >= block and start else 0
        return original(seed, name, shape, std, start - shift, stop - shift)

    with patch.object(init, "normal_rows", normal_rows):
        yield


@contextmanager
def softmax_without_maximum() -> Iterator[None]:
    """Split cross entropy takes the exponential of logits as they are."""
    original = loss._SplitCrossEntropy.forward

    def forward(*args: Any) -> torch.Tensor:
        with patch.object(torch.Tensor, "logsumexp", lambda x, dim: x.exp().sum(dim).log()):
            return original(*args)

    with patch.object(loss._SplitCrossEntropy, "forward", staticmethod(forward)):
        yield


@contextmanager
def validation_takes_training_samples() -> Iterator[None]:
    """Each validation takes a microbatch from the training stream."""
    load_data, validate = Trainer._load_data, Trainer.validate

    def keep(self: Trainer) -> Any:
        self.stream = load_data(self)  # type: ignore[attr-defined]
        return self.stream  # type: ignore[attr-defined]

    def validate_and_take(self: Trainer) -> float:
        if hasattr(self, "stream"):
            next(self.stream)
        return validate(self)

    with patch.object(Trainer, "_load_data", keep), patch.object(Trainer, "validate", validate_and_take):
        yield


@contextmanager
def validation_on_everything() -> Iterator[None]:
    """Validation ignores `evaluation.steps`."""
    original = Trainer.validate

    def validate(self: Trainer) -> float:
        config = self.config
        section = config.evaluation.model_copy(update={"steps": 1000})
        self.config = config.model_copy(update={"evaluation": section})
        value = original(self)
        self.config = config
        return value

    with patch.object(Trainer, "validate", validate):
        yield


@contextmanager
def resumed_without_moments() -> Iterator[None]:
    """A resumed run begins with an optimizer that remembers nothing."""
    original = trainer.resume

    def resume(folder: Any, is_usable: Any, model: Any, optimizer: torch.optim.Optimizer) -> Any:
        state = original(folder, is_usable, model, optimizer)
        for values in optimizer.state.values():
            values["exp_avg"].zero_()
        return state

    with patch.object(trainer, "resume", resume):
        yield


@contextmanager
def resumed_shards_without_moments() -> Iterator[None]:
    """A resumed run loses the optimizer's state of one shard."""
    original = Trainer._resume

    def resume(self: Trainer, is_usable: Any) -> bool:
        resumed = original(self, is_usable)
        for values in self.optimizer.state.values():
            if self.dp_rank == 1 and self.config.parallelism.zero_stage:
                values["exp_avg"].to_local().zero_()
        return resumed

    with patch.object(Trainer, "_resume", resume):
        yield


@contextmanager
def resumed_one_sample_late() -> Iterator[None]:
    """A resumed run leaves a sample out."""
    original = Trainer._resume

    def resume(self: Trainer, is_usable: Any) -> bool:
        resumed = original(self, is_usable)
        self.consumed_samples += resumed
        return resumed

    with patch.object(Trainer, "_resume", resume):
        yield


@contextmanager
def computes_for_ever() -> Iterator[None]:
    """The first step never ends."""

    def train_step(self: Trainer, data: Any) -> Any:
        while True:
            pass

    with patch.object(Trainer, "train_step", train_step):
        yield


@contextmanager
def clipped_by_another_norm_in_half_types() -> Iterator[None]:
    """In half types gradients are clipped by their norm times the number of data-parallel processes."""
    original = Trainer._update

    def update(self: Trainer, grad_norm: float, lr: float) -> None:
        original(self, grad_norm * (self.dp_size if self.config.training.dtype in HALF else 1), lr)

    with patch.object(Trainer, "_update", update):
        yield


@contextmanager
def loss_scale_begins_at_1() -> Iterator[None]:
    """float16 begins without a loss scale."""
    with patch.object(trainer, "LossScaler", lambda scale=1.0: LossScaler(scale=1.0)):
        yield


@contextmanager
def skipped_steps_forgotten_when_resumed() -> Iterator[None]:
    """A resumed run counts skipped steps from 0."""
    original = Trainer._resume

    def resume(self: Trainer, is_usable: Any) -> bool:
        resumed = original(self, is_usable)
        self.skipped_steps = 0
        return resumed

    with patch.object(Trainer, "_resume", resume):
        yield


@contextmanager
def cursor_goes_back_after_a_skipped_step() -> Iterator[None]:
    """A checkpoint of a skipped step has the samples that it consumed still to come."""
    original = Trainer.save

    def save(self: Trainer, is_last: bool = False) -> None:
        consumed = self.consumed_samples
        self.consumed_samples -= self.losses.consecutive_skips * self.config.training.global_batch_size
        original(self, is_last)
        self.consumed_samples = consumed

    with patch.object(Trainer, "save", save):
        yield
