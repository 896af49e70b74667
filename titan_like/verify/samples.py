"""Generated data for verification. All samples differ, and so do their numbers of labels; some have none.

On such samples a mean of means is not the mean over all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from titan_like.config.schema import Data, JobConfig
from titan_like.data.lengths import sample_length, span_counts
from titan_like.data.masked_tokens import MaskedTokens
from titan_like.data.objective import NEXT_TOKENS, Objective
from titan_like.data.packed import token_fingerprint
from titan_like.data.span_corruption import SpanCorruption
from titan_like.models.registry import model_config

IGNORED = -100  # label of a position without loss
END_OF_DOCUMENT = 3  # token that ends a document, where [data] asks for masks
MASK = 4  # token that hides another, where the objective is masked language modelling
PAD = 5  # token that begins and fills up the decoder's input, where the objective is span corruption
_SHARE_OF_ENDS = 0.15  # of tokens that end a document
_EMPTY_BATCH = 2  # index of the global batch in which one data-parallel rank has no label at all


@dataclass(frozen=True)
class Samples(Dataset[torch.Tensor]):
    """Sample i, int64 [2, seq] (inputs and labels), is a function of the seed and i alone.

    An index past the end gives a sample without labels, as validation expects.
    """

    seed: int
    seq_len: int
    vocab_size: int
    size: int = 1 << 40
    empty: frozenset[int] = frozenset()  # samples without any label
    has_documents: bool = False  # whether samples are made of several documents

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + index) % 2**63)
        tokens = torch.randint(self.vocab_size, (self.seq_len + 1,), generator=generator)
        if self.has_documents:
            tokens[torch.rand(self.seq_len + 1, generator=generator) < _SHARE_OF_ENDS] = END_OF_DOCUMENT
        if index % 2:
            tokens[self.seq_len // 2] = self.vocab_size - 1  # the last token before the padding
        inputs, labels = tokens[:-1].clone(), tokens[1:].clone()
        positions = torch.arange(self.seq_len)
        first = index * 5 % (self.seq_len + 1)  # earlier positions have no label: none of them, up to all of them
        labels[(positions < first) | ((positions + index) % 11 == 0)] = IGNORED
        if index >= self.size or index in self.empty:
            labels.fill_(IGNORED)
        return torch.stack((inputs, labels))

    @property
    def fingerprint(self) -> str:
        """Identifies this data in checkpoints."""
        return token_fingerprint(self.first(4).flatten().numpy())

    def drawn(self, num_samples: int) -> dict[str, float]:
        """Nothing: these samples are not a blend."""
        return {}

    def described(self, micro_batch_size: int, num_ranks: int) -> None:
        """Nothing: there is nothing to say of them."""

    def first(self, count: int, start: int = 0) -> torch.Tensor:
        """Samples ``start`` to ``start + count``, int64 [count, 2, seq]."""
        return torch.stack([self[index] for index in range(start, start + count)])


def batches(config: JobConfig, last: int) -> dict[int, range]:
    """The samples of each step from 1 to ``last``. During a ramp-up the batch grows by equal increments."""
    full, rampup = config.training.global_batch_size, config.training.batch_size_rampup
    taken, consumed = {}, 0
    for step in range(1, last + 1):
        size = full
        if rampup is not None:
            start, increment, samples = rampup
            size = min(full, start + increment * (consumed * ((full - start) // increment) // samples))
        taken[step] = range(consumed, consumed + size)
        consumed += size
    return taken


def training_samples(config: JobConfig) -> Samples:
    """An endless training stream. In one batch the last data-parallel rank of this layout has no labels."""
    batch, micro_batch = config.training.global_batch_size, config.training.micro_batch_size
    ranks = config.parallelism.data_parallel_replicate_degree * config.parallelism.data_parallel_shard_degree
    in_batch = range(_EMPTY_BATCH * batch, (_EMPTY_BATCH + 1) * batch)
    empty = frozenset(index for index in in_batch if ranks > 1 and index // micro_batch % ranks == ranks - 1)
    model, has_documents = model_config(config.model), has_masks(config.data)
    raw, seed = sample_length(config, model).raw, 2 * config.job.seed
    return Samples(seed, raw, model.vocab_size, empty=empty, has_documents=has_documents)


def validation_samples(config: JobConfig) -> Samples:
    """Held-out samples: between one and two global batches, and no multiple of the microbatches of all ranks."""
    batch, model = config.training.global_batch_size, model_config(config.model)
    size, raw = batch + max(1, batch // 2 - 1), sample_length(config, model).raw
    return Samples(2 * config.job.seed + 1, raw, model.vocab_size, size, has_documents=has_masks(config.data))


def objective_of(config: JobConfig) -> Objective:
    """The model's objective, with tokens from this module. Where words are masked, a third of the tokens are in none.

    The last tokens of the vocabulary are the sentinels, from the end, as in T5's.
    """
    model = model_config(config.model)
    if model.objective == "span_corruption":
        length = sample_length(config, model)
        noise, spans = span_counts(length.raw, config.data)
        sentinels = range(model.vocab_size - 1, model.vocab_size - 1 - spans, -1)
        return SpanCorruption(length, noise, tuple(sentinels), END_OF_DOCUMENT, PAD)
    if model.objective == "causal":
        return NEXT_TOKENS
    ordinary = np.setdiff1d(np.arange(model.vocab_size), (END_OF_DOCUMENT, MASK))
    joins = np.arange(model.vocab_size) % 3 > 0
    return MaskedTokens(config.data, MASK, ordinary, np.stack((joins, joins)) if config.data.mlm_whole_words else None)


def has_masks(section: Data) -> bool:
    """Whether [data] asks for anything beyond causal language modelling."""
    return section.reset_position_ids or section.reset_attention_mask or section.eod_mask_loss or section.prefix_lm
