"""Seconds of the optimizer's update."""

from __future__ import annotations

from collections.abc import Mapping

from titan_like.optim.update_work import ADAMW_WORK
from titan_like.planner.cost import gemm_time
from titan_like.planner.data_parallel import shard_groups
from titan_like.planner.profile import Profile
from titan_like.planner.trace import TraceKey, trace
from titan_like.planner.trace.program import Gemm
from titan_like.planner.workload import Workload, element_bytes


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
    unsplit = trace(TraceKey.of(work._replace(tensor=1, sequence_parallel=False, expert=1, context=1)))
    size, longest, products = 0, 0.0, 0.0  # of all layers' matrices
    for layer, count in zip(unsplit.layers, work.model.layer_counts, strict=True):
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
