"""Sorts every operator of a traced microbatch into its segment and pass, and follows the storages that are alive."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from math import gcd, prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import noop_context_fn

from titan_like.parallel.activation_checkpoint import Recomputed
from titan_like.planner.trace.levels import BACKWARD, FORWARD, Event, Storages, View, events_as_compiled, fill_in_levels
from titan_like.planner.trace.program import EXPERTS_END, HOST, Attention, Collective, Gemm, Pass, Segment
from titan_like.planner.trace.stand_ins import DECOMPOSED
from titan_like.torch_private import TorchDispatchMode, local_tensor, process_group, schema_of

_GROUPED = {"_grouped_mm", "expert_product", "expert_weight_gradient"}  # with a matrix for each group of rows
_GEMMS = {"mm", "addmm", "bmm", "baddbmm", "addmm_"} | _GROUPED
_FREE = {"wait_tensor", "empty", "new_empty", "empty_like", "empty_strided", "detach", "lift_fresh"}
# By the start of torch's name for them.
_COLLECTIVES = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "all_gather": "all_gather", "_allgather": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter": "reduce_scatter", "all_to_all": "all_to_all",
    "alltoall": "all_to_all", "send": "send", "recv": "receive",
}  # fmt: skip
_OUTSIDE = -1  # of all groups of fused operators: a GEMM or a message


class FusedGroup(NamedTuple):
    """Pointwise operators between two GEMMs or messages, which a compiler can make one kernel."""

    owner: Pass
    recomputed: bool
    reads: dict[int, int]  # storage → bytes
    writes: dict[int, int]


class Recorder(TorchDispatchMode):
    """Records what runs inside it. `enter` says which segment and pass that is."""

    def __init__(self, segments: list[Segment], compiled: range = range(0)) -> None:
        """``compiled``: the segments of which a compiler makes one graph each for both passes."""
        super().__init__()
        self.segments, self.compiled = segments, compiled
        self.is_recomputing = False  # whether activation checkpointing repeats a forward pass
        self.groups: dict[str, tuple[int, int]] = {}  # as `Program.groups`
        self.segment, self.which = 0, FORWARD
        self.events: list[Event] = []
        self._alive: dict[int, tuple[int, int]] = {}  # id of a storage → its number, its bytes
        self._references: dict[int, weakref.ref] = {}
        self._last_number = 0
        self._made_in = [0]  # segments, by number of a storage
        self._gradients: dict[int, int] = {}  # storage of a parameter's gradient → elements
        self._fused = [FusedGroup(segments[0].forward, False, {}, {})]
        self._used_in: defaultdict[int, set[int]] = defaultdict(set)  # storage → fused groups
        # Storages that a compiler may compute twice → those they come from, and what of them.
        self._sources: dict[int, list[tuple[int, View]]] = {}
        self._needed: set[int] = set()  # storages that a backward pass, or another segment, needs in memory
        # Storage → bytes of its views that backward passes read.
        self._views: defaultdict[int, dict[View, int]] = defaultdict(dict)
        self._offloaded: defaultdict[int, set[int]] = defaultdict(set)  # segment → storages

    def enter(self, segment: int, which: int, gradient: torch.Tensor | None = None) -> None:
        """Begin a pass over a segment, a backward pass from this gradient."""
        self.segment, self.which = segment, which
        self._end_fusion()
        boundary = 0 if gradient is None else self.number_of(gradient)
        self.events.append(Event(segment, which, 0, 0, boundary))

    def follow_experts(self, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Note when the backward pass of a layer's experts is over, as FSDP2 does: by the gradient of their input."""
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self.events.append(Event(self.segment, BACKWARD, EXPERTS_END, 0)))

    def follow_recomputation(self, model: nn.Module) -> None:
        """Tell apart what activation checkpointing repeats."""
        for module in model.modules():
            if isinstance(module, Recomputed):
                contexts = partial(self._contexts, module.checkpoint_options.get("context_fn", noop_context_fn))
                module.checkpoint_options = {**module.checkpoint_options, "context_fn": contexts}

    def _contexts(self, contexts: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        forward, repeated = contexts()
        return forward, _Repeated(self, repeated)

    @property
    def current(self) -> Pass:
        """The pass that operators are recorded into now."""
        return self.segments[self.segment].passes[self.which]

    # --- Memory -------------------------------------------------------------------------------------------------------

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage. A new storage adds to the memory in use."""
        storage = local_tensor(tensor).untyped_storage()
        if id(storage) not in self._alive:
            self._add(storage, storage.nbytes())
        return self._alive[id(storage)][0]

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave a parameter or buffer out of the memory in use."""
        self._add(local_tensor(tensor).untyped_storage(), 0)

    def _add(self, storage: torch.UntypedStorage, size: int) -> None:
        key, self._last_number = id(storage), self._last_number + 1
        self._alive[key] = self._last_number, size
        self._made_in.append(self.segment)
        self._references[key] = weakref.ref(storage, lambda _: self._free(key))
        self.events.append(Event(self.segment, self.which, self._last_number, size, repeats=self.is_recomputing))

    def _free(self, key: int) -> None:
        number, size = self._alive.pop(key)
        del self._references[key]
        self.events.append(Event(self.segment, self.which, number, -size, repeats=self.is_recomputing))

    def is_gradient(self, gradient: torch.Tensor) -> None:
        """Tell that this is a parameter's complete gradient. It does not count as an activation of its pass."""
        self._gradients[self.number_of(gradient)] = local_tensor(gradient).numel()

    # --- Operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DECOMPOSED:
            with self:
                return DECOMPOSED[func](*args, **kwargs)
        result = func(*args, **kwargs)
        name = schema_of(func).name.partition("::")[2]
        inputs = list(_tensors(args))
        outputs = list(_tensors([result, *kwargs.values()]))
        changes_inputs = schema_of(func).is_mutable
        input_numbers = {self.number_of(tensor) for tensor in inputs}
        self._needed |= {number for number in input_numbers if self._made_in[number] != self.segment}
        if name == "to_host":
            self._offloaded[self.segment] |= input_numbers
            return result
        written = {self.number_of(tensor): tensor for tensor in outputs}
        is_message = "c10d" in func.namespace
        is_view = not (changes_inputs or is_message) and written.keys() <= input_numbers
        if name in _FREE or name.startswith("_foreach") or is_view:  # lists are data parallelism's own
            return result
        for tensor in inputs if self.which == BACKWARD else ():
            self._views[self.number_of(tensor)][_view(tensor)] = _bytes(tensor)
        if changes_inputs and not outputs:
            outputs = inputs[:1]
        recomputed, current = self.is_recomputing, self.current
        current.launches += 1
        work: Gemm | Attention | Collective | None = None
        size = 0
        if is_message:
            work, size = self._collective(name, args, inputs, outputs, recomputed)
        elif name in _GEMMS:
            work = _gemm(name, inputs, recomputed)
        elif "attention" in name:
            work = _attention(name, args, inputs, recomputed)
        else:
            self._pointwise(inputs, outputs, recomputed)
            if self.which == FORWARD and not (changes_inputs or torch.Tag.nondeterministic_seeded in func.tags):
                read = max(map(_bytes, inputs), default=0)
                for number in written.keys() - input_numbers:
                    if 4 * _bytes(written[number]) >= read:  # else it is a reduction
                        self._sources[number] = [(self.number_of(tensor), _view(tensor)) for tensor in inputs]
            return result
        current.add(work, size)
        for number in input_numbers:
            self._used_in[number].add(_OUTSIDE)
        self._needed |= input_numbers if self.which == BACKWARD else set()
        current.fused_launches += 1
        self._end_fusion()
        return result

    def _collective(
        self, name: str, args: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor], recomputed: bool
    ) -> tuple[Collective | None, int]:
        kind = next((kind for start, kind in _COLLECTIVES.items() if name.startswith(start)), name)
        boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        group = process_group(args[-1]) if boxed is None else dist.ProcessGroup.unbox(boxed)
        if group.size() == 1:
            return None, 0
        label, ranks = group.group_desc.removeprefix("mesh_"), dist.get_process_group_ranks(group)
        self.groups[label] = group.size(), ranks[1] - ranks[0]
        moved = outputs[:1] if kind == "all_gather" else inputs
        if kind == "all_to_all":  # the busiest rank receives more than it sends, or returns more than it gets back
            moved = max(inputs, outputs, key=lambda tensors: sum(map(_bytes, tensors)))
        moved = moved[1:] if name.startswith("_reduce_scatter_base") else moved  # whose first input is its result
        return Collective(kind, label, recomputed), sum(map(_bytes, moved))

    def _pointwise(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor], recomputed: bool) -> None:
        if recomputed != self._fused[-1].recomputed:
            self._end_fusion(recomputed)
        group, number = self._fused[-1], len(self._fused) - 1
        reads = {self.number_of(tensor): _bytes(tensor) for tensor in inputs}
        writes = {self.number_of(tensor): _bytes(tensor) for tensor in outputs}
        moved = sum(reads.values()) + sum(writes.values())
        self.current.eager_bytes = _plus(self.current.eager_bytes, moved, recomputed)
        for storage, size in reads.items():
            if storage not in group.writes:
                group.reads[storage] = max(size, group.reads.get(storage, 0))
            self._used_in[storage].add(number)
        group.writes.update(writes)

    def _end_fusion(self, recomputed: bool = False) -> None:
        if not (self._fused[-1].reads or self._fused[-1].writes):
            self._fused.pop()
        self._fused.append(FusedGroup(self.current, recomputed, {}, {}))

    # --- Sums ---------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Fill in what is known only at the end: memory, and what fused operators read and leave for others."""
        inside = {
            storage
            for number, group in enumerate(self._fused)
            for storage in group.writes
            if self._used_in[storage] == {number} and storage not in self._gradients
        }
        storages = Storages(self._sources, self._needed, inside, self._views)
        events, moved = events_as_compiled(self.events, self.compiled, storages, self._offloaded)
        for index, sizes in moved.items():
            for part, kind in ((self.segments[index].forward, "to_host"), (self.segments[index].backward, "from_host")):
                part.collectives[Collective(kind, HOST, False)] = len(sizes), sum(sizes)
        fill_in_levels(self.segments, events, self._gradients)
        for number, (owner, recomputed, reads, writes) in enumerate(self._fused):
            if reads or writes:
                left = sum(size for storage, size in writes.items() if self._used_in[storage] - {number})
                owner.fused_bytes = _plus(owner.fused_bytes, sum(reads.values()) + left, recomputed)
                owner.fused_launches += 1


class _Repeated:
    """Marks what runs in a context as recomputed. It keeps the context and its tensors for as long as torch does."""

    def __init__(self, recorder: Recorder, context: Any) -> None:
        self.recorder, self.context = recorder, context

    def __enter__(self) -> None:
        self.recorder.is_recomputing = True
        self.context.__enter__()

    def __exit__(self, *error: Any) -> Any:
        self.recorder.is_recomputing = False
        return self.context.__exit__(*error)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                yield local_tensor(item)


def _view(tensor: torch.Tensor) -> View:
    return tensor.storage_offset(), *tensor.shape


def _bytes(tensor: torch.Tensor) -> int:
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _plus(total: tuple[int, int], size: int, recomputed: bool) -> tuple[int, int]:
    return total[0] + size, total[1] + size * recomputed


def _gemm(name: str, inputs: list[torch.Tensor], recomputed: bool) -> Gemm:
    a, b = inputs[-2:] if name in ("addmm", "addmm_", "baddbmm") else inputs[:2]
    (m, k), n, batch = a.shape[-2:], b.shape[-1], prod(a.shape[:-2])
    if name in _GROUPED:
        batch = len(inputs[2])
        if a.ndim == b.ndim == 2:  # gradients of matrices, whose sums run over the rows of a group
            m, k = (m, k) if name == "_grouped_mm" else (k, m)
            k //= batch
        else:
            m, n = m // batch, b.shape[2] if b.shape[1] == k else b.shape[1]
    # Fast kernels need rows of whole 16 bytes, so what counts are strides, not sizes.
    alignment = gcd(16, n, *(max(matrix.stride()[-2:]) for matrix in (a, b)))
    return Gemm(m, n, k, batch, recomputed, alignment, name in _GROUPED)


def _attention(name: str, args: Any, inputs: list[torch.Tensor], recomputed: bool) -> Attention:
    backward = "backward" in name
    q, k = inputs[backward : backward + 2]
    causal = next((arg for arg in args if isinstance(arg, bool)), False)
    window = next((arg for arg in args if type(arg) is int), 0)
    batch, heads, queries, head_dim = q.shape
    return Attention(batch, heads, queries, k.shape[-2], head_dim, causal, backward, recomputed, window)
