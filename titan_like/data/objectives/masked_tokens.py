"""Masked language modelling (arXiv 1810.04805, section 3.1): a model predicts the masked tokens of a sample.

Of the tokens that are chosen, 80 % become the mask token, 10 % a random one, and 10 % stay. Only chosen tokens carry a
loss. Special tokens, such as the end of a document, are never chosen. As with Megatron-LM, whole words can be chosen
instead of tokens, and n-grams of up to `data.mlm_max_ngram` of them, each length n with a weight of 1/n.
"""

from dataclasses import dataclass

import numpy as np
import torch

from titan_like.config.schema import Data
from titan_like.data.batch import Batch, arrays_of
from titan_like.data.loading.permutation import sample_generator
from titan_like.data.source import IGNORED_LABEL
from titan_like.data.text.tokenizer import Tokenizer, check_token
from titan_like.data.text.words import Words

_MASKED, _RANDOM = 0.8, 0.1  # shares of the chosen tokens; the others stay


@dataclass(frozen=True)
class MaskedTokens:
    """Chooses and replaces tokens, as a function of the seed and the sample's number in the run."""

    section: Data
    mask_id: int
    ordinary: np.ndarray  # int64 [n], the tokens that may be chosen, and from which random replacements are drawn
    words: Words | None  # None: every token is a word

    def apply(self, sample: Batch, seed: int, index: int) -> Batch:
        """Turn a sample of next-token prediction into one of masked tokens. Positions without labels are not chosen."""
        inputs, given_labels = arrays_of(sample)
        random = sample_generator(b"masked tokens", seed, index)
        is_candidate = np.isin(inputs, self.ordinary) & (given_labels != IGNORED_LABEL)
        chosen = self._choose(inputs, is_candidate, random)
        labels = np.where(chosen, inputs, IGNORED_LABEL)
        kind, draws = random.random(len(inputs)), random.random(len(inputs))
        replacements = self.ordinary[(draws * len(self.ordinary)).astype(np.int64)]
        replaced = np.where(kind < _MASKED, self.mask_id, np.where(kind < _MASKED + _RANDOM, replacements, inputs))
        tokens = torch.from_numpy(np.where(chosen, replaced, inputs))
        return sample._replace(tokens=tokens, labels=torch.from_numpy(labels))

    def _choose(self, inputs: np.ndarray, is_candidate: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """bool [seq]: `data.mlm_probability` of the tokens that can be chosen, at least one if there is any."""
        count = int(is_candidate.sum())
        remaining = max(1, round(count * self.section.mlm_probability)) if count else 0
        begins = self._begins(inputs, is_candidate, remaining)
        ends = np.append(begins[1:], len(inputs))
        # Words are tried in random order until enough tokens are chosen. Each draws a length n with weight 1/n, and
        # masks the longest span of at most n words that fits.
        lengths = np.arange(1, self.section.mlm_max_ngram + 1)
        steps = np.cumsum(1 / lengths) / np.sum(1 / lengths)
        order = random.random(len(begins)).argsort(kind="stable").tolist()
        drawn = lengths[np.minimum(np.searchsorted(steps, random.random(len(begins)), "right"), len(lengths) - 1)]
        free = is_candidate.copy()
        for word in order:
            if remaining == 0:
                break
            for length in range(min(drawn[word], len(begins) - word), 0, -1):  # shorter if the span does not fit
                begin, end = begins[word], ends[word + length - 1]
                if end - begin <= remaining and free[begin:end].all():
                    free[begin:end] = False
                    remaining -= int(end - begin)
                    break
        if remaining:  # every other word is longer, so the first tokens of one are masked
            begin = next(begin for begin in begins[order] if free[begin])
            free[begin : begin + remaining] = False
        return is_candidate & ~free

    def _begins(self, inputs: np.ndarray, is_candidate: np.ndarray, max_tokens: int) -> np.ndarray:
        """Where words begin: int64 [words].

        Words of more than ``max_tokens``, such as Chinese without spaces or long addresses, could never be chosen and
        are cut into characters. Words also end at tokens that cannot be chosen.
        """
        if self.words is None:
            return np.arange(len(inputs))
        begins, characters = self.words(inputs)
        begins[1:] |= is_candidate[1:] != is_candidate[:-1]
        word = np.cumsum(begins) - 1
        return np.flatnonzero(begins | characters & (np.bincount(word)[word] > max_tokens))


def masked_tokens_of(section: Data, tokenizer: Tokenizer, vocab_size: int) -> MaskedTokens:
    """Masked language modelling as [data] sets it. The tokenizer needs a mask token that the model has."""
    mask_id = check_token(section.tokenizer, "mask", tokenizer.mask_id, "[MASK] or <mask>", vocab_size)
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), list(tokenizer.special_ids))
    return MaskedTokens(section, mask_id, ordinary, tokenizer.words if section.mlm_whole_words else None)
