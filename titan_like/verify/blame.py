"""Find the axis of a layout that is at fault, from runs without some of the axes. Starts no run itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titan_like.config.schema import JobConfig
from titan_like.parallel.axes import ACCUMULATION, AXES, Axis

SAME, DIFFERENT, FAILS, UNDECIDED = "same", "different", "fails", "undecided"
ONE_PROCESS = "one_process"


@dataclass(frozen=True)
class Blame:
    """The axis at fault: a name from `AXES`, several joined by " + ", or one_process."""

    axis: str
    sentence: str
    trials: dict[str, str]  # axis left out, next to those that stay out → same, different, fails or undecided


def find_fault(config: JobConfig, symptom: str, outcome_of: Callable[[JobConfig], str]) -> Blame:
    """Leave out one axis after the other, for good if the difference stays. At fault are those that have to stay.

    ``symptom`` is what the whole layout shows: different or fails. A trial that fails where the layout finished has met
    another problem and tells nothing: a bug that drops the last microbatch leaves none at all in a run with one
    microbatch. An axis without which such trials fail is at fault only if there is no other.
    """
    trials, kept = dict[str, str](), list[Axis]()
    for axis in AXES:
        rest = axis.drop(config)
        if rest == config:
            continue
        trials[axis.name] = outcome_of(rest)
        if trials[axis.name] in (DIFFERENT, symptom):
            config = rest
        else:
            kept.append(axis)
    vanishes = [axis for axis in kept if trials[axis.name] == SAME]
    needed = vanishes or [axis for axis in kept if axis is not ACCUMULATION]
    if not needed:
        cause = "the difference is there also on one process without any parallelism: the trainer itself, or the model"
        return Blame(ONE_PROCESS, cause, trials)
    # A part is named instead of its whole, and accumulation only if nothing else is left.
    wholes = {name for axis in needed for name in axis.within}
    parts = [axis for axis in needed if axis.name not in wholes]
    guilty = [axis for axis in parts if axis is not ACCUMULATION] or parts
    *titles, last = [axis.title for axis in guilty]
    axes = f"{', '.join(titles)} and {last} together: without any one of them" if titles else f"{last}: without it"
    consequence = "every difference vanishes" if vanishes else "there is nothing to compare"
    several = "; it takes several microbatches to show" if len(parts) > len(guilty) else ""
    return Blame(" + ".join(axis.name for axis in guilty), f"{axes} {consequence}{several}", trials)
