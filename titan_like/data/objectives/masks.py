"""Turns a dataset's samples into a model's: applies the objective, and masks and positions of documents and prefixes.

A document ends with its end-of-document token, and the next one begins after it. As with Megatron-LM:
`reset_position_ids` counts positions from 0 in each document, `reset_attention_mask` keeps attention within documents,
and `eod_mask_loss` leaves out the loss where the input is an end-of-document token, whose label is the first token of
another document.

With `prefix_lm` the first tokens of a sample attend to each other, and only the others carry a loss (arXiv 1910.10683,
section 3.2.1). With `reset_attention_mask` each document of a sample has its own prefix.

Multi-token prediction has each position's next token as an input, and the next position's label as its label. It
carries no loss if the next token belongs to another document, or at the last position of the sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from titan_like.config.schema import Data, JobConfig
from titan_like.data.batch import Batch
from titan_like.data.loading.permutation import sample_generator
from titan_like.data.objectives.masked_tokens import MaskedTokens, masked_tokens_of
from titan_like.data.objectives.sentence_pairs import Samples, SentencePairs, pair_tokens_of
from titan_like.data.objectives.span_corruption import SpanCorruption, span_corruption_of
from titan_like.data.source import IGNORED_LABEL, Source
from titan_like.data.text.tokenizer import Tokenizer, tokenizer_of
from titan_like.models.config import TransformerConfig
from titan_like.models.layers.key_ranges import KeyRanges

MASK_SETTINGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "prefix_lm", "prefix_lm_loss")


@dataclass(frozen=True)
class Masks(Dataset[Batch]):
    """A run's samples: the dataset's, changed by the objective and the masks of [data]."""

    section: Data
    eod_id: int | None  # None if the section does not need it
    seed: int
    objective: MaskedTokens | SpanCorruption | None = None  # None: the dataset's labels, the next tokens
    pairs: SentencePairs | None = None  # set if the objective needs pairs of sentences
    has_next: bool = False  # whether the model has multi-token prediction
    samples: Samples = ()  # the dataset's

    def over(self, samples: Samples) -> Masks:
        """The same masks over this dataset."""
        return replace(self, samples=samples)

    def __getitem__(self, index: int) -> Batch:
        """Sample ``index`` of the run."""
        sample, starts = self._masked(index)
        if not self.has_next or sample.labels is None:
            return sample
        tokens, labels = sample.tokens, sample.labels[1:]
        if starts is not None:
            labels = labels.masked_fill(starts[1:] != starts[:-1], IGNORED_LABEL)
        next_tokens = torch.cat((tokens[1:], tokens[-1:]))  # the last one carries no loss
        return sample._replace(next_tokens=next_tokens, next_labels=F.pad(labels, (0, 1), value=IGNORED_LABEL))

    def _masked(self, index: int) -> tuple[Batch, torch.Tensor | None]:
        """The sample without next tokens, and where each token's document begins, if that is known."""
        section, samples = self.section, self.samples
        sample = samples[index] if self.pairs is None else self.pairs.make(samples, index, self.seed)
        if self.objective is not None:
            sample = self.objective.apply(sample, self.seed, index)
        tokens, labels, starts = sample.tokens, sample.labels, sample.document_starts
        sample, has_ranges = sample._replace(document_starts=None), section.reset_attention_mask or section.prefix_lm
        if labels is None or not (section.reset_position_ids or has_ranges or section.eod_mask_loss):
            return sample, starts
        order, eod_id = torch.arange(len(tokens)), -1 if self.eod_id is None else self.eod_id  # -1 is no token
        starts = document_starts(tokens, eod_id) if starts is None else starts
        if section.eod_mask_loss:
            labels = labels.masked_fill(tokens == eod_id, IGNORED_LABEL)
        if section.reset_position_ids:
            sample = sample._replace(positions=order - starts)
        first, end = starts if section.reset_attention_mask else torch.zeros_like(order), order + 1
        if section.prefix_lm:
            prefix_end = prefix_ends(first, self.seed, index)
            if section.prefix_lm_loss == "targets":
                labels = labels.masked_fill(end < prefix_end, IGNORED_LABEL)
            end = torch.maximum(end, prefix_end)
        mask = KeyRanges(first, end) if has_ranges else sample.document_mask
        return sample._replace(labels=labels, document_mask=mask), starts

    def state_dict(self) -> dict[str, list[int]] | None:
        """The dataset's state; see `titan_like.data.source.Source.state_dict`."""
        return self.samples.state_dict() if isinstance(self.samples, Source) else None


def masks_of(config: JobConfig, model: TransformerConfig, tokenizer: Tokenizer | None = None) -> Masks:
    """The `Masks` of the run's objective and [data]. Without ``tokenizer``, the run's is built if needed."""
    section, seed = config.data, config.job.seed
    has_next = "mtp" in model.predictions
    if model.is_causal and not section.separates_documents:
        return Masks(section, None, seed, has_next=has_next)
    tokenizer = tokenizer or tokenizer_of(section)
    eod_id = tokenizer.eod_id if section.separates_documents else None
    objective: MaskedTokens | SpanCorruption | None = None
    if model.objective == "span_corruption":
        objective = span_corruption_of(config, model, tokenizer)
    elif model.objective == "mlm" and "tokens" in model.predictions:
        objective = masked_tokens_of(section, tokenizer, model.vocab_size)
    pairs = None
    if "pair" in model.predictions:
        pair_tokens = pair_tokens_of(section.tokenizer, tokenizer, model.vocab_size)
        pairs = SentencePairs(section.sentence_objective, pair_tokens, tokenizer.eod_id)
    return Masks(section, eod_id, seed, objective, pairs, has_next)


def document_starts(inputs: torch.Tensor, eod_id: int) -> torch.Tensor:
    """Where each token's document begins within the sample: inputs [seq] → int64 [seq]."""
    starts = torch.arange(len(inputs))
    starts[1:] *= inputs[:-1] == eod_id  # 0 where no document begins
    return starts.cummax(0).values


def prefix_ends(first: torch.Tensor, seed: int, index: int) -> torch.Tensor:
    """Where the prefix of each token's segment ends, in sample ``index`` of the run: int64 [seq].

    ``first``, int64 [seq], is where the segment begins: the document, or the sample. The prefix of a segment has from 0
    to all but one of its tokens, with equal probability.
    """
    begins, sizes = torch.unique_consecutive(first, return_counts=True)
    drawn = torch.from_numpy(sample_generator(b"prefixes", seed, index).random(len(begins)))
    return (begins + (drawn * sizes).long()).repeat_interleave(sizes)
