"""The axes along which a layout differs from one process, and how to leave each of them out. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from titan_like.config.schema import JobConfig
from titan_like.parallel.schedules import check_schedule
from titan_like.train.batch_size import rampup_batch_sizes
from titan_like.verify.shrink import edit


@dataclass(frozen=True)
class Axis:
    """One axis. ``drop`` gives the configuration without it, equal to its argument where it is not in use."""

    name: str
    title: str
    drop: Callable[[JobConfig], JobConfig]
    within: str | None = None  # the axis that this one is a part of: it cannot be there without


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
    model_parallel = section.pipeline_parallel_degree * section.tensor_parallel_degree
    return model_parallel * data_parallel_size(config)


def data_parallel_size(config: JobConfig) -> int:
    """Processes that see different samples."""
    section = config.parallelism
    return section.data_parallel_replicate_degree * section.data_parallel_shard_degree


def num_microbatches(config: JobConfig) -> int:
    """Microbatches of a step on each data-parallel process, the fewest during a ramp-up."""
    training = config.training
    return min(rampup_batch_sizes(training)) // (training.micro_batch_size * data_parallel_size(config))


def _drop_sequence(config: JobConfig) -> JobConfig:
    return edit(config, {"parallelism.sequence_parallel": False})


def _drop_tensor(config: JobConfig) -> JobConfig:
    return edit(config, {"parallelism.tensor_parallel_degree": 1, "parallelism.sequence_parallel": False})


def _drop_schedule(config: JobConfig) -> JobConfig:
    """One stage per process in the order 1F1B. Layers of stages that share a process become one stage's."""
    section = config.parallelism
    if section.pipeline_parallel_degree == 1 or section.pipeline_schedule == "1f1b":
        return config
    values = {"parallelism.pipeline_schedule": "1f1b", "parallelism.virtual_stages_per_rank": 1}
    return edit(config, values | {"parallelism.pipeline_layers": None})


def _drop_pipeline(config: JobConfig) -> JobConfig:
    config = _drop_schedule(config)
    return edit(config, {"parallelism.pipeline_parallel_degree": 1, "parallelism.pipeline_schedule": "1f1b",
                         "parallelism.pipeline_layers": None})  # fmt: skip


def _drop_zero(config: JobConfig) -> JobConfig:
    """Full weights everywhere. On one process the stage matters only where FSDP holds weights in a half type."""
    if data_parallel_size(config) == 1 and config.training.dtype in ("float32", "float64"):
        return config
    return edit(config, {"parallelism.zero_stage": 0})


def _drop_replicas(config: JobConfig) -> JobConfig:
    """The replicas' processes become shards."""
    section = config.parallelism
    shards = section.data_parallel_replicate_degree * section.data_parallel_shard_degree
    return edit(
        config,
        {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": shards},
    )


def _drop_data(config: JobConfig) -> JobConfig:
    """One process sees all samples, as more microbatches of the same size."""
    return edit(config, {"parallelism.data_parallel_replicate_degree": 1, "parallelism.data_parallel_shard_degree": 1})


def _drop_recompute(config: JobConfig) -> JobConfig:
    return edit(config, {"activation_checkpoint.mode": "none", "activation_checkpoint.every_n_layers": 1})


def _drop_compile(config: JobConfig) -> JobConfig:
    return edit(config, {"compile.enable": False})


def _drop_accumulation(config: JobConfig) -> JobConfig:
    """As few microbatches as the schedule takes, each larger."""
    section, microbatches = config.parallelism, num_microbatches(config)
    pipeline = section.pipeline_parallel_degree
    fewest = 1
    while pipeline > 1 and check_schedule(
        section.pipeline_schedule, pipeline, section.virtual_stages_per_rank, fewest
    ):  # fmt: skip
        fewest += 1
    if microbatches % fewest:
        return config
    larger = config.training.micro_batch_size * (microbatches // fewest)
    return edit(config, {"training.micro_batch_size": larger})


# Parts come before what they are a part of: of two that a difference vanishes without, the first is named. The number
# of microbatches comes last, since it follows from what the others leave.
AXES = (
    Axis("sequence_parallel", "sequence parallelism", _drop_sequence, within="tensor_parallel"),
    Axis("tensor_parallel", "tensor parallelism", _drop_tensor),
    Axis("pipeline_schedule", "the pipeline schedule", _drop_schedule, within="pipeline_parallel"),
    Axis("pipeline_parallel", "pipeline parallelism", _drop_pipeline),
    Axis("zero_stage", "the ZeRO stage", _drop_zero, within="data_parallel"),
    Axis("replicas", "replicas (HSDP)", _drop_replicas, within="data_parallel"),
    Axis("data_parallel", "data parallelism", _drop_data),
    Axis("recompute", "recomputation of activations", _drop_recompute),
    Axis("compile", "compilation", _drop_compile),
    Axis("accumulation", "accumulation over microbatches", _drop_accumulation),
)
