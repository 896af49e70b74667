"""Levels of memory: what each segment of a trace keeps, and the fullest moments of its passes."""

from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from titan_like.planner.trace.program import EXPERTS_END, Moment, Segment, fullest

FORWARD, BACKWARD, WEIGHTS = range(3)  # passes, in the order of `Segment.passes`


class Event(NamedTuple):
    """A change of the memory in use, or the start of a pass."""

    segment: int
    which: int  # pass
    storage: int  # its number; 0 if a pass starts
    bytes: int  # more, or less
    boundary: int = 0  # where a backward pass starts, the storage of the gradient that it starts from
    repeats: bool = False  # while a backward pass repeats operators of the forward pass


View = tuple[int, ...]  # offset and shape of a tensor in its storage


class Storages(NamedTuple):
    """What a trace knows of storages, by their number."""

    # What a pointwise operator of a forward pass wrote → the storages that it read, and what of them.
    sources: Mapping[int, Sequence[tuple[int, View]]]
    needed: Container[int]  # a backward pass, or another segment, needs them in memory
    inside_kernels: Container[int]  # a single fused kernel writes and reads them
    views: Mapping[int, Mapping[View, int]]  # bytes of each view that backward passes read


def events_as_compiled(
    events: list[Event], compiled: Collection[int], storages: Storages, offloaded: Mapping[int, Iterable[int]]
) -> tuple[list[Event], dict[int, list[int]]]:
    """The events, with some segments' events changed to what they are if a compiler makes a graph of each pass.

    torch's min-cut partitioner does not keep for the backward pass what pointwise operators can compute again from
    tensors that are kept, unless the backward pass needs it in memory, as a matrix product does. A tensor that only the
    kernel which computes it reads is never in memory.

    ``compiled`` names these segments; the events are in the order of the operators. ``offloaded`` gives the storages
    that a segment moves to the host's memory, if they stay for the backward pass. The second result has their bytes.
    """
    ends = {event.storage: event for event in events if event.bytes < 0}
    sizes = {event.storage: event.bytes for event in events if event.bytes > 0}
    stay = {number for number in sizes if number not in ends or ends[number].which != FORWARD}
    made = {event.storage: event.segment for event in events if event.bytes > 0 and event.which == FORWARD}
    written = {number for number, segment in made.items() if segment in compiled}
    absent = _recomputed(storages, sizes, stay, written)
    # At the end of a forward pass, and at the start of a backward pass, by segment.
    freed, returned = defaultdict[int, list[Event]](list), defaultdict[int, list[Event]](list)
    moved, on_device = defaultdict[int, list[int]](list), stay - absent
    for number in absent:
        freed[made[number]].append(Event(made[number], FORWARD, number, -sizes[number]))
    for segment, numbers in offloaded.items():
        for number in on_device.intersection(numbers):
            on_device.remove(number)
            freed[segment].append(Event(segment, FORWARD, number, -sizes[number]))
            returned[segment].append(Event(segment, BACKWARD, number, sizes[number]))
            moved[segment].append(sizes[number])
    compiled_events = list[Event]()
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
    return compiled_events, moved


def _recomputed(storages: Storages, sizes: Mapping[int, int], stay: set[int], written: set[int]) -> set[int]:
    """The storages, of those that compiled forward passes have ``written``, that backward passes compute again."""
    allowed = {number for number in written & storages.sources.keys() if number not in storages.needed}

    def is_kept(number: int, view: View) -> bool:
        views = storages.views.get(number)
        return number in stay and (views is None or view in views or sum(views.values()) >= sizes[number])

    @cache
    def is_recomputed(number: int) -> bool:
        return number in allowed and all(
            source not in sizes or is_kept(source, view) or is_recomputed(source)
            for source, view in storages.sources[number]
        )

    return {number for number in written & stay if is_recomputed(number)}


def fill_in_levels(segments: Sequence[Segment], events: Iterable[Event], gradients: Mapping[int, int]) -> None:
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
                    produced = sum(gradients[storage] for storage in early)
                before, later = carried, sum(created[position] for position in range(index + 1, last + 1))
                carried = later - size_of.get(boundary, 0) * (owner_of.get(boundary, 0) > index)
                if index < last:
                    previous.deferred = max(0, carried - before)
                previous = segment
        elif number == EXPERTS_END:
            segment.at_experts = level - starts[index] - carried
        elif gradient is not None and which == FORWARD:
            level += size
            early[number] = early.get(number, 0) + size
        elif gradient is not None:
            produced += gradient * (size > 0)
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
