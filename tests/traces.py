"""Traces in tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from titan_like.planner import stages, trace
from titan_like.planner.workload import Workload


def microbatch_flops(work: Workload, rank: int, recomputed: bool = False, causal: bool = False) -> int:
    """FLOPs of one microbatch on a process of a pipeline rank, forward and backward.

    ``recomputed`` counts what activation checkpointing repeats, ``causal`` half of a matrix with a causal mask.
    """
    segments = (segment for stage in stages.stages_of_rank(work, rank).values() for segment in stage.segments)
    passes = [one for segment in segments for one in segment.passes]
    amounts = [(gemm.recomputed, count * gemm.flops) for one in passes for gemm, count in one.gemms.items()]
    amounts += [
        (core.recomputed, count * core.flops(causal)) for one in passes for core, count in one.attention.items()
    ]
    return sum(flops for is_recomputed, flops in amounts if recomputed or not is_recomputed)


def microbatch_tokens(work: Workload) -> float:
    """Tokens of one microbatch on one rank, without a decoder's. Context parallelism splits each sequence."""
    return work.micro_batch_size * work.seq_len / work.context


@contextmanager
def fresh_stages(folder: Path) -> Iterator[None]:
    """Keep traces in ``folder``, and compose stages anew, as after a change of `LAYER_UNIT_BYTES`."""
    composed = (stages._stage_program, stages._pipeline_program)
    for cached in composed:
        cached.cache_clear()
    with patch.object(trace, "default_folder", lambda: folder):
        yield
    for cached in composed:
        cached.cache_clear()
