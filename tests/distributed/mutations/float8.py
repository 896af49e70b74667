"""Bugs in the scales of float8 numbers."""

from typing import Any

from tests.distributed.mutations import bug
from titan_like.parallel import float8


@bug(float8, "all_reduce")
def each_rank_scales_its_own_part(_: Any, amax: Any, *_others: Any) -> Any:
    """Tensor-parallel ranks take the largest magnitude of what they hold."""
    return amax


@bug(float8.Float8Gathers, "__init__")
def each_shard_has_its_own_scale(original: Any, self: Any, *arguments: Any) -> None:
    """A rank casts its shard of a weight, before ZeRO gathers it, with a scale that others do not know."""
    original(self, *arguments)
    self.groups = []
