"""The axes along which a layout differs from one process, and how to leave each of them out. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from titan_like.config.schema import JobConfig
from titan_like.data.batch_size import rampup_batch_sizes
from titan_like.parallel.schedules import check_schedule
from titan_like.verify.shrink import edit

Changes = dict[str, Any]


@dataclass(frozen=True)
class Axis:
    """One axis. ``changes`` gives the settings that leave it out, none where it is not in use."""

    name: str
    title: str
    changes: Callable[[JobConfig], Changes]
    within: str | None = None  # the axis that this one is a part of: it cannot be there without

    def drop(self, config: JobConfig) -> JobConfig:
        """The configuration without this axis, equal to its argument where it is not in use."""
        return edit(config, self.changes(config))


def find_axis(name: str) -> Axis:
    """The axis of that name."""
    return next(axis for axis in AXES if axis.name == name)


def axes_in_use(config: JobConfig) -> list[Axis]:
    """Axes that a configuration uses and that can be left out, in the order of `AXES`."""
    return [axis for axis in AXES if axis.drop(config) != config]


def without(config: JobConfig, names: Iterable[str]) -> JobConfig:
    """The configuration with these axes left out, whichever order they are named in."""
    names = set(names)
    for axis in AXES:
        if axis.name in names:
            config = axis.drop(config)
    return config


def with_only(config: JobConfig, axis: Axis) -> JobConfig:
    """The configuration with one axis, and the one that it is a part of, and no other."""
    return without(config, {other.name for other in AXES} - {axis.name, axis.within})


def on_one_process(config: JobConfig) -> JobConfig:
    """The configuration without any axis."""
    return without(config, [axis.name for axis in AXES])


def num_processes(config: JobConfig) -> int:
    """Processes of a configuration whose degrees are all given."""
    section = config.parallelism
    return section.pipeline_parallel_degree * section.tensor_parallel_degree * data_parallel_size(config)


def data_parallel_size(config: JobConfig) -> int:
    """Processes that see different samples."""
    section = config.parallelism
    return section.data_parallel_replicate_degree * section.data_parallel_shard_degree


def _schedule(config: JobConfig) -> Changes:
    """One stage per process in the order 1F1B. Layers of stages that share a process become one stage's."""
    if config.parallelism.pipeline_parallel_degree == 1 or config.parallelism.pipeline_schedule == "1f1b":
        return {}
    return _pipeline(config) | {"parallelism.pipeline_parallel_degree": config.parallelism.pipeline_parallel_degree}


def _pipeline(_: JobConfig) -> Changes:
    return {
        "parallelism.pipeline_parallel_degree": 1,
        "parallelism.pipeline_schedule": "1f1b",
        "parallelism.virtual_stages_per_rank": 1,
        "parallelism.pipeline_layers": None,
    }


def _zero(config: JobConfig) -> Changes:
    """Full weights everywhere. On one process the stage matters only where FSDP holds weights in a half type."""
    is_used = data_parallel_size(config) > 1 or config.training.dtype not in ("float32", "float64")
    return {"parallelism.zero_stage": 0} if is_used else {}


def _data(_: JobConfig, shards: int = 1) -> Changes:
    """One process sees all samples, as more microbatches of the same size."""
    return {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": shards}


def _accumulation(config: JobConfig) -> Changes:
    """As few microbatches as the schedule takes, each larger."""
    section, size = config.parallelism, config.training.micro_batch_size
    microbatches = min(rampup_batch_sizes(config.training)) // (size * data_parallel_size(config))
    pipeline, virtual, fewest = section.pipeline_parallel_degree, section.virtual_stages_per_rank, 1
    while pipeline > 1 and check_schedule(section.pipeline_schedule, pipeline, virtual, fewest):
        fewest += 1
    return {} if microbatches % fewest else {"training.micro_batch_size": size * (microbatches // fewest)}


_SEQUENCE: Changes = {"parallelism.sequence_parallel": False}
_TENSOR = _SEQUENCE | {"parallelism.tensor_parallel_degree": 1}
_RECOMPUTE: Changes = {"activation_checkpoint.mode": "none", "activation_checkpoint.every_n_layers": 1}

# Parts come before what they are a part of: of two that a difference vanishes without, the first is named. The number
# of microbatches comes last, since it follows from what the others leave.
AXES = (
    Axis("sequence_parallel", "sequence parallelism", lambda _: _SEQUENCE, within="tensor_parallel"),
    Axis("tensor_parallel", "tensor parallelism", lambda _: _TENSOR),
    Axis("pipeline_schedule", "the pipeline schedule", _schedule, within="pipeline_parallel"),
    Axis("pipeline_parallel", "pipeline parallelism", _pipeline),
    Axis("zero_stage", "the ZeRO stage", _zero, within="data_parallel"),
    Axis("replicas", "replicas (HSDP)", lambda c: _data(c, data_parallel_size(c)), within="data_parallel"),
    Axis("data_parallel", "data parallelism", _data),
    Axis("recompute", "recomputation of activations", lambda _: _RECOMPUTE),
    Axis("compile", "compilation", lambda _: {"compile.enable": False}),
    Axis("accumulation", "accumulation over microbatches", _accumulation),
)
