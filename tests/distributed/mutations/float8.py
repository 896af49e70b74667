"""Bugs in the scales of float8 numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from tests.distributed.mutations import bug
from titan_like.parallel import float8


@contextmanager
def each_rank_scales_its_own_part() -> Iterator[None]:
    """Tensor-parallel ranks take the largest magnitude of what they hold."""
    with patch.object(float8, "all_reduce", lambda amax, *_: amax):
        yield


@bug(float8.Float8Gathers, "__init__")
def each_shard_has_its_own_scale(original: Any, self: Any, *arguments: Any) -> None:
    """A rank casts its shard of a weight, before ZeRO gathers it, with a scale that others do not know."""
    original(self, *arguments)
    self.groups = []
