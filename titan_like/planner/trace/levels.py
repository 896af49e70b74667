"""Levels of memory: what each segment of a trace keeps, and the fullest moments of its passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from itertools import starmap
from types import MappingProxyType
from typing import NamedTuple

from titan_like.planner.trace.program import Attention, Collective, Gemm, Moment, Segment, fullest

FORWARD, BACKWARD, WEIGHTS = range(3)  # passes, in the order of `Segment.passes`


class Event(NamedTuple):
    """A change of the memory in use, or the start of a pass."""

    segment: int
    which: int  # pass
    storage: int  # its number; 0 if a pass starts
    bytes: int  # more, or less
    boundary: int = 0  # where a backward pass starts, the storage of the gradient that it starts from
    repeats: bool = False  # while a backward pass repeats operators of the forward pass


View = tuple[int, ...]
"""Offset and shape of a tensor in its storage."""


class Operator(NamedTuple):
    """What wrote a storage in a forward pass, where a compiler may compute it again."""

    kind: str  # pointwise, reduction, product, message, or other
    sources: list[tuple[int, View]]  # storages that it read, and what of them
    work: Gemm | Attention | Collective | None = None
    size: int = 0  # bytes of a message


class Storages(NamedTuple):
    """What a trace knows of storages, by their number."""

    operators: Mapping[int, Operator]  # what wrote them in a forward pass
    needed: Container[int]  # a backward pass, or another segment, needs them in memory
    outside: set[int]  # another segment needs them
    inside_kernels: Container[int]  # a single fused kernel writes and reads them
    views: Mapping[int, Mapping[View, int]]  # bytes of each view that backward passes read


class Compiled(NamedTuple):
    """What a compiler, and offload, make of the events of a trace, by segment."""

    events: list[Event]
    recomputed: list[tuple[int, Operator]]  # what costs time to repeat
    written: dict[int, int]  # bytes of what the repeated operators leave for others
    moved: dict[int, list[int]]  # bytes of each storage that goes to the host's memory


def events_as_compiled(
    events: list[Event],
    compiled: Collection[int],
    storages: Storages,
    budget: float = 1.0,
    offloaded: Mapping[int, Iterable[int]] = MappingProxyType({}),
) -> Compiled:
    """The events, with some segments' events changed to what they are if a compiler makes a graph of each pass.

    torch's min-cut partitioner does not keep for the backward pass what pointwise operators can compute again from
    tensors that are kept, unless the backward pass needs it in memory, as a matrix product does. A tensor that only the
    kernel which computes it reads is never in memory. `Partition` has what it recomputes within a budget.

    Args:
        events: of all segments, operator by operator.
        compiled: the segments that are compiled.
        storages: the storages of the events.
        budget: `activation_checkpoint.budget`.
        offloaded: segment → storages that it moves to the host's memory, if they stay for the backward pass.
    """
    ends = {event.storage: event for event in events if event.bytes < 0}
    sizes = {event.storage: event.bytes for event in events if event.bytes > 0}
    stay = {number for number in sizes if number not in ends or ends[number].which != FORWARD}
    made = {event.storage: event.segment for event in events if event.bytes > 0 and event.which == FORWARD}
    dropped, recomputed, written = set[int](), list[tuple[int, Operator]](), defaultdict[int, int](int)
    for segment in compiled:
        partition = Partition(storages, sizes, stay, {number for number, owner in made.items() if owner == segment})
        partition.fit(budget)
        dropped |= partition.dropped
        recomputed += [(segment, operator) for operator in partition.repeated() if operator.work is not None]
    needed, operators = storages.needed, storages.operators
    rematerialized = {number for number in dropped if number in needed or operators[number].kind != "pointwise"}
    # At the end of a forward pass, and at the start of a backward pass, by segment.
    freed, returned = defaultdict[int, list[Event]](list), defaultdict[int, list[Event]](list)
    moved, handled = defaultdict[int, list[int]](list), set[int]()
    leaving = [(made[number], number) for number in dropped]
    leaving += [(segment, number) for segment, numbers in offloaded.items() for number in stay.intersection(numbers)]
    for segment, number in leaving:
        if number in handled:
            continue
        handled.add(number)
        size, is_dropped = sizes[number], number in dropped
        freed[segment].append(Event(segment, FORWARD, number, -size))
        if number in rematerialized or not is_dropped:
            returned[segment].append(Event(segment, BACKWARD, number, size, repeats=is_dropped))
            written[segment] += size * is_dropped
        if not is_dropped:
            moved[segment].append(size)
    compiled_events, absent = list[Event](), dropped - rematerialized
    for event in events:
        if event.storage == 0:
            compiled_events += freed.pop(event.segment - 1, []) if event.which == FORWARD else []
            compiled_events += [event, *(returned.pop(event.segment, []) if event.which == BACKWARD else [])]
            continue
        end = ends.get(event.storage)
        is_short = end is not None and (end.segment, end.which) == (event.segment, event.which)
        if event.bytes > 0 and event.segment in compiled and event.storage in storages.inside_kernels and is_short:
            absent.add(event.storage)
        elif event.bytes > 0 or event.storage not in absent:
            compiled_events.append(event)
    return Compiled(compiled_events, recomputed, written, moved)


class Partition:
    """What torch's partitioner recomputes of one compiled segment (`choose_saved_values_set` in its `partitioners`)."""

    def __init__(self, storages: Storages, sizes: Mapping[int, int], stay: set[int], written: set[int]) -> None:
        """``stay``: storages that autograd keeps for the backward pass. ``written``: the segment's storages."""
        self.operators, self.views, self.sizes, self.stay = storages.operators, storages.views, sizes, stay
        self.kept = written & stay - storages.outside
        self.known = written & self.operators.keys() - storages.outside
        self.cheap = {number for number in self.known if self.operators[number].kind == "pointwise"}
        self.dropped: set[int] = set()
        self._allow({number for number in self.cheap if number not in storages.needed})

    def fit(self, budget: float) -> None:
        """Recompute until a share ``budget`` of the bytes that are kept now remains.

        Cheap operators come first: pointwise ones whose results the backward pass needs in memory, then all except
        GEMMs and reductions. The choice of these that costs the fewest FLOPs follows. Messages are repeated only at 0.
        """
        total, operators = self._size(), self.operators
        if budget == 1 or not total:
            return
        messages, costly = (
            {number for number in self.known if operators[number].kind in kinds}
            for kinds in (("message",), ("product", "reduction", "message"))
        )
        for allowed in (self.known,) if budget == 0 else (self.cheap, self.known - costly):
            self._allow(allowed)
            if budget == 0 or self._size() < budget * total:
                return
        choices: list[tuple[int, int, frozenset[int]]] = [(0, 0, frozenset())]  # bytes, FLOPs, kept
        for number in sorted(costly & self._ancestors(self.kept) - messages, key=lambda storage: -self.sizes[storage]):
            work, size, best = operators[number].work, self.sizes[number], -1
            flops = work.flops if isinstance(work, Gemm) and not work.grouped else 1
            extended = [(old + size, saved + flops, kept | {number}) for old, saved, kept in choices]
            merged, choices = sorted([*choices, *extended], key=lambda choice: (choice[0], -choice[1])), []
            for choice in merged:
                if choice[0] <= budget * total and choice[1] > best:
                    choices.append(choice)
                    best = choice[1]
        self._allow(self.known - messages - choices[-1][2])

    def repeated(self) -> list[Operator]:
        """The operators that the backward pass repeats, each once."""
        numbers = self._ancestors(self.dropped, self.stay - self.dropped)
        return list({id(self.operators[number]): self.operators[number] for number in numbers}.values())

    def _ancestors(self, numbers: set[int], until: Container[int] = ()) -> set[int]:
        """The segment's storages among ``numbers`` and the storages they are computed from, stopping at ``until``."""
        ancestors, waiting = set[int](), list(numbers)
        while waiting:
            number = waiting.pop()
            if number in self.known and number not in ancestors and number not in until:
                ancestors.add(number)
                waiting += [source for source, _ in self.operators[number].sources]
        return ancestors

    def _allow(self, allowed: set[int]) -> None:
        """Drop what operators of ``allowed`` storages can compute from what is kept."""
        self._allowed, self._available = allowed, dict[int, bool]()
        self.dropped = {number for number in self.kept if self._is_recomputed(number)}

    def _is_recomputed(self, number: int) -> bool:
        return number in self._allowed and all(starmap(self._is_available, self.operators[number].sources))

    def _is_available(self, number: int, view: View) -> bool:  # to the backward pass
        is_whole = self._viewed(number) >= self.sizes.get(number, 0)
        if number in self.stay and (is_whole or view in self.views[number]):
            return True
        if number not in self._available:
            self._available[number] = number not in self.sizes or self._is_recomputed(number)
        return self._available[number]

    def _viewed(self, number: int) -> int:
        """Bytes of a storage as torch counts them: each of its views by itself."""
        return sum(self.views[number].values()) if number in self.views else self.sizes.get(number, 0)

    def _size(self) -> int:
        return sum(map(self._viewed, self.kept - self.dropped))


def fill_in_levels(
    segments: Sequence[Segment], events: Iterable[Event], gradients: Mapping[int, tuple[int, int]]
) -> None:
    """What each segment keeps, and the fullest moments of its passes.

    Levels are relative to the start of a segment's forward pass. Gradients of parameters are counted apart, except
    those that a forward pass makes, which are activations until its backward pass starts.
    """
    level = produced = carried = 0  # carried: bytes that backward passes of later segments leave
    starts, created = [0] * len(segments), defaultdict[int, int](int)  # created: live bytes by segment
    size_of, owner_of = dict[int, int](), dict[int, int]()  # storage → bytes, creating segment
    early: dict[int, int] = {}
    last, previous = len(segments) - 1, segments[-1]
    # Gradients of what all layers take are one sum, however many layers add to it.
    sums = {event.boundary for event in events if event.segment == 1}
    for index, which, number, size, boundary, repeats in events:
        segment, gradient = segments[index], gradients.get(number)
        if number == 0:
            produced = 0
            if which == FORWARD:
                starts[index] = level
                if index:
                    segments[index - 1].kept = level - starts[index - 1]
            elif which == BACKWARD:
                if index == last:
                    segment.kept = level - starts[index]
                    level -= sum(early.values())
                    produced = sum(gradients[storage][0] for storage in early)
                before, later = carried, sum(created[position] for position in range(index + 1, last + 1))
                carried = later - size_of.get(boundary, 0) * (owner_of.get(boundary, 0) > index)
                if index < last:
                    previous.deferred = max(0, carried - before)
                previous = segment
        elif gradient is not None and which == FORWARD:
            level += size
            early[number] = early.get(number, 0) + size
        elif gradient is not None:
            elements, excess = gradient
            produced += elements * (size > 0)
            level += excess if size > 0 else -excess
        else:
            level += size
            owner = owner_of.setdefault(number, index)
            created[owner] += size * (number not in sums)
            size_of[number] = size_of.get(number, 0) + size
        if which != WEIGHTS:
            below = starts[index] + (carried if which == BACKWARD else 0)
            segment.passes[which].moments.append(Moment(level - below, produced, repeats))
    for segment in segments:
        for pass_ in segment.passes:
            by_kind = ([moment for moment in pass_.moments if moment.repeats == repeats] for repeats in (False, True))
            pass_.moments = [moment for moments in by_kind for moment in fullest(moments)]
