"""Context parallelism: a CP group of processes splits each sequence (docs/long_context.md).

A rank has two of 2 · size load-balanced chunks of a sequence, one from its head and one from its tail, so that causal
attention gives all ranks equal work (arXiv 2407.21783, section 3.3.2). Everything but attention works on positions one
by one. Positions, masks and labels are sharded like the tokens, so ranks differ only in the positions they own.

| method | before attention | after it | a rank attends with |
|---|---|---|---|
| all_gather | all-gather keys and values | | its queries, all keys |
| ulysses | all-to-all queries, keys and values | all-to-all the result | its heads, the whole sequence |
| ring | pass keys and values on, size - 1 times | | its queries, one rank's keys at a time |
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_like.config.schema import JobConfig
from titan_like.data.batch import B, map_tensors
from titan_like.models.config import TransformerConfig
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.key_ranges import block_mask
from titan_like.models.transformer import Transformer
from titan_like.parallel.collectives import Group, all_to_all, gathered
from titan_like.parallel.cp_attention import cp_attention, shard, shard_positions, unshard
from titan_like.parallel.extend import extend
from titan_like.parallel.layout import Layout, method_of


@dataclass(frozen=True)
class CPShard:
    """This rank's shard of every sequence."""

    size: int  # of the CP group
    rank: int  # in the CP group
    method: str

    def shard(self, batch: B) -> B:
        """A microbatch's fields [batch, seq] → this rank's CP shard of them, [batch, seq / size].

        An encoder's and a decoder's part are sharded apart, and positions count from 0 in both. Masks keep the numbers
        that keys have in the whole sequence. `ulysses` unshards sequences, so its masks stay whole. On a GPU, masks
        get the blocks that FlexAttention takes, except for a ring, which does not use it.
        """
        length, first, method = batch.tokens.shape[1], batch.encoder_len or 0, self.method
        if self.size > 1:
            encoder, rest = (shard_positions(n, self.size, self.rank) for n in (first, length - first))
            local, whole = (torch.cat((encoder, x)).to(batch.tokens.device) for x in (rest, rest + first))
            sharded = map_tensors(lambda x: x[:, whole] if x.shape[1:2] == (length,) else x, batch)
            batch = sharded._replace(
                positions=local if batch.positions is None else sharded.positions,
                document_mask=batch.document_mask if method == "ulysses" else sharded.document_mask,
                encoder_len=None if batch.encoder_len is None else first // self.size,
            )
        mask = batch.document_mask
        if mask is None or not mask.first.is_cuda or (self.size > 1 and method == "ring"):
            return batch
        return batch._replace(document_mask=mask._replace(blocks=block_mask(mask.first, mask.end, length)))


def cp_shard_of(config: JobConfig, model: TransformerConfig, mesh: DeviceMesh) -> CPShard:
    """This rank's CP shard in a configuration's layout."""
    size = Layout.of(config.parallelism).context
    return CPShard(size, mesh["dp_shard"].get_local_rank() % size, method_of(config, model).name)


class ContextCore(AttentionCore):
    """Attention with this rank's CP shard.

    Queries, keys and values of the shard are [batch, heads, seq / size, head_dim]. ``document_mask`` comes from
    `CPShard.shard`; ``bias`` has a row for each query of the shard and a column for each key of the sequence.
    """

    group: Group
    takes_sinks = True

    def query_order(self, seq_len, device):  # type: ignore[no-untyped-def]  # as in the base class
        """As in the base class."""
        length = seq_len * self.group.size
        return shard_positions(length, self.group.size, self.group.rank, device), length


class GatheredCore(ContextCore):
    """Every rank gets all keys and values. Their gradients are reduce-scattered."""

    def attend(self, q, k, v, document_mask, bias):  # type: ignore[no-untyped-def]  # as in the base class
        """As in the base class."""
        keys = unshard(gathered(torch.stack((k, v)), self.group))
        if document_mask is not None or bias is not None or not self.is_causal:
            return super().attend(q, keys[0], keys[1], document_mask, bias)
        return cp_attention(q, keys, None, self, self.group, travels=False)


class UlyssesCore(ContextCore):
    """Every rank gets some heads of the whole sequence (arXiv 2309.14509)."""

    takes_sinks = False

    def query_order(self, seq_len, device):  # type: ignore[no-untyped-def]  # as in the base class
        """As in the base class."""
        return AttentionCore.query_order(self, seq_len * self.group.size, device)

    def local_sinks(self) -> torch.Tensor | None:
        """As in the base class."""
        sinks = super().local_sinks()
        return None if sinks is None else sinks.chunk(self.group.size)[self.group.rank]

    def attend(self, q, k, v, document_mask, bias):  # type: ignore[no-untyped-def]  # as in the base class
        """As in the base class."""
        size = self.group.size
        by_heads = [x.unflatten(1, (size, -1)).movedim(1, 0) for x in (q, k, v)]
        heads = [x.shape[2] for x in by_heads]
        q, k, v = unshard(all_to_all(torch.cat(by_heads, 2), self.group)).split(heads, 1)
        whole = super().attend(q, k, v, document_mask, bias)
        return all_to_all(shard(whole, size), self.group).movedim(0, 1).flatten(1, 2)


class RingCore(ContextCore):
    """The keys and values of one rank at a time pass by (arXiv 2310.01889)."""

    takes_blocks = False

    def attend(self, q, k, v, document_mask, bias):  # type: ignore[no-untyped-def]  # as in the base class
        """As in the base class, except for a bias, which does not travel."""
        if bias is not None:
            raise ValueError('a ring takes no biases; use parallelism.context_parallel_method = "all_gather"')
        return cp_attention(q, torch.stack((k, v)), document_mask, self, self.group, travels=True)


CORES: dict[str, type[ContextCore]] = {"all_gather": GatheredCore, "ulysses": UlyssesCore, "ring": RingCore}


def apply_context_parallel(model: Transformer, group: Group, method: str) -> None:
    """Let all that mixes positions in a model, or in one pipeline stage, work on CP shards.

    `shard_context` is called on the outermost modules that have it.
    """
    model.context_shards = group.size
    inner: set[nn.Module] = set()  # parts of modules that shard the context, which pass it on themselves
    for module in model.modules():
        if isinstance(module, AttentionCore):
            extend(module, CORES[method], group=group)
        elif hasattr(module, "shard_context") and module not in inner:
            cast(Any, module).shard_context(group)
            inner.update(module.modules())
