"""Seconds and memory of the optimizer's update."""

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from math import prod

from titan_like.optim.update_work import ADAMW_WORK, MatrixParts, UpdateWork
from titan_like.planner.cost import gemm_time
from titan_like.planner.data_parallel import shard_elements, shard_groups
from titan_like.planner.profile import Profile
from titan_like.planner.stages import StageProgram
from titan_like.planner.trace import TraceKey, trace
from titan_like.planner.trace.program import Gemm
from titan_like.planner.workload import Workload, element_bytes


def update_time(work: Workload, profile: Profile, elements: Mapping[str, int]) -> float:
    """Seconds on a rank with these parameters before ZeRO shards them, by the mesh dimension over which it does.

    Each matrix is multiplied on one of the processes that share it.
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
    seconds += max(longest, products / work.pipeline / processes)
    if update.exchange is None:
        return seconds
    all_to_all = profile.links.all_gather(shard * element_bytes(dtype), processes, 1)
    return seconds + update.exchange.all_to_alls * all_to_all


def unsplit_key(work: Workload) -> TraceKey:
    """The key of a trace whose layers have whole matrices."""
    return TraceKey.of(work._replace(tensor=1, sequence_parallel=False, expert=1, context=1))


@lru_cache(maxsize=4096)
def update_workspace(
    update: UpdateWork, unsplit: TraceKey, stages: tuple[StageProgram, ...], shards: tuple[tuple[str, int], ...]
) -> int:
    """Most bytes beside weights, gradients and state on the first process that has these stages.

    ``shards``: items of `Sharding.shards`.
    """
    most, sizes = 0.0, dict(shards)
    for segment, is_layer, _ in (counts for stage in stages for counts in stage.counts):
        element = update.matrix_workspace if is_layer and update.exchange is None else update.workspace
        most = max([most, *(element * shard_elements(p, sizes[p.sharers]) for p in segment.parameters)])
    if update.exchange is None:
        return round(most)
    wholes = {parameter.name: parameter for layer in trace(unsplit).layers for parameter in layer.parameters}
    # By how tensor parallelism and ZeRO split each matrix.
    sets = defaultdict[tuple[str, int, int], list[MatrixParts]](list)
    for part in (p for stage in stages for layer in stage.layers for p in layer.parameters if len(p.shape) == 2):
        whole, size = wholes[part.name], sizes[part.sharers]
        shape, cut = (whole.shape[0] // whole.matrices, whole.shape[1]), size if part.matrices % size else 1
        split = prod(shape) * part.matrices // part.elements
        parts = MatrixParts(shape, part.matrices * cut // size, shard_elements(part, size))
        sets[part.sharers, split, cut].append(parts)
    exchanged = (update.exchange.workspace(update, parts, split * cut) for (_, split, cut), parts in sets.items())
    return round(max([most, *exchanged]))
