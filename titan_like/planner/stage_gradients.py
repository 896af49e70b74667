"""Bytes of a stage's gradients, between passes and while one backward pass runs.

Gradients are fresh, in the type of computation, until their unit of communication is complete. Then they are added to
sums over microbatches, or reduced over processes. FSDP2 keeps the input of a reduction until the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from titan_like.optim.update_work import ADAMW_WORK, UpdateWork
from titan_like.planner.data_parallel import CopiedUnit, Gradients, LayerUnit, PassKind, Rules, copied_units
from titan_like.planner.stages import StageProgram
from titan_like.planner.trace.program import Segment


class Placed(NamedTuple):
    """A segment in its stage. Elements count parameters before ZeRO shards them."""

    segment: Segment
    before: int  # bytes that earlier segments keep
    later: int  # bytes that later segments leave to a second part of the backward pass, or to its end
    unit: LayerUnit = LayerUnit()  # its unit of communication; empty outside layers
    begins_unit: bool = False  # whether it is its unit's first layer, after whose backward pass gradients are complete
    following: int = 0  # elements of the unit that the backward pass gathers next
    experts: int = 0  # elements that other processes share, whose gradients are reduced sooner
    through_experts: int = 0  # elements of gradients that are complete when experts' are, these included
    repeats: int = 0  # equal layers before it whose moments lie between their neighbours'

    def follow_experts(self, produced: int) -> bool:
        """Whether the last of the ``produced`` elements come after the experts' gradients."""
        return 0 < self.experts <= self.through_experts < produced


class StageGradients:
    """Bytes of a stage's gradients between passes."""

    def __init__(self, stage: StageProgram, rules: Rules, placed: Sequence[Placed]) -> None:
        self.stage, self.rules, self.elements = stage, rules, stage.elements
        self.matrices = sum([segment.matrices for segment in stage.segments])
        self.largest_parameter = max([segment.largest_parameter for segment in stage.segments])
        parameters = [parameter for segment in stage.segments for parameter in segment.parameters]
        self.largest_vector, self.largest_matrix = (
            max([p.elements for p in parameters if p.deferred is deferred], default=0) for deferred in (False, True)
        )
        # FSDP2 keeps the input of its last reduction. The root comes after the layers, and then the table. In the
        # second part of a split backward pass units come in the order of the forward pass, experts after their layer.
        units = [part.unit for part in placed if part.unit.gathered] or [LayerUnit()]
        lowest, highest = units[0], units[-1]
        root, table = (
            sum([unit.elements for unit in stage.ends if bool(unit.name) is named]) for named in (False, True)
        )
        if self.matrices:
            self.last_reduced = highest.experts or highest.elements
        else:
            self.last_reduced = table or root or lowest.elements - lowest.experts
        in_units = (unit.matrices.elements for unit in reversed(stage.units) if unit.name == "layers")
        self.last_matrices = self.last_reduced if rules.replicated else next(filter(None, in_units), 0)
        self.copied_units = copied_units(stage, rules.compute) if rules.copied else []
        self.frees_copies = len(self.copied_units) > 1  # in a step's last backward pass
        self.freed = rules.compute * sum(unit.elements for unit in self.copied_units) if self.frees_copies else 0

    def between_passes(self, state: int, shard: int) -> int:
        """Bytes in a state. ``shard``: elements of this process's shard."""
        accumulated, retained = self.accumulated(state)
        return accumulated + retained + (self.rules.master * shard if self.rules.has_shards(state) else 0)

    def accumulated(self, state: int) -> tuple[int, int]:
        """Bytes of whole gradients between passes, and of the input of the last reduction."""
        rules, vectors = self.rules, self.elements - self.matrices
        if state == Gradients.NONE or (rules.wrapped and state == Gradients.FINISHED):
            return 0, 0
        if not rules.wrapped:
            if rules.copied and state == Gradients.FINISHED:
                return rules.master * self.elements - self.freed, 0
            element = rules.compute if rules.copied and state in Gradients.FRESH else rules.master
            of_matrix = rules.compute if rules.copied and state in Gradients.FRESH_MATRICES else rules.master
            return element * vectors + (0 if state in Gradients.ONLY_FIRST_PARTS else of_matrix * self.matrices), 0
        if not rules.reduces_every_pass:
            return rules.reduce * (vectors if state in Gradients.ONLY_FIRST_PARTS else self.elements), 0
        if state in Gradients.WAITING:
            return rules.reduce * vectors, 0
        is_of_matrices = state in (Gradients.MATRICES, Gradients.MATRICES_AND_FIRST_PARTS)
        return 0, rules.reduce * (self.last_matrices if is_of_matrices else self.last_reduced)

    def at_update(self, shard: int, microbatches: int, update: UpdateWork) -> int:
        """Bytes during the optimizer's update, less the copies that have been freed.

        Fused AdamW makes a unit's copies again before it frees the unit's gradients, the smallest unit first.
        """
        rules = self.rules
        if not rules.copied:
            return self.between_passes(Gradients.FINISHED, shard)
        element = rules.compute if microbatches == 1 and not update.widens else rules.master
        partial = sum(p.elements for unit in self.stage.units for p in unit.parameters if p.partial)  # summed as master
        peak = held = element * self.elements + (rules.master - element) * partial - self.freed
        makes_copies = self.frees_copies and update == ADAMW_WORK
        for size in sorted(unit.elements for unit in self.copied_units) if makes_copies else ():
            peak = max(peak, held + rules.compute * size)
            held -= (element - rules.compute) * size
        return peak


class PassGradients:
    """Bytes of a stage's gradients in the course of one backward pass."""

    def __init__(self, stage: StageGradients, pass_: PassKind) -> None:
        self.stage, self.rules = stage, stage.rules
        self.reduces = self.rules.reduces(pass_)
        self.accumulated, _ = stage.accumulated(pass_.gradients)  # the pass frees the input of the last reduction
        self.retained = 0
        self.is_first = pass_.gradients == Gradients.NONE
        self.adds_in_place = not self.is_first and self.rules.adds_in_place
        self.has_shards = self.rules.has_shards(pass_.gradients)
        self.done = self.fresh = self.outside = 0  # elements: all so far, of the current unit, outside layers
        self.reduced = 0

    @property
    def shards(self) -> int:
        """Elements of which this pass has made the first reduced gradients."""
        return 0 if self.has_shards else self.reduced

    def during(self, part: Placed, produced: int) -> int:
        """Bytes when a segment's pass has produced this many elements."""
        rules = self.rules
        if not rules.wrapped and not self.adds_in_place:
            return self.accumulated + rules.master * (self.done + produced)
        accumulated, retained = self.accumulated, self.retained
        if part.follow_experts(produced):
            produced -= part.experts
            if self.reduces:
                retained = rules.reduce * part.experts
                accumulated -= min(accumulated, retained) if rules.zero_stage == 1 else 0
            elif self.is_first:  # experts' gradients are accumulated already
                accumulated += rules.reduce * part.experts
        if self.adds_in_place:
            return accumulated + retained + rules.compute * min(produced, self.stage.largest_parameter)
        return accumulated + retained + rules.compute * (self.outside + self.fresh + produced)

    def produce(self, part: Placed) -> None:
        """Count a segment's gradients once its pass is over."""
        self.done += part.segment.produced
        if part.unit.gathered:
            self.fresh += part.segment.produced
        else:
            self.outside += part.segment.produced

    def complete(self, unit: LayerUnit, repeats: int = 0) -> Iterator[tuple[int, int, bool]]:
        """Accumulate or reduce the gradients of a unit and of ``repeats`` units like it.

        Yields for each moment its bytes, the elements that also exist as reduced gradients, and whether it is in the
        middle of a layer, where the experts' gradients are reduced.
        """
        rules = self.rules
        if not rules.wrapped:
            yield self.accumulated + (rules.master * self.done if self.is_first else 0), 0, False
            self.done += unit.elements * repeats
            return
        produced = self.fresh or min(unit.elements, self.outside)
        self.outside -= 0 if self.fresh else produced
        self.fresh, rest = 0, 0 if self.adds_in_place else rules.compute * self.outside
        if not self.reduces:
            before, sums = self.accumulated + self.retained, rules.reduce * produced if self.is_first else 0
            self.accumulated += sums * (1 + repeats)
            # One parameter after the other is converted, unless sums have the type of gradients.
            converted = sums + rules.compute * min(produced, unit.largest_parameter)
            fresh = 0 if self.adds_in_place else rules.compute * produced
            if rules.reduce != rules.compute:
                fresh = max(fresh, converted)
            yield before + rest + fresh, self.shards, False
            return
        had_sums = not rules.reduces_every_pass and not self.is_first  # to which fresh gradients are added in place
        dense_alone = self.stage.stage.sharers in rules.single
        dense = unit.elements - unit.experts, dense_alone, unit.last_parameter, False
        experts = unit.experts, unit.experts_alone, unit.last_of_experts, True
        for size, alone, parameter, early in [experts, dense] if unit.experts else [dense]:
            total, earlier = rules.reduce * size, self.shards
            fresh = 0 if had_sums else rules.compute * min(size, produced)
            self.retained, self.reduced = total, self.reduced + size
            yield self.accumulated + rest + fresh + total, earlier, early
            if had_sums:
                self.accumulated -= min(self.accumulated, total)
            if alone:  # the result is as large
                yield self.accumulated + rest + rules.results * total, earlier, early
                self.accumulated += 0 if self.has_shards else total
                self.reduced -= size  # which stands for shards
            else:
                last = (rules.reduce if had_sums else rules.compute) * parameter
                last = last if rules.held_longer.last_gradient else 0
                yield self.accumulated + rest + last + total, earlier + size, early
        self.reduced += unit.elements * repeats
        if rules.zero_stage == 0:
            self.reduced = 0
            self.accumulated += 0 if had_sums else rules.reduce * unit.elements * repeats
        elif had_sums:
            self.accumulated -= min(self.accumulated, rules.reduce * unit.elements * repeats)


class CopiedGradients(PassGradients):
    """Gradients of `ComputeCopies`, which adds them up unit by unit. The last unit's follow after the pass.

    The copies that a step's last backward pass frees are subtracted.
    """

    def __init__(self, stage: StageGradients, pass_: PassKind) -> None:
        super().__init__(stage, pass_)
        self.units = stage.copied_units
        self.limits = list(accumulate(unit.elements for unit in self.units))
        self.frees = pass_.is_last and stage.frees_copies
        self.is_second = pass_.gradients == Gradients.OF_ONE_PASS

    def during(self, part: Placed, produced: int) -> int:
        """As in the base class."""
        done, before, peak = self.done + produced, 0, 0
        for unit, limit in zip(self.units[:-1], self.limits, strict=False):
            if limit > done:
                break
            if self.done < limit:  # its gradients exist, and so does the sum of one of them
                peak = max(peak, self._at(unit, before, limit))
            before = limit
        return max(peak, self._after(before, done))

    def complete(self, unit: LayerUnit, repeats: int = 0) -> Iterator[tuple[int, int, bool]]:
        """As in the base class."""
        added = max((limit for limit in self.limits[:-1] if limit <= self.done), default=0)
        yield self._after(added, self.done), 0, False
        self.done += unit.elements * repeats
        if self.done == self.limits[-1]:
            yield self._at(self.units[-1], self.done - self.units[-1].elements, self.done), 0, False

    def _at(self, unit: CopiedUnit, before: int, done: int) -> int:
        """Bytes while a unit's gradients are added up."""
        return self._after(before, done) + (self.rules.master * unit.largest_parameter if self.is_second else 0)

    def _after(self, added: int, done: int) -> int:
        """Bytes once the gradients of ``added`` of the ``done`` elements are added up."""
        compute = self.rules.compute
        sums = self.accumulated + (compute * done if self.is_first else compute * (done - added))
        if self.is_second:
            sums += (self.rules.master - compute) * added
        return sums - (compute * added if self.frees else 0)
