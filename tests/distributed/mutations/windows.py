"""Bugs in windows, soft caps and sinks of attention."""

import math
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.distributed.mutations import bug
from titan_like.models.layers import interval_attention
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.transformer import Transformer
from titan_like.parallel import cp_attention
from titan_like.parallel.context import ContextCore, UlyssesCore
from titan_like.parallel.tensor_styles import SplitHeads


@bug(AttentionCore, "key_ranges")
def windows_one_key_short(original: Any, self: AttentionCore, *given: Any) -> KeyRanges | None:
    """The token itself comes on top of the window."""
    found = original(self, *given)
    if found is given[-1] or not found.window:
        return found
    return found._replace(first=torch.where(found.end - found.first == found.window, found.first + 1, found.first))


@bug(Transformer, "keep_stage")
def windows_by_number_in_the_stage(original: Any, self: Transformer, *stage: Any) -> None:
    """The pattern of windows begins anew with the first layer of each stage."""
    original(self, *stage)
    for number, layer in enumerate(self.layers.values()):
        (core,) = (module for module in layer.modules() if isinstance(module, AttentionCore))
        core.window = self.config.kind(self.config.kind_of(number)).window
        core.is_plain = not (core.window or core.softcap or core.sinks is not None)


@bug(ContextCore, "query_order")
def windows_by_local_position(original: Any, self: ContextCore, seq_len: int, device: torch.device) -> Any:
    """Windows count from a query's number in the CP shard."""
    return torch.arange(seq_len, device=device), original(self, seq_len, device)[1]


@bug(SplitHeads, "local_sinks")
def sinks_dropped_on_the_last_rank(original: Any, self: SplitHeads) -> torch.Tensor | None:
    """The last tensor-parallel rank's heads have no sinks."""
    sinks = original(self)
    is_last = self.tensor_group.rank == self.tensor_group.size - 1
    return sinks - math.inf if is_last and sinks is not None else sinks


@bug(UlyssesCore, "local_sinks")
def sinks_of_the_first_heads_everywhere(original: Any, self: UlyssesCore) -> torch.Tensor | None:
    """Every rank of a CP group takes the sinks of the first rank's heads."""
    sinks = AttentionCore.local_sinks(self)
    return None if sinks is None else sinks.chunk(self.group.size)[0]


@bug(interval_attention, "sink_gradient")
def sinks_gradient_of_one_rank(original: Any, *inputs: torch.Tensor) -> torch.Tensor:
    """All ranks but the first lose the gradient of their sinks."""
    found = original(*inputs)
    return torch.zeros_like(found) if dist.get_rank() else found


@bug(interval_attention, "_scores")
def capped_after_the_mask(original: Any, q: Any, k: Any, visible: Any, scale: float, softcap: float) -> torch.Tensor:
    """The soft cap makes hidden scores finite."""
    scores = original(q, k, visible, scale, 0.0)
    return softcap * torch.tanh(scores / softcap) if softcap else scores


@bug(interval_attention, "_slope")
def slope_of_the_cap_forgotten(original: Any, scores: torch.Tensor, softcap: float) -> None:
    """The backward pass takes capped scores for those of the products."""
    return


@bug(cp_attention, "_gradients")
def slope_of_the_cap_forgotten_by_the_ring(original: Any, *inputs: Any) -> Any:
    """The same in what the ranks of a CP group compute."""
    with patch.object(interval_attention, "_slope", lambda *_: None):
        return original(*inputs)
