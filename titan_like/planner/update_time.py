"""Seconds of the optimizer's update."""

from __future__ import annotations

from functools import lru_cache

from titan_like.models.config import TransformerConfig
from titan_like.optim.state_size import ADAMW_WORK, newton_schulz_products
from titan_like.planner.dtypes import element_bytes
from titan_like.planner.layer_time import gemm_time
from titan_like.planner.profile import Profile
from titan_like.planner.shapes import description
from titan_like.planner.workload import Workload


def update_time(work: Workload, profile: Profile, parameters: float, layers: int) -> float:
    """Seconds on a rank that holds ``layers`` layers, and ``parameters`` before ZeRO splits them.

    Muon's matrices are gathered, each on one of the processes that share it, and their updates are sent back.
    """
    update, shards = work.update, work.shard * work.context if work.zero_stage else 1
    # The profile's figure is AdamW's.
    nbytes = parameters / shards * (profile.optimizer_traffic + update.traffic - ADAMW_WORK.traffic)
    if update.newton_schulz_steps == 0:
        return nbytes / profile.memory_rate
    dtype = update.newton_schulz_dtype or ("float32" if profile.device.is_cpu else "bfloat16")
    if dtype not in profile.device.peak:  # as on GPUs before Ampere, which emulate bfloat16
        dtype = "float32"
    elements, longest, products = _matrices(work.model, dtype, profile)
    processes, share = work.tensor * shards, layers / sum(work.model.layer_counts)
    here = share * elements / processes
    computes = update.newton_schulz_steps * max(longest, share * products / processes)
    sends = 2 * profile.links.all_gather(here * element_bytes(dtype), processes, 1)  # two all-to-alls
    return (nbytes + here * update.matrix_traffic) / profile.memory_rate + computes + sends


@lru_cache(maxsize=1024)
def _matrices(model: TransformerConfig, dtype: str, profile: Profile) -> tuple[int, float, float]:
    """The elements of all layers' matrices, and seconds of a Newton-Schulz step: the longest one's, and the sum."""
    elements, longest, total = 0, 0.0, 0.0
    for kind, count in zip(description(model).kinds, model.layer_counts, strict=True):
        for rows, columns in (parameter.shape for parameter in kind.parameters if len(parameter.shape) == 2):
            step = sum(gemm_time(*sizes, 1, dtype, profile) for sizes in newton_schulz_products(rows, columns))
            elements, longest, total = elements + count * rows * columns, max(longest, step), total + count * step
    return elements, longest, total
