"""More tensor-parallel ranks than key-value heads: neighbouring ranks share a head, as in Megatron-LM.

Rows of `SelfAttention.qkv` are split evenly, so each weight exists once, whatever the layout. The shards cut a head
group, [queries per kv head + 2, head_dim]: of its ranks, the last ones hold the key and value. So the ranks of a group
gather the group's output, and each keeps its own queries and a copy of the key and value. In the backward pass the
gradients of these copies are summed.
"""

from typing import Any

import torch
from torch import nn

from titan_like.models.layers.attention import SelfAttention
from titan_like.models.transformer import Transformer
from titan_like.parallel.collectives import Group, gathered
from titan_like.parallel.extend import extend


class SharedHeads(nn.Module):
    """Extends a column-split `SelfAttention.qkv`."""

    kv_group: Group  # the ranks that share a key-value head
    queries: int  # width of a rank's query heads, with their gates
    adapter: Any  # an `Adapter`, if the layer has one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] → the queries of this rank, the key and the value: [batch, seq, heads · head_dim]."""
        ranks = self.kv_group.size
        group = torch.cat(gathered(super().forward(x), self.kv_group).unbind(), -1)
        *queries, key_and_value = group.split([*[self.queries] * ranks, group.shape[-1] - self.queries * ranks], -1)
        return torch.cat((queries[self.kv_group.rank], key_and_value), -1)

    def up(self, low: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """As in `AdaptedLinear`: the shards of B cut a head group, too, but not where those of the base do."""
        whole = self.adapter.up(low, torch.cat(gathered(b, self.kv_group).unbind()))
        return whole.chunk(self.kv_group.size, -1)[self.kv_group.rank]


def share_heads(model: Transformer, kv_group: Group) -> None:
    """Let the ranks of ``kv_group`` share each key-value head of a model, or of one stage.

    Apply it after tensor parallelism.
    """
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.rows_per_kv_head //= kv_group.size
            extend(module.qkv, SharedHeads, kv_group=kv_group, queries=module.rows_per_kv_head * module.head_dim)
