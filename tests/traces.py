"""Traces in tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from titan_like.planner import stages, trace


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
