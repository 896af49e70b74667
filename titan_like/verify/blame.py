"""Find the axis of a layout that is at fault.

An axis is a way in which a layout differs from one process. This module knows how to leave each of them out, and what
follows from runs without some of them. It starts no run itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from titan_like.config.change import edit
from titan_like.config.schema import JobConfig
from titan_like.data.batch_size import rampup_batch_sizes
from titan_like.parallel.schedules import check_schedule
from titan_like.verify.shrink import ONE_STAGE, in_layout, layout_of

SAME, DIFFERENT, FAILS, UNDECIDED = "same", "different", "fails", "undecided"
ONE_PROCESS = "one_process"


@dataclass(frozen=True)
class Axis:
    """One axis. ``drop`` returns the configuration without it, which is an equal one if the axis is not in use."""

    name: str
    title: str
    drop: Callable[[JobConfig], JobConfig]
    within: str | None = None  # the axis that this one is a part of and cannot exist without


@dataclass(frozen=True)
class Trial:
    """A run with some axes left out."""

    left_out: str
    outcome: str  # same, different, fails (it did not finish) or undecided (stopped, or not compared)


@dataclass(frozen=True)
class Blame:
    """The axis at fault: a name from `AXES`, several joined by " + ", or one_process."""

    axis: str
    sentence: str
    trials: list[Trial]


def _with(config: JobConfig, **degrees: int) -> JobConfig:
    return in_layout(config, replace(layout_of(config), **degrees))


def _no_schedule(config: JobConfig) -> JobConfig:
    """1F1B with one stage per process, which takes the layers of all its process's stages."""
    return config if config.parallelism.pipeline_schedule == "1f1b" else edit(config, ONE_STAGE)


def _no_zero(config: JobConfig) -> JobConfig:
    """ZeRO stage 0. On one process the stage matters only in a half type, where FSDP keeps the weights in it."""
    is_used = layout_of(config).data_parallel > 1 or config.training.dtype not in ("float32", "float64")
    return edit(config, {"parallelism.zero_stage": 0}) if is_used else config


def _no_accumulation(config: JobConfig) -> JobConfig:
    """As few and as large microbatches as the schedule allows."""
    section, size, layout = config.parallelism, config.training.micro_batch_size, layout_of(config)
    microbatches = min(rampup_batch_sizes(config.training)) // (size * layout.data_parallel)
    virtual, fewest = section.virtual_stages_per_rank, 1
    while layout.pipeline > 1 and check_schedule(section.pipeline_schedule, layout.pipeline, virtual, fewest):
        fewest += 1
    larger = {"training.micro_batch_size": size * (microbatches // fewest)}
    return config if microbatches % fewest else edit(config, larger)


def _no_replicas(config: JobConfig) -> JobConfig:
    return _with(config, replicate=1, shard=layout_of(config).data_parallel)


_NO_SEQUENCE: dict[str, Any] = {"parallelism.sequence_parallel": False}
_NO_RECOMPUTATION: dict[str, Any] = {"activation_checkpoint.mode": "none", "activation_checkpoint.every_n_layers": 1}

# A part comes before the axis that it is a part of. Accumulation comes last because the number of microbatches follows
# from the other axes: without data parallelism one process sees all samples, as more microbatches of the same size.
AXES = (
    Axis("sequence_parallel", "sequence parallelism", lambda c: edit(c, _NO_SEQUENCE), "tensor_parallel"),
    Axis("tensor_parallel", "tensor parallelism", lambda c: _with(c, tensor=1)),
    Axis("pipeline_schedule", "the pipeline schedule", _no_schedule, "pipeline_parallel"),
    Axis("pipeline_parallel", "pipeline parallelism", lambda c: _with(c, pipeline=1)),
    Axis("zero_stage", "the ZeRO stage", _no_zero, "data_parallel"),
    Axis("replicas", "replicas (HSDP)", _no_replicas, "data_parallel"),
    Axis("data_parallel", "data parallelism", lambda c: _with(c, replicate=1, shard=1)),
    Axis("recompute", "recomputation of activations", lambda c: edit(c, _NO_RECOMPUTATION)),
    Axis("compile", "compilation", lambda c: edit(c, {"compile.enable": False})),
    Axis("accumulation", "accumulation over microbatches", _no_accumulation),
)


def without(config: JobConfig, names: Iterable[str | None]) -> JobConfig:
    """The configuration without these axes, in whatever order they are named."""
    names = set(names)
    for axis in AXES:
        config = axis.drop(config) if axis.name in names else config
    return config


def on_one_process(config: JobConfig) -> JobConfig:
    """The configuration without any axis."""
    return without(config, [axis.name for axis in AXES])


def find_fault(config: JobConfig, symptom: str, outcome_of: Callable[[JobConfig], str]) -> Blame:
    """Leave each axis out in turn; if that decides nothing, try each one alone.

    An axis is at fault if the difference vanishes when it alone is left out. ``symptom`` is what the whole layout
    shows: different or fails. A trial that fails where the layout finished has met another problem and tells nothing:
    a bug that drops the last microbatch leaves none at all in a run with one microbatch.
    """
    axes, trials = [axis for axis in AXES if axis.drop(config) != config], list[Trial]()
    names = {axis.name for axis in AXES}

    def shows(title: str, left_out: Iterable[str | None]) -> bool:
        trials.append(Trial(title, outcome_of(without(config, left_out))))
        return trials[-1].outcome in (DIFFERENT, symptom)

    def verdict(guilty: list[Axis], sentence: str) -> Blame:
        return Blame(" + ".join(axis.name for axis in guilty), sentence, trials)

    alone = "the difference is there also on one process without any parallelism: the trainer itself, or the model"
    if not axes or shows("everything: one process, one microbatch", names):
        return Blame(ONE_PROCESS, alone, trials)
    alone_fails = trials[-1].outcome == FAILS
    # One large microbatch rounds differently, so some rows cannot be compared.
    if trials[-1].outcome == UNDECIDED and shows("everything but accumulation: one process", names - {"accumulation"}):
        return Blame(ONE_PROCESS, alone, trials)
    shown = [axis for axis in axes if shows(axis.title, [axis.name])]
    vanishes = [axis for axis, trial in zip(axes, trials[-len(axes) :], strict=True) if trial.outcome == SAME]
    if vanishes:
        guilty = _smallest(vanishes)
        if len(guilty) > 1:
            return verdict(guilty, f"{_listed(guilty)} together: without any one of them every difference vanishes")
        part_of = [f", a part of {axis.title}" for axis in AXES if axis.name == guilty[0].within]
        sentence = f"{guilty[0].title}{''.join(part_of)}: without it alone every difference vanishes"
        takes_several = vanishes[-1].name == "accumulation" != guilty[0].name
        return verdict(guilty, sentence + "; it takes several microbatches to show" * takes_several)
    wrong: list[Axis] = []
    for axis in axes:
        is_part = axis.within in [other.name for other in wrong]  # the whole may be wrong already
        if not is_part and shows(f"all but {axis.title}", names - {axis.name, axis.within or ""}):
            wrong.append(axis)
    if not wrong and alone_fails:
        return Blame(ONE_PROCESS, alone, trials)
    if not wrong:
        return verdict(axes, "no single axis: the difference stays without any one of them, and none is wrong alone")
    if len(wrong) > 1:
        return verdict(wrong, f"more than one axis: each of {_listed(wrong)} is wrong alone")
    rest = ", and something else is wrong without it" if wrong[0] in shown else ""
    return verdict(wrong, f"{wrong[0].title} is wrong alone{rest}")


def _smallest(vanishes: list[Axis]) -> list[Axis]:
    """Narrow down the axes without which a difference vanishes.

    A part is named instead of its whole, and accumulation only if nothing else is left. Without the ZeRO stage nothing
    is sharded and replicas are no axis of their own, so a fault in the replicas vanishes with either.
    """
    wholes = {axis.within for axis in vanishes}
    wholes |= {"zero_stage"} if any(axis.name == "replicas" for axis in vanishes) else set()
    needed = [axis for axis in vanishes if axis.name not in wholes]
    return [axis for axis in needed if axis.name != "accumulation"] or needed


def _listed(axes: list[Axis]) -> str:
    *first, last = [axis.title for axis in axes]
    return f"{', '.join(first)} and {last}" if first else last
