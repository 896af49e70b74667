"""Runs the recipe on fake tensors for one microbatch: one layer of each kind and the two ends."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import gcd
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch
from titan_like.models import parts
from titan_like.models.layers.experts import Experts
from titan_like.models.transformer import Transformer, shared_modules
from titan_like.optim.shards import matrices_here
from titan_like.parallel.apply import Recipe, build_stages
from titan_like.parallel.context import CPShard
from titan_like.parallel.data import groups_of, units_of
from titan_like.parallel.extend import extend
from titan_like.parallel.layout import Layout
from titan_like.parallel.mesh import build_mesh
from titan_like.parallel.model import Stage
from titan_like.parallel.split import StageLayers
from titan_like.parallel.tensor import partial_parameters
from titan_like.parallel.tuning import Tuning
from titan_like.parallel.weight_gradients import Product, defer_weight_gradients
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.trace.levels import BACKWARD, FORWARD, WEIGHTS
from titan_like.planner.trace.program import Parameter, Program, Segment
from titan_like.planner.trace.recorder import Recorder
from titan_like.planner.trace.stand_ins import as_on_gpu, without_host_reads
from titan_like.torch_private import fake_store, fake_tensor_mode, local_tensor, tree_leaves

_ENTRY, _INPUTS, _FIRST_LAYER = range(3)  # segments


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Act as one of many processes that do not exist. Collectives return without doing anything."""
    hook = sys.excepthook  # which torch wraps with each group, so that every line of a traceback names all ranks
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def run_trace(key: TraceKey) -> Program:
    """Trace one microbatch on the first process of the smallest layout with the key's degrees."""
    shard = key.expert // gcd(key.expert, key.context * key.tensor // key.expert_tensor)
    # With a second replica no group holds all ranks, so each has the name that the recipe gives it.
    degrees = 1, 2, shard, key.context, key.tensor, key.expert, key.expert_tensor
    layout = Layout(*degrees, sequence_parallel=key.sequence_parallel)
    mode, dtype = fake_tensor_mode(), getattr(torch, key.dtype)
    kinds = len(key.model.layer_counts)
    with fake_process_group(0, layout.num_processes), as_on_gpu(mode, dtype):
        splits = {0: StageLayers(range(kinds), True, not key.pipelined)}
        if key.pipelined:
            splits[1] = StageLayers(range(kinds, kinds), False, True)
        mesh = build_mesh(layout, "cpu")
        with parts.WithoutInit():
            config = _config(key, layout)
            # Data parallelism only repeats over parameters what a trace lists once.
            tuning, without_data_parallel = Tuning(layers_on_device=0), cast(Any, lambda *_: None)
            recipe = Recipe(config, key.model, mesh, torch.device("cpu"), tuning, without_data_parallel)
            stages, expert_mesh = build_stages(recipe, splits)
        if key.splits_backward:
            stages = [replace(stage, weight_gradients=defer_weight_gradients(stage.module)) for stage in stages]
        segments = [Segment() for _ in range(_FIRST_LAYER + kinds + 1)]
        compiled = range(_FIRST_LAYER, _FIRST_LAYER + kinds * key.compiled)
        recorder = Recorder(segments, compiled)
        modules = [stage.module for stage in stages]
        for module in modules:
            without_host_reads(module, key.expert_load)
            recorder.follow_recomputation(module)
            for experts in (part for part in module.modules() if isinstance(part, Experts)):
                experts.register_forward_pre_hook(recorder.follow_experts)
        for tensor in (tensor for module in modules for tensor in (*module.parameters(), *module.buffers())):
            recorder.ignore(tensor.data)
        named = [(name, parameter, module) for module in modules for name, parameter in module.named_parameters()]
        owners = {id(parameter): _segment_of(name, module, kinds) for name, parameter, module in named}
        complete = list[int]()  # ids of parameters in the order of their gradients
        for parameter in (parameter for _, parameter, _ in named if parameter.requires_grad):
            parameter.register_post_accumulate_grad_hook(lambda weight: _take(weight, recorder))
            parameter.register_post_accumulate_grad_hook(lambda weight: complete.append(id(weight)))
        extend(modules[0], _Watched, recorder=recorder, frozen_input=key.frozen_input)
        for module in modules[1:]:
            extend(module, _OutputAlone)
        with mode, recorder:
            deferred = _run(key, stages, recorder, owners)
        recorder.finish()
        _list_parameters(modules, groups_of(mesh, expert_mesh), dtype, segments, deferred, complete)
    return Program(segments[_ENTRY], segments[_INPUTS], segments[_FIRST_LAYER:-1], segments[-1], recorder.groups)


def _config(key: TraceKey, layout: Layout) -> JobConfig:
    values = {
        "training.dtype": key.dtype,
        "training.seq_len": key.seq_len,
        "training.micro_batch_size": key.micro_batch_size,
        "training.global_batch_size": key.micro_batch_size * layout.data_parallel,
        "parallelism.context_parallel_method": key.context_method,
        "parallelism.zero_stage": 0,  # each parameter is allocated whole
        "activation_checkpoint.mode": key.recompute,
        "activation_checkpoint.offload": key.offload,
        "lora.rank": key.lora.rank,
        "lora.dropout": 0.1 * key.lora.dropout,
        "lora.modules": list(key.lora.modules),
    }
    return edit(JobConfig(), values | layout.settings())


def microbatch(key: TraceKey) -> Batch:
    """One microbatch on the first context-parallel rank: fake tensors."""
    tokens = torch.zeros(key.micro_batch_size, key.seq_len + key.decoder_seq_len, dtype=torch.int64)
    heads = key.model.predictions
    batch = Batch(
        tokens,
        labels=tokens.clone(),
        sample_labels=tokens.new_zeros(key.micro_batch_size) if {"pair", "choice"} & set(heads) else None,
        loss_factors=torch.ones(len(heads)),
        next_tokens=tokens.clone() if "mtp" in heads else None,
        next_labels=tokens.clone() if "mtp" in heads else None,
        encoder_len=key.seq_len if key.decoder_seq_len else None,
    )
    return CPShard(key.context, 0, key.context_method).shard(batch)


def _run(key: TraceKey, stages: Sequence[Stage], recorder: Recorder, owners: dict[int, int]) -> set[int]:
    """Run one microbatch through all stages and back. Returns ids of the parameters whose gradients were deferred."""
    batch = microbatch(key)
    last, returned = len(recorder.segments) - 1, list[torch.Tensor]()
    output = stages[0].module(batch)
    if len(stages) > 1:
        end, hidden = _Received.apply(output, returned), output.detach().requires_grad_()
        del output
        recorder.enter(last, FORWARD)
        output = stages[1].module(batch, hidden)
    loss = output.sum()
    del output
    recorder.enter(last, BACKWARD)
    loss.backward()
    del loss
    if len(stages) > 1:
        returned.append(hidden.grad)
        del hidden
        end.backward()
    products: list[Product] = []
    for stage in reversed(stages):
        products += [] if stage.weight_gradients is None else stage.weight_gradients.take()
    for product in products:
        recorder.enter(owners[id(product.weight)], WEIGHTS)
        product.add()
        _take(product.weight, recorder)
    return {id(product.weight) for product in products}


class _Received(torch.autograd.Function):
    """Begins the first stage's backward pass from the gradient that the second returns, and keeps nothing."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, returned: list[torch.Tensor]) -> torch.Tensor:
        ctx.returned = returned
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.returned.pop(), None


def _take(parameter: torch.Tensor, recorder: Recorder) -> None:
    """Let the recorder know a complete gradient, and free it. Deferred ones come later."""
    if parameter.grad is not None:
        recorder.is_gradient(parameter.grad)
        parameter.grad = None


class _Watched(Transformer):
    """A stage that tells the recorder which segment runs."""

    recorder: Recorder
    frozen_input: bool

    def embed(self, batch: Batch) -> torch.Tensor:
        self.recorder.enter(_ENTRY, FORWARD)
        output = super().embed(batch)
        if not (output.requires_grad or self.frozen_input):  # layers above the first pass gradients on
            output = output.detach().requires_grad_()
        self.end(_ENTRY, output)
        return output

    def contexts(self, batch: Batch) -> Mapping[str, Any]:
        self.recorder.enter(_INPUTS, FORWARD)
        contexts = super().contexts(batch)
        watched = {id(x): x for x in tree_leaves(contexts) if isinstance(x, torch.Tensor) and x.requires_grad}
        for tensor in watched.values():
            tensor.register_hook(lambda gradient: self.recorder.enter(_INPUTS, BACKWARD, gradient))
        self.recorder.enter(_FIRST_LAYER, FORWARD)
        return contexts

    def run_layer(self, layer: nn.Module, x: torch.Tensor, context: Any, batch: Batch) -> torch.Tensor:
        index = _FIRST_LAYER + list(self.layers.values()).index(layer)
        output = super().run_layer(layer, x, context, batch)
        self.end(index, output)
        self.recorder.enter(index + 1, FORWARD)
        return output

    def end(self, index: int, output: torch.Tensor) -> None:
        self.recorder.segments[index].output = local_tensor(output).nbytes
        if output.requires_grad:
            output.register_hook(lambda gradient: self.recorder.enter(index, BACKWARD, gradient))


class _OutputAlone(Transformer):
    """A stage without layers."""

    def contexts(self, batch: Batch) -> Mapping[str, Any]:
        return {}


def _segment_of(name: str, module: Transformer, num_kinds: int) -> int:
    """The segment of a parameter. A table that is in use at both ends of a stage is the entry's."""
    first, _, rest = name.partition(".")
    if first == "layers":
        return _FIRST_LAYER + list(module.layers).index(rest.partition(".")[0])
    if first in module.shared:
        return _INPUTS
    return _ENTRY if first in module.entry and module.is_first else _FIRST_LAYER + num_kinds


def _list_parameters(
    modules: Sequence[Transformer],
    groups: tuple[Any, Any],
    dtype: torch.dtype,
    segments: list[Segment],
    deferred: set[int],
    complete: list[int],
) -> None:
    """Give each segment its parameters."""
    num_kinds, positions = len(modules[0].layers), {key: number for number, key in enumerate(complete)}
    for module in modules:
        names = {id(part): name for name, part in module.named_modules()}
        units: dict[int, tuple[str, str]] = {}  # id of a parameter → its unit, who shares it
        for unit, group in units_of(module, *groups, dtype):
            for parameter in (parameter for part in unit for parameter in part.parameters()):
                units.setdefault(id(parameter), (names[id(unit[0])], group.dimension))
        partial = {id(parameter) for parameter in partial_parameters(module)}
        uses = [shared_modules(layer) for layer in modules[0].layers.values()]
        for name, parameter in module.named_parameters():
            kinds = tuple(kind for kind, shared in enumerate(uses) if name.partition(".")[0] in shared)
            shape = tuple(local_tensor(parameter.data).shape)
            key = id(parameter)
            flags = key in deferred, key in partial
            in_entry = name.partition(".")[0] in module.entry
            row = Parameter(
                name, shape, *units[key], *flags, kinds, positions.get(key, 0), matrices_here(parameter), in_entry
            )
            segment = segments[_segment_of(name, module, num_kinds)]
            (segment.parameters if parameter.requires_grad else segment.frozen).append(row)
