"""Bugs in the scales of float8 numbers."""

from typing import Any

import torch

from tests.distributed.mutations import bug
from titan_like.parallel import experts, float8


@bug(float8, "all_reduce")
def each_rank_scales_its_own_part(_: Any, amax: Any, *_others: Any) -> Any:
    """Tensor-parallel ranks take the largest magnitude of what they hold."""
    return amax


@bug(float8.Float8Gathers, "__init__")
def each_shard_has_its_own_scale(original: Any, self: Any, *arguments: Any) -> None:
    """A rank casts its shard of a weight, before ZeRO gathers it, with a scale that others do not know."""
    original(self, *arguments)
    self.groups = []


@bug(float8.Float8Experts, "largest")
def one_scale_for_all_experts(original: Any, *arguments: Any) -> torch.Tensor:
    """The rows of all experts have one scale."""
    found = original(*arguments)
    return found.amax(0, keepdim=True).expand_as(found)


@bug(experts, "exchange_of")
def one_scale_for_all_microbatches(original: Any, *arguments: Any) -> Any:
    """An expert's rows have one scale, whichever data-parallel rank they are from."""
    *others, microbatches = arguments
    found = original(*others, microbatches)
    ends = found.offsets[microbatches - 1 :: microbatches]
    return found._replace(offsets=ends.repeat_interleave(microbatches))


@bug(float8.Float8Experts, "largest")
def scale_of_the_tensor_before(original: Any, *arguments: Any) -> torch.Tensor:
    """A scale is that of the tensor that was cast before."""
    found = original(*arguments)
    before, _before[found.shape] = _before.get(found.shape, found), found
    return before


_before: dict[torch.Size, torch.Tensor] = {}
