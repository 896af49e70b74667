"""A traced program: what one process computes, sends and keeps for one microbatch, as plain data.

A model is traced in segments: the entry (everything before the layers), the inputs that all layers take (such as rotary
tables), one layer of each kind, and the head with the loss. Depth, stages, schedules and data parallelism repeat and
combine segments, which is arithmetic; nothing here depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter

HOST = "host"  # the group of a `Collective` that is a copy to or from the host's memory
EXPERTS_END = -1  # in place of an event's storage: the backward pass of a layer's experts is over


class Gemm(NamedTuple):
    """``batch`` products [m, k] · [k, n]."""

    m: int
    n: int
    k: int
    batch: int
    recomputed: bool  # by activation checkpointing
    alignment: int  # elements, at most 16: distances between rows of all three matrices are multiples of it
    grouped: bool = False  # products of experts, each of which has its own number of rows

    @property
    def flops(self) -> int:
        """FLOPs; a multiply-add counts as 2."""
        return 2 * self.m * self.n * self.k * self.batch


class Attention(NamedTuple):
    """One fused attention kernel."""

    batch: int
    heads: int  # of queries
    queries: int
    keys: int
    head_dim: int
    causal: bool
    backward: bool
    recomputed: bool
    window: int = 0  # most keys that a query sees; 0: all; negative: of chunks, whose positions see only each other

    def flops(self, causal: bool = False) -> int:
        """FLOPs of two GEMMs forward and four backward within the window.

        ``causal`` counts what a causal mask leaves, half of the matrix without a window.
        """
        products, seen = 4 if self.backward else 2, min(abs(self.window) or self.keys, self.keys)
        unmasked = 2 * products * self.batch * self.heads * self.queries * seen * self.head_dim
        if causal and self.causal and self.window < 0:
            return unmasked // 2
        return unmasked * (2 * self.keys - seen) // (2 * self.keys) if causal and self.causal else unmasked


class Collective(NamedTuple):
    """All messages of one kind in one process group."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, send, receive
    group: str  # as the recipe calls it; `Program.groups` says where its ranks are
    recomputed: bool


class Moment(NamedTuple):
    """One of the fullest moments of a pass."""

    activations: int  # bytes above the level at the start of the segment's forward pass
    gradients: int  # elements of parameters' gradients that the pass has produced so far
    repeats: bool = False  # whether a backward pass repeats operators of the forward pass


def _from_pairs(value: Any) -> Any:
    return value if isinstance(value, dict) else {tuple(key): amount for key, amount in value}


_Key = TypeVar("_Key")
_Amount = TypeVar("_Amount")
# A dictionary that becomes pairs in JSON, where the keys of objects must be strings.
Amounts = Annotated[
    dict[_Key, _Amount], BeforeValidator(_from_pairs), PlainSerializer(lambda amounts: list(amounts.items()))
]


@dataclass
class Pass:
    """The operators, messages and memory of the forward or backward pass over one segment."""

    gemms: Amounts[Gemm, int] = field(default_factory=dict)  # → how often
    attention: Amounts[Attention, int] = field(default_factory=dict)
    collectives: Amounts[Collective, tuple[int, int]] = field(default_factory=dict)  # → calls, bytes
    # Bytes that all other operators read and write: each by itself, and with neighbours between two GEMMs or messages
    # as one kernel. The second figure of each pair is the recomputed part.
    eager_bytes: tuple[int, int] = (0, 0)
    fused_bytes: tuple[int, int] = (0, 0)
    launches: int = 0  # kernels, each operator by itself
    fused_launches: int = 0
    moments: list[Moment] = field(default_factory=list)  # moments that may be the fullest

    def add(self, work: Gemm | Attention | Collective | None, size: int) -> None:
        """Count an operator, or a message of ``size`` bytes."""
        if isinstance(work, Gemm):
            self.gemms[work] = self.gemms.get(work, 0) + 1
        elif isinstance(work, Attention):
            self.attention[work] = self.attention.get(work, 0) + 1
        elif work is not None:
            calls, total = self.collectives.get(work, (0, 0))
            self.collectives[work] = calls + 1, total + size

    @property
    def flops(self) -> int:
        """FLOPs of GEMMs and attention, with those that activation checkpointing repeats."""
        of_gemms = sum(count * gemm.flops for gemm, count in self.gemms.items())
        return of_gemms + sum(count * core.flops() for core, count in self.attention.items())


class Parameter(NamedTuple):
    """A parameter on one process, before ZeRO shards it."""

    name: str
    shape: tuple[int, ...]
    unit: str  # first module of its FSDP unit; "" is the root
    sharers: str  # mesh dimension over which ZeRO shards it
    deferred: bool  # the second part of a split backward pass computes its gradient
    partial: bool  # sequence parallelism leaves its gradient partial
    kinds: tuple[int, ...]  # of the layers that share it; empty for parameters of a single segment
    position: int  # of its gradient, in the order in which backward passes complete them
    matrices: int = 1  # that are stacked in it
    precedes_layers: bool = False  # in its module, wherever it is used

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(eq=False)
class Segment:
    """A layer, or another part of the model. Compared by identity, because stages share it."""

    forward: Pass = field(default_factory=Pass)
    backward: Pass = field(default_factory=Pass)
    weights: Pass = field(default_factory=Pass)  # the second part of a split backward pass
    kept: int = 0  # bytes that stay from the forward to the backward pass: the output too, but not the input
    deferred: int = 0  # bytes that stay from the first to the second part of a split backward pass
    output: int = 0  # bytes
    at_experts: int = 0  # bytes of activations when the experts' gradients are complete
    parameters: list[Parameter] = field(default_factory=list)  # that are trained
    frozen: list[Parameter] = field(default_factory=list)

    @property
    def passes(self) -> tuple[Pass, Pass, Pass]:
        """The passes, in the order of their fields."""
        return self.forward, self.backward, self.weights

    @cached_property
    def produced(self) -> int:
        """Elements of the gradients that the backward pass completes."""
        return max((moment.gradients for moment in self.backward.moments), default=0)

    @cached_property
    def matrices(self) -> int:
        """Elements of parameters whose gradients a split backward pass defers."""
        return sum(parameter.elements for parameter in self.parameters if parameter.deferred)

    @cached_property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter."""
        return max((parameter.elements for parameter in self.parameters), default=0)

    @cached_property
    def offloaded(self) -> int:
        """Bytes that a layer moves to the host's memory."""
        return sum(size for (_, group, _), (_, size) in self.forward.collectives.items() if group == HOST)

    @cached_property
    def elements(self) -> dict[str, int]:
        """Elements of trained parameters by the mesh dimension over which ZeRO shards them."""
        return _by_sharers(self.parameters)

    @cached_property
    def frozen_elements(self) -> dict[str, int]:
        """Elements of frozen parameters, in the same form."""
        return _by_sharers(self.frozen)


def _by_sharers(parameters: Iterable[Parameter]) -> dict[str, int]:
    elements: dict[str, int] = {}
    for parameter in parameters:
        elements[parameter.sharers] = elements.get(parameter.sharers, 0) + parameter.elements
    return elements


@dataclass
class Program:
    """One microbatch on one process."""

    entry: Segment
    inputs: Segment  # what every stage computes for its layers before them
    layers: list[Segment]  # one of each kind
    head: Segment
    groups: dict[str, tuple[int, int]]  # process group → number of ranks, distance between neighbours

    def segments(self) -> list[Segment]:
        """All segments, in the order of the forward pass."""
        return [self.entry, self.inputs, *self.layers, self.head]

    @cached_property
    def tree(self) -> dict[str, Any]:
        """The program as lists, numbers and strings, for JSON."""
        return _ADAPTER.dump_python(self, mode="json")

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Program:
        """The inverse of `tree`. Raises a `ValueError` if something is missing."""
        return _ADAPTER.validate_python(tree)

    def grown(self, double: Program, samples: int) -> Program:
        """Estimate the program of a larger microbatch from this one, of a single sample, and ``double``, of two.

        Numbers grow in proportion to the samples. Messages and the fullest moments may differ. Raises a `DifferError`
        if the programs have different operators.
        """
        return Program.from_json(_grown(self.tree, double.tree, samples))


_ADAPTER = TypeAdapter(Program)


class DifferError(Exception):
    """Two programs differ by more than numbers."""


def _grown(single: Any, double: Any, samples: int, name: str = "") -> Any:
    if isinstance(single, bool | str) or single is None:
        if single != double:
            raise DifferError
        return single
    if isinstance(single, int):
        return single + (samples - 1) * (double - single)
    if isinstance(single, dict):
        return {key: _grown(value, double[key], samples, key) for key, value in single.items()}
    try:
        if len(single) != len(double):
            raise DifferError
        return [_grown(a, b, samples) for a, b in zip(single, double, strict=True)]
    except DifferError:
        if name == "collectives":
            return [[kind, [samples * calls, samples * size]] for kind, (calls, size) in single]
        if name == "moments":
            return [[samples * activations, *rest] for activations, *rest in single]
        raise


def fullest(moments: Iterable[Moment]) -> list[Moment]:
    """The moments that no other one matches or exceeds in both activations and gradients."""
    front: list[Moment] = []
    for moment in sorted(set(moments), key=lambda candidate: (candidate.gradients, candidate.activations)):
        while front and front[-1].activations <= moment.activations:
            front.pop()
        front.append(moment)
    return front
