"""Bytes of a stage's gradients while one backward pass runs.

Gradients are fresh, in the type of computation, until their unit of communication is complete. Then they are added to
sums over microbatches, or reduced over processes. FSDP2 keeps the input of a reduction until the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from titan_like.parallel.split import GRADIENT_UNIT_BYTES
from titan_like.planner.occupancy import NO_GRADIENTS, OF_ONE_PASS, PassKind
from titan_like.planner.stages import StageProgram
from titan_like.planner.trace.program import Segment

if TYPE_CHECKING:
    from titan_like.planner.stage_memory import StageMemory


class Keeping(NamedTuple):
    """`Sharding` as far as the usage of a pass depends on it: not on the number of shards."""

    zero_stage: int
    wrapped: bool
    copied: bool
    replicated: bool  # then gradients that are missing are summed as zeros
    single: tuple[str, ...]  # names in `Sharding.shards` that have one shard: gathers need no buffer
    compute: int
    reduce: int
    master: int


class Reduced(NamedTuple):
    """A unit whose gradients are reduced, in elements before ZeRO shards them."""

    elements: int = 0
    largest_parameter: int = 0
    last_parameter: int = 0
    experts: int = 0  # elements that other processes share, which are reduced first
    last_of_experts: int = 0  # elements of their last parameter
    experts_alone: bool = False  # whether no process shares them


class Placed(NamedTuple):
    """A segment in its stage. Elements count parameters before ZeRO shards them."""

    segment: Segment
    before: int  # bytes that earlier segments keep
    later: int  # bytes that later segments leave to a second part of the backward pass, or to its end
    experts: int  # elements that other processes share, whose gradients are reduced sooner
    through_experts: int  # elements of gradients that are complete when experts' are, these included
    reduced: Reduced  # its unit of communication; empty outside layers
    largest: int  # of the unit's experts, or of its other elements, whichever are gathered through a buffer
    begins_unit: bool  # whether it is the first layer of its unit, after whose backward pass gradients are complete
    following: int  # elements of the unit that the backward pass gathers next
    repeats: int = 0  # equal layers before it whose moments lie between their neighbours'
    frozen: int = 0  # elements of its unit that are gathered and have no gradients

    def follow_experts(self, produced: int) -> bool:
        """Whether the last of the ``produced`` elements come after the experts' gradients."""
        return 0 < self.experts <= self.through_experts < produced

    @property
    def at_experts(self) -> int:
        """Bytes of activations when the experts' gradients are complete."""
        later = [moment for moment in self.segment.backward.moments if moment.gradients >= self.through_experts]
        return min(later, key=lambda moment: moment.gradients).activations

    @property
    def unit(self) -> int:
        """Elements of its unit of communication that are gathered; 0 outside layers."""
        return self.reduced.elements + self.frozen


class PassGradients:
    """Bytes of a stage's gradients in the course of one backward pass."""

    def __init__(self, stage: StageMemory, pass_: PassKind) -> None:
        self.stage, self.keeping = stage, stage.keeping
        self.reduces = self.keeping.wrapped and pass_.kind == "B" and (self.keeping.zero_stage >= 2 or pass_.is_last)
        self.accumulated, retained = stage.accumulated(pass_.gradients)
        self.retained = retained * (pass_.kind == "W")  # a backward pass frees it first
        self.is_first = pass_.gradients == NO_GRADIENTS
        self.has_shards = stage.has_shards(pass_.gradients)
        self.done = self.fresh = self.outside = 0  # elements: all so far, of the current unit, outside layers
        self.reduced = 0

    @classmethod
    def of(cls, stage: StageMemory, pass_: PassKind) -> PassGradients:
        """The gradients before the pass."""
        return (CopiedGradients if stage.keeping.copied else cls)(stage, pass_)

    @property
    def shards(self) -> int:
        """Elements of which this pass has made the first reduced gradients."""
        return 0 if self.has_shards else self.reduced

    def during(self, part: Placed, produced: int) -> int:
        """Bytes when a segment's pass has produced this many elements."""
        keep = self.keeping
        if not keep.wrapped:  # added in place to what there is
            fresh = self.done + produced if self.is_first else min(produced, self.stage.largest_parameter)
            return self.accumulated + keep.master * fresh
        accumulated, retained = self.accumulated, self.retained
        if part.follow_experts(produced) and not self.reduces:  # experts' gradients are accumulated already
            produced -= part.experts
            accumulated += keep.reduce * part.experts * self.is_first
        elif part.follow_experts(produced):
            produced, retained = produced - part.experts, keep.reduce * part.experts
            accumulated -= min(accumulated, retained) if 0 < keep.zero_stage < 2 else 0
        return accumulated + retained + keep.compute * (self.outside + self.fresh + produced)

    def produce(self, part: Placed) -> None:
        """Count a segment's gradients once its pass is over."""
        self.done += part.segment.produced
        if part.unit:
            self.fresh += part.segment.produced
        else:
            self.outside += part.segment.produced

    def complete(self, unit: Reduced, repeats: int = 0) -> Iterator[tuple[int, int, bool]]:
        """Accumulate or reduce the gradients of a unit and of ``repeats`` units like it.

        Yields for each moment its bytes, the elements that also exist as reduced gradients, and whether it is in the
        middle of a layer, where the experts' gradients are reduced.
        """
        keep = self.keeping
        if not keep.wrapped:
            yield self.accumulated + keep.master * self.done * self.is_first, 0, False
            self.done += unit.elements * repeats
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
            yield before + rest + (fresh if keep.reduce == keep.compute else max(fresh, converted)), self.shards, False
            return
        had_sums = keep.zero_stage < 2 and not self.is_first  # to which fresh gradients are added in place
        dense_alone = self.stage.stage.sharers in keep.single
        dense = unit.elements - unit.experts, dense_alone, unit.last_parameter, False
        experts = unit.experts, unit.experts_alone, unit.last_of_experts, True
        for size, alone, parameter, early in [experts, dense] if unit.experts else [dense]:
            total, earlier, fresh = keep.reduce * size, self.shards, keep.compute * min(size, produced) * (not had_sums)
            self.retained, self.reduced = total, self.reduced + size
            yield self.accumulated + rest + fresh + total, earlier, early
            if had_sums:
                self.accumulated -= min(self.accumulated, total)
            if alone:  # the result is as large, and is divided once more
                yield self.accumulated + rest + 3 * total, earlier, early
                self.accumulated += total * (not self.has_shards)
                self.reduced -= size  # which stands for shards
            else:  # FSDP2 still has a reference to the last gradient when it allocates the result
                last = (keep.reduce if had_sums else keep.compute) * parameter
                yield self.accumulated + rest + last + total, earlier + size, early
        self.reduced += unit.elements * repeats
        if keep.zero_stage == 0:
            self.reduced = 0
            self.accumulated += keep.reduce * unit.elements * repeats * (not had_sums)
        elif had_sums:
            self.accumulated -= min(self.accumulated, keep.reduce * unit.elements * repeats)


class CopiedGradients(PassGradients):
    """Gradients of `ComputeCopies`, which takes up units of at least `GRADIENT_UNIT_BYTES`.

    The copies that a step's last backward pass frees are subtracted.
    """

    def __init__(self, stage: StageMemory, pass_: PassKind) -> None:
        super().__init__(stage, pass_)
        self.units = copied_units(stage.stage, self.keeping.compute)
        self.limits = list(accumulate(unit.elements for unit in self.units))
        self.frees = pass_.is_last and len(self.units) > 1
        self.is_second = pass_.gradients == OF_ONE_PASS

    def _after(self, taken: int, done: int) -> int:
        """Bytes once the gradients of ``taken`` of the ``done`` elements are taken up."""
        compute = self.keeping.compute
        sums = self.accumulated + compute * done * self.is_first
        if self.is_second:
            sums += (self.keeping.master - compute) * taken
        return sums + compute * (done - taken) * (not self.is_first) - compute * taken * self.frees

    def during(self, part: Placed, produced: int) -> int:
        """As in the base class."""
        done, before, peak = self.done + produced, 0, 0
        for unit, limit in zip(self.units[:-1], self.limits, strict=False):  # the last one comes after the pass
            if limit > done:
                break
            if self.done < limit:  # its gradients exist, and so does the sum of one of them
                peak = max(peak, self._at(unit, before, limit))
            before = limit
        return max(peak, self._after(before, done))

    def _at(self, unit: CopiedUnit, before: int, done: int) -> int:
        return self._after(before, done) + self.keeping.master * unit.largest_parameter * self.is_second

    def complete(self, unit: Reduced, repeats: int = 0) -> Iterator[tuple[int, int, bool]]:
        """As in the base class. The rest is taken up after the pass."""
        taken = max((limit for limit in self.limits[:-1] if limit <= self.done), default=0)
        yield self._after(taken, self.done), 0, False
        self.done += unit.elements * repeats
        if self.done == self.limits[-1]:
            yield self._at(self.units[-1], self.done - self.units[-1].elements, self.done), 0, False


class CopiedUnit(NamedTuple):
    """Weights whose gradients `ComputeCopies` takes up together."""

    elements: int
    largest_parameter: int


def copied_units(stage: StageProgram, element: int) -> list[CopiedUnit]:
    """A stage's units, from its end. ``element``: bytes of an element of the copies."""
    units, sizes = list[CopiedUnit](), list[int]()
    for segment in reversed(stage.segments):
        for parameter in reversed(segment.parameters):
            if element * sum(sizes) >= GRADIENT_UNIT_BYTES:
                units.append(CopiedUnit(sum(sizes), max(sizes)))
                sizes = []
            sizes.append(parameter.elements)
    return [*units, CopiedUnit(sum(sizes), max(sizes))]
