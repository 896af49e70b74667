"""The microbatches that a process trains or validates on, and counts over the global batch."""

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import islice
from operator import add
from typing import NamedTuple

import torch
import torch.distributed as dist

from titan_like.data.batch import Batch, count_tokens, num_labels, to_device
from titan_like.metrics.flops import visible_pairs
from titan_like.models.config import TransformerConfig
from titan_like.parallel.context import CPShard
from titan_like.train.observer import Observer


def take_microbatches(
    data: Iterator[Batch], count: int, cp_shard: CPShard, device: torch.device, observer: Observer
) -> list[Batch]:
    """Read the next microbatches, up to ``count``. Returns this rank's CP shards of them, on its device."""
    shards = []
    for batch in islice(data, count):
        observer.take_batch(batch)
        shards.append(cp_shard.shard(to_device(batch, device)))
    return shards


class BatchCounts(NamedTuple):
    """Counts over the global batch; tensors are float64."""

    labels: torch.Tensor  # [predictions]
    tokens: torch.Tensor | int  # that are not padding
    pairs: torch.Tensor  # of a query and a key that document masks leave in all layers; 0 without masks


def count_global_batch(
    batches: Sequence[Batch], model: TransformerConfig, group: dist.ProcessGroup, cp_shard: CPShard
) -> BatchCounts:
    """Count a step's microbatches and sum over ``group``: the ranks with other samples or other CP shards."""
    labels = reduce(add, [num_labels(batch, model.predictions) for batch in batches])
    tokens = reduce(add, [count_tokens(batch) for batch in batches])
    masks = [mask for batch in batches if (mask := batch.document_mask) is not None]
    pairs = labels.new_zeros((), dtype=torch.float64)
    for mask in masks:
        pairs = pairs + visible_pairs(model, mask)
    if group.size() > 1:
        tokens = labels.new_full((), tokens) if isinstance(tokens, int) else tokens
        counts = torch.cat((labels, tokens[None], pairs[None]))
        dist.all_reduce(counts, group=group)
        labels, tokens, pairs = counts[:-2], counts[-2], counts[-1]
    if cp_shard.method == "ulysses":  # each CP rank has all masks
        pairs = pairs / cp_shard.size
    return BatchCounts(labels.double(), tokens if isinstance(tokens, int) else tokens.double(), pairs.double())
