"""The axes of a layout, each with the configuration without it. `verify` leaves them out in turn to find a fault."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from titan_like.config.load import edit
from titan_like.config.schema import JobConfig, Training
from titan_like.data.loading.batch_size import rampup_batch_sizes
from titan_like.models.config import has_experts
from titan_like.models.registry import model_config
from titan_like.parallel.layout import DEGREES, Degree, Layout
from titan_like.parallel.schedules.tables import check_schedule


@dataclass(frozen=True)
class Axis:
    """One axis. ``drop`` returns the configuration without it, which is an equal one if the axis is not in use."""

    name: str
    title: str
    drop: Callable[[JobConfig], JobConfig]
    within: tuple[str, ...] = ()  # axes that this one is a part of, or that it shows nothing without


def in_layout(config: JobConfig, layout: Layout) -> JobConfig:
    """The configuration in this layout. Settings that a degree of 1 does not allow are reset."""
    ranks = layout.token_shards // layout.expert_tensor
    values = replace(layout, expert=math.gcd(layout.expert, ranks)).settings()
    return edit(config, values | ({"parallelism.pipeline_layers": None} if layout.pipeline == 1 else {}))


def num_microbatches(training: Training, layout: Layout) -> int:
    """The fewest microbatches that a process has in a step."""
    return min(rampup_batch_sizes(training)) // (training.micro_batch_size * layout.data_parallel)


def fewest_microbatches(layout: Layout, at_least: int) -> int:
    """The smallest number of microbatches that the schedule takes, from ``at_least`` on."""
    while check_schedule(layout.schedule, layout.pipeline, layout.virtual_stages, at_least) is not None:
        at_least += 1
    return at_least


def changed(config: JobConfig, **changes: Any) -> JobConfig:
    """The configuration with other fields of its `Layout`."""
    return in_layout(config, replace(Layout.of(config.parallelism), **changes))


def _no_schedule(config: JobConfig) -> JobConfig:
    """1F1B with one stage per process, which takes the layers of all its process's stages."""
    if Layout.of(config.parallelism).schedule == "1f1b":
        return config
    return edit(changed(config, schedule="1f1b", virtual_stages=1), {"parallelism.pipeline_layers": None})


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


def _no_sequence(config: JobConfig) -> JobConfig:
    """Without sequence parallelism, which experts need."""
    return config if has_experts(model_config(config.model)) else changed(config, sequence_parallel=False)


_PLAIN = {"mode": "none", "every_n_layers": 1, "budget": None}
_NO_RECOMPUTATION: dict[str, Any] = {f"activation_checkpoint.{name}": value for name, value in _PLAIN.items()}

_WITHIN = {
    "expert": ("tensor_parallel", "context_parallel", "zero_stage", "data_parallel"),
    "expert_tensor": ("tensor_parallel",),
}


def _axis(degree: Degree) -> Axis:
    name, within = degree.name, _WITHIN.get(degree.name, ())
    title = f"{name.replace('_', ' ')} parallelism"
    return Axis(f"{name}_parallel", title, lambda config: changed(config, **{name: 1}), within)


ACCUMULATION = Axis("accumulation", "accumulation over microbatches", _no_accumulation)

# A part comes before the axis that it is a part of. Accumulation comes last because the number of microbatches follows
# from the other axes: without data parallelism one process sees all samples, as more microbatches of the same size.
AXES = (
    Axis("sequence_parallel", "sequence parallelism", _no_sequence, ("tensor_parallel",)),
    Axis("pipeline_schedule", "the pipeline schedule", _no_schedule, ("pipeline_parallel",)),
    *(_axis(degree) for degree in reversed(DEGREES) if degree.name not in ("replicate", "shard")),
    Axis("zero_stage", "the ZeRO stage", _no_zero, ("data_parallel", "context_parallel")),
    Axis(
        "replicas",
        "replicas (HSDP)",
        lambda c: changed(c, replicate=1, shard=Layout.of(c.parallelism).data_parallel),
        ("zero_stage", "data_parallel"),
    ),
    Axis("data_parallel", "data parallelism", lambda c: changed(c, replicate=1, shard=1)),
    Axis("offload", "offload of activations", lambda c: edit(c, {"activation_checkpoint.offload": False})),
    Axis("recompute", "recomputation of activations", lambda c: edit(c, _NO_RECOMPUTATION)),
    Axis("compile", "compilation", lambda c: edit(c, {"compile.enable": False})),
    Axis("cudagraphs", "CUDA graphs", lambda c: edit(c, {"compile.cudagraphs": False})),
    ACCUMULATION,
)


def on_one_process(config: JobConfig) -> JobConfig:
    """The configuration without any axis but accumulation: microbatches keep their size."""
    for axis in AXES:
        config = config if axis is ACCUMULATION else axis.drop(config)
    return config


def other_layout(config: JobConfig, most: int) -> JobConfig:
    """One process or, where the layout has one data-parallel rank, 2 or 3 of up to ``most`` that share the batches."""
    alone = on_one_process(config)
    microbatches = num_microbatches(alone.training, Layout.of(alone.parallelism))
    has_one = Layout.of(config.parallelism).data_parallel == 1
    shared = [ranks for ranks in (2, 3) if has_one and ranks <= most and microbatches % ranks == 0]
    return changed(alone, shard=min(shared, default=1))
