"""One whole step of one process on fake tensors, as on a GPU: the recipe, data parallelism, the pipeline, the update.

It takes seconds, and judges `planner.memory` and `planner.traffic`, which compose the same from a traced microbatch.
What it shares with them is how a compiled layer's events are told from an eager one's (`events_as_compiled`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import _disable_current_modes

from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch
from titan_like.data.loading.lengths import sample_length
from titan_like.models import parts
from titan_like.models.config import TransformerConfig
from titan_like.models.layers import init
from titan_like.models.transformer import Transformer
from titan_like.optim import adamw, shards
from titan_like.optim.adamw import FusedAdamW
from titan_like.optim.optimizer import Gradients, update
from titan_like.optim.shards import ShardedOptimizer
from titan_like.parallel import apply as recipe
from titan_like.parallel import offload
from titan_like.parallel.apply import build_parallel_model, run_batches
from titan_like.parallel.layout import Layout
from titan_like.parallel.mesh import build_mesh
from titan_like.parallel.model import ParallelModel, sum_gradients_of_copies
from titan_like.parallel.schedules.tables import Action
from titan_like.parallel.tensor import partial_parameters, sum_partial_gradients
from titan_like.parallel.timeline import TimedPasses
from titan_like.planner.dry_run import built_optimizer, built_state
from titan_like.planner.predict import workload_of
from titan_like.planner.trace.key import TraceKey
from titan_like.planner.trace.levels import BACKWARD, FORWARD, WEIGHTS, Event, Storages, events_as_compiled
from titan_like.planner.trace.program import HOST, Collective, Segment
from titan_like.planner.trace.recorder import Recorder
from titan_like.planner.trace.run import fake_process_group, microbatch
from titan_like.planner.trace.stand_ins import as_on_gpu, without_host_reads
from titan_like.torch_private import fake_tensor_mode

Amounts = dict[Collective, tuple[int, int]]  # → calls, bytes
_PASSES, _SUMS, _NORM, _UPDATE = range(4)  # segments; those of compiled layers follow


class WholeStep(NamedTuple):
    """The peak memory of one process in a step, and the messages that it sends."""

    passes: int  # most bytes of tensors at once in forward and backward passes, optimizer state included
    update: int  # the same after them: sums of gradients that are still partial, their norm, the update
    weights: int  # bytes of master weights
    optimizer: int
    collectives: Amounts  # of the passes
    sums: Amounts  # of partial gradients and of tied parameters' gradients, after the passes
    of_update: Amounts

    @property
    def peak(self) -> int:
        """Most bytes of tensors at once."""
        return max(self.passes, self.update)


class StepRecorder(Recorder):
    """Records a whole step, with what FSDP2 does to storages."""

    def __init__(self) -> None:
        super().__init__([Segment() for _ in range(_UPDATE + 1)])
        self.compiled_layers: set[int] = set()  # segments
        self._resized: set[int] = set()
        self.enter(_PASSES, FORWARD)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "fsdp":
            return super().__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **(kwargs or {}))  # copies into and out of buffers, which are no operators of a layer
        for value in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor):
                self.number_of(value)
        return result

    def resize(self, storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        """FSDP2 frees gathered weights by changing the size of their storage, which no operator shows."""
        if id(storage) in self._alive:
            number, before = self._alive[id(storage)]
            self._resized.add(number)
            self._alive[id(storage)] = number, size
            self.events.append(Event(self.segment, self.which, number, size - before))
        return _resize(storage, size)

    def levels(self) -> tuple[int, int]:
        """The most bytes before the sums of gradients, and after the last pass."""
        inside = {s for n, group in enumerate(self._fused) for s in group.writes if self._used_in[s] == {n}}
        sources = {number: source for number, source in self._sources.items() if number not in self._resized}
        storages = Storages(sources, self._needed, inside, self._views)
        events, _ = events_as_compiled(self.events, self.compiled_layers, storages, self._offloaded)
        level, most, is_after = 0, [0, 0], False
        for event in events:
            if event.storage == 0 and event.segment == _SUMS:
                is_after, most[1] = True, level
            level += event.bytes
            most[is_after] = max(most[is_after], level)
        return most[0], most[1]

    def sent(self, *segments: int) -> Amounts:
        """What was sent in some segments."""
        calls, sizes = Counter[Collective](), Counter[Collective]()
        for index in segments:
            for pass_ in self.segments[index].passes:
                for key, (count, size) in pass_.collectives.items():
                    calls[key] += count
                    sizes[key] += size
        return {key: (calls[key], sizes[key]) for key in calls}


_resize, _timed = torch.UntypedStorage.resize_, TimedPasses.timed
_reduce = _fsdp_param_group.foreach_reduce


def whole_step(
    config: JobConfig, model: TransformerConfig, layout: Layout, rank: int, block: int | None = None
) -> WholeStep:
    """Run one process's step. ``block``: elements that AdamW takes at once on a CPU; None: a GPU's kernel."""
    work, device, compiles = workload_of(config, model, layout), torch.device("cpu"), config.compile.enable
    if config.optimizer.name == "muon" and config.optimizer.newton_schulz_dtype is None:
        config = edit(config, {"optimizer.newton_schulz_dtype": "bfloat16"})  # as on a GPU
    built, mode = edit(config, {"compile.enable": False}), fake_tensor_mode()
    _clear_sharding_prop_cache()  # which has the meshes of earlier steps, whose process groups are gone
    with (
        fake_process_group(rank, layout.num_processes),
        as_on_gpu(mode),
        mock.patch.object(recipe, "SPLIT_BACKWARD", () if compiles else recipe.SPLIT_BACKWARD),
    ):
        mesh = build_mesh(layout, "cpu")
        recorder = StepRecorder()
        with parts.WithoutInit():
            parallel_model = build_parallel_model(built, model, mesh, device)
        for stage in parallel_model.stages:
            without_host_reads(stage.module, work.expert_load)
            recorder.follow_recomputation(stage.module)
            host = LayerInFlight(recorder)
            for layer in stage.module.modules():
                if isinstance(layer, offload.Offloaded) and not compiles:
                    layer.offload_host = host
        length = sample_length(config, model).positions
        runner = run_batches(built, parallel_model, mesh, device, work.micro_batch_size, length)
        with mode:
            optimizer = built_optimizer(config, parallel_model)
            state = built_state(parallel_model, optimizer)
        if type(optimizer) is FusedAdamW:
            optimizer.write_copies(parallel_model.copied_units())
        layers = _compiled_layers(recorder, parallel_model) if compiles else nullcontext()
        with mode, recorder, _as_in_training(recorder, block), layers:
            for parameter in parallel_model.parameters():
                recorder.number_of(parameter.data)
            for value in (value for values in optimizer.state.values() for value in values.values()):
                if isinstance(value, torch.Tensor):
                    recorder.ignore(value)
            batches = [microbatch(TraceKey.of(work)) for _ in range(work.microbatches)]
            runner.forward_backward(batches, lambda losses, _: losses.sum())
            _finish(recorder, parallel_model, optimizer, layout, mesh)
    passes, last = (state.optimizer + level for level in recorder.levels())
    inside = (_PASSES, *range(_UPDATE + 1, len(recorder.segments)))
    sent = (recorder.sent(*segments) for segments in (inside, (_SUMS,), (_UPDATE,)))
    return WholeStep(passes, last, state.parameters, state.optimizer, *sent)


def _finish(
    recorder: StepRecorder, model: ParallelModel, optimizer: torch.optim.Optimizer, layout: Layout, mesh: Any
) -> None:
    """What the trainer does after the passes. AdamW of torch reads numbers that fake tensors lack, and is left out."""
    recorder.enter(_SUMS, FORWARD)
    sum_partial_gradients([p for stage in model.stages for p in partial_parameters(stage.module)])
    if layout.pipeline > 1:
        sum_gradients_of_copies(model, mesh.get_group("pp"), layout.stage_ranks)
    recorder.enter(_NORM, FORWARD)
    factor = Gradients(model.counted_parameters(), mesh, model.expert_mesh).norm().double()
    recorder.enter(_UPDATE, FORWARD)
    skip: Any = torch.zeros(()) if isinstance(optimizer, ShardedOptimizer) else False  # which the host reads
    if not isinstance(optimizer, torch.optim.AdamW):
        update(optimizer, Gradients(model.parameters(), mesh, model.expert_mesh), 1.0, factor, skip)


@contextmanager
def _as_in_training(recorder: StepRecorder, block: int | None) -> Iterator[None]:
    """Let storages that are resized be seen, and updates run that ask for other processes' objects or a GPU's kernel.

    In an exchange of matrices, each process is taken to have as large a part of them as this one.
    """

    def on_real_tensors(function: Any) -> Any:  # with which torch computes offsets and makes meshes
        def call(*args: Any) -> Any:
            with _disable_current_modes():
                return function(*args)

        return call

    kernel: Any = adamw.update_of if block else lambda _: lambda *_: None  # which needs no room
    with ExitStack() as stack:
        for owner, name, new in (
            (torch.UntypedStorage, "resize_", lambda *of: recorder.resize(*of)),
            (init, "local_shape_and_offset", on_real_tensors(init.local_shape_and_offset)),
            (shards, "flattened", on_real_tensors(shards.flattened)),
            (dist, "all_gather_object", lambda *_, **__: None),
            (adamw, "update_of", kernel),
            (FakeWork, "is_completed", lambda _: False),  # a send takes time, though not to torch 2.15's fake group
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.enter_context(mock.patch.dict(adamw.BLOCK, cpu=block or adamw.BLOCK["cpu"]))
        yield


class LayerInFlight(offload.HostMemory):
    """Lets offload work as with a stream: a layer's tensors leave once the next layer has been computed."""

    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__(torch.device("cpu"))
        self.stream: Any = "side stream"
        self.recorder = recorder

    def copies(self) -> Any:
        return nullcontext()

    def event(self) -> None:
        pass

    def store(self, flat: torch.Tensor) -> torch.Tensor:
        self.recorder.current.add(Collective("to_host", HOST, False), flat.nbytes)
        return flat.new_empty(1).expand(flat.shape)  # no memory of the device

    def load(self, buffer: torch.Tensor, flat: torch.Tensor | None) -> None:
        self.recorder.current.add(Collective("from_host", HOST, False), buffer.numel() * buffer.element_size())


@contextmanager
def _compiled_layers(recorder: StepRecorder, model: ParallelModel) -> Iterator[None]:
    """Make each microbatch's layers segments of their own, which are compiled: entry, inputs, layers, head."""
    counts = {stage.index: len(stage.module.layers) for stage in model.stages}
    first, base = dict[tuple[int, int], int](), 0

    @contextmanager
    def timed(runner: Any, action: Action) -> Iterator[None]:
        nonlocal base
        key, count = (action.stage, action.microbatch), counts[action.stage]
        if action.kind == "F":
            first[key] = len(recorder.segments)
            recorder.segments += [Segment() for _ in range(count + 3)]
            recorder.compiled_layers.update(range(first[key] + 2, first[key] + 2 + count))
        base = first[key]
        if action.kind == "F":
            recorder.enter(base, FORWARD)
        else:
            recorder.enter(base + count + 2, WEIGHTS if action.kind == "W" else BACKWARD)
        with _timed(runner, action):
            yield

    def reduce(*of: Any, **named: Any) -> Any:  # FSDP2's own operators run one by one, in no layer's graph
        layer, recorder.segment = recorder.segment, _PASSES
        try:
            return _reduce(*of, **named)
        finally:
            recorder.segment = layer

    def reached(output: torch.Tensor, index: int) -> torch.Tensor:
        """The forward pass leaves a part with this output for the next one; the backward pass comes the other way."""
        part = base + index
        if output.requires_grad:
            output.register_hook(lambda gradient: recorder.enter(part, BACKWARD, gradient))
        recorder.enter(part + 1, FORWARD)
        return output

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(TimedPasses, "timed", timed))
        stack.enter_context(mock.patch.object(_fsdp_param_group, "foreach_reduce", reduce))
        for stage in model.stages:
            for name, new in _parts_of(stage.module, reached, lambda: recorder.enter(base + 2, FORWARD)).items():
                stack.enter_context(mock.patch.object(stage.module, name, new))
        yield


def _parts_of(
    module: Transformer, reached: Callable[[torch.Tensor, int], torch.Tensor], has_inputs: Callable[[], None]
) -> dict[str, Any]:
    """The methods of a stage that tell when a part of it ends."""
    embed, contexts, run_layer = module.embed, module.contexts, module.run_layer
    numbers = {id(layer): number for number, layer in enumerate(module.layers.values())}

    def contexts_(batch: Batch) -> Any:
        found = contexts(batch)
        has_inputs()
        return found

    return {
        "embed": lambda batch: reached(embed(batch), 0),
        "contexts": contexts_,
        "run_layer": lambda layer, *inputs: reached(run_layer(layer, *inputs), 2 + numbers[id(layer)]),
    }
