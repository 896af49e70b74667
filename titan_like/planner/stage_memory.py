"""What one pipeline stage holds during a step, in each state and during each pass.

The trace knows activations. What is added here is how data parallelism keeps weights and gradients: FSDP2's units of
communication and their buffers, and `ComputeCopies`. benchmarks/trace_memory.py compares the result with whole steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from titan_like.parallel.gradients import UNIT_BYTES
from titan_like.planner.occupancy import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    FINISHED,
    FIRST_PARTS,
    NO_GRADIENTS,
    SUMS,
    SUMS_AND_FIRST_PARTS,
    PassKind,
)
from titan_like.planner.stages import StageProgram
from titan_like.planner.trace.program import Segment


class Usage(NamedTuple):
    """Bytes at a moment of a pass, of one stage."""

    activations: int
    gradients: int
    gathered: int
    reduced: int = 0  # not bytes: elements of gradients that the pass has reduced, whose shards exist besides


def _fullest(moments: Iterable[tuple[int, int, int, int]]) -> list[Usage]:
    """Those of which no other one has as much of bytes and of reduced elements."""
    most: dict[int, tuple[int, tuple[int, int, int, int]]] = {}  # by reduced elements
    for moment in moments:
        activations, gradients, gathered, reduced = moment
        total, best = activations + gradients + gathered, most.get(reduced)
        if best is None or total > best[0]:
            most[reduced] = total, moment
    found, least = list[Usage](), -1
    for total, moment in sorted(most.values(), reverse=True):
        if moment[3] > least:
            least = moment[3]
            found.append(Usage(*moment))
    return found


class Keeping(NamedTuple):
    """`Sharding` as far as the usage of a pass depends on it: not on the number of shards."""

    zero_stage: int
    wrapped: bool
    copied: bool
    single: tuple[str, ...]  # of `Sharding.shards`, those with one shard: gathers need no buffer
    compute: int
    reduce: int
    master: int


class Reduced(NamedTuple):
    """A unit whose gradients are reduced, in elements before ZeRO shards them."""

    elements: int = 0
    largest_parameter: int = 0
    last_parameter: int = 0
    experts: int = 0  # those that other processes share, which are reduced first
    experts_alone: bool = False  # whether no process shares them


class Placed(NamedTuple):
    """A segment in its stage. Elements are those of parameters before ZeRO shards them."""

    segment: Segment
    before: int  # bytes that earlier segments keep
    later: int  # bytes that later segments leave to a second part of the backward pass, or to its end
    experts: int  # elements that other processes share, whose gradients are reduced sooner
    reduced: Reduced  # its unit of communication; empty outside layers
    largest: int  # of the unit's experts, or of its other elements, whichever are gathered through a buffer
    ends_unit: bool  # whether the unit's gradients are complete after its backward pass
    following: int  # elements of the unit that the backward pass gathers next
    repeats: int = 0  # equal layers before it whose moments lie between those of their neighbours

    @property
    def unit(self) -> int:
        """Elements of its unit of communication; 0 outside layers."""
        return self.reduced.elements


class StageMemory:
    """What one stage holds in each state, and during each kind of pass."""

    def __init__(self, stage: StageProgram, keeping: Keeping) -> None:
        self.stage, self.keeping = stage, keeping
        self.received = 0 if stage.is_first else stage.message  # bytes of its input
        # Between the passes over a microbatch: the output is sent and freed, the input is not.
        kept = sum([segment.kept for segment in stage.segments])
        self.held = kept + self.received - (0 if stage.is_last else stage.message)
        self.deferred = sum([segment.deferred for segment in stage.segments])
        self.elements = stage.elements
        self.matrices = sum([segment.matrices for segment in stage.segments])
        self.largest_parameter = max([segment.largest_parameter for segment in stage.segments])
        tables = [unit for unit in stage.ends if unit.name]
        self.root = sum([unit.elements for unit in stage.ends if not unit.name])
        self.table = sum([unit.elements for unit in tables])  # in units before the layers
        self.buffered_table = sum([unit.elements for unit in tables if unit.sharers not in keeping.single])
        self.placed = _placed(stage, keeping.single)
        layers = [part for part in self.placed if part.unit]
        # Where the root is empty, FSDP2 ends a backward pass with a gather of what the forward pass of the microbatch
        # before ended with, which is needed only later.
        is_gathered_early = self.root == 0 and (len(stage.layers_per_unit) > 1 or self.table)
        self.prefetched = layers[-1].largest if layers and is_gathered_early else 0
        # FSDP2 keeps the input of its last reduction. The root comes after the layers, and then the table; in the second
        # part of a split backward pass all units come in the order of the forward pass.
        lowest, highest = ((layers[end].unit - layers[end].reduced.experts) if layers else 0 for end in (0, -1))
        self.last_reduced = highest if self.matrices else self.table or self.root or lowest
        self._moments: dict[PassKind, list[Usage]] = {}
        self._usages: dict[tuple[tuple[PassKind, ...], int], list[Usage]] = {}  # by passes and shard
        self._states: dict[int, list[int]] = {}

    def gathered(self, after: int) -> int:
        """Bytes of gathered weights after a forward or a backward pass."""
        if not self.keeping.wrapped:
            return 0
        if self.keeping.zero_stage < 3:
            return self.keeping.compute * self.elements
        return self.keeping.compute * (self.root if after == AFTER_FORWARD else self.prefetched)

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

    def usages(self, passes: tuple[PassKind, ...], shard: int) -> list[Usage]:
        """The fullest moments of some passes: bytes beyond the activations that the stage holds before them.

        The stage's own weights and gradients are part of them. ``shard``: elements of this process's shard.
        """
        key = passes, shard
        if key not in self._usages:
            self._usages[key] = [self._usage(one, shard) for one in passes]
        return self._usages[key]

    def _usage(self, one: PassKind, shard: int) -> Usage:
        if one not in self._moments:
            moments = {"F": self._forward, "W": self._second_part}.get(one.kind, self._backward)(one)
            self._moments[one] = _fullest(moments)
        sums, factor = self.keeping.master * shard * self._has_shards(one.gradients), self.keeping.master * shard
        found = [
            Usage(activations, gradients + sums + factor * reduced // self.elements, gathered)
            for activations, gradients, gathered, reduced in self._moments[one]
        ]
        return max(found, key=sum)

    def _forward(self, one: PassKind) -> Iterator[tuple[int, int, int, int]]:
        keep, gradients = self.keeping, sum(self._accumulated(one.gradients))
        buffer = 0
        for part in self.placed:
            unit, largest = (part.unit, part.largest) if part.unit else (0, 0)
            if part is self.placed[0] and self.table:
                unit, largest = self.table, self.buffered_table
            weights, is_last_unit = 0, part in self.placed[-2:]
            if keep.wrapped and keep.zero_stage == 3:
                # The unit's weights and the buffer in which they arrived. The head has the last layer's buffer.
                buffer = keep.compute * largest or buffer
                early = self.prefetched if one.gradients != NO_GRADIENTS and not is_last_unit else 0
                weights = keep.compute * (self.root + unit + early) + buffer
            elif keep.wrapped:
                buffer = keep.compute * largest * one.is_first or buffer
                weights = keep.compute * self.elements + buffer
            yield self.received + part.before + part.segment.forward_peak, gradients, weights, 0

    def _backward(self, one: PassKind) -> Iterator[tuple[int, int, int, int]]:
        """Segment by segment, from the last. Gradients are fresh, then accumulated or reduced."""
        gradients = _Gradients.of(self, one)
        freed = 0
        for part in reversed(self.placed):
            held = self.received + part.before + part.later - self.held
            if part is not self.placed[-1] and not self.stage.is_last:
                held += self.stage.message  # the gradient of the stage's output
            weights, shards = self._weights_during(part, one) - freed, gradients.shards
            if self.keeping.zero_stage == 3 and part.unit:  # its weights arrive
                arriving = self.keeping.compute * (self.root + part.unit + part.largest)
                yield held + part.segment.kept, gradients.during(part, 0), arriving, shards
            for moment in part.segment.backward.moments:
                during = gradients.during(part, moment.gradients)
                yield held + moment.activations, during, weights, shards
            gradients.produce(part)
            if part.ends_unit:  # which frees the unit's weights first
                unit = self.keeping.compute * part.unit
                if one.is_last and one.kind == "B" and self.keeping.wrapped and self.keeping.zero_stage < 3:
                    freed += unit * (1 + part.repeats)
                weights -= unit * (self.keeping.wrapped and self.keeping.zero_stage == 3)
                for during, reduced in gradients.complete(part.reduced, part.repeats):
                    yield held + part.segment.output, during, weights, reduced
        weights = self._weights_at_end(one) - freed
        for unit in sorted(self.stage.ends):  # the root first
            size = unit.elements
            weights -= self.keeping.compute * size * (self.keeping.wrapped and self.keeping.zero_stage == 3)
            outside_layers = Reduced(size, self.largest_parameter, unit.parameters[-1].elements)
            for during, reduced in gradients.complete(outside_layers):
                yield self.received + self.deferred - self.held, during, weights, reduced

    def _second_part(self, one: PassKind) -> Iterator[tuple[int, int, int, int]]:
        """All products are computed before any is accumulated or reduced."""
        keep, (accumulated, retained) = self.keeping, self._accumulated(one.gradients)
        weights = self.gathered(AFTER_FORWARD) if keep.zero_stage < 3 else 0
        fresh = keep.compute * self.matrices
        if not (keep.wrapped or keep.copied or one.is_first):
            fresh = min(fresh, keep.compute * self.largest_parameter)
        yield 0, accumulated + retained + fresh, weights, 0
        if not keep.wrapped:
            return
        # The products' inputs are freed. One unit after the other is converted, and reduced.
        reduces = keep.zero_stage >= 2 or one.is_last
        for unit in sorted(self.stage.units, key=lambda unit: unit.name == "layers"):
            matrices = sum(parameter.elements for parameter in unit.parameters if parameter.deferred)
            adds_in_place = keep.zero_stage < 2 and not one.is_first
            accumulated += 0 if adds_in_place else keep.reduce * matrices
            fresh -= keep.compute * matrices
            gone = keep.reduce * unit.elements * reduces
            yield -self.deferred, accumulated + fresh + gone, weights, 0
            accumulated -= min(accumulated, gone)
            if reduces:
                last = keep.reduce * unit.parameters[-1].elements  # as in `_Gradients.complete`
                yield -self.deferred, accumulated + last + fresh + gone, weights, unit.elements

    def _weights_during(self, part: Placed, one: PassKind) -> int:
        keep = self.keeping
        if not keep.wrapped:
            return 0
        if keep.zero_stage < 3:
            return keep.compute * self.elements
        early = self.prefetched * (not one.is_last)
        if part.unit:  # and the buffer of the unit that is gathered next
            is_lowest = part.following == 0
            return keep.compute * (self.root + part.unit + (early if is_lowest else part.following))
        is_entry = part is self.placed[0] and self.stage.is_first
        return keep.compute * (self.root + (self.table + early) * is_entry)

    def _weights_at_end(self, one: PassKind) -> int:
        keep = self.keeping
        if not keep.wrapped:
            return 0
        early = self.prefetched * (not one.is_last)
        return keep.compute * (self.elements if keep.zero_stage < 3 else self.root + self.table + early)


class _Gradients:
    """Bytes of a stage's gradients in the course of one backward pass."""

    def __init__(self, stage: StageMemory, one: PassKind) -> None:
        self.stage, self.keeping = stage, stage.keeping
        self.reduces = self.keeping.wrapped and one.kind == "B" and (self.keeping.zero_stage >= 2 or one.is_last)
        self.accumulated, self.retained = stage._accumulated(one.gradients)
        self.is_first = one.gradients == NO_GRADIENTS
        self.has_shards = stage._has_shards(one.gradients)
        self.done = self.fresh = self.outside = 0  # elements: all so far, of the current unit, outside layers
        self.reduced = 0

    @classmethod
    def of(cls, stage: StageMemory, one: PassKind) -> _Gradients:
        """Before the pass."""
        return (_CopiedGradients if stage.keeping.copied else cls)(stage, one)

    @property
    def shards(self) -> int:
        """Elements of which this pass has made the first reduced gradients."""
        return 0 if self.has_shards else self.reduced

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
        self.done += part.segment.produced * (1 + part.repeats)
        if part.unit:
            self.fresh += part.segment.produced
        else:
            self.outside += part.segment.produced

    def complete(self, unit: Reduced, repeats: int = 0) -> Iterator[tuple[int, int]]:
        """The gradients of a unit are accumulated or reduced; so are those of ``repeats`` units like it.

        Yields bytes at moments of that, and the elements of which reduced gradients exist besides.
        """
        keep = self.keeping
        if not keep.wrapped:
            yield self.accumulated + keep.master * self.done * self.is_first, 0
            return
        produced = self.fresh or min(unit.elements, self.outside)
        self.outside -= 0 if self.fresh else produced
        self.fresh, rest = 0, keep.compute * self.outside
        if not self.reduces:
            before, sums = self.accumulated + self.retained, keep.reduce * produced * self.is_first
            self.accumulated += sums * (1 + repeats)
            # One parameter after the other is converted, unless sums have the type of gradients.
            converted = sums + keep.compute * min(produced, unit.largest_parameter)
            fresh = keep.compute * produced
            yield before + rest + (fresh if keep.reduce == keep.compute else max(fresh, converted)), self.shards
            return
        had_sums = keep.zero_stage < 2 and self.accumulated > 0  # to which fresh gradients are added in place
        parts = [(unit.experts, unit.experts_alone), (unit.elements - unit.experts, keep.zero_stage == 0)]
        for size, alone in parts if unit.experts else parts[1:]:
            whole, earlier, fresh = keep.reduce * size, self.shards, keep.compute * min(size, produced) * (not had_sums)
            self.retained, self.reduced = whole, self.reduced + size
            yield self.accumulated + rest + fresh + whole, earlier
            if had_sums:
                self.accumulated -= min(self.accumulated, whole)
            if alone:  # the result is as large, and is divided once more
                yield self.accumulated + rest + 3 * whole, earlier
                self.accumulated += whole * (keep.zero_stage == 0)
            else:  # FSDP2 still has a reference to the last gradient when it allocates the result
                last = (keep.reduce if had_sums else keep.compute) * unit.last_parameter
                yield self.accumulated + rest + last + whole, earlier + size
        self.reduced += unit.elements * repeats
        if keep.zero_stage == 0:
            self.reduced = 0
            self.accumulated += keep.reduce * unit.elements * repeats * (not had_sums)
        elif had_sums:
            self.accumulated -= min(self.accumulated, keep.reduce * unit.elements * repeats)


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

    def complete(self, unit: Reduced, repeats: int = 0) -> Iterator[tuple[int, int]]:
        """As in the base class. The rest is added up after the pass."""
        taken = max((limit for limit in self.limits if limit <= self.done), default=0)
        is_over = self.done == self.stage.elements
        sums = self.done if is_over else taken
        summed = self.keeping.master * sums if self.is_first else self.accumulated
        yield self.keeping.compute * (self.done - taken) + summed, 0


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


@lru_cache(maxsize=65536)
def _placed(stage: StageProgram, single: tuple[str, ...]) -> list[Placed]:
    """A stage's segments. Of equal layers that are units by themselves, two at either end stand for all.

    ``single`` is that of `Keeping`.
    """
    units: list[tuple[Reduced, int]] = []  # by layer: its unit, and the largest part that is gathered through a buffer
    first = 0
    for count in stage.layers_per_unit:
        units += [_unit(stage.layers[first : first + count], single, stage.sharers)] * count
        first += count
    firsts = set(accumulate(stage.layers_per_unit, initial=0))
    segments = stage.segments
    before = list(accumulate([segment.kept for segment in segments], initial=0))
    later = list(accumulate([segment.deferred for segment in reversed(segments)], initial=0))[-2::-1]
    table = sum([unit.elements for unit in stage.ends if unit.name])
    placed, repeats = [], 0
    for index, segment in enumerate(segments):
        layer = index - stage.first_layer
        if not 0 <= layer < stage.num_layers:
            placed.append(Placed(segment, before[index], later[index], 0, Reduced(), 0, False, 0))
            continue
        near = segments[max(0, index - 2) : index + 3]
        if len(near) == 5 and all([one is segment for one in near]) and {*range(layer - 2, layer + 3)} <= firsts:
            repeats += 1
            continue
        unit, largest = units[layer]
        experts = sum([size for sharers, size in segment.elements.items() if sharers != stage.sharers])
        following = units[layer - 1][1] if layer else table
        where = segment, before[index], later[index]
        placed.append(Placed(*where, experts, unit, largest, layer in firsts, following, repeats))
        repeats = 0
    return placed


@lru_cache(maxsize=65536)
def _unit(layers: tuple[Segment, ...], single: tuple[str, ...], others: str) -> tuple[Reduced, int]:
    sizes: dict[str, int] = {}
    for segment in layers:
        for sharers, size in segment.elements.items():
            sizes[sharers] = sizes.get(sharers, 0) + size
    experts = sum(size for sharers, size in sizes.items() if sharers != others)
    is_alone = all(sharers in single for sharers in sizes if sharers != others)
    largest = max(segment.largest_parameter for segment in layers)
    last = layers[-1].parameters[-1].elements
    buffered = max((size for sharers, size in sizes.items() if sharers not in single), default=0)
    return Reduced(sum(sizes.values()), largest, last, experts, is_alone), buffered
