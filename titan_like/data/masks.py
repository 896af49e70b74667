"""From a dataset's samples to a model's: its objective, and masks and positions of packed documents and of prefixes.

A document ends with its end-of-document token, and the next one begins after it. As with Megatron-LM:
`reset_position_ids` counts positions from 0 in each document, `reset_attention_mask` keeps attention within documents,
and `eod_mask_loss` leaves out the loss where the input is an end-of-document token, whose label is the first token of
another document.

With `prefix_lm` the first tokens of a sample see each other, and only the others carry a loss (arXiv 1910.10683,
section 3.2.1). With `reset_attention_mask` each document of a sample has a prefix of its own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch.utils.data import Dataset

from titan_like.config.schema import Data, JobConfig
from titan_like.data.masked_tokens import MaskedTokens, masked_tokens_of
from titan_like.data.sentence_pairs import PairTokens, Samples, SentencePairs, pair_tokens_of
from titan_like.data.source import IGNORED_LABEL, Source
from titan_like.data.span_corruption import SpanCorruption, span_corruption_of
from titan_like.data.tokenizer import Tokenizer, tokenizer_of
from titan_like.models.config import TransformerConfig
from titan_like.models.layers.visible import VisibleKeys
from titan_like.models.transformer import ModelInputs

MASK_SETTINGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "prefix_lm", "prefix_lm_loss")


@dataclass(frozen=True)
class Masks:
    """What the objective and [data] ask for beyond causal language modelling. It adds rows to samples, and reads them
    from batches.

    The rows of a sample are inputs and labels; then positions, if they are reset; then the first key that each query
    sees and the end of these keys, unless attention is causal; then 1 for padding, where the dataset tells documents.
    """

    section: Data
    eod_id: int | None  # None if the section does not need it
    seed: int
    objective: MaskedTokens | SpanCorruption | None = None  # None: the labels are a dataset's, the next tokens
    pairs: SentencePairs | None = None  # of an objective over pairs of sentences
    pair_tokens: PairTokens | None = None  # where samples are two sentences, with types of tokens and padding

    @property
    def has_intervals(self) -> bool:
        """Whether samples have two rows that say which keys each query sees."""
        return self.section.reset_attention_mask or self.section.prefix_lm

    def add_rows(self, sample: torch.Tensor, index: int) -> torch.Tensor:
        """A dataset's sample, int64 [2 or 3, raw], which is number ``index`` of the run → [2 to 6, seq]."""
        section = self.section
        made = sample[:2] if self.objective is None else self.objective.apply(sample, self.seed, index)
        inputs, labels = made
        if self.pairs is not None:
            labels[0] = sample[1, 0]  # the class of the pair
        tells_padding = len(sample) == 3 and self.objective is None
        if not (section.reset_position_ids or self.has_intervals or section.eod_mask_loss or tells_padding):
            return made
        rows, order = [inputs, labels], torch.arange(len(inputs))
        starts = order * 0 if self.eod_id is None else document_starts(inputs, self.eod_id)
        if len(sample) == 3:
            starts = sample[2]
        if section.eod_mask_loss:
            rows[1] = labels = labels.masked_fill(inputs == self.eod_id, IGNORED_LABEL)
        if section.reset_position_ids:
            rows.append(order - starts)
        first = starts if section.reset_attention_mask else torch.zeros_like(order)
        if section.prefix_lm:
            prefix_end = prefix_ends(first, self.seed, index)
            if section.prefix_lm_loss == "targets":
                rows[1] = labels.masked_fill(order + 1 < prefix_end, IGNORED_LABEL)
            rows += [first, torch.maximum(order + 1, prefix_end)]
        elif section.reset_attention_mask:
            rows += [first, order + 1]
        if len(sample) == 3:
            rows.append(padding_mask_of(sample))
        return torch.stack(rows)

    def split_rows(self, batch: torch.Tensor) -> tuple[ModelInputs, torch.Tensor]:
        """A microbatch's rows, [micro_batch, rows, seq], as the model's inputs and the labels [micro_batch, seq].

        Of a model with encoder and decoder, the labels are of the decoder's positions alone.
        """
        inputs, labels, *others = batch.unbind(1)
        if self.pair_tokens is not None:
            types, seen = self.pair_tokens.types_and_visible(inputs)
            return ModelInputs(inputs, visible=seen, token_types=types), labels
        positions = others.pop(0) if self.section.reset_position_ids else None
        visible = VisibleKeys(others.pop(0), others.pop(0)) if self.has_intervals else None
        padding = others[0].bool() if others else None
        encoder_len = self.objective.encoder_len if isinstance(self.objective, SpanCorruption) else None
        return ModelInputs(inputs, positions, visible, encoder_len, padding_mask=padding), labels[:, encoder_len:]


class MaskedSamples(Dataset[torch.Tensor]):
    """A dataset's samples with the rows that masks add to them."""

    def __init__(self, samples: Samples, masks: Masks) -> None:
        self.samples, self.masks = samples, masks

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sample ``index`` of the run: int64 [rows, seq]."""
        pairs = self.masks.pairs
        sample = self.samples[index] if pairs is None else pairs.make(self.samples, index, self.masks.seed)
        return self.masks.add_rows(sample, index)

    def state_dict(self) -> dict[str, list[int]] | None:
        """That of the dataset; see `titan_like.data.source.Source.state_dict`."""
        return self.samples.state_dict() if isinstance(self.samples, Source) else None


def masks_of(config: JobConfig, model: TransformerConfig, tokenizer: Tokenizer | None = None) -> Masks:
    """What the run's objective and [data] ask for. The run's tokenizer, if none is given, is built only if needed.

    Raises:
        ConfigError: the tokenizer cannot be built, or it or the model lacks a token that is needed.
    """
    section, seed = config.data, config.job.seed
    if model.is_causal and not section.tells_documents_apart:
        return Masks(section, None, seed)
    tokenizer = tokenizer or tokenizer_of(section)
    eod_id = tokenizer.eod_id if section.tells_documents_apart else None
    objective: MaskedTokens | SpanCorruption | None = None
    if model.objective == "span_corruption":
        objective = span_corruption_of(config, model, tokenizer)
    elif model.objective == "mlm" and "tokens" in model.predictions:
        objective = masked_tokens_of(section, tokenizer, model.vocab_size)
    pairs, around = None, None
    if not {"pair", "choice"}.isdisjoint(model.predictions):
        around = pair_tokens_of(section.tokenizer, tokenizer, model.vocab_size)
    if around is not None and "pair" in model.predictions:
        pairs = SentencePairs(section.sentence_objective, around, tokenizer.eod_id)
    return Masks(section, eod_id, seed, objective, pairs, around)


def document_starts(inputs: torch.Tensor, eod_id: int) -> torch.Tensor:
    """Where each token's document begins within the sample: inputs [seq] → int64 [seq]."""
    starts = torch.arange(len(inputs))
    starts[1:] *= inputs[:-1] == eod_id  # 0 where no document begins
    return starts.cummax(0).values


def padding_mask_of(sample: torch.Tensor) -> torch.Tensor:
    """1 where padding fills up a sample that tells documents, int64 [3, seq], else 0: int64 [seq].

    Padding is a last document without labels that repeats one token.
    """
    inputs, labels, starts = sample
    is_last, is_text = starts == starts[-1], (labels != IGNORED_LABEL) | (inputs != inputs[-1])
    return (is_last & ~(is_last & is_text).any()).long()


def prefix_ends(first: torch.Tensor, seed: int, index: int) -> torch.Tensor:
    """Where the prefix of each token's segment ends, in sample ``index`` of the run: int64 [seq].

    ``first``, int64 [seq], is where the segment begins. The segments of a sample are its documents, or one.
    """
    begins, sizes = torch.unique_consecutive(first, return_counts=True)
    ends = [
        begin + prefix_length(size, seed, index, begin)
        for begin, size in zip(begins.tolist(), sizes.tolist(), strict=True)
    ]
    return torch.tensor(ends).repeat_interleave(sizes)


def prefix_length(size: int, seed: int, index: int, begin: int) -> int:
    """Tokens of the prefix of a segment of ``size`` tokens that begins at ``begin``: uniform from 0 to size - 1.

    A function of the seed and the sample, so that every layout and every resumed run draws the same.
    """
    digest = hashlib.blake2b(repr((seed, index, begin)).encode(), digest_size=8, person=b"prefix").digest()
    return int.from_bytes(digest, "little") % size
