"""Layouts in words, and the reasons why one is slower than another, in numbers."""

from __future__ import annotations

from titan_like.parallel.schedules.tables import stages_per_rank
from titan_like.planner.layer_time import accumulation_time
from titan_like.planner.profile import Profile
from titan_like.planner.search import Candidate
from titan_like.planner.step_time import microbatch_of, most_parameters
from titan_like.planner.workload import Workload, pipeline_of

_NAMES = {
    "compute": "computation",
    "recompute": "recomputation",
    "tensor": "tensor-parallel traffic",
    "messages": "pipeline messages",
    "bubble": "bubble",
    "data": "data-parallel traffic",
    "optimizer": "update",
    "other": "host and framework delays",
}
_WORTH_TELLING = 0.25  # of the largest loss


def differences(best: Candidate, other: Candidate) -> dict[str, float]:
    """Seconds that each part of the step takes longer than in the best layout, largest first."""
    mine, theirs = other.time._asdict(), best.time._asdict()
    parts = {name: mine[name] - theirs[name] for name in _NAMES}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def why_slower(best: Candidate, other: Candidate, profile: Profile) -> str:
    """What costs the most more than in the best layout, and what is gained elsewhere if that is much."""
    parts = differences(best, other)
    lost = next(iter(parts))
    if parts[lost] <= 0.0005 * best.time.total:
        return "about as fast"
    told = [f"{_NAMES[lost]} +{parts[lost]:.3g} s ({_because(lost, parts[lost], best.work, other.work, profile)})"]
    gained = min(parts, key=lambda name: parts[name])
    if parts[gained] < -_WORTH_TELLING * parts[lost]:
        told.append(f"{_NAMES[gained]} -{-parts[gained]:.3g} s")
    return ", ".join(told)


def why_too_large(best: Candidate, other: Candidate, usable: float) -> str:
    """How far a layout is from fitting, and how much faster it would be."""
    faster = 1 - other.time.total / best.time.total
    needed = f"{other.memory_bytes / 2**30:.1f} GiB of {usable / 2**30:.1f}"
    return f"does not fit: {needed}; would be {100 * faster:.1f} % faster"


def _because(part: str, seconds: float, best: Workload, work: Workload, profile: Profile) -> str:
    if part == "compute":
        if 2 * (_adding_up(work, profile) - _adding_up(best, profile)) > seconds:
            return f"ZeRO {work.zero_stage} accumulates whole gradients of {work.microbatches} microbatches"
        return _slower_products(best, work)
    if part == "recompute":
        return recomputed(work)
    if part == "tensor":
        across = work.tensor > profile.gpus_per_node
        return f"tensor {work.tensor}" + (f" over {-(-work.tensor // profile.gpus_per_node)} nodes" if across else "")
    if part in ("messages", "bubble"):
        stages = stages_per_rank(work.schedule, work.virtual_stages)
        of = f"pipeline {work.pipeline}" + (f" × {stages} stages" if stages > 1 else "")
        return of if part == "messages" else f"{of}, {work.microbatches} microbatches"
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
    """Seconds per step in which gradients are added to those of earlier microbatches."""
    counts = pipeline_of(work).counts
    parameters = most_parameters(work.model, counts)[0]
    return work.microbatches * accumulation_time(parameters, microbatch_of(work), profile)


def _slower_products(best: Workload, work: Workload) -> str:
    fullest, theirs = (pipeline_of(one).counts.most for one in (work, best))
    if fullest * work.pipeline > theirs * best.pipeline:
        return f"uneven stages: {fullest} of {work.model.num_layers} layers on one of {work.pipeline} ranks"
    return f"smaller products: microbatches of {work.micro_batch_size}, tensor {work.tensor}"


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
    replicas = f"{work.replicate} × " if work.replicate > 1 else ""
    parts.append(f"data {replicas}{work.shard} (ZeRO {work.zero_stage})")
    parts.append(f"microbatches of {work.micro_batch_size}, recomputation {recomputed(work)}")
    return ", ".join(parts)
