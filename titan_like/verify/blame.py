"""Which axis of a layout is at fault. Works with any function that tells whether a configuration differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titan_like.config.schema import JobConfig
from titan_like.verify.axes import Axis, axes_in_use, num_processes, on_one_process, with_only, without

SAME, DIFFERENT = "same", "different"
ONE_PROCESS = "one_process"


@dataclass(frozen=True)
class Trial:
    """A run with some axes left out, and whether the difference was still there."""

    left_out: str
    outcome: str  # same or different


@dataclass(frozen=True)
class Blame:
    """The verdict. ``axis`` is a name of `titan_like.verify.axes.AXES`, several joined by " + ", or one_process."""

    axis: str
    sentence: str
    trials: list[Trial]


def find_fault(config: JobConfig, differs: Callable[[JobConfig], bool]) -> Blame:
    """Leave each axis out in turn; where that tells nothing, use each one alone.

    An axis is at fault if leaving it out alone makes the difference vanish.
    """
    axes, trials = axes_in_use(config), []

    def try_without(title: str, changed: JobConfig) -> bool:
        different = differs(changed)
        trials.append(Trial(title, DIFFERENT if different else SAME))
        return different

    if num_processes(config) > 1 or axes:
        alone_differs = try_without("everything: one process, one microbatch", on_one_process(config))
    else:
        alone_differs = True
    if alone_differs:
        sentence = (
            "the difference is there also on one process without any parallelism: the trainer itself, or the model"
        )
        return Blame(ONE_PROCESS, sentence, trials)
    vanishes = [axis for axis in axes if not try_without(axis.title, without(config, [axis.name]))]
    if vanishes:
        return _verdict(vanishes, trials)
    wrong: list[Axis] = []
    for axis in axes:
        changed = with_only(config, axis)
        if axis.within is not None and any(other.name == axis.within for other in wrong):
            continue  # what it is a part of is wrong already
        different = differs(changed)
        trials.append(Trial(f"all but {axis.title}", DIFFERENT if different else SAME))
        if different:
            wrong.append(axis)
    if not wrong:
        sentence = "no single axis: the difference stays when any one is left out, and none is wrong alone"
        return Blame(" + ".join(axis.name for axis in axes), sentence, trials)
    sentence = f"more than one axis: each of {_listed(wrong)} is wrong alone"
    if len(wrong) == 1:
        sentence = f"{wrong[0].title} is wrong alone, and something else is wrong without it"
    return Blame(" + ".join(axis.name for axis in wrong), sentence, trials)


def _verdict(vanishes: list[Axis], trials: list[Trial]) -> Blame:
    """Name the smallest: a part goes before the whole, and accumulation only where nothing else is needed."""
    wholes = {axis.within for axis in vanishes}
    needed = [axis for axis in vanishes if axis.name not in wholes]
    if len(needed) > 1:
        needed = [axis for axis in needed if axis.name != "accumulation"]
    sentence = f"{needed[0].title}: without it alone every difference vanishes"
    if len(needed) > 1:
        sentence = f"{_listed(needed)} together: without any one of them every difference vanishes"
    elif any(axis.name == "accumulation" for axis in vanishes) and needed[0].name != "accumulation":
        sentence += "; it takes several microbatches to show"
    return Blame(" + ".join(axis.name for axis in needed), sentence, trials)


def _listed(axes: list[Axis]) -> str:
    *first, last = [axis.title for axis in axes]
    return f"{', '.join(first)} and {last}" if first else last
