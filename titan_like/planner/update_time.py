"""Seconds and memory of the optimizer's update."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import lru_cache
from math import prod

from titan_like.optim.update_work import ADAMW_WORK, UpdateWork
from titan_like.planner.cost import gemm_time
from titan_like.planner.data_parallel import shard_groups, shard_rows
from titan_like.planner.profile import Profile
from titan_like.planner.stages import StageProgram
from titan_like.planner.trace import TraceKey, trace
from titan_like.planner.trace.program import Gemm
from titan_like.planner.workload import BYTES, Workload, element_bytes


def update_time(work: Workload, profile: Profile, elements: Mapping[str, int]) -> float:
    """Seconds on a rank with these parameters before ZeRO shards them, by the mesh dimension over which it does.

    An optimizer that multiplies matrices has each gathered on one of the processes that share it, and sends their
    updates back.
    """
    update, groups = work.update, shard_groups(work)
    local_size = sum(number / (groups[sharers][0] if work.zero_stage else 1) for sharers, number in elements.items())
    # The profile's figure is AdamW's.
    nbytes = local_size * (profile.optimizer_traffic + update.traffic - ADAMW_WORK.traffic)
    if not update.matrix_gemms and not update.matrix_traffic:
        return nbytes / profile.memory_rate
    dtype = update.gemm_dtype
    if profile.device.is_cpu or dtype not in profile.device.peak:  # as on GPUs before Ampere, which emulate bfloat16
        dtype = "float32"
    size, longest, products = 0, 0.0, 0.0  # of all layers' matrices
    for layer, count in zip(trace(unsplit_key(work)).layers, work.model.layer_counts, strict=True):
        for matrix in (p for p in layer.parameters if len(p.shape) == 2):
            rows, columns = matrix.shape[0] // matrix.matrices, matrix.shape[1]
            gemms = [(Gemm(*sizes, 1, False, 16), calls) for sizes, calls in update.gemms(rows, columns).items()]
            time = sum(calls * gemm_time(gemm, dtype, profile) for gemm, calls in gemms)
            size, longest = size + count * matrix.elements, max(longest, time)
            products += count * matrix.matrices * time
    processes = work.tensor * (work.shard * work.context if work.zero_stage else 1)
    shard = size / work.pipeline / processes
    seconds = (nbytes + shard * update.matrix_traffic) / profile.memory_rate
    if not update.matrix_gemms:
        return seconds
    sends = 2 * profile.links.all_gather(shard * element_bytes(dtype), processes, 1)  # two all-to-alls
    return seconds + max(longest, products / work.pipeline / processes) + sends


def unsplit_key(work: Workload) -> TraceKey:
    """The key of a trace whose layers have whole matrices."""
    return TraceKey.of(work._replace(tensor=1, sequence_parallel=False, expert=1, context=1))


@lru_cache(maxsize=4096)
def update_workspace(
    update: UpdateWork, unsplit: TraceKey, stages: tuple[StageProgram, ...], shards: tuple[tuple[str, int], ...]
) -> int:
    """Most bytes beside weights, gradients and state on the first process that has these stages.

    ``shards``: items of `Sharding.shards`. An optimizer that multiplies matrices exchanges them as Muon does.
    """
    most, sizes = 0.0, dict(shards)
    for segment, is_layer, _ in (counts for stage in stages for counts in stage.counts):
        element = update.matrix_workspace if is_layer and not update.matrix_gemms else update.workspace
        most = max([most, *(element * _local(p.shape, sizes[p.sharers]) for p in segment.parameters)])
    if not update.matrix_gemms:
        return round(most)
    from titan_like.optim.muon import assign_owners  # imports DTensor, for 0.5 s

    element = BYTES[update.gemm_dtype]
    wholes = {parameter.name: parameter for layer in trace(unsplit).layers for parameter in layer.parameters}
    # By the processes that cut matrices: the shape of a whole one, how many there are, elements on this process.
    sets = defaultdict[tuple[str, int, int], list[tuple[tuple[int, int], int, int]]](list)
    for part in (p for stage in stages for layer in stage.layers for p in layer.parameters if len(p.shape) == 2):
        whole, size = wholes[part.name], sizes[part.sharers]
        shape, cut = (whole.shape[0] // whole.matrices, whole.shape[1]), size if part.matrices % size else 1
        split = prod(shape) * part.matrices // part.elements
        sets[part.sharers, split, cut].append((shape, part.matrices * cut // size, _local(part.shape, size)))
    for (_, split, cut), members in sets.items():
        shapes = [shape for shape, count, _ in members for _ in range(count)]
        numbers = [number for number, (_, count, _) in enumerate(members) for _ in range(count)]
        owners = assign_owners(shapes, split * cut)
        owned = Counter(number for number, owner in zip(numbers, owners, strict=True) if owner == 0)
        stacks = [
            (count * prod(members[n][0]), count * update.workspace_of_matrix(*members[n][0]))
            for n, count in owned.items()
        ]
        held = element * sum([*(whole for whole, _ in stacks), *(local for *_, local in members)])
        if split * cut > 1:  # parts and whole matrices exist, and either copies to be sent or an update's workspace
            most = max(most, 2 * held, *(held + workspace - element * whole for whole, workspace in stacks))
        else:
            most = max([most, *(workspace for _, workspace in stacks)])
    return round(most)


def _local(shape: tuple[int, ...], shards: int) -> int:
    return prod((shard_rows(shape[0], shards), *shape[1:]))
