"""What one pipeline stage holds during a step, in each state and during each pass.

The trace knows activations. This module adds weights, which data parallelism gathers, and `stage_gradients`.
benchmarks/trace_memory.py compares the result with whole steps.
"""

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

from titan_like.planner.data_parallel import Gradients, LayerUnit, PassKind, Rules, Weights, layer_units
from titan_like.planner.stage_gradients import CopiedGradients, PassGradients, Placed, StageGradients
from titan_like.planner.stages import StageProgram


class Usage(NamedTuple):
    """Bytes at a moment of a pass, of one stage."""

    activations: int
    gradients: int
    gathered: int
    reduced: int = 0  # not bytes: elements of gradients that the pass has reduced, whose shards exist too


class StageMemory:
    """What one stage holds in each state, and during each kind of pass."""

    def __init__(self, stage: StageProgram, rules: Rules) -> None:
        self.stage, self.rules = stage, rules
        self.received = 0 if stage.is_first else stage.message  # bytes of its input
        # Between the passes over a microbatch: the output is sent and freed, the input is not.
        kept = sum([segment.kept for segment in stage.segments])
        self.held = kept + self.received - (0 if stage.is_last else stage.message)
        # A layer's tensors are on the way to the host, or from it, while the next one computes. The trace also moves
        # the input of a stage's first layer, which stays.
        self.moving = max([segment.offloaded for segment in stage.segments])
        self.held += self.received if self.moving > 0 else 0
        # The newest microbatch's last layer leaves during the next forward pass, whatever backward passes come first.
        self.leaving = stage.layers[-1].offloaded if stage.layers else 0
        self.deferred = sum([segment.deferred for segment in stage.segments])
        # Gathered elements, and how many of them need a buffer: of the root, and of units before the layers.
        self.root, self.buffered_root = rules.gathered_and_buffered(unit for unit in stage.ends if not unit.name)
        self.table, self.buffered_table = rules.gathered_and_buffered(unit for unit in stage.ends if unit.name)
        self.trained_table = sum([unit.elements for unit in stage.ends if unit.name])
        self.placed = _placed(stage, rules.single, rules.gathers_every_pass)
        self.above = [part for part in self.placed[stage.first_layer + 1 :] if part.unit.gathered]  # other layers
        # Where the root is empty, FSDP2 ends a backward pass with a gather of what the forward pass of the microbatch
        # before ended with, which is needed only later.
        units = [part.unit for part in self.placed if part.unit.gathered]
        is_gathered_early = units and self.root == 0 and (len(stage.layers_per_unit) > 1 or self.table)
        is_buffered = stage.sharers not in rules.single
        self.prefetched = units[-1].gathered - units[-1].experts if is_gathered_early and is_buffered else 0
        self.gradients = StageGradients(stage, rules, self.placed)
        self.states, self.usages, self._moments = (
            cache(self._states_of),
            cache(self._usages_of),
            cache(self._moments_of),
        )

    def _states_of(self, shard: int) -> tuple[list[int], list[int]]:
        """Bytes of gathered weights, and of gradients, in each of their states. ``shard``: elements of this process."""
        weights = [self._gathered(state) for state in range(Weights.AFTER_BACKWARD + 1)]
        return weights, [self.gradients.between_passes(state, shard) for state in range(Gradients.FINISHED + 1)]

    def _usages_of(self, passes: tuple[PassKind, ...], shard: int) -> list[Usage]:
        """The fullest moments of some passes: bytes beyond the activations that the stage holds before them.

        The stage's own weights and gradients are part of them. ``shard``: elements of this process's shard.
        """
        return [self._usage(pass_, shard) for pass_ in passes]

    def _usage(self, pass_: PassKind, shard: int) -> Usage:
        factor = self.rules.master * shard
        sums = factor if self.rules.has_shards(pass_.gradients) else 0
        usages = [
            Usage(activations, gradients + sums + factor * reduced // self.stage.elements, gathered)
            for activations, gradients, gathered, reduced in self._moments(pass_)
        ]
        return max(usages, key=sum)

    def _moments_of(self, pass_: PassKind) -> list[Usage]:
        return _fullest({"F": self._forward, "W": self._second_part}.get(pass_.kind, self._backward)(pass_))

    def _forward(self, pass_: PassKind) -> Iterator[tuple[int, int, int, int]]:
        """Segment by segment. Weights arrive in a buffer, which FSDP2 keeps until the next ones arrive."""
        rules, gradients = self.rules, sum(self.gradients.accumulated(pass_.gradients))
        gathers, frees = rules.gathers(pass_), rules.frees(pass_)
        stays, early = self.root, self.prefetched if pass_.gradients != Gradients.NONE else 0  # elements
        buffer = self.buffered_root
        for number, part in enumerate(self.placed):
            activations = self.received + part.before + (self.moving if part in self.above else 0)
            if part in self.placed[-2:]:
                early = 0
            unit, buffered, begins_unit = part.unit.gathered, part.unit.buffered, part.begins_unit
            trained = part.unit.elements
            if number == 0:
                begins_unit = True
                if self.table:
                    unit, buffered, trained = self.table, self.buffered_table, self.trained_table
            if begins_unit and not frees:
                stays += unit * (1 + part.repeats)
            weights = self.stage.elements
            if gathers:
                weights = stays + unit if frees else stays
                if unit and begins_unit:
                    arriving = weights + early + buffered
                    if rules.held_longer.gather_buffer:
                        arriving += buffer
                    else:  # It is there while shards are cast into the next buffer, but not while weights leave that.
                        cast = trained * rules.compute // rules.master if rules.compute < rules.master else 0
                        yield activations, gradients, rules.compute * (arriving - unit + buffer), cast
                    yield activations, gradients, rules.compute * arriving, 0
                    buffer = buffered
                weights += early + buffer
            during = rules.compute * weights if rules.wrapped else 0
            peak = max((moment.activations for moment in part.segment.forward.moments), default=0)
            yield activations + peak, gradients, during, 0

    def _backward(self, pass_: PassKind) -> Iterator[tuple[int, int, int, int]]:
        """Segment by segment, from the last. Gradients are fresh, then accumulated or reduced."""
        rules = self.rules
        gradients = (CopiedGradients if rules.copied else PassGradients)(self.gradients, pass_)
        gathers, frees, freed = rules.gathers(pass_), rules.frees(pass_), 0
        for part in reversed(self.placed):
            held = self.received + part.before + part.later - self.held + (self.moving if part in self.above else 0)
            of_output = 0 if self.stage.is_last else self.stage.message  # the gradient of the stage's output
            held += 0 if part is self.placed[-1] else of_output  # with which the moments of the last layer begin
            weights, shards = self._weights_during(part, pass_) - freed, gradients.shards
            if gathers and pass_.gathers_root and part is self.placed[-1]:  # after a last layer's and the next one's
                arriving = rules.compute * (self.root + self.buffered_root + part.unit.gathered + part.following)
                yield held + part.segment.kept, gradients.during(part, 0), arriving, shards
            if gathers and part.unit.gathered:  # its weights arrive
                arriving = rules.compute * (self.root + part.unit.gathered + part.unit.buffered)
                yield held + part.segment.kept, gradients.during(part, 0), arriving, shards
            for moment in part.segment.backward.moments:
                during, gathered = gradients.during(part, moment.gradients), weights
                if frees and part.follow_experts(moment.gradients):
                    gathered -= rules.compute * part.experts
                if gathers and moment.repeats and part.experts > 0:
                    # A repeated forward pass gathers experts into a buffer, which FSDP2 keeps until its end.
                    gathered += rules.compute * part.unit.buffered
                yield held + moment.activations, during, gathered, shards
            gradients.produce(part)
            if not part.begins_unit:
                continue
            held += of_output if part is self.placed[-1] else 0
            unit = experts = 0  # whose weights are freed first
            if frees:
                unit, experts = rules.compute * part.unit.gathered, rules.compute * part.unit.experts
            weights -= unit
            if not gathers:
                freed += unit * (1 + part.repeats)
            for during, reduced, is_early in gradients.complete(part.unit, part.repeats):
                activations, extra = (part.segment.at_experts, unit - experts) if is_early else (part.segment.output, 0)
                yield held + activations, during, weights + extra, reduced
        weights = self._weights_during(None, pass_) - freed
        held = self.received - self.held + (self.deferred if pass_.kind == "I" else 0)
        held += 0 if self.stage.is_last else self.stage.message
        for end in sorted(self.stage.ends):  # the root first
            weights -= rules.compute * rules.gathered_elements(end) if frees else 0
            if not end.parameters:
                continue
            largest, last = self.gradients.largest_parameter, end.parameters[-1].elements
            for during, reduced, _ in gradients.complete(LayerUnit(end.elements, 0, largest, last)):
                yield held, during, weights, reduced
        if rules.copied and pass_.kind == "I" and pass_.gradients in Gradients.FRESH:  # sums take the place of both
            new = rules.compute * (self.stage.elements - self.gradients.matrices)
            both = sum(self.gradients.accumulated(pass_.gradients)) + new
            yield held, both + rules.master * self.gradients.largest_vector, weights, 0

    def _weights_during(self, part: Placed | None, pass_: PassKind) -> int:
        """Bytes of gathered weights in a segment's backward pass (None: after the layers'); below ZeRO 3, of all."""
        rules = self.rules
        if not rules.wrapped:
            return 0
        if not rules.gathers_every_pass:
            return rules.compute * self.stage.elements
        early = 0 if pass_.is_last else self.prefetched
        if part is not None and part.unit.gathered:  # and the buffer of the unit that is gathered next
            return rules.compute * (self.root + part.unit.gathered + (part.following or early))
        has_table = part is None or (part is self.placed[0] and self.stage.is_first)
        return rules.compute * (self.root + (self.table + early if has_table else 0))

    def _second_part(self, pass_: PassKind) -> Iterator[tuple[int, int, int, int]]:
        """All products are computed before any is accumulated or reduced. Weights count from what there is before."""
        rules, (accumulated, retained) = self.rules, self.gradients.accumulated(pass_.gradients)
        weights, fresh = 0, rules.compute * self.gradients.matrices
        if rules.adds_in_place and not pass_.is_first:
            yield 0, accumulated + rules.compute * self.gradients.largest_parameter, weights, 0
            fresh = 0
        else:
            yield 0, accumulated + retained + fresh, weights, 0
            if rules.copied and pass_.gradients in Gradients.FRESH_MATRICES:
                yield -self.deferred, accumulated + fresh + rules.master * self.gradients.largest_matrix, weights, 0
        if not rules.wrapped:
            return
        # The products' inputs are freed. One unit after the other is converted, and reduced.
        reduces, had_sums = rules.reduces(pass_), not rules.reduces_every_pass and not pass_.is_first
        lacks_vectors, longer = rules.reduces_matrices_alone(pass_), rules.held_longer
        trained = (unit for unit in self.stage.units if unit.parameters)
        for unit in sorted(trained, key=lambda unit: unit.name == "layers"):
            matrices, present = unit.matrices.elements, unit.matrices if lacks_vectors else unit
            converts = longer.fresh_gradients or had_sums or not reduces  # or else the reduction does
            size = min(fresh, rules.compute * matrices)
            accumulated += rules.reduce * matrices if converts and not had_sums else 0
            fresh -= size if converts else 0
            reduced = rules.reduce * present.elements if reduces else 0
            if rules.frees(pass_) and not rules.gathers_every_pass:
                weights -= rules.compute * unit.elements
            yield -self.deferred, accumulated + fresh + reduced, weights, 0
            if not converts:
                fresh -= size
            accumulated -= min(accumulated, reduced if converts else reduced - rules.reduce * matrices)
            if reduces:
                if unit.sharers in rules.single:
                    yield -self.deferred, accumulated + fresh + rules.results * reduced, weights, 0
                last = rules.reduce * present.parameters[-1].elements if present.parameters else 0
                last = last if longer.last_gradient else 0
                yield -self.deferred, accumulated + last + fresh + reduced, weights, unit.elements

    def _gathered(self, state: int) -> int:
        """Bytes of gathered weights between passes."""
        if not self.rules.wrapped or state == Weights.NOT_GATHERED:
            return 0
        if not self.rules.gathers_every_pass:
            return self.rules.compute * self.stage.elements
        return self.rules.compute * (self.root if state == Weights.AFTER_FORWARD else self.prefetched)


@lru_cache(maxsize=65536)
def _placed(stage: StageProgram, single: tuple[str, ...], gathers_frozen: bool) -> list[Placed]:
    """A stage's segments; two at either end stand for equal layers that are units. Arguments as in `layer_units`."""
    # By layer: its unit, and what of the unit below is gathered while this layer's backward pass runs.
    units: list[tuple[LayerUnit, int]] = []
    below = sum([unit.elements + unit.frozen_elements * gathers_frozen for unit in stage.ends if unit.name])
    for unit, count in zip(layer_units(stage, single, gathers_frozen), stage.layers_per_unit, strict=True):
        units += [(unit, below)] * count
        below = unit.prefetched
    firsts = set(accumulate(stage.layers_per_unit, initial=0))
    segments = stage.segments
    before = list(accumulate([segment.kept for segment in segments], initial=0))
    later = list(accumulate([segment.deferred for segment in reversed(segments)], initial=0))[-2::-1]
    placed, repeats = [], 0
    for index, segment in enumerate(segments):
        layer = index - stage.first_layer
        if not 0 <= layer < stage.num_layers:
            placed.append(Placed(segment, before[index], later[index]))
            continue
        around = segments[max(0, index - 2) : index + 3]
        if len(around) == 5 and all(other is segment for other in around) and {*range(layer - 2, layer + 3)} <= firsts:
            repeats += 1
            continue
        experts = [p for p in segment.parameters if p.sharers != stage.sharers]
        last = max([p.position for p in experts], default=-1)
        through = sum([p.elements for p in segment.parameters if p.position <= last])
        unit, following = units[layer]
        of_unit = unit, layer in firsts, following
        of_experts = sum([p.elements for p in experts]), through
        placed.append(Placed(segment, before[index], later[index], *of_unit, *of_experts, repeats))
        repeats = 0
    return placed


def _fullest(moments: Iterable[tuple[int, int, int, int]]) -> list[Usage]:
    """The moments that no other moment matches or exceeds in both bytes and reduced elements."""
    usages = list[Usage]()
    for usage in sorted(map(Usage._make, moments), key=lambda usage: sum(usage[:3]), reverse=True):
        if not usages or usage.reduced > usages[-1].reduced:
            usages.append(usage)
    return usages
