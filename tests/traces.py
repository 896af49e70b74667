"""Traces in tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from titan_like.planner import stages, trace
from titan_like.planner.workload import Workload


def microbatch_flops(work: Workload, rank: int, recomputed: bool = False, causal: bool = False) -> int:
    """FLOPs of one microbatch on a process of a pipeline rank, forward and backward; arguments as of `Pass.flops`."""
    segments = (segment for stage in stages.stages_of_rank(work, rank).values() for segment in stage.segments)
    return sum(one.flops(recomputed, causal) for segment in segments for one in segment.passes)


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
