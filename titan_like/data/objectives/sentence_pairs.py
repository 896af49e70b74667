"""Pairs of sentences, BERT's second objective: [CLS] A [SEP] B [SEP] and the class of the pair.

A and B are two parts of a text from one document, cut at a random token, as "a 'sentence' can be an arbitrary span of
contiguous text" (arXiv 1810.04805, section 3). In half of the pairs

- ``next_sentence`` replaces B by the end of a text from another sample (arXiv 1810.04805, section 3.1);
- ``sentence_order`` swaps A and B (arXiv 1909.11942, section 3.1; Megatron-LM's, arXiv 1909.08053, section 5.3).

The class, 0 for the original text and 1 otherwise, is the sample's label. Tokens after the first [SEP] have the second
token type, and tokens after the last [SEP] are padding, which no token attends to.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from titan_like.config.errors import ConfigError
from titan_like.data.batch import Batch, arrays_of, num_labels, without_labels
from titan_like.data.loading.permutation import sample_generator
from titan_like.data.source import IGNORED_LABEL
from titan_like.data.text.tokenizer import Tokenizer, check_ids
from titan_like.models.layers.key_ranges import KeyRanges

ADDED = 3  # tokens around two sentences


class Samples(Protocol):
    """Samples of next-token prediction by their number in the run."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


@dataclass(frozen=True)
class PairTokens:
    """The tokens around two sentences."""

    first: int  # [CLS]
    separator: int  # [SEP]
    padding: int  # [PAD]

    def join(self, first: np.ndarray, second: np.ndarray, seq_len: int) -> np.ndarray:
        """[CLS] first [SEP] second [SEP], padded: int64 [seq_len]. Both together have at most seq_len - 3 tokens."""
        parts = (np.array([self.first]), first, np.array([self.separator]), second, np.array([self.separator]))
        joined = np.concatenate(parts)
        return np.pad(joined, (0, seq_len - len(joined)), constant_values=self.padding)

    def batch(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None, sample_labels: torch.Tensor | None = None
    ) -> Batch:
        """Tokens that `join` made, [seq] or [batch, seq], with their types and masks, and with labels."""
        is_end = tokens == self.separator
        types = (is_end.cumsum(-1) - is_end.long() == 1).long()
        order = torch.arange(tokens.shape[-1], device=tokens.device)
        length = (order * is_end).amax(-1, keepdim=True) + 1
        seen = KeyRanges(torch.zeros_like(tokens), length.expand_as(tokens).contiguous())
        return Batch(tokens, labels, None, seen, types, padding_mask=order >= length, sample_labels=sample_labels)


@dataclass(frozen=True)
class SentencePairs:
    """Makes pairs of sentences from windows of text."""

    objective: str  # next_sentence or sentence_order
    tokens: PairTokens
    eod_id: int

    def make(self, samples: Samples, index: int, seed: int) -> Batch:
        """Sample ``index`` of the run as a pair of sentences, whose class is the sample's label.

        The label of a position is its own token, if the dataset has a label there. A sample without labels keeps none,
        and a sample with fewer than two tokens of text has no class.
        """
        random = sample_generator(b"sentence pairs", seed, index)
        window, seq_len = samples[index], len(samples[index].tokens)
        text, has_label = self._text(window, seq_len - ADDED, random)
        cut = 1 + int(random.random() * (len(text) - 1))
        (first, second), (first_has_label, second_has_label) = np.split(text, [cut]), np.split(has_label, [cut])
        is_other = bool(random.random() < 0.5)
        if is_other and self.objective == "sentence_order":
            first, second = second, first
            first_has_label, second_has_label = second_has_label, first_has_label
        elif is_other:
            other, other_has_label = self._text(self._other(samples, window, random), seq_len - ADDED, random)
            # As long as B, from the end of its text and without its beginning, so that B alone does not give the class.
            begin = max(len(other) - len(second), int(len(other) > 1))
            second, second_has_label = other[begin:], other_has_label[begin:]
        inputs = self.tokens.join(first, second, seq_len)
        no_label = np.zeros(1, dtype=bool)
        has_label = np.concatenate((no_label, first_has_label, no_label, second_has_label))
        labels = np.where(np.pad(has_label, (0, seq_len - len(has_label))), inputs, IGNORED_LABEL)
        label = torch.tensor(is_other if len(text) > 1 else IGNORED_LABEL, dtype=torch.int64)
        pair = self.tokens.batch(torch.from_numpy(inputs), torch.from_numpy(labels), label)
        return pair if num_labels(window, ("tokens",)) else without_labels(pair)  # past the end of held-out data

    def _text(self, sample: Batch, max_tokens: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The text around a random token of a sample, up to ``max_tokens`` of one document, and where it has a label.

        Returns int64 [tokens] and bool [tokens], with 0 tokens if the sample has no text.
        """
        inputs, labels = arrays_of(sample)
        is_text = ~np.isin(inputs, (self.eod_id, self.tokens.first, self.tokens.separator))
        places = np.flatnonzero(is_text)
        if len(places) == 0:
            return inputs[:0], labels[:0] != IGNORED_LABEL
        token = places[int(random.random() * len(places))]
        ends = np.flatnonzero(~is_text)
        after = int(np.searchsorted(ends, token))
        begin = int(ends[after - 1]) + 1 if after > 0 else 0
        end = int(ends[after]) if after < len(ends) else len(inputs)
        begin += int(random.random() * (max(0, end - begin - max_tokens) + 1))
        chosen = slice(begin, min(end, begin + max_tokens))
        return inputs[chosen], labels[chosen] != IGNORED_LABEL

    def _other(self, samples: Samples, sample: Batch, random: np.random.Generator) -> Batch:
        """A sample other than ``sample``, or ``sample`` itself if there is no other."""
        drawn = int(random.random() * len(samples))
        for number in (drawn, drawn + 1):
            other = samples[number % len(samples)]
            if not torch.equal(other.tokens, sample.tokens):
                break
        return other


def pair_tokens_of(spec: str, tokenizer: Tokenizer, vocab_size: int) -> PairTokens:
    """The [CLS], [SEP] and [PAD] of the tokenizer ``spec``. Raises a `ConfigError` if one is missing."""
    if (pair_ids := tokenizer.pair_ids) is None:
        reason = "has no [CLS] and [SEP], which pairs of sentences need; use a tokenizer with these, or <s> and </s>"
        raise ConfigError("data.tokenizer", spec, reason)
    check_ids(spec, f"its [CLS], [SEP] and [PAD] are {', '.join(map(str, pair_ids))}", max(pair_ids), vocab_size)
    return PairTokens(*pair_ids)
