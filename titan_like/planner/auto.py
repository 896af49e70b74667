"""Layouts in words, why one is slower than another, and the choice of a run's layout when it starts."""

import torch

from titan_like.config.errors import require
from titan_like.config.load import edit
from titan_like.config.schema import JobConfig
from titan_like.parallel.schedules.tables import stages_per_rank
from titan_like.planner.predict import forecast
from titan_like.planner.profile import Profile
from titan_like.planner.search import Candidate, SearchResult, search
from titan_like.planner.search_space import set_keys
from titan_like.planner.stages import pipeline_of, pipeline_program
from titan_like.planner.workload import Workload
from titan_like.train.environment import environment_number

_NAMES = {
    "compute": "computation",
    "recompute": "recomputation",
    "tensor": "traffic within layers",
    "messages": "pipeline messages",
    "bubble": "bubble",
    "data": "data-parallel traffic",
    "optimizer": "update",
    "other": "host and framework delays",
}
_WORTH_TELLING = 0.25  # of the largest loss


def differences(best: Candidate, other: Candidate) -> dict[str, float]:
    """Seconds that each part of the step takes longer than in the best layout, largest first."""
    seconds, best_seconds = other.time._asdict(), best.time._asdict()
    parts = {name: seconds[name] - best_seconds[name] for name in _NAMES}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def why_slower(best: Candidate, other: Candidate, profile: Profile) -> str:
    """What costs the most more than in the best layout, and what is gained elsewhere if that is much."""
    parts = differences(best, other)
    lost = next(iter(parts))
    if parts[lost] <= 0.0005 * best.time.total:
        return "about as fast"
    reasons = [f"{_NAMES[lost]} +{parts[lost]:.3g} s ({_because(lost, parts[lost], best.work, other.work, profile)})"]
    gained = min(parts, key=lambda name: parts[name])
    if parts[gained] < -_WORTH_TELLING * parts[lost]:
        reasons.append(f"{_NAMES[gained]} -{-parts[gained]:.3g} s")
    return ", ".join(reasons)


def why_too_large(best: Candidate, other: Candidate, usable: float) -> str:
    """How far a layout is from fitting, and how much faster it would be."""
    faster = 1 - other.time.total / best.time.total
    needed = f"{other.memory_bytes / 2**30:.1f} GiB of {usable / 2**30:.1f}"
    return f"does not fit: {needed}; would be {100 * faster:.1f} % faster"


def _because(part: str, seconds: float, best: Workload, work: Workload, profile: Profile) -> str:
    if part == "compute":
        if 2 * (_adding_up(work, profile) - _adding_up(best, profile)) > seconds:
            return f"ZeRO {work.zero_stage} accumulates whole gradients of {work.microbatches} microbatches"
        fullest, best_fullest = (max(pipeline_of(layout).num_layers) for layout in (work, best))
        if fullest * work.pipeline > best_fullest * best.pipeline:
            return f"uneven stages: {fullest} of {len(work.model.layer_kinds)} layers on one of {work.pipeline} ranks"
        return f"smaller products: microbatches of {work.micro_batch_size}, tensor {work.tensor}"
    if part == "recompute":
        return recomputed(work)
    if part == "tensor":
        across, shared = work.tensor > profile.gpus_per_node, f", context {work.context}" if work.context > 1 else ""
        shared += f", experts {work.expert}" if work.expert > 1 else ""
        over = f" over {-(-work.tensor // profile.gpus_per_node)} nodes" if across else ""
        return f"tensor {work.tensor}{over}{shared}"
    if part in ("messages", "bubble"):
        stages = stages_per_rank(work.schedule, work.virtual_stages)
        degrees = f"pipeline {work.pipeline}" + (f" × {stages} stages" if stages > 1 else "")
        return degrees if part == "messages" else f"{degrees}, {work.microbatches} microbatches"
    if part == "data":
        over = f"over {work.data_parallel} GPUs"
        if work.zero_stage == 3:
            return f"ZeRO 3 gathers weights for each of {work.microbatches} microbatches over {work.shard} GPUs"
        often = f"after each of {work.microbatches} microbatches " if work.zero_stage == 2 else ""
        return f"gradient sums {often}{over}"
    if part == "optimizer":
        return f"ZeRO {work.zero_stage}" if work.zero_stage == 0 else f"{work.shard} shards"
    return f"{work.microbatches} microbatches"


def _adding_up(work: Workload, profile: Profile) -> float:
    """Seconds per step in which gradients are added to the sums of earlier microbatches."""
    held = sum(pipeline_program(work).elements.values())
    return work.accumulates * work.microbatches * held * profile.accumulation_bytes / profile.memory_rate


def recomputed(work: Workload) -> str:
    """Which layers are recomputed, and how."""
    return work.recompute if work.recompute_every == 1 else f"{work.recompute} of one layer in {work.recompute_every}"


def described(work: Workload) -> str:
    """A layout in words."""
    parts = []
    if work.tensor > 1:
        parts.append(f"tensor {work.tensor}" + (" with sequence parallelism" if work.sequence_parallel else ""))
    if work.pipeline > 1:
        stages = f" × {work.virtual_stages} stages" if work.virtual_stages > 1 else ""
        parts.append(f"pipeline {work.pipeline}{stages} ({work.schedule})")
    if work.context > 1:
        parts.append(f"context {work.context} ({work.context_method})")
    if work.expert > 1:
        parts.append(f"experts {work.expert}")
    replicas = f"{work.replicate} × " if work.replicate > 1 else ""
    parts.append(f"data {replicas}{work.shard} (ZeRO {work.zero_stage})")
    parts.append(f"microbatches of {work.micro_batch_size}, recomputation {recomputed(work)}")
    return ", ".join(parts)


def with_chosen_layout(config: JobConfig, world_size: int) -> JobConfig:
    """Replace `parallelism.auto` by a layout. Every process chooses the same one, and rank 0 prints it.

    Raises a `ConfigError` if there is no GPU to plan for, or no layout is valid and fits.
    """
    if not config.parallelism.auto:
        return config
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    on_node = environment_number("LOCAL_WORLD_SIZE", 1, least=1)
    nodes_are_equal = world_size == on_node * environment_number("GROUP_WORLD_SIZE", 1, least=1)
    config, message = choose_layout(config, world_size, gpu, on_node if nodes_are_equal else None)
    if environment_number("RANK", 0) == 0:
        print(message, flush=True)
    return config


def choose_layout(
    config: JobConfig, world_size: int, gpu: str | None, gpus_per_node: int | None
) -> tuple[JobConfig, str]:
    """The configuration in the fastest layout that fits, and a line that says which it is and why.

    The parts of the layout that the file or the command line sets stay as they are. The choice depends on the arguments
    alone, so all processes of a job make the same one without communicating.

    ``gpu``, this machine's, and ``gpus_per_node``, None if nodes differ, are for runs that do not set them in
    [cluster]. Raises a `ConfigError` if it is not known what to plan for, or no layout is valid and fits.
    """
    gpu = config.cluster.gpu or gpu
    reason = "there is no GPU here to plan for; name one in cluster.gpu, or a profile of this machine in "
    reason += "cluster.profile (scripts/plan.py microbenchmark writes it), or set the degrees"
    require(gpu is not None or config.cluster.profile is not None, "parallelism.auto", True, reason)
    gpus_per_node = config.cluster.gpus_per_node or gpus_per_node
    reason = "the nodes have unequal numbers of processes; say how many GPUs to plan for on each"
    require(gpus_per_node, "cluster.gpus_per_node", None, reason)
    planned = edit(config, {"cluster.gpu": gpu, "cluster.gpus_per_node": gpus_per_node})
    result = search(planned, world_size, fixed=set_keys(config), kinds=2)
    values = result.space.settings(result.best.work) | {"parallelism.auto": False}
    return edit(config, values), _summary(result)


def _summary(result: SearchResult) -> str:
    best = result.best
    line = (
        f"layout chosen: {described(best.work)}; predicted: {forecast(best.work, result.profile)}; the simplest of "
        f"{result.counts.valid:,} valid layouts that predictions cannot tell from the fastest"
    )
    for other in [candidate for candidate in result.ranked if candidate is not best][:1]:
        slower = 100 * (other.time.total / best.time.total - 1)
        line += f"; next: {described(other.work)}, {slower:+.1f} %: {why_slower(best, other, result.profile)}"
    return line
