"""Generated data for verification. All samples differ, and so do their numbers of labels; some have none.

On such samples a mean of means is not the mean over all tokens.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch

from titan_like.config.entry_points import format_of
from titan_like.config.schema import JobConfig
from titan_like.data.batch import Batch
from titan_like.data.loading.batch_size import global_batch_size_at
from titan_like.data.loading.lengths import sample_length
from titan_like.data.objectives.masks import Masks, masks_of
from titan_like.data.objectives.sentence_pairs import PairTokens
from titan_like.data.source import IGNORED_LABEL, Source
from titan_like.data.text.packed import token_fingerprint
from titan_like.data.text.tokenizer import Tokenizer
from titan_like.models.config import NUM_OPTIONS, TransformerConfig
from titan_like.models.registry import model_config
from titan_like.parallel.layout import Layout

END_OF_DOCUMENT = 3  # token that ends a document, where [data] asks for masks
MASK = 4  # token that hides another, where the objective is masked language modelling
PAD = 5  # token that begins and fills up the decoder's input, where the objective is span corruption
FIRST, SEPARATOR, PADDING = 5, 6, 7  # tokens around two sentences, where samples are pairs
_SHARE_OF_ENDS = 0.15  # share of tokens that end a document, in short samples
_EMPTY_BATCH = 2  # index of the global batch in which one data-parallel rank has no label at all


@dataclass(frozen=True)
class Samples(Source):
    """Sample i is a function of the seed and i alone.

    An index past the end gives a sample without labels, as validation expects.
    """

    config: JobConfig
    model: TransformerConfig
    seed: int
    size: int = 1 << 40
    empty: frozenset[int] = frozenset()  # samples without any label
    outer: frozenset[int] = frozenset()  # samples with labels in the first and the last chunk of a context alone

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + index) % 2**63)
        section, vocab_size = self.config.data, self.model.vocab_size
        seq_len = sample_length(self.config, self.model).raw
        tokens = torch.randint(vocab_size, (seq_len + 1,), generator=generator)
        if section.separates_documents or section.prefix_lm:
            share = _SHARE_OF_ENDS / (1 if index % 2 else max(1, seq_len // 16))  # some documents are long
            tokens[torch.rand(seq_len + 1, generator=generator) < share] = END_OF_DOCUMENT
        if index % 2:
            tokens[seq_len // 2] = vocab_size - 1  # the last token before the padding
        inputs, labels = tokens[:-1].clone(), tokens[1:].clone()
        positions = torch.arange(seq_len)
        first = index * 5 % (seq_len + 1)  # earlier positions have no label: none of them, up to all of them
        labels[(positions < first) | ((positions + index) % 11 == 0)] = IGNORED_LABEL
        if index >= self.size or index in self.empty:
            labels.fill_(IGNORED_LABEL)
        if index in self.outer:
            chunk = seq_len // Layout.of(self.config.parallelism).context_chunks
            labels[chunk:-chunk] = IGNORED_LABEL
        if format_of(section.dataset).is_chat:  # they are padded, and say where each conversation begins
            size, begins = seq_len - index % 4 * seq_len // 6, tokens[:-1].roll(1) == END_OF_DOCUMENT
            starts = torch.where(begins, positions, 0).cummax(0).values
            inputs[size:], labels[size:] = END_OF_DOCUMENT, IGNORED_LABEL
            starts[size:] = size
            return Batch(inputs, labels, document_starts=starts, padding_mask=positions >= size)
        return self._option(inputs, labels, index) if "choice" in self.model.predictions else Batch(inputs, labels)

    def _option(self, tokens: torch.Tensor, labels: torch.Tensor, index: int) -> Batch:
        """One option of a question, two sentences of random tokens. The first option's label is the answer."""
        text = torch.where((tokens == FIRST) | (tokens == SEPARATOR), self.model.vocab_size - 1, tokens)
        length = len(tokens) - index % 3
        text[0], text[length:] = FIRST, PADDING
        text[[1 + index % (length - 3), length - 1]] = SEPARATOR
        has_answer = index % NUM_OPTIONS == 0 and bool((labels != IGNORED_LABEL).any())
        answer = torch.tensor(index // NUM_OPTIONS * 7 % NUM_OPTIONS if has_answer else IGNORED_LABEL)
        return PairTokens(FIRST, SEPARATOR, PADDING).batch(text, sample_labels=answer)

    @property
    def fingerprint(self) -> str:
        """Identifies this data in checkpoints."""
        return token_fingerprint(torch.cat([self[index].tokens for index in range(4)]).numpy())


def batches(config: JobConfig, last: int) -> dict[int, range]:
    """The samples of each step from 1 to ``last``."""
    by_step, consumed = {}, 0
    for step in range(1, last + 1):
        by_step[step] = range(consumed, consumed + global_batch_size_at(config.training, consumed))
        consumed = by_step[step].stop
    return by_step


def training_samples(config: JobConfig) -> Samples:
    """An endless training stream.

    In one batch the last data-parallel rank of this layout has no labels, and in a CP group only the first rank has
    any.
    """
    batch, micro_batch = config.training.global_batch_size, config.training.micro_batch_size
    layout = Layout.of(config.parallelism)
    ranks = layout.data_parallel
    in_batch = range(_EMPTY_BATCH * batch, (_EMPTY_BATCH + 1) * batch)
    empty = frozenset(index for index in in_batch if ranks > 1 and index // micro_batch % ranks == ranks - 1)
    outer = frozenset(in_batch if layout.context > 1 else ())
    return Samples(config, model_config(config.model), 2 * config.job.seed, empty=empty, outer=outer)


def validation_samples(config: JobConfig) -> Samples:
    """Held-out samples: between one and two global batches. The last round of all ranks' microbatches lacks one."""
    batch, model = config.training.global_batch_size, model_config(config.model)
    unit = config.training.micro_batch_size * Layout.of(config.parallelism).data_parallel
    size = batch + (batch // 2 // unit * unit + unit - 1 if unit > 1 else max(1, batch // 2 - 1))
    if "choice" in model.predictions:
        size -= size % NUM_OPTIONS
    return Samples(config, model, 2 * config.job.seed + 1, size)


def words_of_samples(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where words and characters begin. A third of the tokens are words of their own, and runs of others are words."""
    joins = tokens % 3 > 0
    return np.append(True, ~(joins[1:] & joins[:-1])), np.ones(len(tokens), dtype=bool)


class TokenIds(NamedTuple):
    """The attributes of a tokenizer that objectives and masks need."""

    eod_id: int = -1
    mask_id: int = -1
    pad_id: int = -1
    pair_ids: tuple[int, int, int] = (-1, -1, -1)
    sentinel_ids: Sequence[int] = ()
    special_ids: Collection[int] = ()
    vocab_size: int = 0
    words: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] = words_of_samples  # where they and characters begin


def ids_of_samples(vocab_size: int) -> TokenIds:
    """The token ids of the small samples. The last tokens of the vocabulary are the sentinels, from the end."""
    special, sentinels = (END_OF_DOCUMENT, MASK, FIRST, SEPARATOR, PADDING), range(vocab_size - 1, PADDING, -1)
    return TokenIds(END_OF_DOCUMENT, MASK, PAD, (FIRST, SEPARATOR, PADDING), sentinels, special, vocab_size)


def masks_of_run(config: JobConfig) -> Masks:
    """The `Masks` that the trainer applies to the small samples."""
    model = model_config(config.model)
    return masks_of(config, model, cast(Tokenizer, ids_of_samples(model.vocab_size)))
