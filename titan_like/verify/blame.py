"""Which axis of a layout is at fault. Pure: runs are somebody else's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from titan_like.config.schema import JobConfig
from titan_like.verify.axes import Axis, axes_in_use, find_axis, num_processes, on_one_process, with_only, without

SAME, DIFFERENT, FAILS, UNDECIDED = "same", "different", "fails", "undecided"
ONE_PROCESS = "one_process"


@dataclass(frozen=True)
class Trial:
    """A run with some axes left out, and what became of the difference."""

    left_out: str
    outcome: str  # same, different, undecided (stopped, or not compared), or fails: it did not come to its end


@dataclass(frozen=True)
class Blame:
    """The verdict. ``axis`` is a name of `titan_like.verify.axes.AXES`, several joined by " + ", or one_process."""

    axis: str
    sentence: str
    trials: list[Trial]


def find_fault(config: JobConfig, symptom: str, outcome_of: Callable[[JobConfig], str]) -> Blame:
    """Leave each axis out in turn; where that tells nothing, use each one alone.

    An axis is at fault if leaving it out alone makes the difference vanish. ``symptom`` is what the whole layout shows,
    different or fails. A trial that fails where the layout came to its end has met something else, and tells nothing:
    leave a microbatch out, and a run with one has none at all.
    """
    axes, trials = axes_in_use(config), []

    def shows(title: str, changed: JobConfig) -> bool:
        trials.append(Trial(title, outcome_of(changed)))
        return trials[-1].outcome in (DIFFERENT, symptom)

    is_parallel = num_processes(config) > 1 or bool(axes)
    if not is_parallel or shows("everything: one process, one microbatch", on_one_process(config)):
        return _of_one_process(trials)
    alone_fails = trials[-1].outcome == FAILS
    if trials[-1].outcome == UNDECIDED:  # larger microbatches round otherwise, and some things cannot be compared
        parallel = [axis.name for axis in axes if axis.name != "accumulation"]
        if shows("everything but accumulation: one process", without(config, parallel)):
            return _of_one_process(trials)
    vanishes = []
    for axis in axes:
        shows(axis.title, without(config, [axis.name]))
        if trials[-1].outcome == SAME:
            vanishes.append(axis)
    if vanishes:
        return _verdict(vanishes, trials)
    stays = {trial.left_out for trial in trials if trial.outcome in (DIFFERENT, symptom)}
    wrong: list[Axis] = []
    for axis in axes:  # what it is a part of may be wrong already
        if axis.within not in [other.name for other in wrong]:
            wrong += [axis] if shows(f"all but {axis.title}", with_only(config, axis)) else []
    if not wrong and alone_fails:
        return _of_one_process(trials)
    if not wrong:
        sentence = "no single axis: the difference stays when any one is left out, and none is wrong alone"
        return Blame(" + ".join(axis.name for axis in axes), sentence, trials)
    sentence = f"more than one axis: each of {_listed(wrong)} is wrong alone"
    if len(wrong) == 1:
        rest = ", and something else is wrong without it" if wrong[0].title in stays else ""
        sentence = f"{wrong[0].title} is wrong alone{rest}"
    return Blame(" + ".join(axis.name for axis in wrong), sentence, trials)


def _of_one_process(trials: list[Trial]) -> Blame:
    sentence = "the difference is there also on one process without any parallelism: the trainer itself, or the model"
    return Blame(ONE_PROCESS, sentence, trials)


def _verdict(vanishes: list[Axis], trials: list[Trial]) -> Blame:
    """Name the smallest: a part goes before the whole, and accumulation only where nothing else is needed.

    Replicas are told from shards only where something is sharded, so that they vanish together with the ZeRO stage.
    """
    wholes = {axis.within for axis in vanishes}
    if any(axis.name == "replicas" for axis in vanishes):
        wholes.add("zero_stage")
    needed = [axis for axis in vanishes if axis.name not in wholes]
    if len(needed) > 1:
        needed = [axis for axis in needed if axis.name != "accumulation"]
    sentence = f"{_listed(needed)} together: without any one of them every difference vanishes"
    if len(needed) == 1:
        whole = needed[0].within
        part_of = f", a part of {find_axis(whole).title}" if whole else ""
        sentence = f"{needed[0].title}{part_of}: without it alone every difference vanishes"
        if vanishes[-1].name == "accumulation" != needed[0].name:
            sentence += "; it takes several microbatches to show"
    return Blame(" + ".join(axis.name for axis in needed), sentence, trials)


def _listed(axes: list[Axis]) -> str:
    *first, last = [axis.title for axis in axes]
    return f"{', '.join(first)} and {last}" if first else last
