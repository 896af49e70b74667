"""Find the axis of a layout that is at fault.

An axis is a way in which a layout differs from one process. This module knows how to leave each of them out, and what
follows from runs without some of them. It starts no run itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.models.registry import model_config
from titan_like.parallel.layout import DEGREES, Degree, Layout
from titan_like.train.layout_rules import is_sparse
from titan_like.verify.shrink import fewest_microbatches, in_layout, num_microbatches

SAME, DIFFERENT, FAILS, UNDECIDED = "same", "different", "fails", "undecided"
ONE_PROCESS = "one_process"


@dataclass(frozen=True)
class Axis:
    """One axis. ``drop`` returns the configuration without it, which is an equal one if the axis is not in use."""

    name: str
    title: str
    drop: Callable[[JobConfig], JobConfig]
    within: tuple[str, ...] = ()  # axes that this one is a part of, or that it shows nothing without


@dataclass(frozen=True)
class Blame:
    """The axis at fault: a name from `AXES`, several joined by " + ", or one_process."""

    axis: str
    sentence: str
    trials: dict[str, str]  # axis left out, next to those that stay out → same, different, fails or undecided


def _with(config: JobConfig, **changes: Any) -> JobConfig:
    return in_layout(config, replace(Layout.of(config.parallelism), **changes))


def _no_schedule(config: JobConfig) -> JobConfig:
    """1F1B with one stage per process, which takes the layers of all its process's stages."""
    if Layout.of(config.parallelism).schedule == "1f1b":
        return config
    return edit(_with(config, schedule="1f1b", virtual_stages=1), {"parallelism.pipeline_layers": None})


def _no_zero(config: JobConfig) -> JobConfig:
    """ZeRO stage 0. On one process the stage matters only in a 16-bit dtype, where FSDP keeps the weights in it."""
    layout = Layout.of(config.parallelism)
    is_used = layout.weight_ranks > 1 or config.training.dtype not in ("float32", "float64")
    return edit(config, {"parallelism.zero_stage": 0}) if is_used else config


def _no_accumulation(config: JobConfig) -> JobConfig:
    """As few and as large microbatches as the schedule allows. Float8 scales are a microbatch's, so those stay."""
    size, layout = config.training.micro_batch_size, Layout.of(config.parallelism)
    microbatches = num_microbatches(config.training, layout)
    fewest = fewest_microbatches(layout, 1)
    larger = {"training.micro_batch_size": size * (microbatches // fewest)}
    return config if config.float8.enable or microbatches % fewest else edit(config, larger)


def _no_replicas(config: JobConfig) -> JobConfig:
    return _with(config, replicate=1, shard=Layout.of(config.parallelism).data_parallel)


def _no_sequence(config: JobConfig) -> JobConfig:
    """Without sequence parallelism, which experts need."""
    return config if is_sparse(model_config(config.model)) else _with(config, sequence_parallel=False)


_NO_RECOMPUTATION: dict[str, Any] = {"activation_checkpoint.mode": "none", "activation_checkpoint.every_n_layers": 1}

_EXPERT_GROUP = ("tensor_parallel", "context_parallel", "zero_stage", "data_parallel")


def _axis(degree: Degree) -> Axis:
    name, within = degree.name, _EXPERT_GROUP if degree.name == "expert" else ()
    return Axis(f"{name}_parallel", f"{name} parallelism", lambda config: _with(config, **{name: 1}), within)


# A part comes before the axis that it is a part of. Accumulation comes last because the number of microbatches follows
# from the other axes: without data parallelism one process sees all samples, as more microbatches of the same size.
AXES = (
    Axis("sequence_parallel", "sequence parallelism", _no_sequence, ("tensor_parallel",)),
    Axis("pipeline_schedule", "the pipeline schedule", _no_schedule, ("pipeline_parallel",)),
    *(_axis(degree) for degree in reversed(DEGREES) if degree.name not in ("replicate", "shard")),
    Axis("zero_stage", "the ZeRO stage", _no_zero, ("data_parallel", "context_parallel")),
    Axis("replicas", "replicas (HSDP)", _no_replicas, ("zero_stage", "data_parallel")),
    Axis("data_parallel", "data parallelism", lambda c: _with(c, replicate=1, shard=1)),
    Axis("recompute", "recomputation of activations", lambda c: edit(c, _NO_RECOMPUTATION)),
    Axis("compile", "compilation", lambda c: edit(c, {"compile.enable": False})),
    Axis("accumulation", "accumulation over microbatches", _no_accumulation),
)


def on_one_process(config: JobConfig) -> JobConfig:
    """The configuration without any axis but accumulation: microbatches keep their size."""
    for axis in AXES[:-1]:
        config = axis.drop(config)
    return config


def other_layout(config: JobConfig, most: int) -> JobConfig:
    """One process or, where the layout has one data-parallel rank, 2 or 3 of up to ``most`` that share the batches."""
    alone = on_one_process(config)
    microbatches = num_microbatches(alone.training, Layout.of(alone.parallelism))
    has_one = Layout.of(config.parallelism).data_parallel == 1
    shared = [ranks for ranks in (2, 3) if has_one and ranks <= most and microbatches % ranks == 0]
    return _with(alone, shard=min(shared, default=1))


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
    needed = vanishes or [axis for axis in kept if axis.name != "accumulation"]
    if not needed:
        cause = "the difference is there also on one process without any parallelism: the trainer itself, or the model"
        return Blame(ONE_PROCESS, cause, trials)
    # A part is named instead of its whole, and accumulation only if nothing else is left.
    wholes = {name for axis in needed for name in axis.within}
    parts = [axis for axis in needed if axis.name not in wholes]
    guilty = [axis for axis in parts if axis.name != "accumulation"] or parts
    *titles, last = [axis.title for axis in guilty]
    axes = f"{', '.join(titles)} and {last} together: without any one of them" if titles else f"{last}: without it"
    consequence = "every difference vanishes" if vanishes else "there is nothing to compare"
    several = "; it takes several microbatches to show" if len(parts) > len(guilty) else ""
    return Blame(" + ".join(axis.name for axis in guilty), f"{axes} {consequence}{several}", trials)
