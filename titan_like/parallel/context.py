"""Context parallelism: several processes share each sequence (docs/long_context.md).

A process has two of 2 · size pieces of a sequence, one from its head and one from its tail, so that causal attention
gives all of them equal work (arXiv 2407.21783, section 3.3.2). Everything but attention works on positions one by one.
Positions, masks and labels are cut like the tokens, so nothing depends on the rank but which positions it holds.

| method | before attention | after it | a process attends with |
|---|---|---|---|
| all_gather | all-gather keys and values | | its queries, all keys |
| ulysses | all-to-all queries, keys and values | all-to-all the result | its heads, the whole sequence |
| ring | pass keys and values on, size - 1 times | | its queries, one process's keys at a time |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_like.config.schema import JobConfig
from titan_like.data.batch import B, map_tensors
from titan_like.models.config import TransformerConfig
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.key_ranges import block_mask
from titan_like.models.transformer import Transformer
from titan_like.parallel.collectives import Group, all_to_all, gathered
from titan_like.parallel.layout import method_of
from titan_like.parallel.pieces import divided, joined, places_of
from titan_like.parallel.slice_attention import slice_attention


@dataclass(frozen=True)
class Slices:
    """Cuts this process's slice from samples."""

    size: int  # processes that share a sequence
    rank: int
    method: str

    @property
    def unit(self) -> int:
        """What the length of a sequence must be a multiple of."""
        return 2 * self.size if self.size > 1 else 1

    def take(self, batch: B) -> B:
        """A microbatch's fields [batch, seq] → those of this process's slice, [batch, seq / size].

        An encoder's and a decoder's part are cut apart, and positions count from 0 in both. Masks keep the numbers that
        keys have in the whole sequence. `ulysses` puts sequences together again, so its masks stay whole. On a GPU
        masks get the blocks that FlexAttention takes, but those of a ring, which does not use it.
        """
        length, first, method = batch.tokens.shape[1], batch.encoder_len or 0, self.method
        if self.size > 1:
            encoder, rest = (places_of(n, self.size, self.rank) for n in (first, length - first))
            local, whole = (torch.cat((encoder, x)).to(batch.tokens.device) for x in (rest, rest + first))
            cut = map_tensors(lambda x: x[:, whole] if x.shape[1:2] == (length,) else x, batch)
            batch = cut._replace(
                positions=local if batch.positions is None else cut.positions,
                document_mask=batch.document_mask if method == "ulysses" else cut.document_mask,
                encoder_len=None if batch.encoder_len is None else first // self.size,
            )
        mask = batch.document_mask
        if mask is None or not mask.first.is_cuda or (self.size > 1 and method == "ring"):
            return batch
        return batch._replace(document_mask=mask._replace(blocks=block_mask(mask.first, mask.end, length)))


def slices_of(config: JobConfig, model: TransformerConfig, mesh: DeviceMesh) -> Slices:
    """The slices that this process takes in a configuration's layout."""
    size = config.parallelism.context_parallel_degree
    method = method_of(config, model).name
    return Slices(size, mesh["dp_shard"].get_local_rank() % size, method)


def context_group(size: int, mesh: DeviceMesh) -> Group:
    """The group of the ``size`` processes that share this one's sequences. All processes of the job call it."""
    ranks = torch.arange(dist.get_world_size()).view(-1, size, mesh["tp"].size()).transpose(1, 2)
    group, _ = dist.new_subgroups_by_enumeration(ranks.reshape(-1, size).tolist(), group_desc="cp")
    assert group is not None
    return Group(group.group_name, group.size(), group.rank())


class ContextCore(AttentionCore):
    """Attention of this process's slice, of which others hold the rest.

    Queries, keys and values are those of the slice, [batch, heads, seq / size, head_dim]. ``document_mask`` is that of
    `Slices.take`; ``bias`` has a row for each query here and a column for each key of the sequence.
    """

    group: Group


class GatheredCore(ContextCore):
    """Every process gets all keys and values. Their gradients are summed where they came from."""

    def forward(self, q, k, v, document_mask=None, bias=None):  # type: ignore[no-untyped-def]  # as in the base class
        """As in the base class."""
        keys = joined(gathered(torch.stack((k, v)), self.group))
        if document_mask is not None or bias is not None or not self.is_causal:
            return AttentionCore.forward(self, q, keys[0], keys[1], document_mask, bias)
        return slice_attention(q, keys, None, None, True, self.scale_of(q), self.group, travels=False)


class UlyssesCore(ContextCore):
    """Every process gets some heads of the whole sequence (arXiv 2309.14509)."""

    def forward(self, q, k, v, document_mask=None, bias=None):  # type: ignore[no-untyped-def]  # as in the base class
        """As in the base class."""
        size = self.group.size
        by_heads = [x.unflatten(1, (size, -1)).movedim(1, 0) for x in (q, k, v)]
        heads = [x.shape[2] for x in by_heads]
        q, k, v = joined(all_to_all(torch.cat(by_heads, 2), self.group)).split(heads, 1)
        whole = AttentionCore.forward(self, q, k, v, document_mask, bias)
        return all_to_all(divided(whole, size), self.group).movedim(0, 1).flatten(1, 2)


class RingCore(ContextCore):
    """Blocks of keys and values pass by, one process's at a time (arXiv 2310.01889)."""

    def forward(self, q, k, v, document_mask=None, bias=None):  # type: ignore[no-untyped-def]  # as in the base class
        """As in the base class; there is no bias."""
        first, end = (None, None) if document_mask is None else (document_mask.first, document_mask.end)
        keys, scale = torch.stack((k, v)), self.scale_of(q)
        return slice_attention(q, keys, first, end, self.is_causal, scale, self.group, travels=True)


CORES: dict[str, type[ContextCore]] = {"all_gather": GatheredCore, "ulysses": UlyssesCore, "ring": RingCore}


def apply_context_parallel(model: Transformer, group: Group, method: str) -> None:
    """Let all attention of a model, or of one pipeline stage, work on slices of the sequences."""
    model.context_shards = group.size
    for core in model.modules():
        if isinstance(core, AttentionCore):
            core.__class__, core.group = CORES[method], group  # type: ignore[assignment]
