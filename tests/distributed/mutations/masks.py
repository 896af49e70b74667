"""Bugs in masks, prefixes, positions and labels of packed documents."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.distributed.mutations import bug
from titan_like.data.batch import Batch
from titan_like.data.objectives import masks
from titan_like.data.objectives.masked_tokens import MaskedTokens
from titan_like.data.objectives.masks import Masks
from titan_like.data.source import IGNORED_LABEL
from titan_like.models.layers import interval_attention
from titan_like.models.layers.attention import AttentionCore
from titan_like.models.layers.key_ranges import KeyRanges
from titan_like.models.transformer import Transformer
from titan_like.parallel.context import CPShard
from titan_like.parallel.tensor_styles import PositionEmbedding
from titan_like.torch_private import is_in_backward_pass
from titan_like.train.trainer import Trainer
from titan_like.train.validation import Validator

_get_sample = Masks.__getitem__


@bug(Transformer, "forward")
def later_stages_attend_causally(original: Any, self: Any, batch: Any, *hidden: Any) -> Any:
    """Pipeline stages after the first get no mask."""
    return original(self, batch if self.is_first else batch._replace(document_mask=None), *hidden)


@bug(Transformer, "forward")
def later_stages_count_positions_through(original: Any, self: Any, batch: Any, *hidden: Any) -> Any:
    """Pipeline stages after the first get no positions."""
    return original(self, batch if self.is_first else batch._replace(positions=None), *hidden)


@bug(AttentionCore, "forward")
def recomputation_attends_causally(original: Any, self: Any, q: Any, k: Any, v: Any, *masks: Any) -> Any:
    """What is recomputed has no mask."""
    mask, *bias = masks or (None,)
    if mask is not None and is_in_backward_pass():
        mask = mask._replace(end=torch.arange(1, q.shape[2] + 1).expand_as(mask.end))
    return original(self, q, k, v, mask, *bias)


@bug(PositionEmbedding, "forward")
def first_part_of_positions_everywhere(original: Any, self: PositionEmbedding, positions: torch.Tensor) -> torch.Tensor:
    """Under sequence parallelism every process looks up the positions of the sequence's first part."""
    size = self.tensor_group.size
    first = positions[..., : positions.shape[-1] // size]
    return original(self, torch.cat([first] * size, -1) if self.sequence_parallel else positions)


@bug(AttentionCore, "forward")
def second_half_of_heads_sees_all_documents(original: Any, self: Any, q: Any, k: Any, v: Any, *masks: Any) -> Any:
    """Tensor-parallel processes but the first let tokens see other documents."""
    mask, *bias = masks or (None,)
    if mask is not None and dist.get_rank() % 2:
        mask = mask._replace(first=torch.zeros_like(mask.first))
    return original(self, q, k, v, mask, *bias)


@bug(CPShard, "shard")
def documents_leak(original: Any, self: CPShard, batch: Batch) -> Batch:
    """Tokens see the documents before theirs."""
    batch = original(self, batch)
    assert batch.document_mask is not None
    first = torch.zeros_like(batch.document_mask.first)
    return batch._replace(document_mask=batch.document_mask._replace(first=first))


@bug(masks, "prefix_ends")
def prefix_one_token_short(original: Any, first: torch.Tensor, seed: int, index: int) -> torch.Tensor:
    """The last token of a prefix is not seen by the tokens before it."""
    return torch.maximum(original(first, seed, index) - 1, first)


@bug(Masks, "__getitem__")
def masks_drawn_by_each_process(original: Any, self: Masks, index: int) -> Batch:
    """Data-parallel processes draw prefixes and masked tokens from a seed of their own."""
    return _numbered(original, self, index, index + (dist.get_rank() << 40))


def _numbered(original: Any, masks: Masks, index: int, number: int) -> Batch:
    """Sample ``index``, for which is drawn what sample ``number`` draws."""
    return original(masks.over({number: masks.samples[index]}), number)  # type: ignore[arg-type]


@bug(CPShard, "shard")
def mask_of_the_first_sample_for_all(original: Any, self: CPShard, batch: Batch) -> Batch:
    """All samples of a microbatch have the first one's mask."""
    batch = original(self, batch)
    assert batch.document_mask is not None
    first, end = (x[:1].expand_as(x) for x in batch.document_mask[:2])
    return batch._replace(document_mask=KeyRanges(first, end))


@bug(Validator, "validate")
def validation_attends_causally(original: Any, self: Validator, *split: str) -> dict[str, float]:
    """Validation leaves out the masks."""
    with patch.object(CPShard, "shard", lambda self, batch: Batch(batch.tokens, batch.labels)):
        return original(self, *split)


@bug(Trainer, "load_data")
def prefixes_drawn_from_the_start_when_resumed(original: Any, self: Trainer) -> Any:
    """A resumed run numbers its samples from 0 when it draws their prefixes."""
    consumed = self.state.consumed_samples

    def sample(masks: Masks, index: int) -> Batch:
        return _numbered(_get_sample, masks, index, index - consumed)

    Masks.__getitem__ = sample  # type: ignore[method-assign]
    return original(self)


@bug(MaskedTokens, "apply")
def replaced_tokens_are_their_own_labels(original: Any, self: MaskedTokens, *drawn: Any) -> Batch:
    """A masked token is to be predicted as the mask."""
    made = original(self, *drawn)
    return made._replace(labels=torch.where(made.labels == IGNORED_LABEL, made.labels, made.tokens))


@bug(interval_attention, "_blocks")
def later_blocks_of_documents_miss_a_key(original: Any, *inputs: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """On a CPU, blocks of queries after the first of a document do not see its first token."""
    for row, queries, keys, visible in original(*inputs):
        if queries.start > keys.start:
            visible = visible & (torch.arange(visible.shape[1]) > 0)
        yield row, queries, keys, visible
