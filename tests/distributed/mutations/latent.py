"""Bugs in latent attention, groups and biases of experts, and multi-token prediction."""

from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, Shard

from tests.distributed.mutations import bug
from tests.distributed.mutations.context import changed
from titan_like.data.batch import Batch
from titan_like.models.layers.experts import ExpertLinear, SparseMLP
from titan_like.models.layers.latent_attention import LatentHeads
from titan_like.parallel.context import CPShard
from titan_like.parallel.experts import SplitExperts


@bug(LatentHeads, "forward")
def key_of_the_first_tensor_rank(original: Any, self: Any, latents: torch.Tensor, *inputs: Any) -> torch.Tensor:
    """The key that all heads share learns from the first tensor rank's heads alone."""
    if hasattr(self, "tensor_group") and self.tensor_group.rank:
        rope = self.config.rope_head_size
        latents = torch.cat((latents[..., :-rope], latents[..., -rope:].detach()), 2)
    return original(self, latents, *inputs)


@bug(SparseMLP, "forward")
def groups_of_local_experts(original: Any, self: Any, *inputs: Any, **named: Any) -> torch.Tensor:
    """The experts of each rank are in groups of their own."""
    ranks, config = self.experts.group.size if isinstance(self.experts, SplitExperts) else 1, self.router.config

    def choose(scores: torch.Tensor) -> torch.Tensor:
        groups = scores.unflatten(1, (ranks, config.router_groups, -1))
        best = groups.topk(2).values.sum(3).topk(config.router_top_groups, 2).indices
        is_left = torch.ones_like(groups[..., :1], dtype=torch.bool).scatter(2, best[..., None], False)
        return groups.masked_fill(is_left, -torch.inf).flatten(1).topk(config.experts_per_token, 1).indices

    with patch.object(self.router, "choose", choose):
        return original(self, *inputs, **named)


@bug(ExpertLinear, "bias_rows")
def down_biases_added_by_each(original: Any, self: Any, *inputs: Any) -> torch.Tensor:
    """Each tensor rank adds the whole biases to its partial sums."""
    is_part = isinstance(self.weight, DTensor) and self.weight.placements[-1] == Shard(1)
    return original(self, *inputs) * (self.weight.device_mesh.size(-1) if is_part else 1)


@bug(CPShard, "shard")
def next_labels_shifted_once(original: Any, self: CPShard, batch: Batch) -> Batch:
    """What sees a next token predicts it."""
    found = original(self, batch)
    return found._replace(next_labels=found.labels)


@changed
def next_labels_of_the_shard_shifted(_shard: CPShard, batch: Batch, _length: int) -> Batch:
    """Labels are shifted within a CP shard."""
    assert batch.labels is not None
    return batch._replace(next_labels=batch.labels.roll(-1, 1))


@changed
def next_tokens_of_the_shard(_shard: CPShard, batch: Batch, _length: int) -> Batch:
    """After the last token of a chunk comes the first one of the CP shard's next chunk."""
    return batch._replace(next_tokens=batch.tokens.roll(-1, 1))
