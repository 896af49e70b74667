"""Levels of memory: what each segment of a trace keeps, and the fullest moments of its passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from titan_like.planner.trace.program import Moment, Segment, fullest

FORWARD, BACKWARD, WEIGHTS = range(3)  # passes, in the order of `Segment.passes`


class Event(NamedTuple):
    """A change of the memory in use, or the start of a pass."""

    segment: int
    which: int  # pass
    storage: int  # its number; 0 if a pass starts
    bytes: int  # more, or less
    boundary: int = 0  # where a backward pass starts, the storage of the gradient that it starts from
    repeats: bool = False  # while a backward pass repeats operators of the forward pass


def events_as_compiled(
    events: list[Event],
    compiled: Container[int],
    made_from: Mapping[int, list[int]],
    needed: Container[int],
    inside_kernels: Container[int],
) -> list[Event]:
    """The events with those of some segments changed to what they are if a compiler makes a graph of each pass.

    torch's min-cut partitioner does not keep for the backward pass what pointwise operators can compute again from
    tensors that are kept, unless the backward pass needs it in memory, as a matrix product does. A tensor that only the
    kernel which computes it reads is never in memory.

    Args:
        events: of all segments, operator by operator.
        compiled: the segments that are compiled.
        made_from: storages that pointwise operators wrote in forward passes → the storages that these read.
        needed: storages that a backward pass, or another segment, needs in memory.
        inside_kernels: storages that a single fused kernel writes and reads.
    """
    ends = {event.storage: event for event in events if event.bytes < 0}
    availability: dict[int, bool] = {}

    def stays(storage: int) -> bool:  # until the backward pass
        return storage not in ends or ends[storage].which != FORWARD

    def is_available(storage: int) -> bool:  # to the backward pass
        if storage not in availability:
            sources = made_from.get(storage)
            availability[storage] = stays(storage) or (sources is not None and all(map(is_available, sources)))
        return availability[storage]

    def is_recomputed(event: Event) -> bool:
        number = event.storage
        return number in made_from and number not in needed and all(map(is_available, made_from[number]))

    found, freed = list[Event](), dict[int, list[Event]]()  # freed: at the end of a forward pass, by segment
    dropped = set[int]()
    for event in events:
        if event.storage == 0 and event.which == FORWARD:
            found += freed.pop(event.segment - 1, [])
        elif event.storage in dropped:
            continue
        elif event.segment in compiled and event.bytes > 0:
            end = ends.get(event.storage)
            is_short = end is not None and (end.segment, end.which) == (event.segment, event.which)
            if event.storage in inside_kernels and is_short:
                dropped.add(event.storage)
                continue
            if event.which == FORWARD and stays(event.storage) and is_recomputed(event):
                dropped.add(event.storage)
                freed.setdefault(event.segment, []).append(event._replace(bytes=-event.bytes))
        found.append(event)
    return found


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
                    produced = sum(gradients[one][0] for one in early)
                before, later = carried, sum(created[one] for one in range(index + 1, last + 1))
                carried = later - size_of.get(boundary, 0) * (owner_of.get(boundary, 0) > index)
                if index < last:
                    previous.deferred = max(0, carried - before)
                previous = segment
        elif gradient is not None and which == FORWARD:
            level += size
            early[number] = early.get(number, 0) + size
        elif gradient is not None:
            elements, more = gradient
            produced += elements * (size > 0)
            level += more if size > 0 else -more
        else:
            level += size
            owner = owner_of.setdefault(number, index)
            created[owner] += size * (number not in sums)
            size_of[number] = size_of.get(number, 0) + size
        if which != WEIGHTS:
            below = starts[index] + (carried if which == BACKWARD else 0)
            segment.passes[which].moments.append(Moment(level - below, produced, repeats))
    for segment in segments:
        for one in segment.passes:
            by_kind = ([moment for moment in one.moments if moment.repeats == repeats] for repeats in (False, True))
            one.moments = [moment for moments in by_kind for moment in fullest(moments)]
