"""The most bytes that one process holds during a step, composed from a traced microbatch.

`occupancy` says what a schedule holds at each moment, in numbers of microbatches and states of a stage; `StageMemory`
says what each of these takes. The trace knows activations. What is added here is how data parallelism keeps weights and
gradients: FSDP2's units, its buffers, `ComputeCopies`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np

from titan_like.optim.state_size import OptimizerState
from titan_like.parallel.gradients import UNIT_BYTES
from titan_like.planner.occupancy import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    FINISHED,
    FIRST_PARTS,
    NO_GRADIENTS,
    SUMS,
    SUMS_AND_FIRST_PARTS,
    Occupancy,
    PassKind,
    occupancy,
    splits_backward,
)
from titan_like.planner.stages import Sharding, StageProgram, shard_rows, sharding_of, stages_of_rank
from titan_like.planner.trace.program import Segment
from titan_like.planner.workload import Workload, pipeline_of


class StepMemory(NamedTuple):
    """Bytes on one process at the fullest moment of a step."""

    weights: int  # master weights
    optimizer: int
    gradients: int
    gathered: int  # weights in the type of computation, and buffers to gather them
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


class Usage(NamedTuple):
    """Bytes at a moment of a pass, of one stage."""

    activations: int
    gradients: int
    gathered: int
    reduced: int = 0  # not bytes: elements of gradients that the pass has reduced, of which a process keeps its shard


def _fullest(moments: Iterable[Usage]) -> Iterator[Usage]:
    """Those of which no other one has as much of bytes and of reduced elements."""
    most = -1
    for one in sorted(moments, key=lambda moment: (sum(moment[:3]), moment.reduced), reverse=True):
        if one.reduced > most:
            most = one.reduced
            yield one


class Keeping(NamedTuple):
    """`Sharding` as far as the usage of a pass depends on it: not on the number of shards."""

    zero_stage: int
    wrapped: bool
    copied: bool
    buffered: bool  # gathers go through a buffer, because there are several shards
    compute: int
    reduce: int
    master: int


class Placed(NamedTuple):
    """A segment in its stage. Elements are those of parameters before ZeRO shards them."""

    segment: Segment
    before: int  # bytes that earlier segments keep
    later: int  # bytes that later segments leave to a second part of the backward pass, or to its end
    elements: int
    experts: int  # of these, those that are shared by other processes, whose gradients are reduced sooner
    unit: int  # elements of its unit of communication; 0 outside layers
    largest: int  # of the unit's experts, or of its other elements
    ends_unit: bool  # whether the unit's gradients are complete after its backward pass
    following: int  # elements of the unit that the backward pass gathers next
    repeats: int  # equal layers before it whose moments lie between those of their neighbours


class StageMemory:
    """What one stage holds in each state, and during each kind of pass."""

    def __init__(self, stage: StageProgram, keeping: Keeping) -> None:
        self.stage, self.keeping = stage, keeping
        self.received = 0 if stage.is_first else stage.message  # bytes of its input
        # Between the passes over a microbatch: the output is sent and freed, the input is not.
        kept = sum(segment.kept for segment in stage.segments)
        self.held = kept + self.received - (0 if stage.is_last else stage.message)
        self.deferred = sum(segment.deferred for segment in stage.segments)
        parameters = [parameter for unit in stage.units for parameter in unit.parameters]
        self.elements = sum(parameter.elements for parameter in parameters)
        self.matrices = sum(parameter.elements for parameter in parameters if parameter.deferred)
        self.largest_parameter = max((parameter.elements for parameter in parameters), default=0)
        sizes = {"": 0, "layers": 0}
        for unit in stage.units:
            sizes[unit.name] = sizes.get(unit.name, 0) + unit.elements
        self.root = sizes.pop("")
        in_layers = sizes.pop("layers")
        self.table = sum(sizes.values())  # in units before the layers
        self.placed = _placed(stage, self.table)
        first_unit = next((part.unit for part in self.placed if part.unit), 0) if in_layers else 0
        # FSDP2 reduces the root after the layers, and then the table, and keeps the last input.
        self.last_reduced = self.table or self.root or first_unit
        self._moments: dict[tuple, list[Usage]] = {}  # by kind of pass
        self._usages: dict[tuple, Usage] = {}  # by kind of pass and shard
        self._states: dict[int, list[int]] = {}

    def gathered(self, after: int) -> int:
        """Bytes of gathered weights after a forward or a backward pass."""
        if not self.keeping.wrapped:
            return 0
        if self.keeping.zero_stage < 3:
            return self.keeping.compute * self.elements
        return self.keeping.compute * self.root if after == AFTER_FORWARD else 0

    def gradients(self, state: int, shard: int) -> int:
        """Bytes of gradients between passes. ``shard``: elements of this process's shard."""
        keep = self.keeping
        accumulated, retained = self._accumulated(state)
        return accumulated + retained + keep.master * shard * self._has_shards(state)

    def _has_shards(self, state: int) -> bool:
        """Whether reduced gradients exist between passes."""
        keep = self.keeping
        return keep.wrapped and (state == FINISHED or (keep.zero_stage >= 2 and state in (SUMS, SUMS_AND_FIRST_PARTS)))

    def _accumulated(self, state: int) -> tuple[int, int]:
        """Bytes of whole gradients between passes, and of the input of the last reduction."""
        keep, vectors = self.keeping, self.elements - self.matrices
        if state == NO_GRADIENTS or (keep.wrapped and state == FINISHED):
            return 0, 0
        if not keep.wrapped:  # copies have whole sums as soon as one of their gradients exists
            first_parts = state == FIRST_PARTS and not keep.copied
            return keep.master * (vectors if first_parts else self.elements), 0
        if keep.zero_stage < 2:
            return keep.reduce * (vectors if state == FIRST_PARTS else self.elements), 0
        waiting = vectors if state in (FIRST_PARTS, SUMS_AND_FIRST_PARTS) else 0
        return keep.reduce * waiting, keep.reduce * self.last_reduced * (state != FIRST_PARTS)

    def states(self, shard: int) -> list[int]:
        """Bytes of each state, in the order of `Occupancy.counts`. ``shard``: elements of this process's shard."""
        if shard not in self._states:
            weights = [self.gathered(after) for after in (AFTER_FORWARD, AFTER_BACKWARD)]
            gradients = [self.gradients(state, shard) for state in (FIRST_PARTS, SUMS, SUMS_AND_FIRST_PARTS, FINISHED)]
            self._states[shard] = [self.held, self.deferred, *weights, *gradients]
        return self._states[shard]

    def usage(self, one: PassKind, shard: int) -> Usage:
        """The fullest moment of a pass: bytes beyond the activations that the stage holds before it."""
        key = one[1:], shard
        if key not in self._usages:
            if key[0] not in self._moments:
                moments = {"F": self._forward, "W": self._second_part}.get(one.kind, self._backward)(one)
                self._moments[key[0]] = list(_fullest(moments))
            factor, sums = self.keeping.master, self.keeping.master * shard * self._has_shards(one.gradients)

            def with_shard(moment: Usage) -> Usage:
                reduced = 0 if sums else factor * moment.reduced * shard // self.elements
                return moment._replace(gradients=moment.gradients + sums + reduced, reduced=0)

            self._usages[key] = max(map(with_shard, self._moments[key[0]]), key=sum)
        return self._usages[key]

    def _forward(self, one: PassKind) -> Iterator[Usage]:
        keep, gradients = self.keeping, sum(self._accumulated(one.gradients))
        buffer = 0
        for part in self.placed:
            unit, largest = (part.unit, part.largest) if part.unit else (0, 0)
            if part is self.placed[0] and self.table:
                unit = largest = self.table
            weights = 0
            if keep.wrapped and keep.zero_stage == 3:
                # The unit's weights and the buffer in which they arrived. The head has the last layer's buffer.
                buffer = keep.compute * largest or buffer
                weights = keep.compute * (self.root + unit) + buffer
            elif keep.wrapped:
                buffer = keep.compute * largest * (one.is_first and keep.buffered) or buffer
                weights = keep.compute * self.elements + buffer
            activations = max((moment.activations for moment in part.segment.forward.moments), default=0)
            yield Usage(self.received + part.before + activations, gradients, weights)

    def _backward(self, one: PassKind) -> Iterator[Usage]:
        """Segment by segment, from the last. Gradients are fresh, then accumulated or reduced."""
        gradients = _Gradients.of(self, one)
        freed = 0
        for part in reversed(self.placed):
            held = self.received + part.before + part.later - self.held
            if part is not self.placed[-1] and not self.stage.is_last:
                held += self.stage.message  # the gradient of the stage's output
            weights = self._weights_during(part) - freed
            for moment in part.segment.backward.moments:
                during = gradients.during(part, moment.gradients)
                yield Usage(held + moment.activations, during, weights, gradients.reduced)
            gradients.produce(part)
            if part.ends_unit:
                if one.is_last and one.kind == "B" and self.keeping.wrapped and self.keeping.zero_stage < 3:
                    freed += self.keeping.compute * part.unit * (1 + part.repeats)
                reduced = gradients.reduced
                yield Usage(held + part.segment.output, gradients.complete(part.unit, part.repeats), weights, reduced)
        weights = self._weights_at_end() - freed
        for size in (self.root, self.table):
            if size:
                reduced = gradients.reduced
                yield Usage(self.received + self.deferred - self.held, gradients.complete(size), weights, reduced)

    def _second_part(self, one: PassKind) -> Iterator[Usage]:
        """All products are computed before any is accumulated or reduced."""
        keep, (accumulated, retained) = self.keeping, self._accumulated(one.gradients)
        weights = self.gathered(AFTER_FORWARD) if keep.zero_stage < 3 else 0
        fresh = keep.compute * self.matrices
        if not keep.wrapped and not keep.copied:
            fresh = min(fresh, keep.compute * self.largest_parameter) if not one.is_first else fresh
        yield Usage(0, accumulated + retained + fresh, weights)
        if keep.wrapped and (keep.zero_stage >= 2 or one.is_last):
            unit = max(self.root, max((part.unit for part in self.placed), default=0))
            converted = keep.reduce * unit if keep.zero_stage >= 2 or one.is_first else 0
            rest = max(0, fresh - keep.compute * unit)
            yield Usage(-self.deferred, accumulated + rest + converted + keep.reduce * unit, weights)

    def _weights_during(self, part: Placed) -> int:
        keep = self.keeping
        if not keep.wrapped:
            return 0
        if keep.zero_stage < 3:
            return keep.compute * self.elements
        if part.unit:  # and the buffer of its own, or of the unit that is gathered next
            return keep.compute * (self.root + part.unit + max(part.largest, part.following))
        return keep.compute * (self.root + self.table * (part is self.placed[0] and self.stage.is_first))

    def _weights_at_end(self) -> int:
        keep = self.keeping
        if not keep.wrapped:
            return 0
        return keep.compute * (self.elements if keep.zero_stage < 3 else self.root + self.table)


class _Gradients:
    """Bytes of a stage's gradients in the course of one backward pass."""

    def __init__(self, stage: StageMemory, one: PassKind) -> None:
        self.stage, self.keeping = stage, stage.keeping
        self.reduces = self.keeping.wrapped and one.kind == "B" and (self.keeping.zero_stage >= 2 or one.is_last)
        self.accumulated, self.retained = stage._accumulated(one.gradients)
        self.is_first = one.gradients == NO_GRADIENTS
        self.splits = one.kind == "I"
        self.done = self.fresh = self.outside = 0  # elements: all so far, of the current unit, outside layers
        self.reduced = 0

    @classmethod
    def of(cls, stage: StageMemory, one: PassKind) -> _Gradients:
        """Before the pass."""
        return (_CopiedGradients if stage.keeping.copied else cls)(stage, one)

    def during(self, part: Placed, produced: int) -> int:
        """While a segment's pass has produced so many elements."""
        keep = self.keeping
        if not keep.wrapped:  # added in place to what there is
            fresh = self.done + produced if self.is_first else min(produced, self.stage.largest_parameter)
            return self.accumulated + keep.master * fresh
        retained = self.retained
        if self.reduces and 0 < part.experts < produced:
            produced, retained = produced - part.experts, keep.reduce * part.experts
        return self.accumulated + retained + keep.compute * (self.outside + self.fresh + produced)

    def produce(self, part: Placed) -> None:
        """A segment's pass is over."""
        elements = part.elements
        self.done += elements * (1 + part.repeats)
        if part.unit:
            self.fresh += elements
        else:
            self.outside += elements

    def complete(self, unit: int, repeats: int = 0) -> int:
        """The gradients of a unit of so many elements are accumulated or reduced; returns bytes at that moment.

        So are those of ``repeats`` equal units before it.
        """
        keep = self.keeping
        if not keep.wrapped:
            return self.accumulated + keep.master * self.done * self.is_first
        fresh, whole = keep.compute * (self.fresh + self.outside), keep.reduce * unit
        if not self.fresh:
            self.outside = max(0, self.outside - unit)
        self.fresh, rest = 0, keep.compute * self.outside
        if not self.reduces:
            before, grows = self.accumulated + self.retained, whole * self.is_first
            self.accumulated += grows * (1 + repeats)
            return before + max(fresh, grows + rest)
        self.retained, self.reduced = whole, self.reduced + unit * (1 + repeats)
        if keep.zero_stage >= 2:
            return self.accumulated + fresh + whole
        had_sums = self.accumulated > 0  # to which fresh gradients are added in place
        before = self.accumulated + (rest if had_sums else fresh) + whole
        if keep.zero_stage:
            self.accumulated -= min(self.accumulated, whole * (1 + repeats))
            return before
        # A sum over replicas has a result of the same size, and is divided once more.
        during = self.accumulated - whole * had_sums + rest + 3 * whole
        self.accumulated += 0 if had_sums else whole * (1 + repeats)
        self.reduced = 0
        return max(before, during)


class _CopiedGradients(_Gradients):
    """Those of `ComputeCopies`, which adds up units of at least `UNIT_BYTES`."""

    def __init__(self, stage: StageMemory, one: PassKind) -> None:
        super().__init__(stage, one)
        self.limits = _copied_units(stage.stage, self.keeping.compute)

    def during(self, part: Placed, produced: int) -> int:
        """As in the base class."""
        done = self.done + produced
        taken = max((limit for limit in self.limits if limit <= done), default=0)
        size = self.keeping.compute * (done - taken)
        # When a unit is complete, its gradients and their sums exist.
        for limit, before in zip(self.limits, [0, *self.limits], strict=False):
            if self.done < limit <= done:
                size = max(size, self.keeping.compute * (limit - before))
        return size + (self.keeping.master * taken if self.is_first else self.accumulated)

    def complete(self, unit: int, repeats: int = 0) -> int:
        """As in the base class."""
        return 0


def _copied_units(stage: StageProgram, element: int) -> list[int]:
    """Numbers of elements, counted from the end of the stage, after which `ComputeCopies` adds gradients up."""
    limits, size, done = [], 0, 0
    for segment in reversed(stage.segments):
        for parameter in reversed(segment.parameters):
            if size >= UNIT_BYTES:
                limits.append(done)
                size = 0
            size += element * parameter.elements
            done += parameter.elements
    return limits


def _placed(stage: StageProgram, table: int) -> list[Placed]:
    """A stage's segments. Of equal layers that are units by themselves, two at either end stand for all."""
    unit_sizes: list[tuple[int, int, bool]] = []  # by layer: elements of its unit, the largest part, is it the first
    layers = iter(stage.layers)
    for count in stage.layers_per_unit:
        parts: Counter[str] = Counter()
        for parameter in (parameter for _ in range(count) for parameter in next(layers).parameters):
            parts[parameter.sharers] += parameter.elements
        unit_sizes += [(parts.total(), max(parts.values()), n == 0) for n in range(count)]
    before = list(accumulate((segment.kept for segment in stage.segments), initial=0))
    later = list(accumulate((segment.deferred for segment in reversed(stage.segments)), initial=0))[-2::-1]
    placed = []
    for index, segment in enumerate(stage.segments):
        layer, elements = index - stage.first_layer, sum(p.elements for p in segment.parameters if not p.kinds)
        where = segment, before[index], later[index], elements
        if 0 <= layer < stage.num_layers:
            unit, largest, is_first = unit_sizes[layer]
            experts = sum(p.elements for p in segment.parameters if p.sharers != segment.parameters[0].sharers)
            following = unit_sizes[layer - 1][1] if layer else table
            placed.append(Placed(*where, experts, unit, largest, is_first, following, 0))
        else:
            placed.append(Placed(*where, 0, 0, 0, False, 0, 0))
    return list(_without_repeats(placed))


def _without_repeats(parts: Sequence[Placed]) -> Iterator[Placed]:
    repeats = 0
    for index, part in enumerate(parts):
        near = parts[max(0, index - 2) : index + 3]
        if len(near) == 5 and all(one.segment is part.segment and one.unit == one.elements for one in near):
            repeats += 1
        else:
            yield part._replace(repeats=repeats)
            repeats = 0


@lru_cache(maxsize=65536)
def _stage_memory(stage: StageProgram, keeping: Keeping) -> StageMemory:
    return StageMemory(stage, keeping)


def rank_memory(work: Workload, rank: int, reduce_bytes: int = 4) -> StepMemory:
    """The fullest moment of a step on a pipeline rank. ``reduce_bytes``: of an element in `training.reduce_dtype`."""
    splits = splits_backward(work.schedule, work.pipeline, work.compiled)
    shape = work.schedule, work.pipeline, work.virtual_stages
    occupied = occupancy(*shape, work.microbatches, rank, splits)
    sharding = sharding_of(work, reduce_bytes)
    keeping = _keeping(sharding)
    programs = stages_of_rank(work, rank)
    stages = [_stage_memory(programs[stage], keeping) for stage in occupied.stages]
    shards = [_sharded(programs[stage], tuple(sharding.shards.items()), work.optimizer) for stage in occupied.stages]
    values: list[float] = []
    for stage, (shard, _) in zip(stages, shards, strict=True):
        values += stage.states(shard)
    values.append(programs[occupied.stages[0]].message)
    usages = [stages[one.stage].usage(one, shards[one.stage][0]) for one in occupied.passes]
    totals = occupied.counts @ np.array([*values, *map(sum, usages)], dtype=float)
    fullest = int(totals.argmax())
    weights = sharding.master * sum(shard for shard, _ in shards)
    optimizer = sharding.master * sum(state for _, state in shards)
    copies = sharding.compute * sum(stage.elements for stage in stages) if sharding.copied else 0
    row = occupied.counts[fullest]
    own = usages[int(row[8 * len(stages) + 1 :].argmax())]
    gathered = own.gathered + copies
    gradients = own.gradients
    for n in range(len(stages)):
        columns, parts = row[Occupancy.columns_of(n)], values[8 * n : 8 * n + 8]
        gathered += int(columns[2:4] @ np.array(parts[2:4]))
        gradients += int(columns[4:] @ np.array(parts[4:]))
    activations = int(totals[fullest]) + copies - gathered - gradients
    return StepMemory(weights, round(optimizer), gradients, gathered, activations)


def _keeping(sharding: Sharding) -> Keeping:
    buffered = max(sharding.shards.values()) > 1
    sizes = sharding.compute, sharding.reduce, sharding.master
    return Keeping(sharding.zero_stage, sharding.wrapped, sharding.copied, buffered, *sizes)


@lru_cache(maxsize=65536)
def _sharded(stage: StageProgram, shards: tuple[tuple[str, int], ...], optimizer: OptimizerState) -> tuple[int, float]:
    """Elements of the first process's shard of a stage, and values that the optimizer keeps for them."""
    sizes, elements, state = dict(shards), 0, 0.0
    for unit in stage.units:
        for parameter in unit.parameters:
            rows, *others = parameter.shape
            shape = shard_rows(rows, sizes[unit.sharers]), *others
            elements += prod(shape)
            state += optimizer.of(parameter.name, shape)
    return elements, state


def step_memory(work: Workload, reduce_bytes: int = 4) -> dict[int, StepMemory]:
    """Memory of the pipeline ranks that may be the fullest, by rank."""
    return {rank: rank_memory(work, rank, reduce_bytes) for rank in _candidates(work)}


def _candidates(work: Workload) -> tuple[int, ...]:
    """Both ends and, of ranks between them with equal stages, the first: later ones hold fewer microbatches."""
    pipeline = pipeline_of(work)
    if splits_backward(work.schedule, work.pipeline, work.compiled):
        return tuple(range(work.pipeline))
    return pipeline.largest
