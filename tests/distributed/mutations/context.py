"""Bugs in what the ranks of a CP group compute, most of which other frameworks have had."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from tests.distributed.mutations import bug
from titan_like.data.batch import Batch
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.parallel import collectives, context, cp_attention
from titan_like.parallel.collectives import Group
from titan_like.parallel.context import CPShard
from titan_like.parallel.data import DataParallel, sharded_modules
from titan_like.parallel.gradients import GradientAllReduce
from titan_like.train.trainer import Trainer
from titan_like.verify.processes import Prepare


def changed(change: Callable[[CPShard, Batch, int], Batch]) -> Prepare:
    """Change the CP shard of a batch, given that and the length of the whole sequence."""

    @wraps(change)
    def shard(original: Any, self: CPShard, batch: Batch) -> Batch:
        cut = original(self, batch)
        return change(self, cut, batch.tokens.shape[1]) if self.size > 1 else cut

    return bug(CPShard, "shard")(shard)


@changed
def positions_by_rank(cp_shard: CPShard, batch: Batch, length: int) -> Batch:
    """Positions are those of a contiguous part of the sequence."""
    part = length // cp_shard.size
    return batch._replace(positions=torch.arange(cp_shard.rank * part, (cp_shard.rank + 1) * part))


@changed
def mask_by_local_position(cp_shard: CPShard, batch: Batch, length: int) -> Batch:
    """A query sees as many keys as its number in the CP shard says."""
    if batch.document_mask is None:
        return batch
    first, end, *_ = batch.document_mask
    return batch._replace(document_mask=KeyRanges(first, torch.arange(1, end.shape[1] + 1).expand_as(end)))


@changed
def labels_of_the_shard_shifted(cp_shard: CPShard, batch: Batch, length: int) -> Batch:
    """Labels are the next tokens of the CP shard, which are wrong at the edges of chunks."""
    assert batch.labels is not None
    half, shifted = batch.labels.shape[1] // 2, batch.labels.clone()
    shifted[:, half - 1] = batch.tokens[:, half]
    return batch._replace(labels=shifted)


@bug(context, "unshard")
def chunks_swapped(original: Any, shards: torch.Tensor) -> torch.Tensor:
    """Gathered keys and values of the last two chunks change places."""
    *others, last, very_last = original(shards).chunk(2 * len(shards), -2)
    return torch.cat((*others, very_last, last), -2)


@bug(collectives._Gathered, "backward")
def keys_gradient_of_the_last_rank_dropped(original: Any, ctx: Any, gradient: torch.Tensor) -> Any:
    """What the last process's queries make of the gradients of keys and values is lost."""
    return original(ctx, gradient if ctx.group.rank < ctx.group.size - 1 else torch.zeros_like(gradient))


@contextmanager
def heads_come_back_in_reverse() -> Iterator[None]:
    """The second all-to-all's parts are taken in the reverse order."""
    original, calls = context.all_to_all, [0]

    def all_to_all(x: torch.Tensor, group: Group) -> torch.Tensor:
        calls[0] += 1
        return original(x, group) if calls[0] % 2 else original(x, group).flip(0)

    with patch.object(context, "all_to_all", all_to_all):
        yield


@bug(Trainer, "_sum_over_samples")
def losses_counted_by_each(original: Any, self: Trainer, value: torch.Tensor) -> None:
    """The reported loss is summed over the CP group as if each had the whole of it."""
    original(self, value)
    if value.ndim == 1:
        value.mul_(self.cp_shard.size)


@bug(GradientAllReduce, "_start")
def gradients_summed_over_data_alone(_: Any, self: GradientAllReduce, number: int) -> None:
    """The ranks of a CP group do not reduce their gradients; here that leaves no rank to reduce with."""
    self._in_flight.append(SimpleNamespace(wait=lambda: None))


@bug(DataParallel, "before_backward")
def gradients_averaged_over_shards(original: Any, self: DataParallel, is_last: bool) -> None:
    """FSDP2 averages over ranks that have CP shards of the same samples."""
    original(self, is_last)
    for module in sharded_modules(self.model):
        module.set_gradient_divide_factor(2.0)


@contextmanager
def backward_ring_stands_still() -> Iterator[None]:
    """The backward pass uses the process's own keys and values in every step."""
    original, in_backward = cp_attention._passing, cp_attention._gradients
    own: list[torch.Tensor] = []

    def passing(block: torch.Tensor, *ring: Any) -> Iterator[tuple[int, torch.Tensor]]:
        own[:] = [block]
        yield from original(block, *ring)

    def gradients(here: list[torch.Tensor], keys: torch.Tensor, block: Any, how: Any) -> tuple[torch.Tensor, ...]:
        return in_backward(here, own[0][..., block.keys, :], block, how)

    with patch.object(cp_attention, "_passing", passing), patch.object(cp_attention, "_gradients", gradients):
        yield


@bug(cp_attention, "_blocks")
def last_step_of_the_ring_skipped(original: Any, *args: Any) -> Iterator[Any]:
    """The block that arrives last is not attended to."""
    *_, how, source = args
    return original(*args) if (source - how.rank - 1) % how.size else iter(())


@bug(cp_attention, "_merge")
def denominators_merged_in_bfloat16(original: Any, *arguments: torch.Tensor) -> None:
    """The logarithms of the softmax's denominators are rounded before they are merged."""
    *others, total = arguments
    original(*others, total.bfloat16().to(total.dtype))


@bug(cp_attention, "_blocks")
def bidirectional_ring_skips_later_chunks(original: Any, length: int, ranges: Any, how: Any, source: Any) -> Any:
    """Without a mask, queries still see no chunk after their own, as balanced causal attention has it."""
    for block in original(length, ranges, how._replace(is_causal=True), source):
        yield block._replace(is_causal=False)


@bug(cp_attention, "_merge")
def attention_merged_in_bfloat16(original: Any, output: torch.Tensor, *others: torch.Tensor) -> None:
    """Attention to one block of keys after the other adds up in the model's type."""
    original(output, *others)
    output.copy_(output.bfloat16())


@bug(cp_attention, "_exchange")
def ring_gradients_in_bfloat16(original: Any, block: torch.Tensor, how: Any) -> torch.Tensor:
    """The gradients of keys and values travel in the model's type."""
    return original(block.bfloat16(), how).to(block.dtype)
