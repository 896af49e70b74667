"""Bugs in the objective over pairs of sentences and in the head of the first token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.distributed.mutations import bug, under
from titan_like.data.batch import Batch
from titan_like.data.objectives.sentence_pairs import SentencePairs
from titan_like.models.bert.model import Bert
from titan_like.parallel.collectives import CopyFromFirstRank
from titan_like.parallel.context import CPShard
from titan_like.parallel.tensor_styles import FirstTokenOfAll, PooledLinear
from titan_like.train import log, microbatches


@contextmanager
def _changed_inputs(**values: Any) -> Iterator[None]:
    shard = CPShard.shard
    with patch.object(CPShard, "shard", lambda self, batch: shard(self, batch)._replace(**values)):
        yield


@under(lambda: _changed_inputs(token_types=None))
def types_dropped() -> None:
    """All tokens are of the first type."""


@under(lambda: _changed_inputs(document_mask=None))
def padding_is_seen() -> None:
    """Attention sees the padding."""


@bug(SentencePairs, "make")
def classes_swapped(original: Any, *arguments: Any) -> Batch:
    """Every process labels pairs in order as those that are not."""
    pair = original(*arguments)
    return pair._replace(sample_labels=1 - pair.sample_labels) if pair.sample_labels >= 0 else pair


@bug(SentencePairs, "make")
def pairs_drawn_by_each_process(original: Any, self: SentencePairs, samples: Any, index: int, seed: int) -> Batch:
    """Each process makes other pairs of the same samples."""
    return original(self, samples, index, seed + dist.get_rank())


@bug(microbatches, "num_labels")
def pairs_divided_by_tokens(original: Any, *arguments: Any) -> Any:
    """The loss of pairs is divided by the number of masked tokens."""
    return original(*arguments)[:1].expand(2)


@bug(Bert, "loss")
def pairs_weigh_as_much_as_tokens(original: Any, self: Bert, *arguments: Any) -> torch.Tensor:
    """Only the gradient of the loss of tokens is halved, so the loss is right."""
    found = original(self, *arguments)
    halved = found[:1] / 2
    return torch.cat((halved + halved.detach(), found[1:]))


@bug(log, "named_losses")
def losses_under_each_other_s_names(original: Any, predictions: Any, losses: Any) -> dict[str, float]:
    """The loss is right, but that of tokens is reported as that of pairs, and the other way round."""
    return original(predictions, losses[::-1])


@bug(FirstTokenOfAll, "forward")
def each_rank_takes_its_own_first_token(_: Any, self: Any, x: Any) -> Any:
    """Under sequence parallelism each rank takes the first token of its part of the sequence."""
    return x[:, :1]


@bug(CopyFromFirstRank, "backward")
def first_token_gets_no_gradient(_: Any, ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    """Under sequence parallelism the layers get no gradient from the head of the first token."""
    return torch.zeros_like(gradient), None


@under(lambda: patch.object(PooledLinear, "partial_gradients", ("weight", "bias")))
def gradients_of_the_pooler_summed() -> None:
    """Gradients that every rank has in full are summed as if they were partial."""
