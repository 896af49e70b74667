"""Traces in tests: in a folder of their own, and stages that are composed anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from titan_like.planner import stages


@contextmanager
def fresh_stages() -> Iterator[None]:
    """Compose stages anew, as after a change of `LAYER_UNIT_BYTES`."""
    for cached in (stages._stage_program, stages._stages_of_rank):
        cached.cache_clear()
    yield
    for cached in (stages._stage_program, stages._stages_of_rank):
        cached.cache_clear()
