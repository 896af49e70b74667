"""What one pipeline stage holds during a step, in each state and during each pass.

The trace knows activations. This module adds how data parallelism keeps weights and gradients: FSDP2's units of
communication and their buffers, and `ComputeCopies`. benchmarks/trace_memory.py compares the result with whole steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from titan_like.optim.update_work import ADAMW_WORK, UpdateWork
from titan_like.planner.occupancy import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    FINISHED,
    FIRST_PARTS,
    MATRICES,
    MATRICES_AND_FIRST_PARTS,
    NO_GRADIENTS,
    OF_ONE_PASS,
    SUMS,
    WAITING,
    PassKind,
)
from titan_like.planner.pass_gradients import Keeping, PassGradients, Placed, Reduced, copied_units
from titan_like.planner.stages import StageProgram, Unit
from titan_like.planner.trace.program import Segment


class Usage(NamedTuple):
    """Bytes at a moment of a pass, of one stage."""

    activations: int
    gradients: int
    gathered: int
    reduced: int = 0  # not bytes: elements of gradients that the pass has reduced, whose shards exist too


def _fullest(moments: Iterable[tuple[int, int, int, int]]) -> list[Usage]:
    """The moments that no other moment matches or exceeds in both bytes and reduced elements."""
    largest: dict[int, tuple[int, tuple[int, int, int, int]]] = {}  # by reduced elements
    for moment in moments:
        activations, gradients, gathered, reduced = moment
        total, best = activations + gradients + gathered, largest.get(reduced)
        if best is None or total > best[0]:
            largest[reduced] = total, moment
    usages, most_reduced = list[Usage](), -1
    for _, moment in sorted(largest.values(), reverse=True):
        if moment[3] > most_reduced:
            most_reduced = moment[3]
            usages.append(Usage(*moment))
    return usages


class StageMemory:
    """What one stage holds in each state, and during each kind of pass."""

    def __init__(self, stage: StageProgram, keeping: Keeping) -> None:
        self.stage, self.keeping = stage, keeping
        self.received = 0 if stage.is_first else stage.message  # bytes of its input
        # Between the passes over a microbatch: the output is sent and freed, the input is not.
        kept = sum([segment.kept for segment in stage.segments])
        self.held = kept + self.received - (0 if stage.is_last else stage.message)
        # A layer's tensors are on the way to the host, or from it, while the next one computes. The trace also moves
        # the input of a stage's first layer, which stays.
        self.moving = max([segment.offloaded for segment in stage.segments])
        self.held += self.received * (self.moving > 0)
        self.deferred = sum([segment.deferred for segment in stage.segments])
        self.elements = stage.elements
        self.matrices = sum([segment.matrices for segment in stage.segments])
        self.largest_parameter = max([segment.largest_parameter for segment in stage.segments])
        tables = [unit for unit in stage.ends if unit.name]
        root, table = (
            sum([unit.elements for unit in stage.ends if bool(unit.name) is named]) for named in (False, True)
        )
        # Elements that are gathered: of the root, and of units before the layers.
        self.root = sum([self.gathered_elements(unit) for unit in stage.ends if not unit.name])
        self.table = sum([self.gathered_elements(unit) for unit in tables])
        self.buffered_table = sum([self.gathered_elements(end) for end in tables if end.sharers not in keeping.single])
        self.unbuffered = {unit.name for unit in stage.ends if unit.sharers in keeping.single}
        self.placed = _placed(stage, keeping.single, keeping.zero_stage == 3)
        layers = [part for part in self.placed if part.unit]
        # Where the root is empty, FSDP2 ends a backward pass with a gather of what the forward pass of the microbatch
        # before ended with, which is needed only later.
        is_gathered_early = self.root == 0 and (len(stage.layers_per_unit) > 1 or self.table)
        plain = layers[-1].unit - layers[-1].reduced.experts if layers else 0
        self.prefetched = plain * (is_gathered_early and stage.sharers not in keeping.single)
        # FSDP2 keeps the input of its last reduction. The root comes after the layers, and then the table. In the
        # second part of a split backward pass units come in the order of the forward pass, experts after their layer.
        lowest, highest = (layers[0].reduced, layers[-1].reduced) if layers else (Reduced(), Reduced())
        whole_pass = table or root or lowest.elements - lowest.experts
        self.last_reduced = (highest.experts or highest.elements) if self.matrices else whole_pass
        in_units = (sum(_matrices(unit)) for unit in reversed(stage.units) if unit.name == "layers")
        self.last_matrices = self.last_reduced if keeping.replicated else next(filter(None, in_units), 0)
        units = copied_units(stage, keeping.compute) if keeping.copied else []
        self.copied_units = sorted(unit.elements for unit in units) if len(units) > 1 else []
        self.freed = keeping.compute * sum(self.copied_units)  # bytes of copies, by a step's last backward pass
        self._moments: dict[PassKind, list[Usage]] = {}
        self._usages: dict[tuple[tuple[PassKind, ...], int], list[Usage]] = {}  # by passes and shard
        self._states: dict[int, tuple[list[int], list[int]]] = {}

    def gathered_elements(self, unit: Unit) -> int:
        """Elements of a unit that are gathered, before ZeRO shards them."""
        return unit.elements + unit.frozen_elements * (self.keeping.zero_stage == 3)

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
        accumulated, retained = self.accumulated(state)
        return accumulated + retained + keep.master * shard * self.has_shards(state)

    def has_shards(self, state: int) -> bool:
        """Whether reduced gradients exist between passes."""
        keep = self.keeping
        summed = keep.zero_stage >= 2 and state not in (NO_GRADIENTS, FIRST_PARTS)
        return keep.wrapped and (state == FINISHED or summed)

    def accumulated(self, state: int) -> tuple[int, int]:
        """Bytes of whole gradients between passes, and of the input of the last reduction."""
        keep, vectors = self.keeping, self.elements - self.matrices
        if state == NO_GRADIENTS or (keep.wrapped and state == FINISHED):
            return 0, 0
        if not keep.wrapped:
            if keep.copied and state == FINISHED:
                return keep.master * self.elements - self.freed, 0
            element = keep.compute if keep.copied and state in (FIRST_PARTS, OF_ONE_PASS) else keep.master
            return element * (vectors if state == FIRST_PARTS else self.elements), 0
        if keep.zero_stage < 2:
            return keep.reduce * (vectors if state == FIRST_PARTS else self.elements), 0
        waiting = vectors if state in WAITING else 0
        last = self.last_matrices if state in (MATRICES, MATRICES_AND_FIRST_PARTS) else self.last_reduced
        return keep.reduce * waiting, keep.reduce * last * (state not in WAITING)

    def workspace(self, update: UpdateWork, shard: int) -> float:
        """Bytes that an update needs beside gradients, for this process's ``shard`` of the parameters."""
        largest = {True: 0, False: 0}  # elements of a parameter, inside and outside layers
        for segment, is_layer, _ in self.stage.counts:
            largest[is_layer] = max(largest[is_layer], segment.largest_parameter)
        most = max(update.matrix_workspace * largest[True], update.workspace * largest[False])
        return most * shard / max(self.elements, 1)

    def at_update(self, shard: int, microbatches: int, update: UpdateWork) -> int:
        """Bytes of gradients during the optimizer's update, less the copies that have been freed.

        Fused AdamW makes a unit's copies again before it frees the unit's gradients, the smallest unit first.
        """
        keep = self.keeping
        if not keep.copied:
            return self.gradients(FINISHED, shard)
        element = keep.compute if microbatches == 1 else keep.master
        peak = held = element * self.elements - self.freed
        for size in self.copied_units if update == ADAMW_WORK else ():
            peak = max(peak, held + keep.compute * size)
            held -= (element - keep.compute) * size
        return peak

    def states(self, shard: int) -> tuple[list[int], list[int]]:
        """Bytes of gathered weights, and of gradients, in each of their states. ``shard``: as for `gradients`."""
        if shard not in self._states:
            weights = [0, *(self.gathered(after) for after in (AFTER_FORWARD, AFTER_BACKWARD))]
            self._states[shard] = weights, [self.gradients(state, shard) for state in range(FINISHED + 1)]
        return self._states[shard]

    def usages(self, passes: tuple[PassKind, ...], shard: int) -> list[Usage]:
        """The fullest moments of some passes: bytes beyond the activations that the stage holds before them.

        The stage's own weights and gradients are part of them. ``shard``: elements of this process's shard.
        """
        key = passes, shard
        if key not in self._usages:
            self._usages[key] = [self._usage(pass_, shard) for pass_ in passes]
        return self._usages[key]

    def _usage(self, pass_: PassKind, shard: int) -> Usage:
        if pass_ not in self._moments:
            moments = {"F": self._forward, "W": self._second_part}.get(pass_.kind, self._backward)(pass_)
            self._moments[pass_] = _fullest(moments)
        sums, factor = self.keeping.master * shard * self.has_shards(pass_.gradients), self.keeping.master * shard
        usages = [
            Usage(activations, gradients + sums + factor * reduced // self.elements, gathered)
            for activations, gradients, gathered, reduced in self._moments[pass_]
        ]
        return max(usages, key=sum)

    def _forward(self, pass_: PassKind) -> Iterator[tuple[int, int, int, int]]:
        """Segment by segment. Weights arrive in a buffer, which FSDP2 keeps until the next ones have arrived."""
        keep, gradients = self.keeping, sum(self.accumulated(pass_.gradients))
        gathers = keep.wrapped and (keep.zero_stage == 3 or pass_.is_first)
        stays, early = self.root, self.prefetched if pass_.gradients != NO_GRADIENTS else 0  # elements
        buffer = self.root * ("" not in self.unbuffered)
        for number, part in enumerate(self.placed):
            unit, largest = part.unit, part.largest
            if number == 0 and self.table:
                unit, largest = self.table, self.buffered_table
            early *= part not in self.placed[-2:]
            begins_unit = part.begins_unit or number == 0
            stays += unit * (1 + part.repeats) * (keep.zero_stage < 3 and begins_unit)
            weights = (stays + unit if keep.zero_stage == 3 else stays) if gathers else self.elements
            held = self.received + part.before + (self.moving if part.unit else 0)
            if gathers and unit and begins_unit:
                arriving = keep.compute * (weights + early + buffer + largest)
                yield held, gradients, arriving, 0
                buffer = largest
            during = keep.compute * (weights + (early + buffer) * gathers) * keep.wrapped
            yield held + part.segment.forward_peak, gradients, during, 0

    def _backward(self, pass_: PassKind) -> Iterator[tuple[int, int, int, int]]:
        """Segment by segment, from the last. Gradients are fresh, then accumulated or reduced."""
        gradients = PassGradients.of(self, pass_)
        freed, frees = 0, self._frees(pass_)
        for part in reversed(self.placed):
            held = self.received + part.before + part.later - self.held + (self.moving if part.unit else 0)
            if part is not self.placed[-1] and not self.stage.is_last:
                held += self.stage.message  # the gradient of the stage's output
            weights, shards = self._weights_during(part, pass_) - freed, gradients.shards
            if self.keeping.zero_stage == 3 and part.unit:  # its weights arrive
                arriving = self.keeping.compute * (self.root + part.unit + part.largest)
                yield held + part.segment.kept, gradients.during(part, 0), arriving, shards
            for moment in part.segment.backward.moments:
                during = gradients.during(part, moment.gradients)
                dropped = part.experts * (frees and part.follow_experts(moment.gradients))
                # A repeated forward pass gathers experts into a buffer, which FSDP2 keeps until its end.
                dropped -= part.largest * (self.keeping.zero_stage == 3 and moment.repeats and part.experts > 0)
                yield held + moment.activations, during, weights - self.keeping.compute * dropped, shards
            gradients.produce(part)
            if part.begins_unit:  # which frees the unit's weights first
                unit, experts = (self.keeping.compute * size * frees for size in (part.unit, part.reduced.experts))
                weights -= unit
                freed += unit * (1 + part.repeats) * (self.keeping.zero_stage < 3)
                for during, reduced, is_early in gradients.complete(part.reduced, part.repeats):
                    activations, extra = (part.at_experts, unit - experts) if is_early else (part.segment.output, 0)
                    yield held + activations, during, weights + extra, reduced
        weights = self._weights_at_end(pass_) - freed
        held = self.received - self.held + (self.deferred if pass_.kind == "I" else 0)
        for end in sorted(self.stage.ends):  # the root first
            weights -= self.keeping.compute * self.gathered_elements(end) * frees
            if not end.parameters:
                continue
            outside_layers = Reduced(end.elements, self.largest_parameter, end.parameters[-1].elements)
            for during, reduced, _ in gradients.complete(outside_layers):
                yield held, during, weights, reduced

    def _second_part(self, pass_: PassKind) -> Iterator[tuple[int, int, int, int]]:
        """All products are computed before any is accumulated or reduced."""
        keep, (accumulated, retained) = self.keeping, self.accumulated(pass_.gradients)
        weights = self.gathered(AFTER_FORWARD) if keep.zero_stage < 3 else 0
        fresh = keep.compute * self.matrices
        if not (keep.wrapped or keep.copied or pass_.is_first):
            fresh = min(fresh, keep.compute * self.largest_parameter)
        yield 0, accumulated + retained + fresh, weights, 0
        if not keep.wrapped:
            return
        # The products' inputs are freed. One unit after the other is converted, and reduced.
        reduces = keep.zero_stage >= 2 or pass_.is_last
        lacks = keep.zero_stage >= 2 and not keep.replicated and pass_.gradients in (SUMS, MATRICES)  # all but matrices
        trained = (unit for unit in self.stage.units if unit.parameters)
        for unit in sorted(trained, key=lambda unit: unit.name == "layers"):
            matrices = sum(_matrices(unit))
            adds_in_place = keep.zero_stage < 2 and not pass_.is_first
            accumulated += 0 if adds_in_place else keep.reduce * matrices
            fresh -= keep.compute * matrices
            reduced = keep.reduce * (matrices if lacks else unit.elements) * reduces
            weights -= keep.compute * unit.elements * self._frees(pass_) * (keep.zero_stage < 3)
            yield -self.deferred, accumulated + fresh + reduced, weights, 0
            accumulated -= min(accumulated, reduced)
            if reduces:
                if unit.sharers in keep.single:  # as in `PassGradients.complete`
                    yield -self.deferred, accumulated + fresh + 3 * reduced, weights, 0
                last = keep.reduce * (_matrices(unit) or [0] if lacks else [p.elements for p in unit.parameters])[-1]
                yield -self.deferred, accumulated + last + fresh + reduced, weights, unit.elements

    def _frees(self, pass_: PassKind) -> bool:
        """Whether a backward pass frees gathered weights, unit by unit, before it reduces gradients."""
        is_done = pass_.is_last and pass_.kind in "BW"
        return self.keeping.wrapped and (is_done or self.keeping.zero_stage == 3)

    def _weights_during(self, part: Placed, pass_: PassKind) -> int:
        keep = self.keeping
        if not keep.wrapped:
            return 0
        if keep.zero_stage < 3:
            return keep.compute * self.elements
        early = self.prefetched * (not pass_.is_last)
        if part.unit:  # and the buffer of the unit that is gathered next
            is_lowest = part.following == 0
            return keep.compute * (self.root + part.unit + (early if is_lowest else part.following))
        is_entry = part is self.placed[0] and self.stage.is_first
        return keep.compute * (self.root + (self.table + early) * is_entry)

    def _weights_at_end(self, pass_: PassKind) -> int:
        keep = self.keeping
        if not keep.wrapped:
            return 0
        early = self.prefetched * (not pass_.is_last)
        return keep.compute * (self.elements if keep.zero_stage < 3 else self.root + self.table + early)


def _matrices(unit: Unit) -> list[int]:
    """Elements of the parameters whose gradients a split backward pass defers."""
    return [parameter.elements for parameter in unit.parameters if parameter.deferred]


@lru_cache(maxsize=65536)
def _placed(stage: StageProgram, single: tuple[str, ...], gathers_frozen: bool) -> list[Placed]:
    """A stage's segments. For equal layers that are units by themselves, two at either end stand for all.

    ``single`` is as in `Keeping`.
    """
    # By layer: its unit, the largest part that is gathered through a buffer, and what the unit below has gathered while
    # this layer's backward pass runs: not yet its experts.
    units: list[tuple[Reduced, int, int, int]] = []
    ends = [unit for unit in stage.ends if unit.name]
    first, below = 0, sum([unit.elements + unit.frozen_elements * gathers_frozen for unit in ends])
    for count in stage.layers_per_unit:
        layers = stage.layers[first : first + count]
        unit, buffered = _unit(layers, single, stage.sharers, gathers_frozen)
        frozen = [layer.frozen_elements.items() for layer in layers if gathers_frozen]
        dense = sum([size for items in frozen for sharers, size in items if sharers == stage.sharers])
        units += [(unit, buffered, below, sum([size for items in frozen for _, size in items]))] * count
        first, below = first + count, (unit.elements - unit.experts + dense) * (stage.sharers not in single)
    firsts = set(accumulate(stage.layers_per_unit, initial=0))
    segments = stage.segments
    before = list(accumulate([segment.kept for segment in segments], initial=0))
    later = list(accumulate([segment.deferred for segment in reversed(segments)], initial=0))[-2::-1]
    placed, repeats = [], 0
    for index, segment in enumerate(segments):
        layer = index - stage.first_layer
        if not 0 <= layer < stage.num_layers:
            placed.append(Placed(segment, before[index], later[index], 0, 0, Reduced(), 0, False, 0))
            continue
        around = segments[max(0, index - 2) : index + 3]
        if len(around) == 5 and all(other is segment for other in around) and {*range(layer - 2, layer + 3)} <= firsts:
            repeats += 1
            continue
        unit, largest, following, frozen_elements = units[layer]
        experts = [p for p in segment.parameters if p.sharers != stage.sharers]
        last = max([p.position for p in experts], default=-1)
        through = sum([p.elements for p in segment.parameters if p.position <= last])
        placement = segment, before[index], later[index], sum([p.elements for p in experts]), through
        placed.append(Placed(*placement, unit, largest, layer in firsts, following, repeats, frozen_elements))
        repeats = 0
    return placed


@lru_cache(maxsize=65536)
def _unit(
    layers: tuple[Segment, ...], single: tuple[str, ...], dense: str, gathers_frozen: bool
) -> tuple[Reduced, int]:
    sizes, gathered = Counter[str](), Counter[str]()
    for segment in layers:
        sizes.update(segment.elements)
        gathered.update(segment.frozen_elements if gathers_frozen else {})
    experts = sum(size for sharers, size in sizes.items() if sharers != dense)
    is_alone = all(sharers in single for sharers in sizes if sharers != dense)
    largest = max(segment.largest_parameter for segment in layers)
    last = layers[-1].parameters[-1].elements
    last_of_experts = next((p.elements for p in layers[-1].parameters[::-1] if p.sharers != dense), 0)
    buffered = max((size for sharers, size in (sizes + gathered).items() if sharers not in single), default=0)
    return Reduced(sum(sizes.values()), largest, last, experts, last_of_experts, is_alone), buffered
